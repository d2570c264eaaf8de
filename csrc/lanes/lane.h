/* Lanes: FIFO queues of transfers. Lane and transfer states are drawn at struct kvs_lane (state.h) and in transfer.h.
 * For the core's own files only. */
#ifndef KVS_LANE_H
#define KVS_LANE_H

#include "lanes/state.h"

/* The driver's priority of a lane's streams. */
int kvs_lane_stream_priority(const struct kvs_device_info *, enum kvs_direction, enum kvs_priority);
/* Make the spare streams, when the device is opened. */
int kvs_lanes_stock(struct kvs_engine *, struct kvs_error *);
/* Find or create the lane for a submission, and hold it until release. leftovers: the submission was refused after it
 * queued something. */
int kvs_lane_acquire(struct kvs_engine *, const struct kvs_options *, enum kvs_direction, struct kvs_lane **,
                     struct kvs_error *);
void kvs_lane_release(struct kvs_lane *, bool leftovers);
/* Reserve a place and events for `transfer`. KVS_QUEUE_FULL. Caller holds lane->submit. */
int kvs_lane_reserve(struct kvs_lane *, struct kvs_transfer *, struct kvs_error *);
void kvs_lane_unreserve(struct kvs_lane *, struct kvs_transfer *);
void kvs_lane_append(struct kvs_lane *, struct kvs_transfer *);
/* kvs_lane_fork: `to` waits for the work queued on `from` so far. kvs_lane_head: gives the stream that is to wait for
 * the next transfer's start dependencies, with `ahead` the burst stream, otherwise the lane stream. If
 * that is another stream than the last time, it waits for the work of the last one. Both: the caller holds
 * lane->submit. */
int kvs_lane_fork(struct kvs_lane *, kvs_stream from, kvs_stream to, struct kvs_error *);
int kvs_lane_head(struct kvs_lane *, bool ahead, kvs_stream *head, struct kvs_error *);
int kvs_lane_reap(struct kvs_lane *, struct kvs_error *);
/* The same, unless the lane is empty or another thread holds its lock: for readers of counters. */
int kvs_lane_try_reap(struct kvs_lane *, struct kvs_error *);
/* The race point of transfer `sequence`, or of a later one that has ended; the caller frees it. NULL: unknown. */
struct kvs_race_point *kvs_lane_point(struct kvs_lane *, uint64_t sequence);
/* The last unfinished transfer that may touch [low, high); 0: none. */
uint64_t kvs_lane_last_on(struct kvs_lane *, uint64_t low, uint64_t high);
/* As kvs_transfer_pin() for the transfer `sequence` of the lane, and takes a reference for the caller to drop. */
int kvs_lane_pin(struct kvs_lane *, uint64_t sequence, struct kvs_transfer **, kvs_event *end, struct kvs_error *);
/* The same for the oldest transfer, if it has begun and waits for nothing but its own work. False: there is none. */
bool kvs_lane_pin_begun(struct kvs_lane *, struct kvs_transfer **, kvs_event *end);
/* KVS_OK: the transfer is done. KVS_NOT_READY: it runs, and *end may be waited for until kvs_transfer_unpin(), which
 * the caller must call. Any other status: why neither. */
int kvs_transfer_pin(struct kvs_transfer *, kvs_event *end, struct kvs_error *);
void kvs_transfer_unpin(struct kvs_transfer *);
void kvs_engine_reap(struct kvs_engine *);
void kvs_engine_lose(struct kvs_engine *);
void kvs_lanes_destroy(struct kvs_engine *);
/* Wait until no transfer that touches `region` is unfinished; NULL: no transfer at all. */
int kvs_engine_drain(struct kvs_engine *, const struct kvs_region *region, int64_t timeout_ns, struct kvs_error *);

#endif
