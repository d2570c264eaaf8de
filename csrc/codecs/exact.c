/* The host's loops over whole segments: the last one of a unit is padded with zeros, which are no escapes. */
#include "codecs/exact.h"

#include <string.h>

#include "codecs/codec.h"

enum { PAIRS = KVS_EXACT_SEGMENT / 2 };

static uint32_t coded_nbytes(uint32_t nbytes) { return kvs_exact_layout_of(nbytes).nbytes; }

static uint32_t at_most(uint32_t left, uint32_t most) { return left < most ? left : most; }

/* Several maxima side by side, since compilers vectorise no reduction but their own. */
static uint32_t base_of(const uint32_t pairs[PAIRS]) {
  enum { LANES = 16 };
  uint32_t most[LANES] = {0};
  for (int i = 0; i < PAIRS; i += LANES)
    for (int lane = 0; lane < LANES; lane++) most[lane] = kvs_exact_most(most[lane], pairs[i + lane]);
  for (int lane = 1; lane < LANES; lane++) most[0] = kvs_exact_larger(most[0], most[lane]);
  return kvs_exact_base(most[0]);
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

static bool encode(const struct kvs_unit *unit, const void *values, uint8_t *coded, uint32_t *escapes) {
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(unit));
  for (uint32_t segment = 0; segment < layout.segments; segment++) {
    const uint32_t *pairs = (const uint32_t *)values + (size_t)segment * PAIRS;
    uint32_t first = segment * KVS_EXACT_SEGMENT, count = at_most(layout.values - first, KVS_EXACT_SEGMENT);
    uint32_t base = base_of(pairs), both = base | base << 16, all = 0;
    uint16_t rest[PAIRS];
    uint8_t joined[PAIRS];
    for (int i = 0; i < PAIRS; i++) {
      uint32_t codes = kvs_exact_codes(pairs[i], both);
      rest[i] = (uint16_t)kvs_exact_rest(pairs[i]);
      joined[i] = (uint8_t)kvs_exact_join(codes);
      all |= codes + 0x00010001u; /* bit 4: an escape */
    }
    memcpy(coded + KVS_UNIT_HEAD + first, rest, count);
    memcpy(coded + layout.codes + first / 2, joined, (count + 1) / 2);
    coded[layout.bases + segment] = (uint8_t)base;
    if (all & 0x00100010u && !append_escapes(&layout, pairs, joined, first, coded, escapes)) return false;
  }
  return true;
}

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
  if (!check_escapes(&layout, coded, escapes)) return false;
  for (uint32_t segment = 0; segment < layout.segments; segment++) {
    uint32_t *pairs = (uint32_t *)values + (size_t)segment * PAIRS;
    uint32_t first = segment * KVS_EXACT_SEGMENT, count = at_most(layout.values - first, KVS_EXACT_SEGMENT);
    uint32_t base = coded[layout.bases + segment], both = base | base << 16;
    uint16_t rest[PAIRS] = {0};
    uint8_t joined[PAIRS] = {0};
    memcpy(rest, coded + KVS_UNIT_HEAD + first, count);
    memcpy(joined, coded + layout.codes + first / 2, (count + 1) / 2);
    for (int i = 0; i < PAIRS; i++) pairs[i] = kvs_exact_pair(rest[i], joined[i], both);
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
