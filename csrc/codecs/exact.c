/* The host's loops over whole segments: the last one of a unit is padded with zeros, which are no escapes. */
#include "codecs/exact.h"

#include <string.h>

#include "codecs/codec.h"

enum { PAIRS = KVS_EXACT_SEGMENT / 2, MOST_CLASSES = KVS_UNIT_NBYTES / 4 / KVS_EXACT_ROWS };

static uint32_t coded_nbytes(uint32_t nbytes, enum kvs_kind kind) {
  (void)kind;
  return kvs_exact_layout_of(nbytes).nbytes;
}

static uint32_t at_most(uint32_t left, uint32_t most) { return left < most ? left : most; }

/* -- marks --------------------------------------------------------------------------------------------------------- */

/* Where the marks of a coded unit are. */
struct marks {
  uint32_t inner; /* 0: nothing is marked */
  uint32_t outer, classes;
  const uint8_t *bits;
};

static struct marks marks_of(const struct kvs_exact_layout *layout, const uint8_t *coded) {
  const uint8_t *at = coded + layout->marks;
  if (!layout->classes || at[0] == 0) return (struct marks){0};
  return (struct marks){16u * at[0], at[1], layout->classes, at + 2};
}

/* Goes through the values, 8 at a time, without a division for each. */
struct walk {
  uint32_t inner, at, row, first; /* at: in the row; first: class of the row's first pair */
};

static struct walk walk_from(uint32_t inner, uint32_t value) {
  return (struct walk){.inner = inner,
                       .at = value % inner,
                       .row = value / inner % KVS_EXACT_ROWS,
                       .first = value / (KVS_EXACT_ROWS * inner) * (inner / 2)};
}

/* The class of the next pair; the three behind it follow. */
static uint32_t walk_on(struct walk *walk) {
  uint32_t class = walk->first + walk->at / 2;
  walk->at += 8;
  if (walk->at < walk->inner) return class;
  walk->at = 0;
  if (++walk->row < KVS_EXACT_ROWS) return class;
  walk->row = 0;
  walk->first += walk->inner / 2;
  return class;
}

/* Which of the next 4 pairs are marked: bits 0 to 3. */
static uint32_t marked_pairs(const struct marks *marks, struct walk *walk) {
  uint32_t class = walk_on(walk);
  return class < marks->classes ? marks->bits[class / 8] >> class % 8 & 15u : 0;
}

static uint32_t typical(const uint8_t *most, uint32_t classes) {
  uint32_t found = 0, some = 0;
  for (uint32_t i = 0; i < classes; i++) some += most[i] > 0;
  for (uint32_t bit = 0x80; bit; bit /= 2) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < classes; i++) count += most[i] >= (found | bit);
    if (count > kvs_exact_above(some)) found |= bit;
  }
  return found;
}

/* Mark the outliers of a guess. False: there are none, or no such guess. */
static bool mark(const struct kvs_exact_layout *layout, const uint32_t *values, uint32_t inner, uint8_t *coded) {
  uint8_t most[MOST_CLASSES] = {0}, *at = coded + layout->marks;
  uint32_t outer = 0;
  if (!inner) return false;
  struct walk walk = walk_from(inner, 0);
  for (uint32_t i = 0; i < layout->values / 2; i += 4) {
    uint32_t class = walk_on(&walk);
    for (uint32_t j = 0; class < layout->classes && j < 4; j++) {
      uint32_t exponent = kvs_exact_base(kvs_exact_most(0, values[i + j]));
      if (exponent > most[class + j]) most[class + j] = (uint8_t)exponent;
    }
  }
  uint32_t limit = typical(most, layout->classes) + KVS_EXACT_ABOVE;
  for (uint32_t i = 0; i < layout->classes; i++) {
    if (most[i] <= limit) continue;
    at[2 + i / 8] |= (uint8_t)(1 << i % 8);
    if (most[i] > outer) outer = most[i];
  }
  at[0] = (uint8_t)(inner / 16);
  at[1] = (uint8_t)outer;
  return outer != 0;
}

