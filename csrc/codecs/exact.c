/* The host's loops over whole segments: the last one of a unit is padded with zeros, which are no escapes. */
#include "codecs/exact.h"

#include <string.h>

#include "codecs/codec.h"

enum { PAIRS = KVS_EXACT_SEGMENT / 2, MOST_CLASSES = KVS_UNIT_NBYTES / 4 / KVS_EXACT_ROWS };

static uint32_t coded_nbytes(uint32_t nbytes) { return kvs_exact_layout_of(nbytes).nbytes; }

static uint32_t at_most(uint32_t left, uint32_t most) { return left < most ? left : most; }

/* -- marks --------------------------------------------------------------------------------------------------------- */

/* Where the marks of a coded unit are. */
struct marks {
  uint32_t inner; /* 0: nothing is marked */
  uint32_t outer;
  const uint8_t *bits;
};

static struct marks marks_of(const struct kvs_exact_layout *layout, const uint8_t *coded) {
  const uint8_t *at = coded + layout->marks;
  if (!layout->classes || at[0] == 0) return (struct marks){0};
  return (struct marks){kvs_exact_inner(layout, at[0]), at[1], at + 2};
}

static bool is_marked(const struct marks *marks, uint32_t value) {
  uint32_t class = kvs_exact_class(marks->inner, value);
  return marks->bits[class / 8] >> class % 8 & 1;
}

/* The largest exponent that more than kvs_exact_above() classes reach. */
static uint32_t typical(const uint8_t *most, uint32_t classes) {
  uint32_t found = 0;
  for (uint32_t bit = 0x80; bit; bit /= 2) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < classes; i++) count += most[i] >= (found | bit);
    if (count > kvs_exact_above(classes)) found |= bit;
  }
  return found;
}

/* Mark the outliers of a classing. False: there are none, or no such classing. */
static bool mark(const struct kvs_exact_layout *layout, const uint32_t *values, uint32_t classing, uint8_t *coded) {
  const uint32_t inner = kvs_exact_inner(layout, classing);
  uint8_t most[MOST_CLASSES] = {0}, *at = coded + layout->marks;
  uint32_t outer = 0;
  if (!inner) return false;
  for (uint32_t i = 0; i < layout->values / 2; i++) {
    uint32_t class = kvs_exact_class(inner, 2 * i), exponent = kvs_exact_base(kvs_exact_most(0, values[i]));
    if (exponent > most[class]) most[class] = (uint8_t)exponent;
  }
  uint32_t limit = typical(most, layout->classes) + KVS_EXACT_ABOVE;
  for (uint32_t i = 0; i < layout->classes; i++) {
    if (most[i] <= limit) continue;
    at[2 + i / 8] |= (uint8_t)(1 << i % 8);
    if (most[i] > outer) outer = most[i];
  }
  at[0] = (uint8_t)classing;
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

/* The base of each pair of a segment, in both halves; returns the segment's own. */
static uint32_t bases_of(const struct kvs_exact_layout *layout, const struct marks *marks, const uint32_t pairs[PAIRS],
                         uint32_t first, uint32_t bases[PAIRS]) {
  uint32_t most = 0, count = at_most(layout->values - first, KVS_EXACT_SEGMENT) / 2;
  if (marks->inner)
    for (uint32_t i = 0; i < count; i++)
      if (!is_marked(marks, first + 2 * i)) most = kvs_exact_most(most, pairs[i]);
  const uint32_t base = marks->inner ? kvs_exact_base(most) : base_of(pairs);
  for (uint32_t i = 0; i < PAIRS; i++) bases[i] = base | base << 16;
  for (uint32_t i = 0; marks->inner && i < count; i++)
    if (is_marked(marks, first + 2 * i)) bases[i] = marks->outer | marks->outer << 16;
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
    uint32_t bases[PAIRS], base = bases_of(layout, &marks, pairs, first, bases), all = 0;
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
  for (uint32_t classing = 1; !fits && layout.classes && classing <= KVS_EXACT_CLASSINGS; classing++) {
    memset(coded + layout.marks, 0, layout.nbytes - layout.marks);
    *escapes = 0;
    fits = mark(&layout, values, classing, coded) && encode_segments(&layout, values, coded, escapes);
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
  if (layout.classes && coded[layout.marks] && !marks.inner) return false; /* no such classing */
  for (uint32_t segment = 0; segment < layout.segments; segment++) {
    uint32_t *pairs = (uint32_t *)values + (size_t)segment * PAIRS;
    uint32_t first = segment * KVS_EXACT_SEGMENT, count = at_most(layout.values - first, KVS_EXACT_SEGMENT);
    uint32_t base = coded[layout.bases + segment], both = base | base << 16, outer = marks.outer | marks.outer << 16;
    uint16_t rest[PAIRS] = {0};
    uint8_t joined[PAIRS] = {0};
    memcpy(rest, coded + KVS_UNIT_HEAD + first, count);
    memcpy(joined, coded + layout.codes + first / 2, (count + 1) / 2);
    for (int i = 0; i < PAIRS; i++) pairs[i] = kvs_exact_pair(rest[i], joined[i], both);
    for (uint32_t i = 0; marks.inner && i < count / 2; i++)
      if (is_marked(&marks, first + 2 * i)) pairs[i] = kvs_exact_pair(rest[i], joined[i], outer);
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
