/* Decoding of `exact`, by one CTA. */
#ifndef KVS_CODECS_EXACT_DECODE_CUH
#define KVS_CODECS_EXACT_DECODE_CUH

#include "codecs/exact.h"
#include "codecs/page.cuh"

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
    groups->marked[i] = at < layout.classes ? load_byte(coded + layout.marks + 2u + at / 8u) >> (at % 8u) : 0u;
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
                                                  uint64_t coded, uint32_t escapes, uint32_t inner) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(&unit));
  return decode_values_of<true>(unit, place, coded, layout, escapes, inner);
}

static __device__ __forceinline__ bool decode_exact(const struct kvs_unit &unit, const struct code_place &place,
                                                    uint64_t coded, uint32_t escapes) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(&unit));
  const uint32_t inner = layout.classes ? 16u * load_byte(coded + layout.marks) : 0u;
  const bool right = inner == 0 ? decode_values_of<false>(unit, place, coded, layout, escapes, 0)
                                : decode_marked(unit, place, coded, escapes, inner);
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
