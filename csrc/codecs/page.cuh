/* Both sides of a unit, for the CUDA code of the codecs: a page, of any alignment, in groups of 16 bytes; and the coded
 * bytes, whose head is 16-byte aligned. */
#ifndef KVS_CODECS_PAGE_CUH
#define KVS_CODECS_PAGE_CUH

#include "codecs/unit.h"
#include "kernels/common.cuh"

#define CODE_VALUES 8u /* of a thread at a time: a group */

/* -- the side that is not coded -------------------------------------------------------------------------------- */

/* Where the 16 bytes of a group are, and how many of them: fewer at the end of the unit. */
struct code_place {
  uint64_t page, valid_nbytes; /* bytes of the page behind valid_nbytes are read as zeros */
  int whole;                   /* groups are aligned, and none is in two rows */
};

static __device__ __forceinline__ struct code_place place_of(const struct kvs_unit &unit, uint64_t page,
                                                             uint64_t valid_nbytes) {
  const uint64_t apart = (page + unit.offset) | unit.row_nbytes | (unit.rows > 1 ? unit.pitch : 0);
  return {page, valid_nbytes, (apart & 15u) == 0};
}

static __device__ __forceinline__ uint64_t offset_in_page(const struct kvs_unit &unit, uint32_t byte) {
  if (unit.rows == 1) return unit.offset + byte;
  const uint32_t row = byte / unit.row_nbytes;
  return unit.offset + row * unit.pitch + (byte - row * unit.row_nbytes);
}

/* 16 bytes of the unit from `byte` on; zeros behind its end. */
static __device__ __forceinline__ uint4 load_group(const struct kvs_unit &unit, const struct code_place &place,
                                                   uint32_t byte) {
  const uint32_t nbytes = kvs_unit_nbytes(&unit);
  uint4 words = {0, 0, 0, 0};
  if (byte >= nbytes) return words;
  const uint64_t at = offset_in_page(unit, byte);
  if (place.whole && at + 16u <= place.valid_nbytes) {
    word_load(&words, (const uint4 *)(place.page + at));
    return words;
  }
  uint32_t held[4] = {0, 0, 0, 0};
  for (uint32_t i = 0; i < 16u && byte + i < nbytes; i++) {
    const uint64_t from = offset_in_page(unit, byte + i);
    uint8_t value = 0;
    if (from < place.valid_nbytes) word_load(&value, (const uint8_t *)(place.page + from));
    held[i / 4u] |= (uint32_t)value << (8u * (i % 4u));
  }
  return {held[0], held[1], held[2], held[3]};
}

/* One value of 16 bits. */
static __device__ __forceinline__ uint32_t load_value(const struct kvs_unit &unit, const struct code_place &place,
                                                      uint32_t value) {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < 2u; i++) {
    const uint64_t from = offset_in_page(unit, 2u * value + i);
    uint8_t byte = 0;
    if (from < place.valid_nbytes) word_load(&byte, (const uint8_t *)(place.page + from));
    bits |= (uint32_t)byte << (8u * i);
  }
  return bits;
}

static __device__ __forceinline__ void store_value(const struct kvs_unit &unit, const struct code_place &place,
                                                   uint32_t value, uint32_t bits) {
  for (uint32_t i = 0; i < 2u; i++) {
    const uint8_t byte = (uint8_t)(bits >> (8u * i));
    word_store((uint8_t *)(place.page + offset_in_page(unit, 2u * value + i)), &byte);
  }
}

static __device__ __forceinline__ void store_group(const struct kvs_unit &unit, const struct code_place &place,
                                                   uint32_t byte, const uint32_t words[4]) {
  const uint32_t nbytes = kvs_unit_nbytes(&unit);
  if (byte >= nbytes) return;
  if (place.whole) {
    const uint4 held = {words[0], words[1], words[2], words[3]};
    word_store((uint4 *)(place.page + offset_in_page(unit, byte)), &held);
    return;
  }
  for (uint32_t i = 0; i < 16u && byte + i < nbytes; i++) {
    const uint8_t value = (uint8_t)(words[i / 4u] >> (8u * (i % 4u)));
    word_store((uint8_t *)(place.page + offset_in_page(unit, byte + i)), &value);
  }
}

