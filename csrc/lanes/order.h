/* The waits of a transfer, on the lane that the caller holds. Before: the transfer's head waits for the start
 * dependencies. Behind: later work waits for the lane stream. */
#ifndef KVS_ORDER_H
#define KVS_ORDER_H

#include "lanes/state.h"

int kvs_order_before(struct kvs_transfer *, const struct kvs_work *, const struct kvs_options *, struct kvs_error *);
int kvs_order_before_layer(struct kvs_transfer *, const struct kvs_options *, size_t layer, struct kvs_error *);
int kvs_order_behind(struct kvs_transfer *, const struct kvs_work *, const struct kvs_options *, struct kvs_error *);

#endif
