/* Encoding and decoding of a unit by one CTA of kvs_code_threads() threads: the same bytes as csrc/codecs/unit_code.c
 * gives. A thread handles groups of 8 consecutive values, 16 bytes.
 *
 * A codec has a function for each direction, which is not inlined: each has all registers for its values, of which a
 * thread of two CTAs an SM has 64.
 *
 * All threads of the CTA call these functions, with the same arguments. Coded pages are 16-byte aligned; pages that are
 * not coded may have any alignment. tests/c/code_cta.cc runs these files on the CPU. */
#ifndef KVS_CODECS_UNIT_CUH
#define KVS_CODECS_UNIT_CUH

#include "codecs/exact.cuh"
#include "codecs/exact_decode.cuh"
#include "codecs/fp4.cuh"
#include "codecs/fp4_e4m3.cuh"
#include "codecs/mxfp8.cuh"

/* -- raw ------------------------------------------------------------------------------------------------------- */

static __device__ __noinline__ void encode_raw(const struct kvs_unit &unit, const struct code_place place,
                                               uint64_t coded) {
  const uint32_t nbytes = kvs_unit_nbytes(&unit);
  const struct code_values values = load_values(unit, place);
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++)
    if (2u * group_first(i) < nbytes) word_store((uint4 *)(coded + KVS_UNIT_HEAD + 2u * group_first(i)), &values.of[i]);
}

static __device__ __noinline__ enum kvs_unit_verdict decode_raw(const struct kvs_unit &unit,
                                                                const struct code_place place, uint64_t coded) {
  const struct code_head head = load_head(coded);
  struct code_values values;
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++)
    if (2u * group_first(i) < kvs_unit_nbytes(&unit))
      word_load(&values.of[i], (const uint4 *)(coded + KVS_UNIT_HEAD + 2u * group_first(i)));
  const enum kvs_unit_verdict verdict = check_head(unit, KVS_UNIT_RAW_VERSION, head);
  if (verdict == KVS_UNIT_GOOD) store_values(unit, place, values);
  return verdict;
}

static __device__ __noinline__ void zero_unit(const struct kvs_unit &unit, const struct code_place &place) {
  struct code_values zeros;
  for (uint32_t i = 0; i < CODE_GROUPS; i++) zeros.of[i] = {0, 0, 0, 0};
  store_values(unit, place, zeros);
}

/* -- units ----------------------------------------------------------------------------------------------------- */

/* The rows of kvs_codecs, as they are on a GPU. */
static __device__ __forceinline__ uint8_t version_of(uint32_t codec) {
  return codec == KVS_CODEC_EXACT   ? (uint8_t)KVS_EXACT_VERSION
         : codec == KVS_CODEC_MXFP8 ? (uint8_t)KVS_MXFP8_VERSION
         : codec == KVS_CODEC_FP4   ? (uint8_t)KVS_FP4_VERSION
                                    : (uint8_t)KVS_UNIT_RAW_VERSION;
}

/* `turn`: 0 and 1 in turns, from unit to unit of a CTA. */
static __device__ __forceinline__ enum kvs_unit_verdict encode_unit(const struct kvs_unit &unit, uint64_t page,
                                                                    uint64_t valid_nbytes, uint64_t coded_page,
                                                                    uint32_t turn, struct code_shared *shared) {
  const struct code_place place = place_of(unit, page, valid_nbytes);
  const uint64_t coded = coded_page + unit.coded;
  const bool bf16 = unit.kind == KVS_UNIT_BF16;
  if (unit.codec == KVS_CODEC_EXACT) return encode_exact(unit, place, coded, turn, shared);
  if (unit.codec == KVS_CODEC_MXFP8)
    bf16 ? encode_mxfp8<true>(unit, place, coded) : encode_mxfp8<false>(unit, place, coded);
  else if (unit.codec == KVS_CODEC_FP4 && unit.kind == KVS_UNIT_E4M3)
    encode_fp4_e4m3(unit, place, coded);
  else if (unit.codec == KVS_CODEC_FP4)
    bf16 ? encode_fp4<true>(unit, place, coded) : encode_fp4<false>(unit, place, coded);
  else
    encode_raw(unit, place, coded);
  store_head(unit, coded, version_of(unit.codec), KVS_HEAD_CODED, 0);
  return KVS_UNIT_GOOD;
}

static __device__ __forceinline__ enum kvs_unit_verdict decode_unit(const struct kvs_unit &unit, uint64_t coded_page,
                                                                    uint64_t page) {
  const struct code_place place = place_of(unit, page, UINT64_MAX);
  const uint64_t coded = coded_page + unit.coded;
  const bool bf16 = unit.kind == KVS_UNIT_BF16;
  enum kvs_unit_verdict verdict;
  if (unit.codec == KVS_CODEC_EXACT)
    verdict = decode_exact(unit, place, coded);
  else if (unit.codec == KVS_CODEC_MXFP8)
    verdict = bf16 ? decode_mxfp8<true>(unit, place, coded) : decode_mxfp8<false>(unit, place, coded);
  else if (unit.codec == KVS_CODEC_FP4 && unit.kind == KVS_UNIT_E4M3)
    verdict = decode_fp4_e4m3(unit, place, coded);
  else if (unit.codec == KVS_CODEC_FP4)
    verdict = bf16 ? decode_fp4<true>(unit, place, coded) : decode_fp4<false>(unit, place, coded);
  else
    verdict = decode_raw(unit, place, coded);
  if (verdict != KVS_UNIT_GOOD) zero_unit(unit, place);
  return verdict;
}

/* Zeros for a unit that has no source. */
static __device__ enum kvs_unit_verdict decode_nothing(const struct kvs_unit &unit, uint64_t page) {
  zero_unit(unit, place_of(unit, page, UINT64_MAX));
  return KVS_UNIT_NOT_STORED;
}

#endif
