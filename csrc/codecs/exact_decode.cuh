/* Decoding of `exact`, by one CTA. A thread loads its values, and one escape, before any of them is used. */
#ifndef KVS_CODECS_EXACT_DECODE_CUH
#define KVS_CODECS_EXACT_DECODE_CUH

#include "codecs/exact.h"
#include "codecs/page.cuh"

struct code_groups {
  uint32_t rest[CODE_GROUPS][2], joined[CODE_GROUPS], base[CODE_GROUPS];
  uint32_t marked[CODE_GROUPS]; /* pairs */
};

/* An escape: a thread has at most one. */
struct code_escape {
  uint32_t low, high, exponent;     /* the bytes of its position */
  uint32_t before_low, before_high; /* of the one before it */
};

/* Of the smallest CTA's largest unit; rounding to 16 bytes adds 5. */
static_assert(KVS_CODE_LEAST_THREADS * CODE_GROUPS * CODE_VALUES / KVS_EXACT_PER_ESCAPE + 6 <= KVS_CODE_LEAST_THREADS,
              "a thread has one escape");

template <bool Marked>
static __device__ __forceinline__ void load_groups(uint64_t coded, const struct kvs_exact_layout &layout,
                                                   uint32_t inner, struct code_groups *groups) {
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) {
    const uint32_t first = group_first(i) < layout.values ? group_first(i) : 0u;
    load_words<2>(coded + KVS_UNIT_HEAD + first, groups->rest[i]);
    load_words<1>(coded + layout.codes + first / 2u, &groups->joined[i]);
    groups->base[i] = load_byte(coded + layout.bases + first / KVS_EXACT_SEGMENT);
    if (!Marked) continue;
    const uint32_t at = kvs_exact_class(inner, first);
    groups->marked[i] = at < layout.classes ? load_byte(coded + layout.marks + 2u + at / 8u) >> (at % 8u) : 0u;
  }
}

/* Has no branch: the kernel would wait for the loads at its end. */
static __device__ __forceinline__ struct code_escape load_escape(uint64_t coded,
                                                                 const struct kvs_exact_layout &layout) {
  const uint32_t place = threadIdx.x < layout.places ? threadIdx.x : 0u;
  const uint64_t at = coded + layout.escapes + 3u * place, before = place ? at - 3u : at;
  struct code_escape escape;
  escape.low = load_byte(at), escape.high = load_byte(at + 1), escape.exponent = load_byte(at + 2);
  escape.before_low = load_byte(before), escape.before_high = load_byte(before + 1);
  return escape;
}

static __device__ __forceinline__ uint32_t position_of(const struct code_escape &escape) {
  return escape.low | escape.high << 8;
}

static __device__ __forceinline__ bool is_wrong(const struct code_escape &escape,
                                                const struct kvs_exact_layout &layout) {
  const uint32_t position = position_of(escape), before = escape.before_low | escape.before_high << 8;
  return position >= layout.values || (threadIdx.x != 0 && position <= before);
}

/* As kvs_exact_pair(). */
static __device__ __forceinline__ uint32_t pair_of(uint32_t rest, uint32_t codes, uint32_t base) {
  const uint32_t less = (base - 14u & 0xffu) * 0x00010001u;
  codes = (codes | codes << 12) & 0x000f000fu;
  const uint32_t exponents = __viaddmin_u16x2(codes, less, codes << 12); /* 0 for code 0; modulo 256 below */
  return (rest & 0x007f007fu) | (rest << 8 & 0x80008000u) | (exponents << 7 & 0x7f807f80u);
}

template <bool Marked>
static __device__ __forceinline__ struct code_values values_of(const struct code_groups &groups, uint32_t outer) {
  struct code_values values;
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) {
    uint32_t pairs[4];
#pragma unroll
    for (uint32_t j = 0; j < 4u; j++)
      pairs[j] = pair_of(__byte_perm(groups.rest[i][j / 2u], 0, j % 2u ? 0x4342 : 0x4140),
                         groups.joined[i] >> (8u * j) & 0xffu,
                         Marked && (groups.marked[i] >> j & 1u) ? outer : groups.base[i]);
    values.of[i] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
  return values;
}

static __device__ __noinline__ void decode_marked(const struct kvs_unit &unit, const struct code_place place,
                                                  uint64_t coded, const struct kvs_exact_layout layout,
                                                  uint32_t inner) {
  struct code_groups groups;
  load_groups<true>(coded, layout, inner, &groups);
  store_values(unit, place, values_of<true>(groups, load_byte(coded + layout.marks + 1u)));
}

/* All threads learn the verdict. If it is DAMAGED, the destination holds anything. */
static __device__ __noinline__ enum kvs_unit_verdict decode_exact(const struct kvs_unit &unit,
                                                                  const struct code_place place, uint64_t coded) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(&unit));
  struct code_groups groups;
  const struct code_head words = load_head(coded);
  const uint32_t inner = layout.classes ? load_byte(coded + layout.marks) : 0u;
  load_groups<false>(coded, layout, 0, &groups);
  const struct code_escape escape = load_escape(coded, layout);
  const struct kvs_unit_head head = head_of(words);
  const enum kvs_unit_verdict verdict = kvs_unit_check(&unit, KVS_EXACT_VERSION, &head);
  if (verdict != KVS_UNIT_GOOD) return verdict;
  if (inner == 0)
    store_values(unit, place, values_of<false>(groups, 0));
  else
    decode_marked(unit, place, coded, layout, 16u * inner);
  if (head.escapes == 0) return KVS_UNIT_GOOD;
  const bool own = threadIdx.x < head.escapes;
  if (__syncthreads_or(head.escapes > layout.places || (own && is_wrong(escape, layout)))) return KVS_UNIT_DAMAGED;
  if (!own) return KVS_UNIT_GOOD;
  const uint32_t rest = load_byte(coded + KVS_UNIT_HEAD + position_of(escape));
  store_value(unit, place, position_of(escape), kvs_exact_escaped(rest, escape.exponent));
  return KVS_UNIT_GOOD;
}

#endif
