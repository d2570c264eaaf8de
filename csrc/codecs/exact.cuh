/* Encoding by `exact`, by one CTA. A warp has whole segments, in registers. Each segment's escapes are counted; behind
 * one barrier, sums over segments, lanes and values give each escape its place. So the list is in order of position,
 * whatever the order in which warps run. */
#ifndef KVS_CODECS_EXACT_CUH
#define KVS_CODECS_EXACT_CUH

#include "codecs/marks.cuh"

/* What a thread has of its warp's segments: CODE_VALUES values in each of two groups. */
struct code_segments {
  uint32_t pairs[CODE_OWN][CODE_VALUES];
  uint32_t escapes[CODE_OWN]; /* bit 4 i: value i of the first group is one; bit 4 i + 1: of the second */
};

static __device__ __forceinline__ struct code_segments segments_of(const struct code_values &values) {
  struct code_segments own;
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) {
    uint32_t *pairs = own.pairs[i / 2u] + 4u * (i % 2u);
    pairs[0] = values.of[i].x, pairs[1] = values.of[i].y, pairs[2] = values.of[i].z, pairs[3] = values.of[i].w;
  }
  return own;
}

static __device__ __forceinline__ uint32_t segment_of(uint32_t own) {
  return own * (blockDim.x / KVS_WARP) + threadIdx.x / KVS_WARP;
}

/* -- encoding ---------------------------------------------------------------------------------------------------- */

/* By a warp: the base of its segment, without the pairs in `marked`. */
static __device__ __forceinline__ uint32_t find_base(const uint32_t pairs[CODE_VALUES], uint32_t marked) {
  uint32_t most = 0;
#pragma unroll
  for (uint32_t i = 0; i < CODE_VALUES; i++)
    if (!(marked >> i & 1u)) most = __vmaxu2(most, kvs_exact_exponents(pairs[i]));
  const uint32_t base = __reduce_max_sync(KVS_ALL_LANES, kvs_exact_base(most));
  if (base != 0xffu) return base;
  most = 0; /* infinity and NaN do not count */
#pragma unroll
  for (uint32_t i = 0; i < CODE_VALUES; i++)
    if (!(marked >> i & 1u)) most = kvs_exact_most(most, pairs[i]);
  return __reduce_max_sync(KVS_ALL_LANES, kvs_exact_base(most));
}

/* As kvs_exact_codes(), where no finite exponent is above the base. */
static __device__ __forceinline__ uint32_t codes_of(uint32_t pair, uint32_t base) {
  const uint32_t exponents = kvs_exact_exponents(pair), less = (13u - base & 0xffffu) * 0x00010001u;
  const uint32_t codes = __viaddmin_u16x2(exponents, less, 0x000e000eu) + 0x00010001u; /* the sum modulo 2^16 */
  return __vminu2(codes, exponents * 15u);                                             /* 0 for exponent 0 */
}

/* Signs and mantissas of 4 values. */
static __device__ __forceinline__ uint32_t rests_of(uint32_t pair, uint32_t next) {
  const uint32_t low = (pair & 0x007f007fu) | (pair >> 8 & 0xff80ff80u),
                 high = (next & 0x007f007fu) | (next >> 8 & 0xff80ff80u);
  return __byte_perm(low, high, 0x6420);
}

/* Bit 4 i: code i is an escape. */
static __device__ __forceinline__ uint32_t escaped_codes(uint32_t joined) {
  const uint32_t both = joined & joined >> 1;
  return both & both >> 2 & 0x11111111u;
}

template <bool Marked>
static __device__ __forceinline__ void encode_segment(struct code_segments *own, uint32_t k, uint64_t coded,
                                                      const struct kvs_exact_layout &layout, uint32_t inner,
                                                      uint32_t turn, struct code_shared *shared) {
  const uint32_t segment = segment_of(k);
  const uint32_t *pairs = own->pairs[k];
  uint32_t marked = 0, escapes = 0;
  if (Marked)
    marked = marked_pairs(layout, inner, group_first(2u * k), shared) |
             marked_pairs(layout, inner, group_first(2u * k + 1u), shared) << 4u;
  const uint32_t base = find_base(pairs, marked);
#pragma unroll
  for (uint32_t half = 0; half < 2u; half++) {
    const uint32_t first = group_first(2u * k + half);
    uint32_t codes[4], rest[2];
#pragma unroll
    for (uint32_t i = 0; i < 4u; i++)
      codes[i] = codes_of(pairs[4u * half + i], Marked && (marked >> (4u * half + i) & 1u) ? shared->outer : base);
    rest[0] = rests_of(pairs[4u * half], pairs[4u * half + 1u]);
    rest[1] = rests_of(pairs[4u * half + 2u], pairs[4u * half + 3u]);
    const uint32_t joined = join_codes(codes);
    escapes |= escaped_codes(joined) << half;
    store_8(coded + KVS_UNIT_HEAD + first, rest, bytes_left(layout.values, first, 8u));
    store_4(coded + layout.codes + first / 2u, joined, bytes_left((layout.values + 1u) / 2u, first / 2u, 4u));
  }
  own->escapes[k] = escapes;
  const uint32_t count = __reduce_add_sync(KVS_ALL_LANES, (uint32_t)__popc(escapes));
  if (threadIdx.x % KVS_WARP != 0) return;
  shared->escapes[turn][segment] = count;
  store_byte(coded + layout.bases + segment, base);
}

