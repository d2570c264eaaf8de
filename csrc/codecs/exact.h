/* Codec `exact`: bf16 without loss in about 0.76 of the size. The arithmetic, for C and CUDA C++.
 *
 * Most exponents of a tensor lie close together. A segment of 512 values has a base, its largest finite exponent. Of
 * each value are stored: a byte with the sign and the mantissa, and a code of 4 bits for the exponent:
 *   0        exponent 0 (zero and subnormals)
 *   1 to 14  exponent base - 14 + code
 *   15       an escape: position and exponent are in a list. Infinity and NaN are escapes
 * The list is in order of position, so the encoder gives one form only. It has a fixed number of places.
 *
 * Keys of models with biases have channels that are hundreds of times as large as the others: with their base, many
 * values of the others would be escapes. So where the escapes do not fit, pairs of adjacent channels are marked whose
 * largest exponent is far above the others'; marked values have a base of their own, `outer`, for the whole unit. What
 * a channel is follows from a guess: the values are rows of `inner` channels, one after the other, 16 rows before the
 * next head. kvs_exact_guess() has the guesses, which are tried in order: rows as long as a 16th of the unit (tokens
 * with all heads), then the usual sizes of heads (heads with all tokens). A unit that fits with none is not stored.
 *
 * Behind the head: n bytes of signs and mantissas, rounded up to 16; n / 2 bytes of codes, the even value in the low
 * half, rounded up to 16; a byte a segment, its base; if n is a multiple of 256, inner / 16 (0: nothing is marked),
 * `outer`, and a bit a pair of channels, of the first n / 32 ones; 3 bytes an escape: position (16 bits) and exponent;
 * zeros. A decoder takes any inner.
 *
 * Two values are handled together, in the halves of a 32-bit word. No half overflows into the other: exponents have 8
 * bits, and the sums below stay under 2^12. */
#ifndef KVS_CODECS_EXACT_H
#define KVS_CODECS_EXACT_H

#include "codecs/unit.h"

enum {
  KVS_EXACT_VERSION = 2,
  KVS_EXACT_SEGMENT = 512,    /* values */
  KVS_EXACT_PER_ESCAPE = 180, /* a unit has places for at least one escape in so many values */
  KVS_EXACT_ESCAPE = 15,      /* code */
  KVS_EXACT_ROWS = 16,        /* values of a channel of one head */
  KVS_EXACT_GUESSES = 6,
  KVS_EXACT_ABOVE = 3, /* a pair of channels is marked whose largest exponent is more than this above a typical one */
};

/* Offsets from the head. */
struct kvs_exact_layout {
  uint32_t values, segments;
  uint32_t codes, bases, marks, escapes;
  uint32_t classes; /* pairs of channels; 0: there are no marks */
  uint32_t places;  /* for escapes */
  uint32_t nbytes;
};

KVS_BOTH struct kvs_exact_layout kvs_exact_layout_of(uint32_t nbytes) {
  struct kvs_exact_layout layout;
  layout.values = nbytes / 2u;
  layout.segments = (layout.values + KVS_EXACT_SEGMENT - 1u) / KVS_EXACT_SEGMENT;
  layout.codes = KVS_UNIT_HEAD + kvs_round16(layout.values);
  layout.bases = layout.codes + kvs_round16((layout.values + 1u) / 2u);
  layout.classes = layout.values % 256u ? 0u : layout.values / (2u * KVS_EXACT_ROWS);
  layout.marks = layout.bases + layout.segments;
  layout.escapes = layout.marks + (layout.classes ? 2u + layout.classes / 8u : 0u);
  layout.nbytes = kvs_round16(layout.escapes + 3u * (layout.values / KVS_EXACT_PER_ESCAPE));
  layout.places = (layout.nbytes - layout.escapes) / 3u;
  return layout;
}

/* The values of a row, in guess 0 and later ones: a multiple of 16. 0: that guess is none for this unit. */
KVS_BOTH uint32_t kvs_exact_guess(const struct kvs_exact_layout *layout, uint32_t guess) {
  const uint32_t whole = layout->values / KVS_EXACT_ROWS;
  const uint32_t inner = guess == 0u   ? whole
                         : guess == 1u ? 128u
                         : guess == 2u ? 64u
                         : guess == 3u ? 96u
                         : guess == 4u ? 80u
                                       : 256u;
  return layout->classes == 0u || (guess && inner >= whole) ? 0u : inner;
}

/* The class of the pair that begins with this value. Those of 8 values from a multiple of 8 on follow each other. From
 * layout.classes on there are no marks. */
KVS_BOTH uint32_t kvs_exact_class(uint32_t inner, uint32_t value) {
  return value / (KVS_EXACT_ROWS * inner) * (inner / 2u) + value % inner / 2u;
}

/* A typical largest exponent is the largest one that more than so many of the classes reach that are not all zeros. */
KVS_BOTH uint32_t kvs_exact_above(uint32_t classes) { return classes * 5u / 8u; }

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
