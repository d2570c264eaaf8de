/* Submitting: from a checked plan to work queued on the device. */
#ifndef KVS_SUBMIT_H
#define KVS_SUBMIT_H

#include "lanes/work.h"

int kvs_submit(struct kvs_engine *, struct kvs_work *, const struct kvs_options *, struct kvs_transfer **,
               struct kvs_error *);

#endif
