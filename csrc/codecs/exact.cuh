/* Encoding by `exact`, by one CTA. A warp owns a segment. The escapes of all segments are counted first; a prefix sum
 * over segments, lanes and values gives each its place. So the list is in order of position, whatever the order in
 * which warps run. */
#ifndef KVS_CODECS_EXACT_CUH
#define KVS_CODECS_EXACT_CUH

#include "codecs/marks.cuh"

/* Pairs of values that a lane has of a segment: 8 values of each half. */
struct code_pairs {
  uint32_t of[8];
};

static __device__ __forceinline__ struct code_pairs load_segment(const struct kvs_unit &unit,
                                                                 const struct code_place &place, uint32_t segment) {
  struct code_pairs pairs;
  for (uint32_t half = 0; half < 2u; half++) {
    const uint32_t first = segment * KVS_EXACT_SEGMENT + half * 256u + threadIdx.x % KVS_WARP * CODE_VALUES;
    const uint4 words = load_group(unit, place, 2u * first);
    pairs.of[4u * half] = words.x, pairs.of[4u * half + 1u] = words.y;
    pairs.of[4u * half + 2u] = words.z, pairs.of[4u * half + 3u] = words.w;
  }
  return pairs;
}

/* -- encoding ---------------------------------------------------------------------------------------------------- */

template <bool Marked>
static __device__ __forceinline__ void encode_segment(const struct code_pairs &pairs, uint64_t coded,
                                                      const struct kvs_exact_layout &layout, uint32_t segment,
                                                      uint32_t inner, struct code_shared *shared) {
  const uint32_t lane = threadIdx.x % KVS_WARP;
  uint32_t most = 0, mask = 0, marked = 0;
  for (uint32_t half = 0; Marked && half < 2u; half++) {
    const uint32_t first = segment * KVS_EXACT_SEGMENT + half * 256u + lane * CODE_VALUES;
    marked |= marked_pairs(layout, inner, first, shared) << (4u * half);
  }
  for (int i = 0; i < 8; i++)
    if (!Marked || !(marked >> i & 1u)) most = kvs_exact_most(most, pairs.of[i]);
  const uint32_t base = __reduce_max_sync(KVS_ALL_LANES, kvs_exact_base(most));
  for (uint32_t half = 0; half < 2u; half++) {
    const uint32_t first = segment * KVS_EXACT_SEGMENT + half * 256u + lane * CODE_VALUES;
    uint32_t rest[2] = {0, 0}, joined = 0;
    for (uint32_t i = 0; i < 4u; i++) {
      const uint32_t own = Marked && (marked >> (4u * half + i) & 1u) ? shared->outer : base;
      const uint32_t pair = pairs.of[4u * half + i], codes = kvs_exact_codes(pair, own | own << 16);
      const uint32_t escaped = (codes + 0x00010001u) >> 4 & 0x00010001u; /* 15 becomes 16 */
      rest[i / 2u] |= kvs_exact_rest(pair) << (16u * (i % 2u));
      joined |= kvs_exact_join(codes) << (8u * i);
      mask |= ((escaped | escaped >> 15) & 3u) << (8u * half + 2u * i);
    }
    store_bytes<2>(coded + KVS_UNIT_HEAD + first, rest, bytes_left(layout.values, first, 8u));
    store_bytes<1>(coded + layout.codes + first / 2u, &joined, bytes_left((layout.values + 1u) / 2u, first / 2u, 4u));
  }
  const uint32_t count = __reduce_add_sync(KVS_ALL_LANES, (uint32_t)__popc(mask));
  shared->masks[segment][lane] = (uint16_t)mask;
  if (lane != 0) return;
  shared->escapes[segment] = count;
  store_byte(coded + layout.bases + segment, base);
}

/* By the first warp: the number of escapes before each segment, and in all. */
static __device__ __forceinline__ void sum_escapes(uint32_t segments, struct code_shared *shared) {
  const uint32_t lane = threadIdx.x;
  const uint32_t own = lane < segments ? shared->escapes[lane] : 0u;
  uint32_t sum = own;
  for (uint32_t by = 1; by < KVS_WARP; by *= 2u) {
    const uint32_t before = __shfl_up_sync(KVS_ALL_LANES, sum, by);
    if (lane >= by) sum += before;
  }
  if (lane < segments) shared->escapes[lane] = sum - own;
  if (lane == KVS_WARP - 1u) shared->total = sum;
}

