/* Kernels CODE and VERIFY on a host device: grids of coded pages, as a path would launch them, against
 * kvs_encode_blocks(). */
#include "codecs/coding.h"
#include "host_device.h"
#include "kernels/code.h"

enum { LAYERS = 3, PAGE = 4096 + 72, SLOTS = 24, PAIRS = 20 };

/* Layers are tensors of their own on the GPU, and lie together in a block of the host. */
struct grid {
  struct kvs_device *device;
  struct kvs_coding *coding;
  struct kvs_coding_info info;
  unsigned char *gpu[LAYERS], *coded;
  uint32_t *verdicts;
  struct kvs_code_params params;
};

static struct grid make_grid(struct kvs_device *device, uint64_t *random, const char *codec, bool decode) {
  const struct kvs_field field = {.nbytes = PAGE - 72, .kind = KVS_KIND_BF16};
  const struct kvs_coding_layout layout = {
      .block_nbytes = LAYERS * PAGE, .page_nbytes = PAGE, .codec = codec, .fields = &field, .nfields = 1};
  struct grid g = {.device = device};
  struct kvs_row rows[LAYERS] = {{0}};
  struct kvs_error err;
  uint32_t from[SLOTS], to[SLOTS];
  CHECK(kvs_coding_open(&layout, &g.coding, &err) == KVS_OK, "%s", err.message);
  kvs_coding_get_info(g.coding, &g.info);
  g.coded = make_memory(device, SLOTS * g.info.coded_nbytes);
  memset(g.coded, 0xa5, SLOTS * g.info.coded_nbytes);
  g.verdicts = make_memory(device, PAIRS * sizeof *g.verdicts);
  memset(g.verdicts, 0, PAIRS * sizeof *g.verdicts);
  for (int layer = 0; layer < LAYERS; layer++) {
    g.gpu[layer] = make_memory(device, SLOTS * PAGE);
    for (size_t i = 0; i < SLOTS * PAGE; i += 2) { /* exponents of 120 to 127 */
      uint64_t word = check_random(random);
      uint16_t value = (uint16_t)((word & 0x807f) | (120 + (word >> 40) % 8) << 7);
      memcpy(g.gpu[layer] + i, &value, 2);
    }
    uint64_t gpu = address(g.gpu[layer]), coded = address(g.coded) + (uint64_t)layer * g.info.coded_page_nbytes;
    rows[layer] = (struct kvs_row){.src = decode ? coded : gpu,
                                   .dst = decode ? gpu : coded,
                                   .src_stride = decode ? g.info.coded_nbytes : PAGE,
                                   .dst_stride = decode ? PAGE : g.info.coded_nbytes,
                                   .nbytes = PAGE};
  }
  shuffle(random, from, SLOTS);
  shuffle(random, to, SLOTS);
  for (size_t i = 0; i < PAIRS; i++) g.params.inline_pairs[i] = (struct kvs_pair){from[i], to[i]};
  void *table = make_memory(device, sizeof rows),
       *units = make_memory(device, g.coding->nunits * sizeof(struct kvs_unit));
  memcpy(table, rows, sizeof rows);
  memcpy(units, g.coding->units, g.coding->nunits * sizeof(struct kvs_unit));
  g.params.units = (struct kvs_units){.rows = address(table), .nrows = LAYERS, .parts = (uint32_t)g.coding->nunits};
  g.params.table = address(units);
  g.params.verdicts = address(g.verdicts);
  g.params.count = (uint64_t)PAIRS * LAYERS * g.coding->nunits;
  g.params.valid_nbytes = UINT64_MAX;
  g.params.by_src = decode;
  return g;
}

static void launch(struct grid *g, kvs_stream stream) {
  struct kvs_launch launch = {KVS_KERNEL_CODE, 7, 512, 0, &g->params, sizeof g->params};
  OK(kvs_dev_launch(g->device, &launch, stream, &err));
  OK(kvs_dev_synchronize(g->device, &err));
}

static uint8_t encode_slot(const struct grid *g, uint32_t slot, uint64_t valid_nbytes, uint8_t *coded) {
  uint8_t block[LAYERS * PAGE], verdict;
  const struct kvs_blocks from = {.ptr = block};
  for (int layer = 0; layer < LAYERS; layer++) memcpy(block + layer * PAGE, g->gpu[layer] + slot * PAGE, PAGE);
  (void)kvs_encode_blocks(g->coding, &from, valid_nbytes, coded, 0, 1, &verdict);
  return verdict;
}