/* -- the coded side -------------------------------------------------------------------------------------------- */

/* `count` of the bytes in `words` to an address that is aligned for all of them. */
template <int Words>
static __device__ __forceinline__ void store_bytes(uint64_t to, const uint32_t words[Words], uint32_t count) {
  if (Words % 2 == 0 && count >= 4u * Words) {
    for (int i = 0; i < Words; i += 2) {
      const uint64_t both = words[i] | (uint64_t)words[i + 1] << 32;
      word_store((uint64_t *)to + i / 2, &both);
    }
    return;
  }
  if (count >= 4u * Words) {
    for (int i = 0; i < Words; i++) word_store((uint32_t *)to + i, &words[i]);
    return;
  }
  for (uint32_t i = 0; i < count; i++) {
    const uint8_t value = (uint8_t)(words[i / 4u] >> (8u * (i % 4u)));
    word_store((uint8_t *)to + i, &value);
  }
}

static __device__ __forceinline__ uint32_t load_byte(uint64_t from) {
  uint8_t value;
  word_load(&value, (const uint8_t *)from);
  return value;
}

static __device__ __forceinline__ void store_byte(uint64_t to, uint32_t value) {
  const uint8_t byte = (uint8_t)value;
  word_store((uint8_t *)to, &byte);
}

/* Words behind the end of a section belong to the next one, and are not used. */
template <int Words> static __device__ __forceinline__ void load_words(uint64_t from, uint32_t words[Words]) {
  for (int i = 0; Words % 2 == 0 && i < Words; i += 2) {
    uint64_t both;
    word_load(&both, (const uint64_t *)from + i / 2);
    words[i] = (uint32_t)both, words[i + 1] = (uint32_t)(both >> 32);
  }
  for (int i = 0; Words % 2 != 0 && i < Words; i++) word_load(&words[i], (const uint32_t *)from + i);
}

static __device__ __forceinline__ void zero_bytes(uint64_t coded, uint32_t from, uint32_t end) {
  for (uint32_t at = from + threadIdx.x; at < end; at += blockDim.x) store_byte(coded + at, 0);
}

static __device__ __forceinline__ uint32_t bytes_left(uint32_t end, uint32_t at, uint32_t most) {
  const uint32_t left = at < end ? end - at : 0u;
  return left < most ? left : most;
}

static __device__ __forceinline__ void store_head(const struct kvs_unit &unit, uint64_t coded, uint8_t version,
                                                  uint32_t state, uint32_t escapes) {
  if (threadIdx.x != 0) return;
  const struct kvs_unit_head head = kvs_unit_head_of(&unit, version, state, escapes);
  const uint32_t words[4] = {head.magic | (uint32_t)head.version << 16 | (uint32_t)head.codec << 24,
                             head.state | (uint32_t)head.kind << 8 | (uint32_t)head.escapes << 16, head.nbytes, 0};
  store_bytes<4>(coded, words, 16);
}

/* The larger of all lanes of an aligned group of so many. */
template <unsigned Lanes> static __device__ __forceinline__ uint32_t largest(uint32_t value) {
  for (unsigned apart = Lanes / 2u; apart != 0; apart /= 2u) {
    const uint32_t other = __shfl_xor_sync(KVS_ALL_LANES, value, (int)apart);
    value = other > value ? other : value;
  }
  return value;
}

static __device__ __forceinline__ uint32_t half_word(const uint4 &words, uint32_t value) {
  const uint32_t word = value < 2u ? words.x : value < 4u ? words.y : value < 6u ? words.z : words.w;
  return word >> (16u * (value % 2u)) & 0xffffu;
}

#endif
