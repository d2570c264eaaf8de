/* Codec `mxfp8` by one CTA: 4 lanes have a block of 32 values. Blocks of bf16 that hold neither infinity nor NaN are
 * converted by the GPU's own instructions, whose results are those of mxfp8.h: multiplying by a power of two is exact
 * in float, but for values that become zero either way. */
#ifndef KVS_CODECS_MXFP8_CUH
#define KVS_CODECS_MXFP8_CUH

#include "codecs/mxfp8.h"
#include "codecs/page.cuh"

/* GPUs before sm_89 do not have them, nor has the CPU that tests this code. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define KVS_E4M3_INSTRUCTIONS 1
#else
#define KVS_E4M3_INSTRUCTIONS 0
#endif

#if KVS_E4M3_INSTRUCTIONS
/* Two elements. */
static __device__ __forceinline__ uint32_t e4m3_of(uint32_t pair, float factor) {
  uint16_t elements;
  const float low = __uint_as_float(pair << 16) * factor, high = __uint_as_float(pair & 0xffff0000u) * factor;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(elements) : "f"(high), "f"(low));
  return elements;
}

/* Two bf16. */
static __device__ __forceinline__ uint32_t bf16_of(uint32_t elements, float factor) {
  uint32_t halves, pair;
  float low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)elements));
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high)
      : "r"(halves));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high * factor), "f"(low * factor));
  return pair;
}
#endif

/* By the arithmetic of mxfp8.h, not inlined: the common case stays short. */
static __device__ __noinline__ uint64_t codes_of_group(const uint4 words, const struct kvs_float type, int scale) {
  uint64_t codes = 0;
#pragma unroll 2
  for (uint32_t i = 0; i < CODE_VALUES; i++)
    codes |= (uint64_t)kvs_mxfp8_code(type, half_word(words, i), scale) << (8u * i);
  return codes;
}

static __device__ __noinline__ uint4 values_of_group(uint64_t codes, const struct kvs_float type, uint32_t scale) {
  uint32_t pairs[4] = {0, 0, 0, 0};
#pragma unroll
  for (uint32_t i = 0; i < CODE_VALUES; i++)
    pairs[i / 2u] |= kvs_mxfp8_value(type, codes >> (8u * i) & 0xffu, scale) << (16u * (i % 2u));
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

static __device__ __forceinline__ void encode_group(const uint4 &words, struct kvs_float type, int scale, bool finite,
                                                    uint32_t codes[2]) {
#if KVS_E4M3_INSTRUCTIONS
  if (type.mantissa == 7 && finite) {
    const float factor = __uint_as_float((uint32_t)(127 - scale) << 23);
    codes[0] = e4m3_of(words.x, factor) | e4m3_of(words.y, factor) << 16;
    codes[1] = e4m3_of(words.z, factor) | e4m3_of(words.w, factor) << 16;
    return;
  }
#endif
  (void)finite;
  const uint64_t both = codes_of_group(words, type, scale);
  codes[0] = (uint32_t)both, codes[1] = (uint32_t)(both >> 32);
}

/* The largest magnitude of a group without NaN; infinity counts as the largest finite value. */
static __device__ __noinline__ uint32_t largest_finite(const uint4 words, const struct kvs_float type) {
  uint32_t most = 0;
#pragma unroll
  for (uint32_t i = 0; i < CODE_VALUES; i++) {
    const uint32_t magnitude = half_word(words, i) & ~type.sign;
    const uint32_t counted = kvs_float_is_nan(type, magnitude) ? 0u : kvs_float_finite(type, magnitude);
    most = counted > most ? counted : most;
  }
  return most;
}

/* Threads step together, since the lanes of a block of values exchange their maxima. */
template <bool Bf16>
static __device__ __noinline__ void encode_mxfp8(const struct kvs_unit &unit, const struct code_place place,
                                                 uint64_t coded) {
  const struct kvs_float type = Bf16 ? kvs_bf16() : kvs_fp16(); /* known to the compiler */
  const struct kvs_mxfp8_layout layout = kvs_mxfp8_layout_of(kvs_unit_nbytes(&unit));
  const struct code_values values = load_values(unit, place);
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) {
    const uint32_t first = group_first(i);
    uint32_t most = largest<KVS_MXFP8_BLOCK / CODE_VALUES>(largest_of_group(values.of[i], type)), codes[2];
    const bool finite = most <= type.most;
    if (__any_sync(KVS_ALL_LANES, !finite))
      most = largest<KVS_MXFP8_BLOCK / CODE_VALUES>(largest_finite(values.of[i], type));
    const int scale = kvs_mxfp8_scale(type, most);
    encode_group(values.of[i], type, scale, finite, codes);
    store_8(coded + KVS_UNIT_HEAD + first, codes, bytes_left(layout.values, first, 8u));
    if (first < layout.values && first % KVS_MXFP8_BLOCK == 0)
      store_byte(coded + layout.scales + first / KVS_MXFP8_BLOCK, (uint32_t)(scale + 127));
  }
  zero_bytes(coded, KVS_UNIT_HEAD + layout.values, layout.scales);
  zero_bytes(coded, layout.scales + layout.blocks, layout.nbytes);
}

static __device__ __forceinline__ uint4 decode_group(const uint32_t codes[2], struct kvs_float type, uint32_t scale) {
#if KVS_E4M3_INSTRUCTIONS
  const uint32_t nan = ((codes[0] & 0x7f7f7f7fu) + 0x01010101u) | ((codes[1] & 0x7f7f7f7fu) + 0x01010101u);
  if (type.mantissa == 7 && scale < 240u && !(nan & 0x80808080u)) { /* no product overflows */
    const float factor = __uint_as_float(scale == 0 ? 1u << 22 : scale << 23);
    return {bf16_of(codes[0], factor), bf16_of(codes[0] >> 16, factor), bf16_of(codes[1], factor),
            bf16_of(codes[1] >> 16, factor)};
  }
#endif
  return values_of_group(codes[0] | (uint64_t)codes[1] << 32, type, scale);
}

template <bool Bf16>
static __device__ __noinline__ enum kvs_unit_verdict decode_mxfp8(const struct kvs_unit &unit,
                                                                  const struct code_place place, uint64_t coded) {
  const struct kvs_float type = Bf16 ? kvs_bf16() : kvs_fp16();
  const struct kvs_mxfp8_layout layout = kvs_mxfp8_layout_of(kvs_unit_nbytes(&unit));
  const struct code_head head = load_head(coded);
  uint32_t codes[CODE_GROUPS][2], scales[CODE_GROUPS];
  struct code_values values;
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) {
    const uint32_t first = group_first(i) < layout.values ? group_first(i) : 0u;
    load_words<2>(coded + KVS_UNIT_HEAD + first, codes[i]);
    scales[i] = load_byte(coded + layout.scales + first / KVS_MXFP8_BLOCK);
  }
  const enum kvs_unit_verdict verdict = check_head(unit, KVS_MXFP8_VERSION, head);
  if (verdict != KVS_UNIT_GOOD) return verdict;
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) values.of[i] = decode_group(codes[i], type, scales[i]);
  store_values(unit, place, values);
  return KVS_UNIT_GOOD;
}

#endif
