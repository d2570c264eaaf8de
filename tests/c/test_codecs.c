/* The codecs: every value through `exact`; stability of the others over every maximum, scale and element; fields that
 * are right and wrong; what does not fit. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "codecs/coding.h"
#include "codecs/exact.h"
#include "codecs/fp4.h"
#include "codecs/fp4_e4m3.h"
#include "codecs/mxfp8.h"
#include "codecs/unit_code.h"

static struct kvs_error err;

static struct kvs_coding *open_coding(uint64_t nbytes, const char *codec, enum kvs_kind kind) {
  const struct kvs_field field = {.nbytes = nbytes, .kind = kind};
  const struct kvs_coding_layout layout = {.block_nbytes = nbytes, .codec = codec, .fields = &field, .nfields = 1};
  struct kvs_coding *coding = NULL;
  CHECK(kvs_coding_open(&layout, &coding, &err) == KVS_OK, "%s", err.message);
  return coding;
}

static uint64_t coded_nbytes(const struct kvs_coding *coding) {
  struct kvs_coding_info info;
  kvs_coding_get_info(coding, &info);
  CHECK(info.coded_nbytes % 16 == 0, "%d", (int)info.coded_nbytes);
  return info.coded_nbytes;
}

static int encode(const struct kvs_coding *coding, const void *block, void *coded) {
  const struct kvs_blocks from = {.ptr = (void *)(uintptr_t)block};
  uint8_t verdict;
  (void)kvs_encode_blocks(coding, &from, UINT64_MAX, coded, 0, 1, &verdict);
  return verdict;
}

static int decode(const struct kvs_coding *coding, const void *coded, void *block) {
  const struct kvs_blocks to = {.ptr = block};
  uint8_t verdict;
  (void)kvs_decode_blocks(coding, coded, 0, &to, 1, &verdict);
  return verdict;
}

/* -- exact ----------------------------------------------------------------------------------------------------- */

/* Each of the 65,536 values at each base: by the arithmetic for all bases, and through whole units for some. */
static void test_every_value(void) {
  uint32_t wrong = 0;
  for (uint32_t base = 0; base < 255; base++)
    for (uint32_t value = 0; value < 65536; value++) {
      uint32_t pair = value | (value ^ 0x8001u) << 16, both = base | base << 16, codes = kvs_exact_codes(pair, both);
      uint32_t rest = kvs_exact_rest(pair), back = kvs_exact_pair(rest, kvs_exact_join(codes), both);
      if ((codes & 15) == KVS_EXACT_ESCAPE) {
        wrong += kvs_exact_escaped(rest & 0xff, value >> 7 & 0xff) != value;
        wrong += kvs_exact_escaped(rest >> 8, value >> 7 & 0xff) != (value ^ 0x8001u);
      } else {
        wrong += back != pair;
      }
    }
  CHECK(wrong == 0, "%u", wrong);
}

static void test_every_value_in_units(void) {
  enum { VALUES = 512, PER = 3 }; /* a block of 512 values has places for 3 escapes */
  static const uint32_t bases[] = {0, 1, 13, 14, 15, 127, 254};
  struct kvs_coding *coding = open_coding(2 * VALUES, "exact", KVS_KIND_BF16);
  uint16_t *block = calloc(VALUES, 2), *back = calloc(VALUES, 2);
  uint8_t *coded = calloc(1, coded_nbytes(coding));
  uint32_t wrong = 0;
  for (size_t base = 0; base < sizeof bases / sizeof *bases; base++)
    for (uint32_t first = 0; first < 65536; first += PER) {
      block[0] = (uint16_t)(bases[base] << 7 | 0x55);
      for (uint32_t i = 0; i < PER; i++) block[1 + 170 * i] = (uint16_t)(first + i < 65536 ? first + i : 0);
      wrong += encode(coding, block, coded) != KVS_CODED_GOOD || decode(coding, coded, back) != KVS_CODED_GOOD ||
               memcmp(block, back, 2 * VALUES) != 0;
    }
  CHECK(wrong == 0, "%u", wrong);
  kvs_coding_close(coding);
  free(block), free(back), free(coded);
}

