/* Codec `exact`: bf16 without loss in about 0.76 of the size. The arithmetic, for C and CUDA C++.
 *
 * Most exponents of a tensor lie close together. A segment of 512 values has a base, its largest finite exponent. Of
 * each value are stored: a byte with the sign and the mantissa, and a code of 4 bits for the exponent:
 *   0        exponent 0 (zero and subnormals)
 *   1 to 14  exponent base - 14 + code
 *   15       an escape: position and exponent are in a list. Infinity and NaN are escapes
 * The list is in order of position, so a unit has one coded form only. It has a fixed number of places; a unit with
 * more escapes is not stored.
 *
 * Behind the head: n bytes of signs and mantissas, rounded up to 16; n / 2 bytes of codes, the even value in the low
 * half, rounded up to 16; a byte a segment, its base; 3 bytes an escape: position (16 bits) and exponent; zeros.
 *
 * Two values are handled together, in the halves of a 32-bit word. No half overflows into the other: exponents have 8
 * bits, and the sums below stay under 2^12. */
#ifndef KVS_CODECS_EXACT_H
#define KVS_CODECS_EXACT_H

#include "codecs/unit.h"

enum {
  KVS_EXACT_VERSION = 1,
  KVS_EXACT_SEGMENT = 512,    /* values */
  KVS_EXACT_PER_ESCAPE = 160, /* a unit has places for at least one escape in so many values */
  KVS_EXACT_ESCAPE = 15,      /* code */
};

/* Offsets from the head. */
struct kvs_exact_layout {
  uint32_t values, segments;
  uint32_t codes, bases, escapes;
  uint32_t places; /* for escapes */
  uint32_t nbytes;
};

KVS_BOTH struct kvs_exact_layout kvs_exact_layout_of(uint32_t nbytes) {
  struct kvs_exact_layout layout;
  layout.values = nbytes / 2u;
  layout.segments = (layout.values + KVS_EXACT_SEGMENT - 1u) / KVS_EXACT_SEGMENT;
  layout.codes = KVS_UNIT_HEAD + kvs_round16(layout.values);
  layout.bases = layout.codes + kvs_round16((layout.values + 1u) / 2u);
  layout.escapes = layout.bases + layout.segments;
  layout.nbytes = kvs_round16(layout.escapes + 3u * (layout.values / KVS_EXACT_PER_ESCAPE));
  layout.places = (layout.nbytes - layout.escapes) / 3u;
  return layout;
}

/* The exponents of a pair of values. */
KVS_BOTH uint32_t kvs_exact_exponents(uint32_t pair) { return pair >> 7 & 0x00ff00ffu; }

/* The larger of two pairs of exponents, in each half. */
KVS_BOTH uint32_t kvs_exact_larger(uint32_t a, uint32_t b) {
  const uint32_t less = ((a + 0x01000100u - b) >> 8 & 0x00010001u) ^ 0x00010001u; /* 1 where a < b */
  const uint32_t mask = (less << 8) - less;
  return (b & mask) | (a & ~mask);
}

/* The larger of `most` and the finite exponents of a pair of values, in each half. */
KVS_BOTH uint32_t kvs_exact_most(uint32_t most, uint32_t pair) {
  const uint32_t exponents = kvs_exact_exponents(pair), special = (exponents + 0x00010001u) >> 8 & 0x00010001u;
  return kvs_exact_larger(most, exponents & ~((special << 8) - special));
}

/* The base of a segment, from kvs_exact_most() of all its pairs. */
KVS_BOTH uint32_t kvs_exact_base(uint32_t most) {
  const uint32_t low = most & 0xffu, high = most >> 16;
  return low > high ? low : high;
}

/* The codes of a pair of values, 4 bits in each half. `base`: in both halves. */
KVS_BOTH uint32_t kvs_exact_codes(uint32_t pair, uint32_t base) {
  const uint32_t exponents = kvs_exact_exponents(pair);
  const uint32_t above = (exponents + 0x010d010du - base) ^ 0x01000100u; /* code - 1, where it is below 14 */
  const uint32_t escaped = (above + 0x03f203f2u) >> 10 & 0x00010001u,
                 some = (exponents + 0x00ff00ffu) >> 8 & 0x00010001u;
  return (((above + 0x00010001u) & 0x000f000fu) | ((escaped << 4) - escaped)) & ((some << 4) - some);
}

/* The signs and mantissas of a pair of values, in 16 bits. */
KVS_BOTH uint32_t kvs_exact_rest(uint32_t pair) {
  const uint32_t bytes = (pair >> 8 & 0x00800080u) | (pair & 0x007f007fu);
  return (bytes | bytes >> 8) & 0xffffu;
}

/* Both codes in a byte. */
KVS_BOTH uint32_t kvs_exact_join(uint32_t codes) { return (codes | codes >> 12) & 0xffu; }

/* The inverse: a pair of values. Escapes get a meaningless exponent, to be replaced. */
KVS_BOTH uint32_t kvs_exact_pair(uint32_t rest, uint32_t joined, uint32_t base) {
  const uint32_t bytes = (rest | rest << 8) & 0x00ff00ffu, codes = (joined | joined << 12) & 0x000f000fu;
  const uint32_t some = (codes + 0x000f000fu) >> 4 & 0x00010001u;
  const uint32_t exponents = (codes + base + 0x00f200f2u) & ((some << 8) - some); /* - 14, modulo 256 */
  return (bytes & 0x00800080u) << 8 | (bytes & 0x007f007fu) | exponents << 7;
}

/* An escaped value. */
KVS_BOTH uint32_t kvs_exact_escaped(uint32_t rest, uint32_t exponent) {
  return (rest & 0x80u) << 8 | exponent << 7 | (rest & 0x7fu);
}

#endif