/* By one warp: in the order of a segment's values, which is half, lane, value. */
static __device__ __forceinline__ void store_escapes(const struct kvs_unit &unit, const struct code_place &place,
                                                     uint64_t coded, const struct kvs_exact_layout &layout,
                                                     uint32_t segment, const struct code_shared *shared) {
  const uint32_t lane = threadIdx.x % KVS_WARP, mask = shared->masks[segment][lane];
  uint32_t at = shared->escapes[segment];
  if (!__any_sync(KVS_ALL_LANES, mask != 0)) return;
  for (uint32_t half = 0; half < 2u; half++) {
    const uint32_t own = mask >> (8u * half) & 0xffu, count = (uint32_t)__popc(own);
    const uint32_t first = segment * KVS_EXACT_SEGMENT + half * 256u + lane * CODE_VALUES;
    uint32_t sum = count;
    for (uint32_t by = 1; by < KVS_WARP; by *= 2u) {
      const uint32_t before = __shfl_up_sync(KVS_ALL_LANES, sum, by);
      if (lane >= by) sum += before;
    }
    uint64_t to = coded + layout.escapes + 3u * (at + sum - count);
    for (uint32_t i = 0; i < CODE_VALUES; i++) {
      if (!(own >> i & 1u)) continue;
      const uint32_t position = first + i, value = load_value(unit, place, position);
      store_byte(to, position);
      store_byte(to + 1, position >> 8);
      store_byte(to + 2, value >> 7 & 0xffu);
      to += 3;
    }
    at += __shfl_sync(KVS_ALL_LANES, sum, KVS_WARP - 1);
  }
}

/* The number of escapes. All threads learn it. */
template <bool Marked>
static __device__ __forceinline__ uint32_t encode_segments(const struct kvs_unit &unit, const struct code_place &place,
                                                           uint64_t coded, const struct kvs_exact_layout &layout,
                                                           uint32_t inner, struct code_shared *shared) {
  const uint32_t warp = threadIdx.x / KVS_WARP, warps = blockDim.x / KVS_WARP;
  for (uint32_t segment = warp; segment < layout.segments; segment += 2u * warps) {
    const struct code_pairs pairs = load_segment(unit, place, segment),
                            more = load_segment(unit, place, segment + warps); /* none behind the end */
    encode_segment<Marked>(pairs, coded, layout, segment, inner, shared);
    if (segment + warps < layout.segments) encode_segment<Marked>(more, coded, layout, segment + warps, inner, shared);
  }
  __syncthreads();
  if (warp == 0) sum_escapes(layout.segments, shared);
  __syncthreads();
  return shared->total;
}

/* With marks, as the escapes of the unit do not fit without. Returns the values of a row; 0: no guess helps. */
static __device__ __noinline__ uint32_t encode_marked(const struct kvs_unit unit, const struct code_place place,
                                                      uint64_t coded, struct code_shared *shared) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(&unit));
  for (uint32_t guess = 0; guess < KVS_EXACT_GUESSES; guess++) {
    const uint32_t inner = kvs_exact_guess(&layout, guess);
    if (inner == 0 || !mark_outliers(unit, place, layout, inner, shared)) continue;
    if (encode_segments<true>(unit, place, coded, layout, inner, shared) <= layout.places) return inner;
  }
  return 0;
}

static __device__ __forceinline__ enum kvs_unit_verdict
encode_exact(const struct kvs_unit &unit, const struct code_place &place, uint64_t coded, struct code_shared *shared) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(&unit));
  const uint32_t warp = threadIdx.x / KVS_WARP, warps = blockDim.x / KVS_WARP;
  const bool fits = encode_segments<false>(unit, place, coded, layout, 0, shared) <= layout.places;
  const uint32_t inner = fits ? 0u : encode_marked(unit, place, coded, shared), total = shared->total;
  if (!fits && inner == 0) {
    zero_bytes(coded, KVS_UNIT_HEAD, layout.nbytes);
    store_head(unit, coded, KVS_EXACT_VERSION, KVS_HEAD_NOT_STORED, 0);
    return KVS_UNIT_NOT_STORED;
  }
  for (uint32_t segment = warp; segment < layout.segments; segment += warps)
    store_escapes(unit, place, coded, layout, segment, shared);
  zero_bytes(coded, KVS_UNIT_HEAD + layout.values, layout.codes);
  zero_bytes(coded, layout.codes + (layout.values + 1u) / 2u, layout.bases);
  store_marks(coded, layout, inner, shared);
  zero_bytes(coded, layout.escapes + 3u * total, layout.nbytes);
  store_head(unit, coded, KVS_EXACT_VERSION, KVS_HEAD_CODED, total);
  return KVS_UNIT_GOOD;
}

#endif
