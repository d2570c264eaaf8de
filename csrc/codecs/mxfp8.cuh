/* Codec `mxfp8` by one CTA: 4 lanes have a block of 32 values. */
#ifndef KVS_CODECS_MXFP8_CUH
#define KVS_CODECS_MXFP8_CUH

#include "codecs/mxfp8.h"
#include "codecs/page.cuh"

/* Threads step together, since the lanes of a block of values exchange their maxima. */
static __device__ __forceinline__ void encode_mxfp8(const struct kvs_unit &unit, const struct code_place &place,
                                                    uint64_t coded, struct kvs_float type) {
  const struct kvs_mxfp8_layout layout = kvs_mxfp8_layout_of(kvs_unit_nbytes(&unit));
  for (uint32_t from = 0; from < layout.values; from += blockDim.x * CODE_VALUES) {
    const uint32_t first = from + threadIdx.x * CODE_VALUES;
    const uint4 words = load_group(unit, place, 2u * first);
    uint32_t most = 0, codes[2] = {0, 0};
#pragma unroll
    for (uint32_t i = 0; i < CODE_VALUES; i++) {
      const uint32_t magnitude = half_word(words, i) & ~type.sign;
      const uint32_t counted = kvs_float_is_nan(type, magnitude) ? 0u : kvs_float_finite(type, magnitude);
      most = counted > most ? counted : most;
    }
    const int scale = kvs_mxfp8_scale(type, largest<KVS_MXFP8_BLOCK / CODE_VALUES>(most));
#pragma unroll
    for (uint32_t i = 0; i < CODE_VALUES; i++)
      codes[i / 4u] |= kvs_mxfp8_code(type, half_word(words, i), scale) << (8u * (i % 4u));
    store_bytes<2>(coded + KVS_UNIT_HEAD + first, codes, bytes_left(layout.values, first, 8u));
    if (first < layout.values && first % KVS_MXFP8_BLOCK == 0)
      store_byte(coded + layout.scales + first / KVS_MXFP8_BLOCK, (uint32_t)(scale + 127));
  }
  zero_bytes(coded, KVS_UNIT_HEAD + layout.values, layout.scales);
  zero_bytes(coded, layout.scales + layout.blocks, layout.nbytes);
}

static __device__ __forceinline__ void decode_mxfp8(const struct kvs_unit &unit, const struct code_place &place,
                                                    uint64_t coded, struct kvs_float type) {
  const struct kvs_mxfp8_layout layout = kvs_mxfp8_layout_of(kvs_unit_nbytes(&unit));
  for (uint32_t first = threadIdx.x * CODE_VALUES; first < layout.values; first += blockDim.x * CODE_VALUES) {
    const uint32_t scale = load_byte(coded + layout.scales + first / KVS_MXFP8_BLOCK);
    uint32_t codes[2], pairs[4] = {0, 0, 0, 0};
    load_words<2>(coded + KVS_UNIT_HEAD + first, codes);
#pragma unroll
    for (uint32_t i = 0; i < CODE_VALUES; i++)
      pairs[i / 2u] |= kvs_mxfp8_value(type, codes[i / 4u] >> (8u * (i % 4u)) & 0xffu, scale) << (16u * (i % 2u));
    store_group(unit, place, 2u * first, pairs);
  }
}

#endif
