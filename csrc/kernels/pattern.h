/* The test pattern: what a block must hold. Included by C and CUDA C++: plain data and inline functions. */
#ifndef KVS_KERNELS_PATTERN_H
#define KVS_KERNELS_PATTERN_H

#include "codecs/both.h"

/* The pattern that `kvswap replay` and the tests write into blocks and verify after copies. It shares no code with the
 * copy paths: byte i of an item is byte i % 8 (little-endian) of kvs_pattern_value(kind, key, i / 8), for any
 * alignment. */
enum kvs_pattern_mode { KVS_PATTERN_WRITE, KVS_PATTERN_CHECK };
/* What the words are. The last two are bf16, for blocks that are coded. */
enum kvs_pattern_kind {
  KVS_PATTERN_BYTES,
  /* Any sign and mantissa, and exponents in a window: `exact` holds them. By the key's two low bits: 1: a value in 256
   * is far below, an escape; 2: any bytes, which do not fit; 3: as many escapes as the 14 bits above say, one in 32
   * values from the first on. */
  KVS_PATTERN_WINDOW,
  KVS_PATTERN_COARSE, /* few values, which each codec gives back as they are */
};

struct kvs_pattern_item {
  uint64_t ptr, nbytes, key;
};

struct kvs_pattern_result {
  uint64_t wrong; /* bytes that differ */
  uint64_t first; /* item << 40 | offset of the first wrong byte; UINT64_MAX: none */
};

struct kvs_pattern_params {
  uint64_t items; /* address of struct kvs_pattern_item[nitems], device or pinned memory */
  uint64_t nitems;
  uint64_t result; /* address of one struct kvs_pattern_result, initially {0, UINT64_MAX}; CHECK only */
  uint64_t mode, kind;
};

KVS_BOTH uint64_t kvs_pattern_word(uint64_t key, uint64_t index) {
  uint64_t z = key + (index + 1u) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

/* Four values of bf16: value j is bits 16 * j on. */
KVS_BOTH uint64_t kvs_pattern_window(uint64_t key, uint64_t index) {
  const uint64_t word = kvs_pattern_word(key, index);
  const uint64_t exponents = (word >> 7 & 0x0007000700070007ull) + 0x0079007900790079ull; /* 121 to 128 */
  uint64_t values = (word & 0x807f807f807f807full) | exponents << 7;
  if (key % 4u == 2u) return word;
  const int escapes =
      key % 4u == 1u ? index % 64u == 0 : key % 4u == 3u && index % 8u == 0 && index / 8u < (key >> 2 & 0x3fffu);
  if (escapes) values = (values & ~0x7f80ull) | 20ull << 7; /* far below */
  return values;
}

/* Magnitudes 1, 1.5, 2, 3, 4 and 6; the first of sixteen is 6, which makes the scale of `fp4` a power of two. */
KVS_BOTH uint64_t kvs_pattern_coarse(uint64_t key, uint64_t index) {
  const uint64_t word = kvs_pattern_word(key, index), any = word & 0x0007000700070007ull;
  uint64_t steps = any - ((any >> 2 & any >> 1 & 0x0001000100010001ull) << 2); /* 6 and 7 become 2 and 3 */
  if (index % 4u == 0) steps = (steps & ~0xffffull) | 5u;
  return (word & 0x8000800080008000ull) | ((steps << 6) + 0x3f803f803f803f80ull);
}

KVS_BOTH uint64_t kvs_pattern_value(uint64_t kind, uint64_t key, uint64_t index) {
  if (kind == KVS_PATTERN_WINDOW) return kvs_pattern_window(key, index);
  return kind == KVS_PATTERN_COARSE ? kvs_pattern_coarse(key, index) : kvs_pattern_word(key, index);
}

#endif