/* The pairwise arithmetic against the plain definition: every exponent with every base. */
static void test_codes(void) {
  uint32_t wrong = 0;
  for (uint32_t base = 0; base < 255; base++)
    for (uint32_t low = 0; low < 256; low++)
      for (uint32_t high = 0; high < 256; high++) {
        uint32_t pair = low << 7 | high << 23 | 0x80550000u, codes = kvs_exact_codes(pair, base | base << 16), want[2];
        for (int i = 0; i < 2; i++) {
          int exponent = (int)(i ? high : low), code = exponent + 14 - (int)base;
          want[i] = exponent == 0 ? 0u : code >= 1 && code <= 14 ? (uint32_t)code : 15u;
        }
        wrong += codes != (want[0] | want[1] << 16);
        uint32_t most = kvs_exact_most(base | base << 16, pair),
                 finite[2] = {low < 255 ? low : 0, high < 255 ? high : 0};
        for (int i = 0; i < 2; i++) wrong += (most >> 16 * i & 0xffffu) != (finite[i] > base ? finite[i] : base);
      }
  CHECK(wrong == 0, "%u", wrong);
}

static void test_sizes(void) {
  static const struct {
    uint64_t nbytes;
    double most;
  } cases[] = {{2048, 0.775}, {8192, 0.764}, {16384, 0.764}, {32768, 0.764}, {65536, 0.764}, {49152, 0.764}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct kvs_coding *coding = open_coding(cases[i].nbytes, "exact", KVS_KIND_BF16);
    double share = (double)coded_nbytes(coding) / (double)cases[i].nbytes;
    CHECK(share <= cases[i].most, "%d: %f", (int)cases[i].nbytes, share);
    kvs_coding_close(coding);
  }
}

static void fill_normal(uint16_t *values, size_t count, uint64_t *seed) {
  for (size_t i = 0; i < count; i++)
    values[i] = (uint16_t)((120 + check_below(seed, 8)) << 7 | (check_random(seed) & 0x807f));
}

/* As many escapes as there are places; one more; the last value; NaN payloads and infinities. */
static void test_limits(void) {
  enum { VALUES = 16384 };
  struct kvs_coding *coding = open_coding(2 * VALUES, "exact", KVS_KIND_BF16);
  const struct kvs_exact_layout layout = kvs_exact_layout_of(2 * VALUES);
  uint16_t *block = calloc(VALUES, 2), *back = calloc(VALUES, 2);
  uint64_t size = coded_nbytes(coding), seed = 3, zeros = 0;
  uint8_t *coded = calloc(1, size);
  CHECK(layout.places >= VALUES / KVS_EXACT_PER_ESCAPE && layout.nbytes == size, "%u", layout.places);
  for (uint32_t more = 0; more < 2; more++) {
    fill_normal(block, VALUES, &seed);
    for (uint32_t i = 0; i < layout.places + more; i++)
      block[VALUES - 1 - i * (VALUES / (layout.places + 1))] = (uint16_t)(0x7f80 | (i & 0x807f));
    CHECK(encode(coding, block, coded) == (more ? KVS_CODED_NOT_STORED : KVS_CODED_GOOD), "%u", more);
    memset(back, 0xa5, 2 * VALUES);
    CHECK(decode(coding, coded, back) == (more ? KVS_CODED_NOT_STORED : KVS_CODED_GOOD), "%u", more);
    if (!more) CHECK(memcmp(block, back, 2 * VALUES) == 0, "the bytes differ");
  }
  for (size_t i = 0; i < VALUES; i++) zeros += back[i] == 0;
  CHECK(zeros == VALUES, "what is not stored is zeros");
  for (uint64_t i = KVS_UNIT_HEAD; i < size; i++) zeros += coded[i] == 0;
  CHECK(zeros == VALUES + size - KVS_UNIT_HEAD, "no value leaves");
  kvs_coding_close(coding);
  free(block), free(back), free(coded);
}

