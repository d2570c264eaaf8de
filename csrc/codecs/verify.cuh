/* Verifying a unit by one CTA: what kvs_unit_verify() does (csrc/codecs/unit_code.h). */
#ifndef KVS_CODECS_VERIFY_CUH
#define KVS_CODECS_VERIFY_CUH

#include "codecs/unit.cuh"

static __device__ __forceinline__ int words_differ(const uint4 &a, const uint4 &b) {
  return (a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w) ? 1 : 0;
}

/* Both are 16-byte aligned, and nbytes is a multiple of 16. */
static __device__ __forceinline__ int bytes_differ(uint64_t one, uint64_t other, uint32_t nbytes) {
  int differ = 0;
  for (uint32_t at = 16u * threadIdx.x; at < nbytes; at += 16u * blockDim.x) {
    uint4 a, b;
    word_load(&a, (const uint4 *)(one + at));
    word_load(&b, (const uint4 *)(other + at));
    differ |= words_differ(a, b);
  }
  return differ;
}

static __device__ __forceinline__ int values_differ(const struct kvs_unit &unit, const struct code_place &place,
                                                    const struct kvs_unit &alone, uint64_t values) {
  const struct code_values one = load_values(unit, place),
                           other = load_values(alone, place_of(alone, values, UINT64_MAX));
  int differ = 0;
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) differ |= words_differ(one.of[i], other.of[i]);
  return differ;
}

/* Whether coding this page again gives other bytes. */
static __device__ int codes_otherwise(struct kvs_unit unit, uint64_t page, uint64_t valid_nbytes, uint64_t coded,
                                      uint64_t again, struct code_shared *shared) {
  unit.coded = 0;
  (void)encode_unit(unit, page, valid_nbytes, again, 0, shared);
  __syncthreads();
  const int differ = __syncthreads_or(bytes_differ(coded, again, unit.coded_nbytes));
  return differ;
}

static __device__ enum kvs_unit_verdict verify_unit(const struct kvs_unit &unit, uint64_t page, uint64_t valid_nbytes,
                                                    uint64_t coded_page, uint64_t scratch, struct code_shared *shared) {
  const struct kvs_unit alone = kvs_unit_alone(&unit);
  const uint64_t coded = coded_page + unit.coded, again = scratch + KVS_UNIT_NBYTES;
  const enum kvs_unit_verdict found = decode_unit(alone, coded_page, scratch);
  if (found == KVS_UNIT_NOT_STORED) return found;
  __syncthreads();
  int wrong = found != KVS_UNIT_GOOD;
  if (unit.codec == KVS_CODEC_RAW || unit.codec == KVS_CODEC_EXACT)
    wrong |= __syncthreads_or(values_differ(unit, place_of(unit, page, valid_nbytes), alone, scratch));
  else
    wrong |= codes_otherwise(unit, page, valid_nbytes, coded, again, shared) |
             codes_otherwise(alone, scratch, UINT64_MAX, coded, again, shared);
  if (!wrong) return KVS_UNIT_GOOD;
  store_head(unit, coded, version_of(unit.codec), KVS_HEAD_NOT_STORED, 0);
  return KVS_UNIT_MISCODED;
}

#endif