/* One block has a layer that does not fit; one pair has no source, one no destination. */
static void test_encode(uint64_t seed, const char *codec, uint64_t valid_nbytes) {
  uint64_t random = seed + 1;
  struct kvs_device *device = open_device(seed);
  struct grid g = make_grid(device, &random, codec, false);
  struct kvs_pair *pairs = g.params.inline_pairs;
  uint8_t *wanted = malloc(g.info.coded_nbytes);
  fill_random(&random, g.gpu[1] + pairs[5].src * PAGE, PAGE);
  pairs[7].src = KVS_BAD_SLOT;
  uint32_t left_out = pairs[9].dst;
  pairs[9].dst = KVS_BAD_SLOT;
  g.params.valid_nbytes = valid_nbytes;
  launch(&g, make_stream(device));
  for (size_t i = 0; i < PAIRS; i++) {
    if (i == 9) continue;
    uint8_t verdict = i == 7 ? encode_slot(&g, 0, 0, wanted) : encode_slot(&g, pairs[i].src, valid_nbytes, wanted);
    CHECK(load32(&g.verdicts[i]) == verdict, "pair %d", (int)i);
    CHECK(memcmp(g.coded + pairs[i].dst * g.info.coded_nbytes, wanted, g.info.coded_nbytes) == 0, "pair %d", (int)i);
  }
  CHECK(load32(&g.verdicts[5]) == (codec[0] == 'e' ? KVS_UNIT_NOT_STORED : KVS_UNIT_GOOD), "%s", codec);
  CHECK(g.coded[left_out * g.info.coded_nbytes] == 0xa5, "no destination");
  free(wanted);
  kvs_coding_close(g.coding);
  kvs_dev_close(device);
}

static void test_decode(uint64_t seed, const char *codec) {
  uint64_t random = seed + 1;
  struct kvs_device *device = open_device(seed);
  struct grid g = make_grid(device, &random, codec, true);
  const struct kvs_pair *pairs = g.params.inline_pairs;
  uint8_t *wanted = calloc(1, LAYERS * PAGE), verdict;
  const struct kvs_blocks to = {.ptr = wanted};
  for (uint32_t slot = 0; slot < SLOTS; slot++)
    (void)encode_slot(&g, slot, UINT64_MAX, g.coded + slot * g.info.coded_nbytes);
  g.coded[pairs[3].src * g.info.coded_nbytes + g.info.coded_page_nbytes + 2] ^= 1; /* the version of layer 1 */
  g.params.inline_pairs[4].src = KVS_BAD_SLOT;
  launch(&g, make_stream(device));
  for (size_t i = 0; i < PAIRS; i++) {
    verdict = KVS_UNIT_NOT_STORED;
    memset(wanted, 0, LAYERS * PAGE);
    if (i != 4) (void)kvs_decode_blocks(g.coding, g.coded + pairs[i].src * g.info.coded_nbytes, 0, &to, 1, &verdict);
    CHECK(load32(&g.verdicts[i]) == verdict, "pair %d", (int)i);
    for (int layer = 0; layer < LAYERS; layer++)
      CHECK(memcmp(g.gpu[layer] + pairs[i].dst * PAGE, wanted + layer * PAGE, PAGE) == 0, "pair %d", (int)i);
  }
  CHECK(load32(&g.verdicts[3]) == KVS_UNIT_DAMAGED, "the head was changed");
  free(wanted);
  kvs_coding_close(g.coding);
  kvs_dev_close(device);
}

/* Kernel VERIFY after CODE: what is right stays as it is. A bit that is wrong, in a head, a value or behind the values,
 * is found, and its unit no longer decodes. A block that does not fit keeps its verdict. */
