/* Both sides of a unit, for the CUDA code of the codecs: a page, of any alignment, in groups of 16 bytes; and the coded
 * bytes, whose head is 16-byte aligned. */
#ifndef KVS_CODECS_PAGE_CUH
#define KVS_CODECS_PAGE_CUH

#include "codecs/floats.h"
#include "codecs/unit.h"
#include "kernels/common.cuh"

#define CODE_THREADS KVS_CODE_THREADS
#define CODE_VALUES 8u /* of a group */

/* A CTA of blockDim.x threads, CODE_THREADS or fewer, has at most this many groups a thread: kvs_code_threads(). All
 * are loaded before the first is used: one load at a time would leave the kernel waiting for memory. */
enum { CODE_GROUPS = KVS_UNIT_NBYTES / 16 / CODE_THREADS };

/* The first value of a thread's group `i`. A warp has 512 consecutive values in two groups of each of its lanes. */
static __device__ __forceinline__ uint32_t group_first(uint32_t i) {
  const uint32_t warp = threadIdx.x / KVS_WARP, lane = threadIdx.x % KVS_WARP;
  return ((i / 2u * (blockDim.x / KVS_WARP) + warp) * 2u + i % 2u) * KVS_WARP * CODE_VALUES + lane * CODE_VALUES;
}

/* -- the side that is not coded -------------------------------------------------------------------------------- */

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

/* A thread's values of a unit; zeros behind its end. */
struct code_values {
  uint4 of[CODE_GROUPS];
};

/* Byte by byte, where groups are not aligned, lie in two rows, or reach behind valid_nbytes. Not inlined, so that the
 * common case has all registers for its values. */
static __device__ __noinline__ struct code_values load_bytes(const struct kvs_unit &unit,
                                                             const struct code_place place) {
  const uint32_t nbytes = kvs_unit_nbytes(&unit);
  struct code_values values;
  for (uint32_t group = 0; group < CODE_GROUPS; group++) {
    uint32_t held[4] = {0, 0, 0, 0};
    for (uint32_t i = 0, byte = 2u * group_first(group); i < 16u && byte < nbytes; i++, byte++) {
      const uint64_t from = offset_in_page(unit, byte);
      uint8_t value = 0;
      if (from < place.valid_nbytes) word_load(&value, (const uint8_t *)(place.page + from));
      held[i / 4u] |= (uint32_t)value << (8u * (i % 4u));
    }
    values.of[group] = {held[0], held[1], held[2], held[3]};
  }
  return values;
}

static __device__ __noinline__ void store_bytes(const struct kvs_unit &unit, const struct code_place place,
                                                const struct code_values values) {
  for (uint32_t group = 0; group < CODE_GROUPS; group++) {
    const uint32_t held[4] = {values.of[group].x, values.of[group].y, values.of[group].z, values.of[group].w};
    for (uint32_t i = 0, byte = 2u * group_first(group); i < 16u && byte < kvs_unit_nbytes(&unit); i++, byte++) {
      const uint8_t value = (uint8_t)(held[i / 4u] >> (8u * (i % 4u)));
      word_store((uint8_t *)(place.page + offset_in_page(unit, byte)), &value);
    }
  }
}

static __device__ __forceinline__ struct code_values load_values(const struct kvs_unit &unit,
                                                                 const struct code_place &place) {
  const uint32_t nbytes = kvs_unit_nbytes(&unit);
  struct code_values values;
  if (!place.whole || offset_in_page(unit, nbytes - 1u) >= place.valid_nbytes) return load_bytes(unit, place);
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++) {
    values.of[i] = {0, 0, 0, 0};
    if (2u * group_first(i) < nbytes)
      word_load(&values.of[i], (const uint4 *)(place.page + offset_in_page(unit, 2u * group_first(i))));
  }
  return values;
}

static __device__ __forceinline__ void store_values(const struct kvs_unit &unit, const struct code_place &place,
                                                    const struct code_values &values) {
  if (!place.whole) return store_bytes(unit, place, values);
#pragma unroll
  for (uint32_t i = 0; i < CODE_GROUPS; i++)
    if (2u * group_first(i) < kvs_unit_nbytes(&unit))
      word_store_once((uint4 *)(place.page + offset_in_page(unit, 2u * group_first(i))), &values.of[i]);
}

