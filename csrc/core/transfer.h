/* The life of a transfer. For the core's own files only. */
#ifndef KVS_TRANSFER_H
#define KVS_TRANSFER_H

#include "core/core.h"

struct kvs_transfer *kvs_transfer_new(struct kvs_engine *, struct kvs_error *);
void kvs_transfer_drop(struct kvs_transfer *);   /* one reference of the memory */
void kvs_transfer_finish(struct kvs_transfer *); /* its event was reached, or the device is lost; under lane->lock */
/* KVS_OK: it is done. KVS_NOT_READY: it runs, *end may be waited for until unpin, and unpin is due. Else why neither.
 */
int kvs_transfer_pin(struct kvs_transfer *, kvs_event *end, struct kvs_error *);
void kvs_transfer_unpin(struct kvs_transfer *);
int kvs_transfer_poll(struct kvs_transfer *, struct kvs_error *); /* KVS_OK: ended; KVS_NOT_READY; else cannot tell */

#endif