/* -- lossy codecs: stable, and within their error ---------------------------------------------------------------- */

/* Decoding and coding again changes nothing, for every scale and every element; larger values do not become smaller. So
 * the largest of a block stays the largest, and for every maximum it asks for the same scale. */
static void test_stable_mxfp8(struct kvs_float type) {
  uint32_t wrong = 0, tried = 0;
  for (int scale = kvs_mxfp8_scale(type, 1); scale <= type.bias - 8; scale++) {
    uint32_t before = 0;
    for (uint32_t value = 0; value <= type.most + 1u; value++, tried++) {
      uint32_t code = kvs_mxfp8_code(type, value, scale), back = kvs_mxfp8_value(type, code, (uint32_t)(scale + 127));
      wrong += kvs_mxfp8_code(type, back, scale) != code || back < before || back > type.most;
      wrong += kvs_mxfp8_code(type, value | type.sign, scale) != (code | 0x80u);
      wrong += kvs_mxfp8_value(type, code | 0x80u, (uint32_t)(scale + 127)) != (back | type.sign);
      wrong += code == 0 && back != 0;
      before = back;
    }
  }
  for (uint32_t most = 0; most <= type.most; most++, tried++) {
    int scale = kvs_mxfp8_scale(type, most);
    uint32_t back = kvs_mxfp8_value(type, kvs_mxfp8_code(type, most, scale), (uint32_t)(scale + 127));
    wrong += kvs_mxfp8_scale(type, back) != scale;
  }
  CHECK(wrong == 0 && tried > 1000000, "%u of %u", wrong, tried);
}

static void test_stable_fp4(struct kvs_float type) {
  uint32_t wrong = 0, tried = 0;
  for (uint32_t scale = 0; scale <= kvs_fp4_scale(type, type.most); scale++) {
    uint32_t before = 0;
    for (uint32_t value = 0; value <= type.most + 1u; value++, tried++) {
      uint32_t code = kvs_fp4_code(type, value, scale), back = kvs_fp4_value(type, code, scale);
      wrong += kvs_fp4_code(type, back, scale) != code || back < before || back > type.most;
      wrong += kvs_fp4_code(type, value | type.sign, scale) != (code | 8u);
      wrong += kvs_fp4_value(type, code | 8u, scale) != (back | type.sign);
      wrong += code == 0 && back != 0;
      before = back;
    }
  }
  for (uint32_t most = 0; most <= type.most; most++, tried++) {
    uint32_t scale = kvs_fp4_scale(type, most), back = kvs_fp4_value(type, kvs_fp4_code(type, most, scale), scale);
    wrong += kvs_fp4_scale(type, back) != scale;
  }
  CHECK(wrong == 0 && tried > 1000000, "%u of %u", wrong, tried);
}

/* Of e4m3: every largest magnitude of a block, every value beside it, every code. The largest decodes to itself. */
static void test_stable_fp4_e4m3(void) {
  uint32_t wrong = 0, tried = 0;
  for (uint32_t most = 0; most < KVS_E4M3_NAN; most++) {
    const uint64_t levels = kvs_fp4_e4m3_levels(most);
    uint32_t before = 0;
    for (uint32_t value = 0; value <= most; value++, tried++) {
      uint32_t code = kvs_fp4_e4m3_code(value, most), back = kvs_fp4_e4m3_value(levels, code);
      wrong += kvs_fp4_e4m3_code(back, most) != code || back < before || back > most || code > 7;
      wrong += kvs_fp4_e4m3_code(value | 0x80u, most) != (code | 8u);
      wrong += kvs_fp4_e4m3_value(levels, code | 8u) != (back | 0x80u);
      wrong += value == 0 && back != 0;
      before = back;
    }
    wrong += before != most;
    for (uint32_t code = 1; code < 8; code++)
      wrong += kvs_fp4_e4m3_value(levels, code) < kvs_fp4_e4m3_value(levels, code - 1);
  }
  CHECK(wrong == 0 && tried == 127 * 128 / 2, "%u of %u", wrong, tried);
  for (uint32_t scale = KVS_E4M3_NAN; scale < 256; scale++)
    CHECK(kvs_fp4_e4m3_value(kvs_fp4_e4m3_levels(scale), scale & 15u) == (0x7fu | (scale & 8u) << 4), "NaN");
}

