/* Encoding and decoding of a unit by one CTA: the same arithmetic as csrc/codecs/unit_code.c, and the same bytes. A
 * thread handles 8 consecutive values, 16 bytes, at a time.
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

#define CODE_THREADS 512

/* -- raw ------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void encode_raw(const struct kvs_unit &unit, const struct code_place &place,
                                                  uint64_t coded) {
  const uint32_t nbytes = kvs_unit_nbytes(&unit);
  for (uint32_t byte = 16u * threadIdx.x; byte < nbytes; byte += 16u * blockDim.x) {
    const uint4 words = load_group(unit, place, byte);
    word_store((uint4 *)(coded + KVS_UNIT_HEAD + byte), &words);
  }
}

static __device__ __forceinline__ void decode_raw(const struct kvs_unit &unit, const struct code_place &place,
                                                  uint64_t coded) {
  const uint32_t nbytes = kvs_unit_nbytes(&unit);
  for (uint32_t byte = 16u * threadIdx.x; byte < nbytes; byte += 16u * blockDim.x) {
    uint32_t words[4];
    load_words<4>(coded + KVS_UNIT_HEAD + byte, words);
    store_group(unit, place, byte, words);
  }
}

static __device__ __forceinline__ void zero_unit(const struct kvs_unit &unit, const struct code_place &place) {
  const uint32_t zeros[4] = {0, 0, 0, 0};
  for (uint32_t byte = 16u * threadIdx.x; byte < kvs_unit_nbytes(&unit); byte += 16u * blockDim.x)
    store_group(unit, place, byte, zeros);
}

/* -- units ----------------------------------------------------------------------------------------------------- */

/* The rows of kvs_codecs, as they are on a GPU. */
static __device__ __forceinline__ uint8_t version_of(uint32_t codec) {
  return codec == KVS_CODEC_EXACT   ? (uint8_t)KVS_EXACT_VERSION
         : codec == KVS_CODEC_MXFP8 ? (uint8_t)KVS_MXFP8_VERSION
         : codec == KVS_CODEC_FP4   ? (uint8_t)KVS_FP4_VERSION
                                    : (uint8_t)KVS_UNIT_RAW_VERSION;
}

static __device__ enum kvs_unit_verdict encode_unit(const struct kvs_unit &unit, uint64_t page, uint64_t valid_nbytes,
                                                    uint64_t coded_page, struct code_shared *shared) {
  const struct code_place place = place_of(unit, page, valid_nbytes);
  const uint64_t coded = coded_page + unit.coded;
  const struct kvs_float type = unit.kind == KVS_UNIT_BF16 ? kvs_bf16() : kvs_fp16();
  switch (unit.codec) {
  case KVS_CODEC_EXACT:
    return encode_exact(unit, place, coded, shared);
  case KVS_CODEC_MXFP8:
    encode_mxfp8(unit, place, coded, type);
    store_head(unit, coded, KVS_MXFP8_VERSION, KVS_HEAD_CODED, 0);
    return KVS_UNIT_GOOD;
  case KVS_CODEC_FP4:
    if (unit.kind == KVS_UNIT_E4M3)
      encode_fp4_e4m3(unit, place, coded);
    else
      encode_fp4(unit, place, coded, type);
    store_head(unit, coded, KVS_FP4_VERSION, KVS_HEAD_CODED, 0);
    return KVS_UNIT_GOOD;
  default:
    encode_raw(unit, place, coded);
    store_head(unit, coded, KVS_UNIT_RAW_VERSION, KVS_HEAD_CODED, 0);
    return KVS_UNIT_GOOD;
  }
}

static __device__ __forceinline__ struct kvs_unit_head load_head(uint64_t coded) {
  uint32_t words[4];
  load_words<4>(coded, words);
  struct kvs_unit_head head;
  head.magic = (uint16_t)words[0];
  head.version = (uint8_t)(words[0] >> 16);
  head.codec = (uint8_t)(words[0] >> 24);
  head.state = (uint8_t)words[1];
  head.kind = (uint8_t)(words[1] >> 8);
  head.escapes = (uint16_t)(words[1] >> 16);
  head.nbytes = words[2];
  head.reserved = words[3];
  return head;
}

static __device__ __forceinline__ bool decode_values(const struct kvs_unit &unit, const struct code_place &place,
                                                     uint64_t coded, uint32_t escapes) {
  const struct kvs_float type = unit.kind == KVS_UNIT_BF16 ? kvs_bf16() : kvs_fp16();
  if (unit.codec == KVS_CODEC_EXACT) return decode_exact(unit, place, coded, escapes);
  if (escapes != 0) return false;
  if (unit.codec == KVS_CODEC_MXFP8)
    decode_mxfp8(unit, place, coded, type);
  else if (unit.codec == KVS_CODEC_FP4 && unit.kind == KVS_UNIT_E4M3)
    decode_fp4_e4m3(unit, place, coded);
  else if (unit.codec == KVS_CODEC_FP4)
    decode_fp4(unit, place, coded, type);
  else
    decode_raw(unit, place, coded);
  return true;
}

static __device__ enum kvs_unit_verdict decode_unit(const struct kvs_unit &unit, uint64_t coded_page, uint64_t page) {
  const struct code_place place = place_of(unit, page, UINT64_MAX);
  const uint64_t coded = coded_page + unit.coded;
  const struct kvs_unit_head head = load_head(coded);
  enum kvs_unit_verdict verdict = kvs_unit_check(&unit, version_of(unit.codec), &head);
  if (verdict == KVS_UNIT_GOOD && !decode_values(unit, place, coded, head.escapes)) verdict = KVS_UNIT_DAMAGED;
  if (verdict != KVS_UNIT_GOOD) zero_unit(unit, place);
  return verdict;
}

/* Zeros for a unit that has no source. */
static __device__ enum kvs_unit_verdict decode_nothing(const struct kvs_unit &unit, uint64_t page) {
  zero_unit(unit, place_of(unit, page, UINT64_MAX));
  return KVS_UNIT_NOT_STORED;
}

#endif
