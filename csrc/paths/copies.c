/* Issuing to the copy engine: plain copies and rects, and the retries after a refusal. */
#include "paths/copies.h"

#include <stdlib.h>

#include "base/wait.h"
#include "paths/parts.h"

/* -- what was refused ------------------------------------------------------------------------------------------ */

void kvs_note_failure(struct kvs_submission *s, uint32_t block, const struct kvs_error *why) {
  struct kvs_transfer *transfer = s->transfer;
  if (transfer->error.status == KVS_OK) transfer->error = *why;
  if (transfer->all_failed) return;
  if (transfer->nfailed == s->failed_capacity) {
    size_t capacity = s->failed_capacity ? 2 * s->failed_capacity : 16;
    uint32_t *failed = realloc(transfer->failed, capacity * sizeof *failed);
    if (!failed) {
      transfer->all_failed = true; /* no memory to name them: report all blocks as failed */
      return;
    }
    transfer->failed = failed;
    s->failed_capacity = capacity;
  }
  transfer->failed[transfer->nfailed++] = block;
}

/* One block, split at the ends of the driver's allocations: there may be seams that kvswap does not know. */
static int copy_in_parts(struct kvs_submission *s, uint64_t dst, uint64_t src, uint64_t nbytes, struct kvs_error *why) {
  int status = kvs_give_one(s, dst, src, nbytes, s->lane->stream, why);
  while (status == KVS_REFUSED && nbytes) {
    struct kvs_region from, to;
    struct kvs_error ignored;
    if (kvs_dev_pointer_query(s->device, src, &from, &ignored) || kvs_dev_pointer_query(s->device, dst, &to, &ignored))
      return status;
    uint64_t part = from.base + from.nbytes - src, dst_part = to.base + to.nbytes - dst;
    if (dst_part < part) part = dst_part;
    if (part >= nbytes) return kvs_give_one(s, dst, src, nbytes, s->lane->stream, why);
    int first = kvs_give_one(s, dst, src, part, s->lane->stream, why);
    if (first) return first;
    dst += part, src += part, nbytes -= part;
  }
  return status;
}

static uint64_t overlap(uint64_t begin, uint64_t end, uint64_t from, uint64_t to) {
  return (end < to ? end : to) - (begin > from ? begin : from);
}

/* For each block that copy i of the view carries: issue it alone (`again`), or mark it failed with *why. */
void kvs_block_by_block(struct kvs_submission *s, size_t i, bool again, const struct kvs_error *why) {
  struct kvs_copies *copies = &s->view, *single = &s->work->scratch->single;
  uint64_t begin = copies->dst[i], end = begin + copies->nbytes[i];
  struct kvs_error err = *why;
  if (single->count == 0 && s->work->plan(s->work->call, KVS_FORM_SINGLE, s->work->scratch, &err)) {
    single->count = 0;
    s->transfer->all_failed = true;
    kvs_note_failure(s, copies->block[i], &err);
    return;
  }
  /* Both lists are in the same order, so the search continues where the last one ended. */
  for (size_t seen = 0, found = 0; seen < single->count && found < end - begin && !s->fatal; seen++) {
    size_t b = s->cursor;
    s->cursor = b + 1 < single->count ? b + 1 : 0;
    if (single->dst[b] >= end || single->dst[b] + single->nbytes[b] <= begin) continue;
    uint64_t from = single->dst[b] > begin ? single->dst[b] : begin;
    uint64_t part = overlap(begin, end, single->dst[b], single->dst[b] + single->nbytes[b]);
    found += part;
    if (found >= end - begin) s->cursor = b; /* the next copy may carry the rest of this block */
    int status = again ? copy_in_parts(s, from, copies->src[i] + (from - begin), part, &err) : why->status;
    if (kvs_is_lost(status)) s->fatal = kvs_fail_driver(s->err, status, err.code, err.operation, "%s", "");
    if (status) kvs_note_failure(s, single->block[b], &err);
  }
}

/* All blocks count as failed, even those that were copied. */
void kvs_fail_all(struct kvs_submission *s, const struct kvs_error *why) {
  s->transfer->error = *why;
  s->transfer->all_failed = true;
}