/* The nearest e4m3 to a sixth of each magnitude times each element, by floating-point arithmetic; the nearest element.
 */
static void test_values_fp4_e4m3(void) {
  static const double elements[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  uint32_t wrong = 0;
  for (uint32_t most = 1; most < KVS_E4M3_NAN; most++)
    for (uint32_t code = 0; code < 8; code++) {
      double exact = kvs_e4m3_units(most) * elements[code] / 6, apart = 1e9;
      uint32_t found = kvs_fp4_e4m3_value(kvs_fp4_e4m3_levels(most), code), at = 0;
      for (uint32_t value = 0; value < KVS_E4M3_NAN; value++) {
        double distance = kvs_e4m3_units(value) - exact;
        distance = distance < 0 ? -distance : distance;
        if (distance < apart || (distance == apart && value % 2 == 0)) apart = distance, at = value;
      }
      wrong += found != at;
    }
  CHECK(wrong == 0, "%u", wrong);
  CHECK(kvs_fp4_e4m3_code(0x7e, 0x7e) == 7 && kvs_fp4_e4m3_code(0x38, 0x7e) == 0, "448, and 1 beside it");
  CHECK(kvs_fp4_e4m3_value(kvs_fp4_e4m3_levels(0x44), 5) == 0x3c, "3 of 6 sixths of 3 is 1.5");
}

static void test_special_values(void) {
  struct kvs_float bf16 = kvs_bf16();
  int scale = kvs_mxfp8_scale(bf16, bf16.most);
  CHECK(scale == 119, "%d", scale);
  CHECK(kvs_mxfp8_value(bf16, kvs_mxfp8_code(bf16, 0xff80, scale), 246) == 0xff60, "infinity is -448 * 2^119");
  CHECK(kvs_mxfp8_value(bf16, kvs_mxfp8_code(bf16, 0x7f81, 3), 130) == 0x7fc0, "NaN");
  CHECK(kvs_mxfp8_value(bf16, kvs_mxfp8_code(bf16, 0x8000, -127), 0) == 0x8000, "-0");
  CHECK(kvs_mxfp8_value(bf16, 0x12, KVS_MXFP8_NO_SCALE) == 0x7fc0, "e8m0's NaN");
  CHECK(kvs_mxfp8_scale(bf16, 0x3f80) == -8 && kvs_mxfp8_code(bf16, 0x3f80, -8) == 0x78, "1 is 256 * 2^-8");
  CHECK(kvs_mxfp8_scale(bf16, 0x3ff0) == -7, "1.875 needs a larger scale than 1.75");
  CHECK(kvs_mxfp8_scale(bf16, 0x3fe0) == -8, "1.75 is 448 * 2^-8");
  uint32_t six = kvs_fp4_scale(bf16, 0x40c0); /* 6 */
  CHECK(kvs_fp4_scale_number(six).significand == 8 && kvs_fp4_value(bf16, 7, six) == 0x40c0, "6 is 6 * 1");
  CHECK(kvs_fp4_value(bf16, 5, six) == 0x4040 && kvs_fp4_value(bf16, 1, six) == 0x3f00, "3 and 0.5");
  CHECK(kvs_fp4_scale(bf16, bf16.most) == KVS_FP4_SCALE_MOST, "the largest");
  CHECK(kvs_fp4_value(bf16, 7, KVS_FP4_SCALE_MOST) == 0x4928, "688128");
  CHECK(kvs_fp4_value(kvs_fp16(), 7, kvs_fp4_scale(kvs_fp16(), 0x7bff)) == 0x7b80, "61440");
}

/* Random blocks with random ranges, specials and subnormals: coding what was decoded gives the same bytes. */
static void test_stable_blocks(const char *codec, enum kvs_kind kind) {
  enum { VALUES = 4096 + 40 };
  struct kvs_coding *coding = open_coding(2 * VALUES, codec, kind);
  uint64_t size = coded_nbytes(coding), seed = 17, wrong = 0;
  uint16_t *block = calloc(VALUES, 2);
  uint8_t *coded = malloc(size), *again = malloc(size);
  for (int round = 0; round < 200; round++) {
    uint64_t range = 1 + check_below(&seed, 15);
    for (size_t i = 0; i < VALUES; i++) {
      uint64_t value = check_random(&seed);
      block[i] = (uint16_t)(value & 0xffff);
      if (range < 15) block[i] = (uint16_t)((value & 0x8000) | ((value & 0x7fff) >> range));
    }
    wrong += encode(coding, block, coded) != KVS_CODED_GOOD || decode(coding, coded, block) != KVS_CODED_GOOD;
    memset(again, 0x5a, size);
    wrong += encode(coding, block, again) != KVS_CODED_GOOD || memcmp(coded, again, size) != 0;
  }
  CHECK(wrong == 0, "%s: %d", codec, (int)wrong);
  kvs_coding_close(coding);
  free(block), free(coded), free(again);
}

/* -- fields ---------------------------------------------------------------------------------------------------- */

/* Rows of a latent cache: 512 bytes of e4m3, 4 scales, 64 values of bf16; and pages, and an odd end. */
static void test_fields(void) {
  const struct kvs_field fields[] = {{.offset = 528, .nbytes = 128, .kind = KVS_KIND_BF16, .codec = "mxfp8"},
                                     {.nbytes = 512, .kind = KVS_KIND_E4M3},
                                     {.offset = 512, .nbytes = 16, .kind = KVS_KIND_FP32}};
  enum { TOKENS = 64, PAGES = 3, NBYTES = 656 * TOKENS * PAGES };
  struct kvs_coding_layout layout = {.block_nbytes = NBYTES,
                                     .page_nbytes = 656 * TOKENS,
                                     .pitch = 656,
                                     .codec = "exact",
                                     .fields = fields,
                                     .nfields = 3};
  struct kvs_coding *coding = NULL;
  CHECK(kvs_coding_open(&layout, &coding, &err) == KVS_OK, "%s", err.message);
  CHECK(coding->nunits == 3 && coding->units[0].rows == 64 && coding->units[2].row_nbytes == 128, "%d",
        (int)coding->nunits);
  CHECK(coding->coded_page_nbytes == 16 + 64 * 512 + 16 + 64 * 16 + 16 + 64 * 64 + 128, "%d",
        (int)coding->coded_page_nbytes);
  CHECK(!coding->lossless, "mxfp8 is not");
  uint64_t seed = 5, size = coded_nbytes(coding);
  uint8_t *block = malloc(NBYTES), *back = calloc(1, NBYTES), *coded = malloc(size), *again = malloc(size);
  for (int i = 0; i < NBYTES; i++) block[i] = (uint8_t)check_random(&seed);
  CHECK(encode(coding, block, coded) == 0 && decode(coding, coded, back) == 0, "a latent cache");
  int same = 1;
  for (int token = 0; token < TOKENS * PAGES; token++)
    same &= memcmp(block + 656 * token, back + 656 * token, 528) == 0;
  CHECK(same, "what is kept as it is");
  CHECK(encode(coding, back, again) == 0 && memcmp(coded, again, size) == 0, "stable");
  /* Behind valid_nbytes the encoder reads zeros. */
  struct kvs_blocks from = {.ptr = block};
  uint8_t verdict;
  (void)kvs_encode_blocks(coding, &from, 656 * 5, coded, size, 1, &verdict);
  for (int page = 0; page < PAGES; page++) memset(block + 656 * (TOKENS * page + 5), 0, 656 * (TOKENS - 5));
  CHECK(encode(coding, block, again) == 0 && memcmp(coded, again, size) == 0, "only the valid bytes");
  kvs_coding_close(coding);
  free(block), free(back), free(coded), free(again);
}

/* The same rows by fp4: latents in 4 bits, scales as they are, and the RoPE part as its field says. */
static void test_latents(void) {
  enum { TOKENS = 64, NBYTES = 656 * TOKENS };
  static const struct {
    const char *rope;
    double least;
  } cases[] = {{"raw", 1.55}, {"exact", 1.65}, {"mxfp8", 1.8}};
  uint64_t seed = 5;
  uint8_t block[NBYTES], back[NBYTES], coded[NBYTES], again[NBYTES];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const struct kvs_field fields[] = {{.nbytes = 512, .kind = KVS_KIND_E4M3},
                                       {.offset = 512, .nbytes = 16, .kind = KVS_KIND_FP32},
                                       {.offset = 528, .nbytes = 128, .kind = KVS_KIND_BF16, .codec = cases[i].rope}};
    const struct kvs_coding_layout layout = {
        .block_nbytes = NBYTES, .pitch = 656, .codec = "fp4", .fields = fields, .nfields = 3};
    struct kvs_coding *coding = NULL;
    CHECK(kvs_coding_open(&layout, &coding, &err) == KVS_OK, "%s", err.message);
    CHECK(NBYTES > cases[i].least * (double)coded_nbytes(coding), "%s", cases[i].rope);
    for (int at = 0; at < NBYTES; at++) block[at] = (uint8_t)check_random(&seed);
    for (int token = 0; token < TOKENS; token++)
      for (int value = 0; value < 64; value++) block[656 * token + 529 + 2 * value] = 0x3f;
    CHECK(encode(coding, block, coded) == 0 && decode(coding, coded, back) == 0, "%s", cases[i].rope);
    CHECK(encode(coding, back, again) == 0 && memcmp(coded, again, coded_nbytes(coding)) == 0, "stable");
    const int kept = 16 + (i < 2 ? 128 : 0);
    int same = 1;
    for (int at = 0; at < NBYTES; at += 656) same &= memcmp(block + at + 512, back + at + 512, (size_t)kept) == 0;
    CHECK(same, "scales, and the RoPE part unless it is mxfp8");
    kvs_coding_close(coding);
  }
}

