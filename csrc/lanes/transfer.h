/* The life of a transfer. For the core's own files only.
 *
 *   kvs_transfer_new()      kvs_lane_reserve()          kvs_lane_append()
 *         NEW ------------------> RESERVED ------------------> QUEUED ---> DONE or FAILED
 *          \ a check fails           \ order.c fails             kvs_transfer_finish()
 *           \________________________ \____________ freed
 *
 * NEW and RESERVED have no lock of their own: only the submitter has the transfer, and it holds lane->submit from
 * RESERVED to QUEUED. `state` is KVS_STATE_RUNNING until the end. The end is under lane->lock: kvs_lane_reap() when
 * `end` is reached, kvs_engine_lose() when the device is lost. FAILED if blocks were refused while queued, a source
 * block was lost, a wait or record was refused, or a device in the dependency mask, or its own, was lost. Nothing moves
 * a transfer out of DONE or FAILED. */
#ifndef KVS_TRANSFER_H
#define KVS_TRANSFER_H

#include "lanes/state.h"

struct kvs_transfer *kvs_transfer_new(struct kvs_engine *, struct kvs_error *);
void kvs_transfer_drop(struct kvs_transfer *);   /* drops one reference */
void kvs_transfer_finish(struct kvs_transfer *); /* its end was reached, or the device is lost; under lane->lock */

#endif