static void test_verify(uint64_t seed, const char *codec) {
  uint64_t random = seed + 1;
  struct kvs_device *device = open_device(seed);
  struct grid g = make_grid(device, &random, codec, false);
  const struct kvs_pair *pairs = g.params.inline_pairs;
  const uint64_t nbytes = (uint64_t)SLOTS * g.info.coded_nbytes, page = g.info.coded_page_nbytes;
  const bool exact = codec[0] == 'e';
  uint8_t *wanted = malloc(nbytes);
  kvs_stream stream = make_stream(device);
  if (exact) fill_random(&random, g.gpu[1] + pairs[5].src * PAGE, PAGE);
  g.params.inline_pairs[7].src = KVS_BAD_SLOT;
  launch(&g, stream);
  memcpy(wanted, g.coded, nbytes);
  struct kvs_verify_params params = {.code = g.params, .scratch = address(make_memory(device, 7 * KVS_VERIFY_NBYTES))};
  struct kvs_launch verify = {KVS_KERNEL_VERIFY, 7, 512, 0, &params, sizeof params};
  for (int round = 0; round < 2; round++) {
    OK(kvs_dev_launch(device, &verify, stream, &err));
    OK(kvs_dev_synchronize(device, &err));
    for (size_t i = 0; i < PAIRS; i++) {
      uint32_t verdict = i == 5 && exact ? KVS_UNIT_NOT_STORED : KVS_UNIT_GOOD;
      if (round && i >= 10 && i < 13) verdict = KVS_UNIT_MISCODED;
      CHECK(load32(&g.verdicts[i]) == verdict, "round %d, pair %d: %u", round, (int)i, load32(&g.verdicts[i]));
    }
    if (round) break;
    CHECK(memcmp(g.coded, wanted, nbytes) == 0, "%s: bytes were changed", codec);
    for (size_t i = 10; i < 13; i++) { /* a head's version, a value, and a value of a field that is kept as it is */
      const uint64_t at = i == 10 ? 2 : i == 11 ? page + KVS_UNIT_HEAD + 9 : 3 * page - 17;
      g.coded[pairs[i].dst * g.info.coded_nbytes + at] ^= 1;
    }
  }
  for (size_t i = 0; i < PAIRS; i++) {
    uint8_t block[LAYERS * PAGE], verdict;
    const struct kvs_blocks to = {.ptr = block};
    bool good = !(i == 5 && exact) && (i < 10 || i >= 13);
    (void)kvs_decode_blocks(g.coding, g.coded + pairs[i].dst * g.info.coded_nbytes, 0, &to, 1, &verdict);
    CHECK(verdict == (good ? KVS_UNIT_GOOD : KVS_UNIT_NOT_STORED), "pair %d: %d", (int)i, verdict);
  }
  params.scratch += 8; /* not aligned */
  OK(kvs_dev_launch(device, &verify, stream, &err));
  expect_lost(device, "verify", seed);
  free(wanted);
  kvs_coding_close(g.coding);
  kvs_dev_close(device);
}

/* A kernel that would touch memory that is not there, or coded pages that are not aligned, loses the device. */
static void test_faults(void) {
  for (int what = 0; what < 4; what++)
    for (int decode = 0; decode < 2; decode++) {
      uint64_t random = 9;
      struct kvs_device *device = open_device(3);
      struct grid g = make_grid(device, &random, "mxfp8", decode);
      struct kvs_row *row = (struct kvs_row *)(uintptr_t)g.params.units.rows;
      kvs_stream stream = make_stream(device);
      if (what == 0) g.params.inline_pairs[3].src = SLOTS;
      if (what == 1) g.params.inline_pairs[3].dst = SLOTS;
      if (what == 2) *(decode ? &row->src : &row->dst) += 8;
      if (what == 3) g.params.verdicts += 4;
      struct kvs_launch launch = {KVS_KERNEL_CODE, 7, 512, 0, &g.params, sizeof g.params};
      OK(kvs_dev_launch(device, &launch, stream, &err));
      expect_lost(device, decode ? "decode" : "encode", (uint64_t)what);
      kvs_coding_close(g.coding);
      kvs_dev_close(device);
    }
}

int main(void) {
  static const char *const codecs[] = {"exact", "mxfp8", "fp4"};
  for (uint64_t seed = 0; seed < 6; seed++) { /* 0: threads */
    test_encode(seed, codecs[seed % 3], UINT64_MAX);
    test_encode(seed, codecs[seed % 3], 1000);
    test_decode(seed, codecs[seed % 3]);
    test_verify(seed, codecs[seed % 3]);
  }
  test_faults();
  return check_close();
}