static void test_wrong_fields(void) {
  static const struct {
    struct kvs_coding_layout layout;
    struct kvs_field fields[2];
    const char *says;
  } cases[] = {
      {{.codec = "exact"}, {{0}}, "block_nbytes is 0"},
      {{.block_nbytes = 4096, .page_nbytes = 1000, .codec = "exact"}, {{0}}, "not a whole number of pages"},
      {{.block_nbytes = 4096, .pitch = 1000, .codec = "exact"}, {{0}}, "does not divide a page"},
      {{.block_nbytes = 4096, .codec = "best"}, {{0}}, "the codec is best; there are exact, mxfp8, fp4"},
      {{.block_nbytes = 4096}, {{0}}, "the codec is missing"},
      {{.block_nbytes = 4096, .codec = "raw"}, {{0}}, "there are exact"},
      {{.block_nbytes = 4096, .codec = "exact", .nfields = 1},
       {{.nbytes = 7, .kind = KVS_KIND_BF16}},
       "a value of bf16 has 2"},
      {{.block_nbytes = 4096, .codec = "exact", .nfields = 1},
       {{.offset = 8, .nbytes = 4096}},
       "within the pitch, 4096"},
      {{.block_nbytes = 4096, .codec = "exact", .nfields = 1}, {{.nbytes = 16, .kind = 17}}, "kind 17 is unknown"},
      {{.block_nbytes = 4096, .codec = "exact", .nfields = 1},
       {{.nbytes = 16, .kind = KVS_KIND_FP16}},
       "codes none of the fields"},
      {{.block_nbytes = 4096, .codec = "exact", .nfields = 1},
       {{.nbytes = 16, .kind = KVS_KIND_BF16, .codec = "raws"}},
       "the codec of fields[0] is raws"},
      {{.block_nbytes = 4096, .codec = "mxfp8", .nfields = 1},
       {{.nbytes = 16, .kind = KVS_KIND_FP32, .codec = "mxfp8"}},
       "codes bf16, fp16"},
      {{.block_nbytes = 4096, .codec = "exact", .nfields = 1},
       {{.nbytes = 16, .kind = KVS_KIND_BF16, .codec = "zip"}},
       "the codec of fields[0] is zip"},
      {{.block_nbytes = 4096, .codec = "exact", .nfields = 2},
       {{.offset = 1024, .nbytes = 16, .kind = KVS_KIND_BF16}, {.offset = 1000, .nbytes = 32, .kind = KVS_KIND_BF16}},
       "one ends at 1032, the next begins at 1024"},
      {{.block_nbytes = 4096, .codec = "exact", .reserved = {0, 1}}, {{0}}, "reserved"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct kvs_coding_layout layout = cases[i].layout;
    struct kvs_coding *coding = NULL;
    layout.fields = cases[i].fields;
    err.message[0] = '\0';
    CHECK(kvs_coding_open(&layout, &coding, &err) == KVS_INVALID, "case %d", (int)i);
    CHECK(strstr(err.message, cases[i].says) != NULL, "%s", err.message);
  }
}

/* Units never cross a page, a K or V half, or a repetition that fills the pitch; they cover every byte once. */
static void test_cuts(void) {
  static const uint64_t pages[] = {2, 2048, 6144, 32768, 33000, 65536, 98304 + 2048};
  for (size_t i = 0; i < sizeof pages / sizeof *pages; i++)
    for (int halves = 1; halves <= 2; halves++) {
      uint64_t pitch = pages[i] / (uint64_t)halves, next = 0;
      const struct kvs_coding_layout layout = {
          .block_nbytes = 4 * pages[i], .page_nbytes = pages[i], .pitch = pitch, .codec = "exact"};
      struct kvs_coding *coding = NULL;
      int status = kvs_coding_open(&layout, &coding, &err);
      if (pitch % 2) continue; /* refused above */
      CHECK(status == KVS_OK, "%s", err.message);
      for (size_t unit = 0; unit < coding->nunits; unit++) {
        const struct kvs_unit *one = &coding->units[unit];
        uint64_t end = one->offset + one->row_nbytes;
        CHECK(one->offset == next && one->rows == 1 && one->row_nbytes <= KVS_UNIT_NBYTES, "%d", (int)one->offset);
        CHECK(one->offset / pitch == (end - 1) / pitch, "%d", (int)one->offset);
        next = end;
      }
      CHECK(next == pages[i], "%d", (int)next);
      kvs_coding_close(coding);
    }
}

int main(void) {
  test_every_value();
  test_every_value_in_units();
  test_codes();
  test_sizes();
  test_limits();
  test_stable_mxfp8(kvs_bf16());
  test_stable_mxfp8(kvs_fp16());
  test_stable_fp4(kvs_bf16());
  test_stable_fp4(kvs_fp16());
  test_stable_fp4_e4m3();
  test_values_fp4_e4m3();
  test_special_values();
  test_stable_blocks("mxfp8", KVS_KIND_BF16);
  test_stable_blocks("mxfp8", KVS_KIND_FP16);
  test_stable_blocks("fp4", KVS_KIND_BF16);
  test_stable_blocks("fp4", KVS_KIND_FP16);
  test_stable_blocks("fp4", KVS_KIND_E4M3);
  test_fields();
  test_latents();
  test_wrong_fields();
  test_cuts();
  return check_close();
}