/* The number of escapes in all segments below `end`. */
static __device__ __forceinline__ uint32_t count_escapes(uint32_t end, uint32_t turn,
                                                         const struct code_shared *shared) {
  const uint32_t lane = threadIdx.x % KVS_WARP;
  return __reduce_add_sync(KVS_ALL_LANES, lane < end ? shared->escapes[turn][lane] : 0u);
}

/* By a warp: in the order of a segment's values, which is group, lane, value. */
static __device__ __forceinline__ void store_escapes(const struct code_segments &own, uint32_t k, uint64_t coded,
                                                     const struct kvs_exact_layout &layout, uint32_t turn,
                                                     const struct code_shared *shared) {
  const uint32_t lane = threadIdx.x % KVS_WARP;
  if (!__any_sync(KVS_ALL_LANES, own.escapes[k] != 0)) return;
  uint32_t at = count_escapes(segment_of(k), turn, shared);
#pragma unroll
  for (uint32_t half = 0; half < 2u; half++) {
    const uint32_t escaped = own.escapes[k] >> half & 0x11111111u, count = (uint32_t)__popc(escaped);
    uint32_t sum = count;
    for (uint32_t by = 1; by < KVS_WARP; by *= 2u) {
      const uint32_t before = __shfl_up_sync(KVS_ALL_LANES, sum, by);
      if (lane >= by) sum += before;
    }
    uint64_t to = coded + layout.escapes + 3u * (at + sum - count);
    at += __shfl_sync(KVS_ALL_LANES, sum, KVS_WARP - 1);
    if (escaped == 0) continue;
#pragma unroll
    for (uint32_t i = 0; i < CODE_VALUES; i++) {
      if (!(escaped >> (4u * i) & 1u)) continue;
      const uint32_t position = group_first(2u * k + half) + i;
      store_byte(to, position);
      store_byte(to + 1, position >> 8);
      store_byte(to + 2, own.pairs[k][4u * half + i / 2u] >> (16u * (i % 2u) + 7u) & 0xffu);
      to += 3;
    }
  }
}

/* The number of escapes. All threads learn it. */
template <bool Marked>
static __device__ __forceinline__ uint32_t encode_segments(struct code_segments *own, uint64_t coded,
                                                           const struct kvs_exact_layout &layout, uint32_t inner,
                                                           uint32_t turn, struct code_shared *shared) {
#pragma unroll
  for (uint32_t k = 0; k < CODE_OWN; k++)
    if (segment_of(k) < layout.segments) encode_segment<Marked>(own, k, coded, layout, inner, turn, shared);
  __syncthreads();
  return count_escapes(layout.segments, turn, shared);
}

/* Encode with marks, because the escapes do not fit without them. Returns the values of a row; 0: no guess fits. */
static __device__ __noinline__ uint32_t encode_marked(struct code_segments *own, uint64_t coded,
                                                      const struct kvs_exact_layout &layout, uint32_t turn,
                                                      struct code_shared *shared) {
  for (uint32_t guess = 0; guess < KVS_EXACT_GUESSES; guess++) {
    const uint32_t inner = kvs_exact_guess(&layout, guess);
    if (inner == 0 || !mark_outliers(own->pairs, layout, inner, shared)) continue;
    if (encode_segments<true>(own, coded, layout, inner, turn, shared) <= layout.places) return inner;
  }
  return 0;
}

static __device__ __forceinline__ void store_list(const struct code_segments &own, uint64_t coded,
                                                  const struct kvs_exact_layout &layout, uint32_t inner, uint32_t turn,
                                                  struct code_shared *shared) {
#pragma unroll
  for (uint32_t k = 0; k < CODE_OWN; k++)
    if (segment_of(k) < layout.segments) store_escapes(own, k, coded, layout, turn, shared);
  store_marks(coded, layout, inner, shared);
}

/* The rest of encode_exact() for a unit that needs marks: its number of escapes. `own` is a copy, so that the caller
 * keeps its values in registers. */
static __device__ __noinline__ uint32_t finish_marked(struct code_segments own, uint64_t coded,
                                                      const struct kvs_exact_layout layout, uint32_t turn,
                                                      struct code_shared *shared) {
  const uint32_t inner = encode_marked(&own, coded, layout, turn, shared);
  if (inner == 0) return layout.places + 1u;
  store_list(own, coded, layout, inner, turn, shared);
  return count_escapes(layout.segments, turn, shared);
}

/* `turn` is 0 for one unit and 1 for the next: a warp that is ahead may count while others read. */
static __device__ __noinline__ enum kvs_unit_verdict encode_exact(const struct kvs_unit &unit,
                                                                  const struct code_place place, uint64_t coded,
                                                                  uint32_t turn, struct code_shared *shared) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(&unit));
  struct code_segments own = segments_of(load_values(unit, place));
  uint32_t total = encode_segments<false>(&own, coded, layout, 0, turn, shared);
  if (total <= layout.places)
    store_list(own, coded, layout, 0, turn, shared);
  else
    total = finish_marked(own, coded, layout, turn, shared);
  if (total > layout.places) {
    zero_bytes(coded, KVS_UNIT_HEAD, layout.nbytes);
    store_head(unit, coded, KVS_EXACT_VERSION, KVS_HEAD_NOT_STORED, 0);
    return KVS_UNIT_NOT_STORED;
  }
  zero_bytes(coded, KVS_UNIT_HEAD + layout.values, layout.codes);
  zero_bytes(coded, layout.codes + (layout.values + 1u) / 2u, layout.bases);
  zero_bytes(coded, layout.escapes + 3u * total, layout.nbytes);
  store_head(unit, coded, KVS_EXACT_VERSION, KVS_HEAD_CODED, total);
  return KVS_UNIT_GOOD;
}

#endif
