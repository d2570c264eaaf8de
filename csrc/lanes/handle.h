/* What callers ask of a transfer. */
#ifndef KVS_HANDLE_H
#define KVS_HANDLE_H

#include "lanes/state.h"

int kvs_transfer_poll(struct kvs_transfer *,
                      struct kvs_error *); /* KVS_OK: ended; KVS_NOT_READY: it runs; else unknown */

#endif
