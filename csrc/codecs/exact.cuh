/* Codec `exact` by one CTA. A warp owns a segment. The escapes of all segments are counted first; a prefix sum over
 * segments, lanes and values gives each its place. So the list is in order of position, whatever the order in which
 * warps run. */
#ifndef KVS_CODECS_EXACT_CUH
#define KVS_CODECS_EXACT_CUH

#include "codecs/exact.h"
#include "codecs/page.cuh"

#define CODE_SEGMENTS (KVS_UNIT_NBYTES / 2 / KVS_EXACT_SEGMENT)
#define CODE_CLASSES (KVS_UNIT_NBYTES / 4 / KVS_EXACT_ROWS)

struct code_shared {
  uint32_t escapes[CODE_SEGMENTS];         /* of each segment; then of all segments before it */
  uint32_t total;                          /* of the unit */
  uint16_t masks[CODE_SEGMENTS][KVS_WARP]; /* which of a lane's 16 values are escapes */
  uint32_t most[CODE_CLASSES];             /* the largest exponent of each class */
  uint32_t marks[CODE_CLASSES / 32];       /* a bit a class */
  uint32_t outer;                          /* the largest exponent of marked classes; 0: none is marked */
};

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

/* -- marks ------------------------------------------------------------------------------------------------------- */

/* By the first warp: the largest exponent that more than kvs_exact_above() classes reach; then the marks. */
static __device__ __forceinline__ void mark_classes(uint32_t classes, struct code_shared *shared) {
  uint32_t typical = 0, outer = 0;
  for (uint32_t bit = 0x80u; bit != 0; bit /= 2u) {
    uint32_t count = 0;
    for (uint32_t i = threadIdx.x; i < classes; i += KVS_WARP) count += shared->most[i] >= (typical | bit);
    if (__reduce_add_sync(KVS_ALL_LANES, count) > kvs_exact_above(classes)) typical |= bit;
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
static __device__ __forceinline__ bool mark_outliers(const struct kvs_unit &unit, const struct code_place &place,
                                                     const struct kvs_exact_layout &layout, uint32_t inner,
                                                     struct code_shared *shared) {
  __syncthreads(); /* nobody reads what was shared before */
  for (uint32_t i = threadIdx.x; i < layout.classes; i += blockDim.x) shared->most[i] = 0;
  for (uint32_t i = threadIdx.x; i < CODE_CLASSES / 32u; i += blockDim.x) shared->marks[i] = 0;
  __syncthreads();
  for (uint32_t first = threadIdx.x * CODE_VALUES; first < layout.values; first += blockDim.x * CODE_VALUES) {
    const uint4 words = load_group(unit, place, 2u * first);
    const uint32_t at = kvs_exact_class(inner, first);
    atomicMax(&shared->most[at], kvs_exact_base(kvs_exact_most(0, words.x)));
    atomicMax(&shared->most[at + 1u], kvs_exact_base(kvs_exact_most(0, words.y)));
    atomicMax(&shared->most[at + 2u], kvs_exact_base(kvs_exact_most(0, words.z)));
    atomicMax(&shared->most[at + 3u], kvs_exact_base(kvs_exact_most(0, words.w)));
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
  return shared->marks[at / 32u] >> (at % 32u) & 15u;
}

/* `classing` 0: zeros. */
static __device__ __forceinline__ void store_marks(uint64_t coded, const struct kvs_exact_layout &layout,
                                                   uint32_t classing, const struct code_shared *shared) {
  const uint64_t to = coded + layout.marks;
  for (uint32_t i = threadIdx.x; i < layout.escapes - layout.marks; i += blockDim.x) {
    const uint32_t bits = i < 2u ? 0u : shared->marks[(i - 2u) / 4u] >> (8u * ((i - 2u) % 4u));
    store_byte(to + i, classing == 0 ? 0u : i == 0 ? classing : i == 1u ? shared->outer : bits);
  }
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

/* With marks, as the escapes of the unit do not fit without. Returns the classing; 0: none helps. */
static __device__ __noinline__ uint32_t encode_marked(const struct kvs_unit unit, const struct code_place place,
                                                      uint64_t coded, struct code_shared *shared) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(&unit));
  for (uint32_t classing = 1; classing <= KVS_EXACT_CLASSINGS; classing++) {
    const uint32_t inner = kvs_exact_inner(&layout, classing);
    if (inner == 0 || !mark_outliers(unit, place, layout, inner, shared)) continue;
    if (encode_segments<true>(unit, place, coded, layout, inner, shared) <= layout.places) return classing;
  }
  return 0;
}

static __device__ __forceinline__ enum kvs_unit_verdict
encode_exact(const struct kvs_unit &unit, const struct code_place &place, uint64_t coded, struct code_shared *shared) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(&unit));
  const uint32_t warp = threadIdx.x / KVS_WARP, warps = blockDim.x / KVS_WARP;
  const bool fits = encode_segments<false>(unit, place, coded, layout, 0, shared) <= layout.places;
  const uint32_t classing = fits ? 0u : encode_marked(unit, place, coded, shared), total = shared->total;
  if (!fits && classing == 0) {
    zero_bytes(coded, KVS_UNIT_HEAD, layout.nbytes);
    store_head(unit, coded, KVS_EXACT_VERSION, KVS_HEAD_NOT_STORED, 0);
    return KVS_UNIT_NOT_STORED;
  }
  for (uint32_t segment = warp; segment < layout.segments; segment += warps)
    store_escapes(unit, place, coded, layout, segment, shared);
  zero_bytes(coded, KVS_UNIT_HEAD + layout.values, layout.codes);
  zero_bytes(coded, layout.codes + (layout.values + 1u) / 2u, layout.bases);
  store_marks(coded, layout, classing, shared);
  zero_bytes(coded, layout.escapes + 3u * total, layout.nbytes);
  store_head(unit, coded, KVS_EXACT_VERSION, KVS_HEAD_CODED, total);
  return KVS_UNIT_GOOD;
}

