/* What one call gives the copy engine, and the gaps between calls.
 *
 * The copy engine of a direction serves one stream until that one pauses. What a model copies itself, the tokens that a
 * step has sampled or the inputs of the next step, waits for all that was queued before it, 10 ms behind 512 MiB, and
 * never comes while transfers always follow each other. So between host and GPU no more than UNBROKEN_NBYTES are given
 * without a gap, and larger copies are cut. The engine makes other streams' copies in a gap, so that these wait for as
 * long as the link takes for UNBROKEN_NBYTES: 0.46 ms (H200; 0.25 measured with 16 MiB, 0.58 with 32,
 * benchmarks/small_copies.cu). A gap takes 4 us, 10 beside a decode step: one every 16 MiB left 0.95 of a copy's rate
 * there, one every 24 MiB 0.96.
 *
 * A gap is a command, and so is a part of a copy. A stream holds some 1,024, then the driver holds its caller. So
 * beyond 3 GiB in a lane a gap comes after a 128th of what is queued: a stream takes 18 GiB and more. */
#include "paths/parts.h"

#include "lanes/lane.h"
#include "plan/stride.h"

enum { UNBROKEN_NBYTES = 24 << 20, QUEUE_PARTS = 128 };

/* Priority `high` promises a model nothing. With one hardware queue a gap changes nothing. Pageable memory is copied in
 * parts by the driver. */
static bool wants_gaps(const struct kvs_submission *s, bool pageable) {
  bool link = s->work->direction == KVS_D2H || s->work->direction == KVS_H2D;
  bool useful = link && !pageable && !s->engine->one_queue;
  return useful && s->options->priority != KVS_PRIORITY_HIGH && !s->engine->disabled.gaps;
}

/* The engine does not pause between two transfers of a lane, but does where the lane has none left. */
void kvs_begin_giving(struct kvs_submission *s, bool pageable) {
  uint64_t share = (atomic_load(&s->lane->nbytes) + s->work->nbytes) / QUEUE_PARTS;
  s->most_unbroken = !wants_gaps(s, pageable) ? UINT64_MAX : share > UNBROKEN_NBYTES ? share : UNBROKEN_NBYTES;
  if (atomic_load(&s->lane->count) == 0) s->lane->unbroken = 0;
}

/* How much the next call may carry: what is left until the next gap, unless that is little. */
static uint64_t room(const struct kvs_submission *s) {
  uint64_t most = s->most_unbroken, unbroken = s->lane->unbroken;
  uint64_t left = unbroken < most ? most - unbroken : 0;
  return left < most / 4 ? most : left;
}

/* Before a call that carries so many bytes. A refused gap does not fail the transfer: a model waits longer. A lost
 * device refuses the call as well. A lender's link pauses between pieces. */
static void leave_gap(struct kvs_submission *s, uint64_t nbytes, kvs_stream stream) {
  struct kvs_lane *lane = s->lane;
  struct kvs_error ignored;
  if (s->link != s->device) return;
  if (lane->unbroken && lane->unbroken + nbytes > s->most_unbroken) {
    (void)kvs_dev_gap(s->device, stream, &ignored);
    lane->unbroken = 0;
  }
  lane->unbroken += nbytes;
}

/* The copy engine begins when the first call returns, so the first ones are short. One call for a long list is slow
 * and, below 28 KiB from host to device, very slow (H200, driver 580, 8192 x 16 KiB: 25 -> 45 GB/s D2H in parts, 6 ->
 * 43 H2D; 180 x 24 KiB H2D 549 us in parts of 128, 170 in parts of 16 to 32; 180 x 64 KiB 326 and 253; more streams
 * undo it; benchmarks/batch_parts.cu). */
static size_t most_copies(const struct kvs_submission *s, uint64_t mean, size_t issued) {
  bool slow = s->work->direction == KVS_H2D && mean < KVS_SLOW_COPY_NBYTES;
  size_t most = slow ? 32 : mean < 32 << 10 ? 128 : 256;
  if (s->engine->disabled.batch) return 1;
  return issued < KVS_COST_BATCH ? KVS_COST_BATCH : issued < most ? issued : most;
}

size_t kvs_call_end(const struct kvs_submission *s, const struct kvs_copies *copies, size_t from, size_t to,
                    uint64_t mean, size_t issued) {
  size_t end = from + 1, most = most_copies(s, mean, issued);
  uint64_t nbytes = copies->nbytes[from], most_nbytes = room(s);
  if (most < to - from) to = from + most;
  while (end < to && (nbytes += copies->nbytes[end]) <= most_nbytes) end++;
  return end;
}

int kvs_give_one(struct kvs_submission *s, uint64_t dst, uint64_t src, uint64_t nbytes, kvs_stream stream,
                 struct kvs_error *err) {
  int status = KVS_OK;
  for (uint64_t at = 0, part; !status && at < nbytes; at += part) {
    uint64_t most = room(s);
    part = nbytes - at < most ? nbytes - at : most;
    leave_gap(s, part, stream);
    status = kvs_dev_copy(s->link, dst + at, src + at, part, stream, err);
  }
  return status;
}

int kvs_give(struct kvs_submission *s, const struct kvs_copies *copies, size_t from, size_t to, kvs_stream stream,
             struct kvs_error *err) {
  uint64_t nbytes = 0;
  if (to - from == 1) return kvs_give_one(s, copies->dst[from], copies->src[from], copies->nbytes[from], stream, err);
  for (size_t i = from; i < to; i++) nbytes += copies->nbytes[i];
  leave_gap(s, nbytes, stream);
  return kvs_dev_copy_batch(s->link, copies, from, to, stream, err);
}

/* Cut between rows alone. */
int kvs_give_rect(struct kvs_submission *s, const struct kvs_rect *rect, kvs_stream stream, struct kvs_error *err) {
  uint64_t rows = kvs_rect_rows(rect);
  int status = KVS_OK;
  for (uint64_t at = 0, count; !status && at < rows; at += count) {
    struct kvs_rect part = *rect;
    count = room(s) / rect->width;
    if (count == 0) count = 1;
    if (count > rows - at) count = rows - at;
    part.dst = kvs_rect_dst(rect, at);
    part.src = kvs_rect_src(rect, at);
    *(rect->depth > 1 ? &part.depth : &part.height) = count;
    leave_gap(s, count * rect->width, stream);
    status = kvs_dev_copy_rect(s->link, &part, stream, err);
  }
  return status;
}
