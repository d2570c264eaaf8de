/* Work that tests and demonstrations put on a device's streams: patterns that are written and checked, and delays. */
#ifndef KVS_PATTERN_H
#define KVS_PATTERN_H

#include "device/device.h"
#include "kvswap.h"

/* The test pattern (kernels.h) over a list of items, enqueued on a stream. CHECK compares, WRITE writes. The items are
 * copied. The caller frees the job. kvs_pattern_wait() waits (timeout_ns < 0: no limit); kvs_pattern_free() never does.
 */
struct kvs_pattern_job;
int kvs_pattern_submit(struct kvs_engine *engine, enum kvs_pattern_mode mode, enum kvs_pattern_kind kind,
                       const struct kvs_pattern_item *items, size_t nitems, kvs_stream stream,
                       struct kvs_pattern_job **job, struct kvs_error *err);
bool kvs_pattern_done(struct kvs_pattern_job *job);
int kvs_pattern_wait(struct kvs_pattern_job *job, int64_t timeout_ns, struct kvs_pattern_result *result,
                     struct kvs_error *err);
void kvs_pattern_free(struct kvs_pattern_job *job);

/* Keep a stream busy for a time (at most 10 s): for order tests and demonstrations. */
int kvs_delay(struct kvs_engine *engine, uint64_t ns, kvs_stream stream, struct kvs_error *err);

#endif
