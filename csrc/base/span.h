/* Ranges of addresses. */
#ifndef KVS_SPAN_H
#define KVS_SPAN_H

#include <stdbool.h>
#include <stdint.h>

/* Extend a range by the same bytes at `count` places, at least 1, `stride` bytes apart; whether it is within the
 * address space. */
static inline bool kvs_span_extend(uint64_t *low, uint64_t *nbytes, int64_t stride, uint64_t count) {
  int64_t reach;
  if (__builtin_mul_overflow(stride, (int64_t)(count - 1), &reach) || reach == INT64_MIN) return false;
  uint64_t more = (uint64_t)(reach < 0 ? -reach : reach);
  if (reach < 0) *low -= more;
  return !__builtin_add_overflow(*nbytes, more, nbytes);
}

#endif