/* -- encoding ------------------------------------------------------------------------------------------------------ */

/* Several maxima side by side, since compilers vectorise no reduction but their own. */
static uint32_t base_of(const uint32_t pairs[PAIRS]) {
  enum { LANES = 16 };
  uint32_t most[LANES] = {0};
  for (int i = 0; i < PAIRS; i += LANES)
    for (int lane = 0; lane < LANES; lane++) most[lane] = kvs_exact_most(most[lane], pairs[i + lane]);
  for (int lane = 1; lane < LANES; lane++) most[0] = kvs_exact_larger(most[0], most[lane]);
  return kvs_exact_base(most[0]);
}

/* The base of each pair of a segment, in both halves; returns the segment's own. `count`: pairs of the unit. */
static uint32_t bases_of(const struct marks *marks, const uint32_t pairs[PAIRS], uint32_t first, uint32_t count,
                         uint32_t bases[PAIRS]) {
  uint32_t most = 0, base = 0;
  uint8_t marked[PAIRS / 4] = {0};
  if (!marks->inner) {
    base = base_of(pairs);
    for (uint32_t i = 0; i < PAIRS; i++) bases[i] = base | base << 16;
    return base;
  }
  struct walk walk = walk_from(marks->inner, first);
  for (uint32_t i = 0; i < count; i++) {
    if (i % 4 == 0) marked[i / 4] = (uint8_t)marked_pairs(marks, &walk);
    if (!(marked[i / 4] >> i % 4 & 1)) most = kvs_exact_most(most, pairs[i]);
  }
  base = kvs_exact_base(most);
  for (uint32_t i = 0; i < PAIRS; i++) {
    uint32_t own = marked[i / 4] >> i % 4 & 1 ? marks->outer : base;
    bases[i] = own | own << 16;
  }
  return base;
}

/* Append the escapes of a segment, from value `first` on. False: there are more than places. */
static bool append_escapes(const struct kvs_exact_layout *layout, const uint32_t pairs[PAIRS],
                           const uint8_t joined[PAIRS], uint32_t first, uint8_t *coded, uint32_t *escapes) {
  for (uint32_t i = 0; i < KVS_EXACT_SEGMENT; i++) {
    if ((joined[i / 2] >> 4 * (i & 1) & 15) != KVS_EXACT_ESCAPE) continue;
    if (*escapes == layout->places) return false;
    uint32_t position = first + i, exponent = kvs_exact_exponents(pairs[i / 2]) >> 16 * (i & 1) & 0xffu;
    uint8_t *place = coded + layout->escapes + 3 * (*escapes)++;
    place[0] = (uint8_t)position;
    place[1] = (uint8_t)(position >> 8);
    place[2] = (uint8_t)exponent;
  }
  return true;
}

/* With the marks that stand in `coded`. */
static bool encode_segments(const struct kvs_exact_layout *layout, const uint32_t *values, uint8_t *coded,
                            uint32_t *escapes) {
  const struct marks marks = marks_of(layout, coded);
  for (uint32_t segment = 0; segment < layout->segments; segment++) {
    const uint32_t *pairs = values + (size_t)segment * PAIRS;
    uint32_t first = segment * KVS_EXACT_SEGMENT, count = at_most(layout->values - first, KVS_EXACT_SEGMENT);
    uint32_t bases[PAIRS], base = bases_of(&marks, pairs, first, count / 2, bases), all = 0;
    uint16_t rest[PAIRS];
    uint8_t joined[PAIRS];
    for (int i = 0; i < PAIRS; i++) {
      uint32_t codes = kvs_exact_codes(pairs[i], bases[i]);
      rest[i] = (uint16_t)kvs_exact_rest(pairs[i]);
      joined[i] = (uint8_t)kvs_exact_join(codes);
      all |= codes + 0x00010001u; /* bit 4: an escape */
    }
    memcpy(coded + KVS_UNIT_HEAD + first, rest, count);
    memcpy(coded + layout->codes + first / 2, joined, (count + 1) / 2);
    coded[layout->bases + segment] = (uint8_t)base;
    if (all & 0x00100010u && !append_escapes(layout, pairs, joined, first, coded, escapes)) return false;
  }
  return true;
}

