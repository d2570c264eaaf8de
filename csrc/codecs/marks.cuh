/* Marks of `exact` by one CTA: which pairs of channels are far larger than the others (exact.h). */
#ifndef KVS_CODECS_MARKS_CUH
#define KVS_CODECS_MARKS_CUH

#include "codecs/exact.h"
#include "codecs/page.cuh"

#define CODE_SEGMENTS (KVS_UNIT_NBYTES / 2 / KVS_EXACT_SEGMENT)
#define CODE_CLASSES (KVS_UNIT_NBYTES / 4 / KVS_EXACT_ROWS)

/* Segments of a warp. */
enum { CODE_OWN = CODE_GROUPS / 2 };

struct code_shared {
  uint32_t escapes[2][CODE_SEGMENTS]; /* of each segment, of a unit and of the next */
  uint32_t most[CODE_CLASSES];        /* the largest exponent of each class */
  uint32_t marks[CODE_CLASSES / 32];  /* a bit a class */
  uint32_t outer;                     /* the largest exponent of marked classes; 0: none is marked */
};

/* By the first warp: a typical largest exponent, and the marks. */
static __device__ __forceinline__ void mark_classes(uint32_t classes, struct code_shared *shared) {
  uint32_t typical = 0, outer = 0, some = 0;
  for (uint32_t i = threadIdx.x; i < classes; i += KVS_WARP) some += shared->most[i] > 0;
  some = __reduce_add_sync(KVS_ALL_LANES, some);
  for (uint32_t bit = 0x80u; bit != 0; bit /= 2u) {
    uint32_t count = 0;
    for (uint32_t i = threadIdx.x; i < classes; i += KVS_WARP) count += shared->most[i] >= (typical | bit);
    if (__reduce_add_sync(KVS_ALL_LANES, count) > kvs_exact_above(some)) typical |= bit;
  }
  for (uint32_t i = threadIdx.x; i < classes; i += KVS_WARP) {
    const uint32_t most = shared->most[i];
    if (most <= typical + KVS_EXACT_ABOVE) continue;
    atomicOr(&shared->marks[i / 32u], 1u << (i % 32u));
    outer = most > outer ? most : outer;
  }
  outer = __reduce_max_sync(KVS_ALL_LANES, outer);
  if (threadIdx.x == 0) shared->outer = outer;
}

/* Mark the outliers among rows of `inner` values. False: there are none. All threads learn it. */
static __device__ __forceinline__ bool mark_outliers(const uint32_t (*pairs)[CODE_VALUES],
                                                     const struct kvs_exact_layout &layout, uint32_t inner,
                                                     struct code_shared *shared) {
  __syncthreads(); /* no thread reads what was shared before */
  for (uint32_t i = threadIdx.x; i < layout.classes; i += blockDim.x) shared->most[i] = 0;
  for (uint32_t i = threadIdx.x; i < CODE_CLASSES / 32u; i += blockDim.x) shared->marks[i] = 0;
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) {
    const uint32_t first = group_first(i), at = kvs_exact_class(inner, first);
    if (first >= layout.values || at >= layout.classes) continue;
    for (uint32_t j = 0; j < 4u; j++)
      atomicMax(&shared->most[at + j], kvs_exact_base(kvs_exact_most(0, pairs[i / 2u][4u * (i % 2u) + j])));
  }
  __syncthreads();
  if (threadIdx.x < KVS_WARP) mark_classes(layout.classes, shared);
  __syncthreads();
  return shared->outer != 0;
}

/* Which of the 4 pairs from a value on, a multiple of 8, are marked. */
static __device__ __forceinline__ uint32_t marked_pairs(const struct kvs_exact_layout &layout, uint32_t inner,
                                                        uint32_t first, const struct code_shared *shared) {
  if (first >= layout.values) return 0;
  const uint32_t at = kvs_exact_class(inner, first);
  if (at >= layout.classes) return 0;
  return shared->marks[at / 32u] >> (at % 32u) & 15u;
}

/* `inner` 0: zeros. */
static __device__ __forceinline__ void store_marks(uint64_t coded, const struct kvs_exact_layout &layout,
                                                   uint32_t inner, const struct code_shared *shared) {
  const uint64_t to = coded + layout.marks;
  for (uint32_t i = threadIdx.x; i < layout.escapes - layout.marks; i += blockDim.x) {
    const uint32_t bits = i < 2u ? 0u : shared->marks[(i - 2u) / 4u] >> (8u * ((i - 2u) % 4u));
    store_byte(to + i, inner == 0 ? 0u : i == 0 ? inner / 16u : i == 1u ? shared->outer : bits);
  }
}

#endif