/* -- sources in pageable memory ---------------------------------------------------------------------------------- */

static const int64_t SOURCE_NS = 60ll * 1000 * 1000 * 1000;

const struct kvs_region *kvs_pageable(const struct kvs_regions *regions) {
  for (size_t i = 0; i < regions->count; i++)
    if (regions->items[i].memory == KVS_MEMORY_PAGEABLE) return &regions->items[i];
  return NULL;
}

static int poll_stream(void *arg, struct kvs_error *err) {
  const struct kvs_submission *s = arg;
  int status = kvs_dev_stream_query(s->device, s->lane->stream, err);
  return status == KVS_REFUSED ? KVS_NOT_READY : status; /* a refused query says nothing about the stream */
}

/* A driver may read pageable memory while it is asked to copy it, whatever the stream still waits for (H200, driver
 * 580: a load behind a store read the bytes of before the store). So all that comes before on the stream ends first. */
bool kvs_await_source(struct kvs_submission *s) {
  struct kvs_error why;
  if (!s->reads_early) return true;
  int status = kvs_wait_until(poll_stream, s, s->device->stepped, SOURCE_NS, &why);
  if (status == KVS_TIMEOUT)
    (void)kvs_fail(
        &why, KVS_REFUSED,
        "the source is pageable host memory, which is copied only when all that comes before has ended, and "
        "that had not after %.0f s; nothing was copied: pin it (Device.register), so that nothing waits for it",
        (double)SOURCE_NS / 1e9);
  if (kvs_is_lost(status))
    kvs_stop_issuing(s, &why);
  else if (status)
    kvs_fail_all(s, &why);
  return status == KVS_OK;
}

/* -- copies ---------------------------------------------------------------------------------------------------- */

static void issue_range(struct kvs_submission *s, size_t from, size_t to) {
  struct kvs_error why;
  if (from >= to || s->fatal) return;
  int status = kvs_give(s, &s->view, from, to, s->lane->stream, &why);
  if (kvs_is_lost(status)) {
    kvs_stop_issuing(s, &why);
  } else if (status && to - from == 1) {
    kvs_block_by_block(s, from, true, &why);
  } else if (status) {
    size_t middle = from + (to - from) / 2; /* repeating a copy that was accepted is harmless: sources do not change */
    issue_range(s, from, middle);
    issue_range(s, middle, to);
  }
}

void kvs_issue_copies(struct kvs_submission *s) {
  size_t count = s->view.count, all = s->work->scratch->copies.count;
  uint64_t mean = all ? s->work->nbytes / all : 0;
  for (size_t from = 0, end; from < count; from = end) {
    end = kvs_call_end(s, &s->view, from, count, mean, from);
    issue_range(s, from, end);
  }
}

/* If the driver refuses the rect, copy the block row by row. */
static void issue_rect(struct kvs_submission *s, const struct kvs_rect *rect, uint32_t block) {
  struct kvs_error why;
  int status = kvs_give_rect(s, rect, s->lane->stream, &why);
  for (uint64_t row = 0; status && !kvs_is_lost(status) && row < kvs_rect_rows(rect); row++) {
    int again = copy_in_parts(s, kvs_rect_dst(rect, row), kvs_rect_src(rect, row), rect->width, &why);
    if (kvs_is_lost(again)) status = again;
    if (again && !kvs_is_lost(again)) {
      kvs_note_failure(s, block, &why);
      return;
    }
  }
  if (kvs_is_lost(status)) kvs_stop_issuing(s, &why);
}

void kvs_issue_rects(struct kvs_submission *s) {
  const struct kvs_rects *rects = &s->work->scratch->rects;
  for (size_t i = s->first_rect; i < s->rects_end && !s->fatal; i++) issue_rect(s, &rects->items[i], rects->block[i]);
}

int kvs_plan_copies(struct kvs_submission *s, struct kvs_error *err) {
  struct kvs_work *work = s->work;
  int status = work->planned ? KVS_OK : work->plan(work->call, KVS_FORM_COPIES, work->scratch, err);
  if (!status) work->planned = true;
  return status;
}