static bool encode(const struct kvs_unit *unit, const void *values, uint8_t *coded, uint32_t *escapes) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(unit));
  bool fits = encode_segments(&layout, values, coded, escapes);
  for (uint32_t guess = 0; !fits && layout.classes && guess < KVS_EXACT_GUESSES; guess++) {
    memset(coded + layout.marks, 0, layout.nbytes - layout.marks);
    *escapes = 0;
    fits = mark(&layout, values, kvs_exact_guess(&layout, guess), coded) &&
           encode_segments(&layout, values, coded, escapes);
  }
  return fits;
}

/* -- decoding ------------------------------------------------------------------------------------------------------ */

static uint32_t position_of(const uint8_t *place) { return place[0] | (uint32_t)place[1] << 8; }

/* In order, and inside the unit. */
static bool check_escapes(const struct kvs_exact_layout *layout, const uint8_t *coded, uint32_t escapes) {
  uint32_t least = 0;
  if (escapes > layout->places) return false;
  for (uint32_t i = 0; i < escapes; i++) {
    uint32_t position = position_of(coded + layout->escapes + 3 * i);
    if (position < least || position >= layout->values) return false;
    least = position + 1;
  }
  return true;
}

static bool decode(const struct kvs_unit *unit, const uint8_t *coded, uint32_t escapes, void *values) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(unit));
  const struct marks marks = marks_of(&layout, coded);
  if (!check_escapes(&layout, coded, escapes)) return false;
  for (uint32_t segment = 0; segment < layout.segments; segment++) {
    uint32_t *pairs = (uint32_t *)values + (size_t)segment * PAIRS;
    uint32_t first = segment * KVS_EXACT_SEGMENT, count = at_most(layout.values - first, KVS_EXACT_SEGMENT);
    uint32_t base = coded[layout.bases + segment], both = base | base << 16, outer = marks.outer | marks.outer << 16;
    uint16_t rest[PAIRS] = {0};
    uint8_t joined[PAIRS] = {0};
    memcpy(rest, coded + KVS_UNIT_HEAD + first, count);
    memcpy(joined, coded + layout.codes + first / 2, (count + 1) / 2);
    for (int i = 0; i < PAIRS; i++) pairs[i] = kvs_exact_pair(rest[i], joined[i], both);
    struct walk walk = marks.inner ? walk_from(marks.inner, first) : (struct walk){0};
    for (uint32_t i = 0; marks.inner && i < count / 2; i += 4)
      for (uint32_t j = 0, marked = marked_pairs(&marks, &walk); j < 4; j++)
        if (marked >> j & 1) pairs[i + j] = kvs_exact_pair(rest[i + j], joined[i + j], outer);
  }
  for (uint32_t i = 0; i < escapes; i++) {
    const uint8_t *place = coded + layout.escapes + 3 * i;
    uint32_t position = position_of(place);
    uint16_t value = (uint16_t)kvs_exact_escaped(coded[KVS_UNIT_HEAD + position], place[2]);
    memcpy((uint8_t *)values + 2 * (size_t)position, &value, sizeof value);
  }
  return true;
}

const struct kvs_codec_ops kvs_codec_exact = {
    .name = "exact",
    .version = KVS_EXACT_VERSION,
    .lossless = true,
    .kinds = 1u << KVS_KIND_BF16,
    .coded_nbytes = coded_nbytes,
    .encode = encode,
    .decode = decode,
};
