/* What one call gives the copy engine, and the gaps between calls.
 *
 * The copy engine of a direction serves one stream until that one pauses. What a model copies itself, the tokens that a
 * step has sampled or the inputs of the next step, waits for all that was queued before it: 10 ms behind 512 MiB. So no
 * call carries more than UNBROKEN_NBYTES, and after so many bytes there is a gap, in which other streams' copies are
 * made: they wait for 0.3 ms at most (H200, benchmarks/small_copies.cu). A gap takes 4 us, 10 us beside a decode step;
 * one every 8 MiB cost 6 % of the rate there. Priority `high` promises a model nothing and has no gaps. */
#include "core/submit.h"

#include "core/lane.h"

enum { UNBROKEN_NBYTES = 16 << 20 }; /* 0.3 ms of the link */

static uint64_t most_unbroken(const struct kvs_submission *s) {
  bool never = s->engine->disabled.gaps || s->options->priority == KVS_PRIORITY_HIGH;
  return never ? UINT64_MAX : UNBROKEN_NBYTES;
}

/* Before a call that gives the engine so many bytes. Without the gap a model waits longer, so its refusal is none of
 * the transfer; a lost device refuses the copies too. */
static void leave_gap(struct kvs_submission *s, uint64_t nbytes, kvs_stream stream) {
  struct kvs_lane *lane = s->lane;
  struct kvs_error ignored;
  if (lane->unbroken + nbytes > most_unbroken(s) && lane->unbroken) {
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

size_t kvs_part_end(const struct kvs_submission *s, const struct kvs_copies *copies, size_t from, size_t to,
                    uint64_t mean, size_t issued) {
  size_t end = from + 1, most = most_copies(s, mean, issued);
  uint64_t nbytes = copies->nbytes[from], most_nbytes = most_unbroken(s);
  if (most < to - from) to = from + most;
  while (end < to && (nbytes += copies->nbytes[end]) <= most_nbytes) end++;
  return end;
}

int kvs_give_one(struct kvs_submission *s, uint64_t dst, uint64_t src, uint64_t nbytes, kvs_stream stream,
                 struct kvs_error *err) {
  uint64_t most = most_unbroken(s);
  int status = KVS_OK;
  for (uint64_t at = 0, part; !status && at < nbytes; at += part) {
    part = nbytes - at < most ? nbytes - at : most;
    leave_gap(s, part, stream);
    status = kvs_dev_copy(s->device, dst + at, src + at, part, stream, err);
  }
  return status;
}

int kvs_give(struct kvs_submission *s, const struct kvs_copies *copies, size_t from, size_t to, kvs_stream stream,
             struct kvs_error *err) {
  uint64_t nbytes = 0;
  if (to - from == 1) return kvs_give_one(s, copies->dst[from], copies->src[from], copies->nbytes[from], stream, err);
  for (size_t i = from; i < to; i++) nbytes += copies->nbytes[i];
  leave_gap(s, nbytes, stream);
  return kvs_dev_copy_batch(s->device, copies, from, to, stream, err);
}

/* In parts of whole rows. A box of several slices, some of the blocks of a tensor, is not cut: blocks are smaller. */
int kvs_give_rect(struct kvs_submission *s, const struct kvs_rect *rect, kvs_stream stream, struct kvs_error *err) {
  uint64_t rows = most_unbroken(s) / rect->width;
  int status = KVS_OK;
  if (rows == 0) rows = 1;
  if (rect->depth > 1 || rows > rect->height) rows = rect->height;
  for (uint64_t at = 0; !status && at < rect->height; at += rows) {
    struct kvs_rect part = *rect;
    part.dst += at * rect->dst_pitch;
    part.src += at * rect->src_pitch;
    part.height = rect->height - at < rows ? rect->height - at : rows;
    leave_gap(s, part.width * part.height * part.depth, stream);
    status = kvs_dev_copy_rect(s->device, &part, stream, err);
  }
  return status;
}