/* The escapes are in order and inside the unit. All threads learn it. */
static __device__ __forceinline__ bool right_escapes(uint64_t coded, const struct kvs_exact_layout &layout,
                                                     uint32_t escapes) {
  bool wrong = escapes > layout.places;
  for (uint32_t i = threadIdx.x; !wrong && i < escapes; i += blockDim.x) {
    const uint64_t at = coded + layout.escapes + 3u * i;
    const uint32_t position = load_byte(at) | load_byte(at + 1) << 8;
    const uint32_t before = i ? load_byte(at - 3) | load_byte(at - 2) << 8 : 0u;
    wrong = position >= layout.values || (i && position <= before);
  }
  return !__syncthreads_or(wrong);
}

/* What a thread loads before it stores any of it. */
enum { CODE_GROUPS = 4 };

struct code_groups {
  uint32_t rest[CODE_GROUPS][2], joined[CODE_GROUPS], base[CODE_GROUPS];
  uint32_t marked[CODE_GROUPS]; /* pairs */
};

template <bool Marked>
static __device__ __forceinline__ void load_groups(uint64_t coded, const struct kvs_exact_layout &layout, uint32_t from,
                                                   uint32_t inner, struct code_groups *groups) {
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) {
    const uint32_t first = from + i * blockDim.x * CODE_VALUES;
    if (first >= layout.values) continue;
    load_words<2>(coded + KVS_UNIT_HEAD + first, groups->rest[i]);
    load_words<1>(coded + layout.codes + first / 2u, &groups->joined[i]);
    groups->base[i] = load_byte(coded + layout.bases + first / KVS_EXACT_SEGMENT);
    if (!Marked) continue;
    const uint32_t at = kvs_exact_class(inner, first);
    groups->marked[i] = load_byte(coded + layout.marks + 2u + at / 8u) >> (at % 8u);
  }
}

template <bool Marked>
static __device__ __forceinline__ void store_groups(const struct kvs_unit &unit, const struct code_place &place,
                                                    const struct kvs_exact_layout &layout, uint32_t from,
                                                    uint32_t outer, const struct code_groups &groups) {
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) {
    const uint32_t first = from + i * blockDim.x * CODE_VALUES, base = groups.base[i];
    uint32_t pairs[4];
    if (first >= layout.values) continue;
    for (uint32_t j = 0; j < 4u; j++) {
      const uint32_t own = Marked && (groups.marked[i] >> j & 1u) ? outer : base;
      pairs[j] = kvs_exact_pair(groups.rest[i][j / 2u] >> (16u * (j % 2u)) & 0xffffu,
                                groups.joined[i] >> (8u * j) & 0xffu, own | own << 16);
    }
    store_group(unit, place, 2u * first, pairs);
  }
}

/* The values are loaded beside the escapes, which decide whether they are used. */
template <bool Marked>
static __device__ __forceinline__ bool decode_values_of(const struct kvs_unit &unit, const struct code_place &place,
                                                        uint64_t coded, const struct kvs_exact_layout &layout,
                                                        uint32_t escapes, uint32_t inner) {
  const uint32_t outer = Marked ? load_byte(coded + layout.marks + 1u) : 0u;
  uint32_t from = threadIdx.x * CODE_VALUES;
  struct code_groups groups;
  load_groups<Marked>(coded, layout, from, inner, &groups);
  if (!right_escapes(coded, layout, escapes)) return false;
  while (from < layout.values) {
    store_groups<Marked>(unit, place, layout, from, outer, groups);
    from += CODE_GROUPS * blockDim.x * CODE_VALUES;
    load_groups<Marked>(coded, layout, from, inner, &groups);
  }
  return true;
}

static __device__ __noinline__ bool decode_marked(const struct kvs_unit unit, const struct code_place place,
                                                  uint64_t coded, uint32_t escapes, uint32_t classing) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(&unit));
  const uint32_t inner = kvs_exact_inner(&layout, classing);
  return inner != 0 && decode_values_of<true>(unit, place, coded, layout, escapes, inner);
}

static __device__ __forceinline__ bool decode_exact(const struct kvs_unit &unit, const struct code_place &place,
                                                    uint64_t coded, uint32_t escapes) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(&unit));
  const uint32_t classing = layout.classes ? load_byte(coded + layout.marks) : 0u;
  const bool right = classing == 0 ? decode_values_of<false>(unit, place, coded, layout, escapes, 0)
                                   : decode_marked(unit, place, coded, escapes, classing);
  if (!right) return false;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < escapes; i += blockDim.x) {
    const uint64_t at = coded + layout.escapes + 3u * i;
    const uint32_t position = load_byte(at) | load_byte(at + 1) << 8;
    store_value(unit, place, position,
                kvs_exact_escaped(load_byte(coded + KVS_UNIT_HEAD + position), load_byte(at + 2)));
  }
  return true;
}

#endif