/* One value of 16 bits. */
static __device__ __forceinline__ void store_value(const struct kvs_unit &unit, const struct code_place &place,
                                                   uint32_t value, uint32_t bits) {
  for (uint32_t i = 0; i < 2u; i++) {
    const uint8_t byte = (uint8_t)(bits >> (8u * i));
    word_store((uint8_t *)(place.page + offset_in_page(unit, 2u * value + i)), &byte);
  }
}

/* -- the coded side -------------------------------------------------------------------------------------------- */

/* The first `count` bytes: the end of a section, once in a unit at most. */
static __device__ __noinline__ void store_end(uint64_t to, uint64_t bytes, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    const uint8_t value = (uint8_t)(bytes >> (8u * i));
    word_store((uint8_t *)to + i, &value);
  }
}

/* `count` of the 8 bytes to an address that is aligned for all of them. */
static __device__ __forceinline__ void store_8(uint64_t to, const uint32_t words[2], uint32_t count) {
  const uint64_t both = words[0] | (uint64_t)words[1] << 32;
  if (count >= 8u)
    word_store((uint64_t *)to, &both);
  else
    store_end(to, both, count);
}

static __device__ __forceinline__ void store_4(uint64_t to, uint32_t word, uint32_t count) {
  if (count >= 4u)
    word_store((uint32_t *)to, &word);
  else
    store_end(to, word, count);
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
  const uint4 words = {head.magic | (uint32_t)head.version << 16 | (uint32_t)head.codec << 24,
                       head.state | (uint32_t)head.kind << 8 | (uint32_t)head.escapes << 16, head.nbytes, 0};
  word_store((uint4 *)coded, &words);
}

/* 8 codes of 4 bits, from 4 pairs of them in halves of words. */
static __device__ __forceinline__ uint32_t join_codes(const uint32_t codes[4]) {
  uint32_t both[4]; /* in byte 2 */
#pragma unroll
  for (int i = 0; i < 4; i++) both[i] = codes[i] * 0x00010010u;
  return __byte_perm(__byte_perm(both[0], both[1], 0x0062), __byte_perm(both[2], both[3], 0x0062), 0x5410);
}

struct code_head {
  uint64_t low, high;
};

/* Its bytes are looked at later, so that other loads need not wait for them. */
static __device__ __forceinline__ struct code_head load_head(uint64_t coded) {
  struct code_head words;
  word_load(&words.low, (const uint64_t *)coded);
  word_load(&words.high, (const uint64_t *)coded + 1);
  return words;
}

static __device__ __forceinline__ struct kvs_unit_head head_of(const struct code_head &words) {
  struct kvs_unit_head head;
  head.magic = (uint16_t)words.low;
  head.version = (uint8_t)(words.low >> 16);
  head.codec = (uint8_t)(words.low >> 24);
  head.state = (uint8_t)(words.low >> 32);
  head.kind = (uint8_t)(words.low >> 40);
  head.escapes = (uint16_t)(words.low >> 48);
  head.nbytes = (uint32_t)words.high;
  head.reserved = (uint32_t)(words.high >> 32);
  return head;
}

/* For codecs without escapes. */
static __device__ __forceinline__ enum kvs_unit_verdict check_head(const struct kvs_unit &unit, uint8_t version,
                                                                   const struct code_head &words) {
  const struct kvs_unit_head head = head_of(words);
  const enum kvs_unit_verdict verdict = kvs_unit_check(&unit, version, &head);
  return verdict == KVS_UNIT_GOOD && head.escapes != 0 ? KVS_UNIT_DAMAGED : verdict;
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

/* The largest magnitude of a group, NaN and infinity included. */
static __device__ __forceinline__ uint32_t largest_of_group(const uint4 &words, struct kvs_float type) {
  const uint32_t magnitudes = (type.sign - 1u) * 0x00010001u;
  const uint32_t most = __vmaxu2(__vmaxu2(words.x & magnitudes, words.y & magnitudes),
                                 __vmaxu2(words.z & magnitudes, words.w & magnitudes));
  return (most & 0xffffu) > most >> 16 ? most & 0xffffu : most >> 16;
}

#endif
