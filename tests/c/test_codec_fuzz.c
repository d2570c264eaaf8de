/* Units that no encoder wrote: random bytes, and coded units with some bytes changed. Decoding reads and writes nothing
 * outside the unit, gives the same result twice, and leaves zeros unless it says GOOD. The number of units is the
 * argument (default 20,000); the second is the seed. Meant for AddressSanitizer: the buffers are as large as the unit.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "codecs/coding.h"
#include "codecs/unit_code.h"

static uint64_t seed = 1, wrong, counts[3];

static struct kvs_coding *random_coding(void) {
  static const char *const codecs[] = {"exact", "mxfp8", "fp4"};
  uint64_t which = check_below(&seed, 3), rows = 1 + check_below(&seed, 4), row = 2 * (1 + check_below(&seed, 400));
  if (check_below(&seed, 64) == 0) row = 2 * (1 + check_below(&seed, KVS_UNIT_NBYTES));
  enum kvs_kind kind = which && check_below(&seed, 2) ? KVS_KIND_FP16 : KVS_KIND_BF16;
  if (which == 2 && check_below(&seed, 2)) kind = KVS_KIND_E4M3, row -= check_below(&seed, 2);
  const struct kvs_field field = {.nbytes = row, .kind = kind};
  uint64_t pitch = row + check_below(&seed, 3) * check_below(&seed, 9);
  const struct kvs_coding_layout layout = {
      .block_nbytes = rows * pitch, .pitch = pitch, .codec = codecs[which], .fields = &field, .nfields = 1};
  struct kvs_coding *coding = NULL;
  struct kvs_error err;
  CHECK(kvs_coding_open(&layout, &coding, &err) == KVS_OK, "%s", err.message);
  return coding;
}

static void fill(uint8_t *bytes, uint64_t nbytes) {
  uint64_t mask = check_below(&seed, 2) ? UINT64_MAX : 0x807f807f807f807f; /* exponents 0 and 1 */
  for (uint64_t i = 0; i < nbytes; i += 8) {
    uint64_t word = (check_random(&seed) & mask) | (~mask & 0x3f003f003f003f00);
    memcpy(bytes + i, &word, nbytes - i < 8 ? nbytes - i : 8);
  }
}

/* Random bytes, random bytes behind valid heads, or a coded block of random values; then up to 8 bytes are changed.
 * With valid heads, decoding goes on to the bytes behind them. */
static void make(const struct kvs_coding *coding, uint8_t *coded, uint64_t nbytes, const struct kvs_blocks *blocks) {
  uint8_t verdict;
  fill(blocks->ptr, coding->block_nbytes);
  (void)kvs_encode_blocks(coding, blocks, UINT64_MAX, coded, nbytes, 1, &verdict);
  uint64_t how = check_below(&seed, 4);
  if (how == 0) fill(coded, nbytes);
  if (how == 1)
    for (size_t i = 0; i < coding->nunits; i++)
      fill(coded + coding->units[i].coded + KVS_UNIT_HEAD, coding->units[i].coded_nbytes - KVS_UNIT_HEAD);
  if (how == 2 && nbytes > 8) coded[4] = KVS_HEAD_CODED, coded[6] = (uint8_t)check_random(&seed);
  for (uint64_t i = check_below(&seed, 9); i > 0; i--)
    coded[check_below(&seed, check_below(&seed, 2) ? nbytes : 16)] = (uint8_t)check_random(&seed);
}

static uint64_t fuzz(void) {
  struct kvs_coding *coding = random_coding();
  struct kvs_coding_info info;
  kvs_coding_get_info(coding, &info);
  uint8_t *block = malloc(info.block_nbytes), *again = malloc(info.block_nbytes), *coded = malloc(info.coded_nbytes);
  const struct kvs_blocks blocks = {.ptr = block}, second = {.ptr = again};
  for (int i = 0; i < 16; i++) {
    uint8_t verdicts[2];
    make(coding, coded, info.coded_nbytes, &blocks);
    memset(block, 0xa5, info.block_nbytes);
    memset(again, 0x5a, info.block_nbytes);
    uint64_t bad = kvs_decode_blocks(coding, coded, info.coded_nbytes, &blocks, 1, &verdicts[0]);
    bad += kvs_decode_blocks(coding, coded, info.coded_nbytes, &second, 1, &verdicts[1]);
    wrong += verdicts[0] != verdicts[1] || bad != 2u * (verdicts[0] != KVS_CODED_GOOD);
    wrong += memcmp(block, again, info.block_nbytes) != 0;
    counts[verdicts[0]]++;
    for (size_t unit = 0; unit < coding->nunits; unit++) {
      const struct kvs_unit *one = &coding->units[unit];
      if (kvs_unit_decode(one, coded, block) == KVS_UNIT_GOOD) continue;
      for (uint32_t row = 0; row < one->rows; row++)
        for (uint32_t at = 0; at < one->row_nbytes; at++) wrong += block[one->offset + row * one->pitch + at] != 0;
    }
  }
  uint64_t units = 16 * info.units;
  kvs_coding_close(coding);
  free(block), free(again), free(coded);
  return units;
}

int main(int argc, char **argv) {
  uint64_t units = argc > 1 ? strtoull(argv[1], NULL, 10) : 20000;
  if (argc > 2) seed = strtoull(argv[2], NULL, 10) | 1;
  for (uint64_t done = 0; done < units;) done += fuzz();
  CHECK(wrong == 0, "%d", (int)wrong);
  for (int i = 0; i < 3; i++) CHECK(counts[i] > 0, "verdict %d was never given", i);
  return check_close();
}
