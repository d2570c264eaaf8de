/* What one call gives the copy engine, and the gaps between calls. */
#ifndef KVS_PARTS_H
#define KVS_PARTS_H

#include "paths/submission.h"

/* Before the first call of a transfer. `pageable`: some of its host memory is. */
void kvs_begin_giving(struct kvs_submission *, bool pageable);
/* Where the call that begins at `from` ends, after `issued` copies of a mean size. */
size_t kvs_call_end(const struct kvs_submission *, const struct kvs_copies *, size_t from, size_t to, uint64_t mean,
                    size_t issued);
/* That call, on that stream; and calls of one copy, of one rect. */
int kvs_give(struct kvs_submission *, const struct kvs_copies *, size_t from, size_t to, kvs_stream,
             struct kvs_error *);
int kvs_give_one(struct kvs_submission *, uint64_t dst, uint64_t src, uint64_t nbytes, kvs_stream, struct kvs_error *);
int kvs_give_rect(struct kvs_submission *, const struct kvs_rect *, kvs_stream, struct kvs_error *);

#endif
