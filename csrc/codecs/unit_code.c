/* Encoding and decoding of blocks by the CPU, unit by unit, through one buffer that holds a unit's values contiguous
 * and aligned, whatever the block is. */
#include <string.h>

#include "codecs/coding.h"
#include "codecs/table.h"
#include "codecs/unit_code.h"

static void gather(const struct kvs_unit *unit, const uint8_t *page, uint64_t valid_nbytes, uint8_t *values) {
  uint32_t nbytes = kvs_unit_nbytes(unit), rounded = (nbytes + KVS_UNIT_ROUND - 1) / KVS_UNIT_ROUND * KVS_UNIT_ROUND;
  for (uint32_t row = 0; row < unit->rows; row++) {
    uint64_t at = unit->offset + row * unit->pitch, left = at < valid_nbytes ? valid_nbytes - at : 0;
    uint32_t count = left < unit->row_nbytes ? (uint32_t)left : unit->row_nbytes;
    uint8_t *to = values + (size_t)row * unit->row_nbytes;
    if (count) memcpy(to, page + at, count);
    memset(to + count, 0, unit->row_nbytes - count);
  }
  memset(values + nbytes, 0, rounded - nbytes);
}

static void scatter(const struct kvs_unit *unit, const uint8_t *values, uint8_t *page) {
  for (uint32_t row = 0; row < unit->rows; row++)
    memcpy(page + unit->offset + row * unit->pitch, values + (size_t)row * unit->row_nbytes, unit->row_nbytes);
}

enum kvs_unit_verdict kvs_unit_encode(const struct kvs_unit *unit, const void *page, uint64_t valid_nbytes,
                                      void *coded_page) {
  const struct kvs_codec_ops *codec = kvs_codecs[unit->codec];
  uint8_t *coded = (uint8_t *)coded_page + unit->coded;
  uint32_t values[KVS_UNIT_NBYTES / 4], escapes = 0;
  gather(unit, page, valid_nbytes, (uint8_t *)values);
  memset(coded, 0, unit->coded_nbytes);
  bool fits = codec->encode(unit, values, coded, &escapes);
  if (!fits) memset(coded, 0, unit->coded_nbytes);
  struct kvs_unit_head head =
      kvs_unit_head_of(unit, codec->version, fits ? KVS_HEAD_CODED : KVS_HEAD_NOT_STORED, fits ? escapes : 0);
  memcpy(coded, &head, sizeof head);
  return fits ? KVS_UNIT_GOOD : KVS_UNIT_NOT_STORED;
}

enum kvs_unit_verdict kvs_unit_decode(const struct kvs_unit *unit, const void *coded_page, void *page) {
  const struct kvs_codec_ops *codec = kvs_codecs[unit->codec];
  const uint8_t *coded = (const uint8_t *)coded_page + unit->coded;
  uint32_t values[KVS_UNIT_NBYTES / 4];
  struct kvs_unit_head head;
  memcpy(&head, coded, sizeof head);
  enum kvs_unit_verdict verdict = kvs_unit_check(unit, codec->version, &head);
  if (!verdict && !codec->decode(unit, coded, head.escapes, values)) verdict = KVS_UNIT_DAMAGED;
  if (verdict)
    kvs_unit_zero(unit, page);
  else
    scatter(unit, (const uint8_t *)values, page);
  return verdict;
}

static bool is_same(const struct kvs_unit *unit, const void *page, uint64_t valid_nbytes, const uint8_t *coded,
                    uint8_t *scratch) {
  const struct kvs_unit alone = kvs_unit_alone(unit);
  uint8_t *again = scratch + KVS_UNIT_NBYTES;
  struct kvs_unit moved = *unit, moved_alone = alone;
  moved.coded = moved_alone.coded = 0;
  if (kvs_unit_decode(&alone, coded - unit->coded, scratch) != KVS_UNIT_GOOD) return false;
  if (kvs_codecs[unit->codec]->lossless) {
    uint32_t values[KVS_UNIT_NBYTES / 4];
    gather(unit, page, valid_nbytes, (uint8_t *)values);
    return memcmp(values, scratch, kvs_unit_nbytes(unit)) == 0;
  }
  (void)kvs_unit_encode(&moved, page, valid_nbytes, again);
  if (memcmp(again, coded, unit->coded_nbytes) != 0) return false;
  (void)kvs_unit_encode(&moved_alone, scratch, UINT64_MAX, again);
  return memcmp(again, coded, unit->coded_nbytes) == 0;
}

enum kvs_unit_verdict kvs_unit_verify(const struct kvs_unit *unit, const void *page, uint64_t valid_nbytes,
                                      void *coded_page, void *scratch) {
  const uint8_t version = kvs_codecs[unit->codec]->version;
  uint8_t *coded = (uint8_t *)coded_page + unit->coded;
  struct kvs_unit_head head;
  memcpy(&head, coded, sizeof head);
  if (kvs_unit_check(unit, version, &head) == KVS_UNIT_NOT_STORED) return KVS_UNIT_NOT_STORED;
  if (is_same(unit, page, valid_nbytes, coded, scratch)) return KVS_UNIT_GOOD;
  head = kvs_unit_head_of(unit, version, KVS_HEAD_NOT_STORED, 0);
  memcpy(coded, &head, sizeof head);
  return KVS_UNIT_MISCODED;
}

void kvs_unit_zero(const struct kvs_unit *unit, void *page) {
  for (uint32_t row = 0; row < unit->rows; row++)
    memset((uint8_t *)page + unit->offset + row * unit->pitch, 0, unit->row_nbytes);
}

/* -- the surface ----------------------------------------------------------------------------------------------- */

static uint8_t *page_of(const struct kvs_coding *coding, const struct kvs_blocks *blocks, size_t block, uint64_t page) {
  uint64_t page_stride = blocks->page_stride ? blocks->page_stride : coding->page_nbytes;
  uint64_t stride = blocks->stride ? blocks->stride : page_stride * coding->pages;
  return (uint8_t *)blocks->ptr + block * stride + page * page_stride;
}

size_t kvs_encode_blocks(const struct kvs_coding *coding, const struct kvs_blocks *from, uint64_t valid_nbytes,
                         void *coded, uint64_t coded_stride, size_t count, uint8_t *verdicts) {
  size_t bad = 0;
  for (size_t block = 0; block < count; block++) {
    enum kvs_unit_verdict worst = KVS_UNIT_GOOD;
    for (uint64_t page = 0; page < coding->pages; page++) {
      uint8_t *to = (uint8_t *)coded + block * coded_stride + page * coding->coded_page_nbytes;
      for (size_t i = 0; i < coding->nunits; i++) {
        enum kvs_unit_verdict one =
            kvs_unit_encode(&coding->units[i], page_of(coding, from, block, page), valid_nbytes, to);
        if (one > worst) worst = one;
      }
    }
    verdicts[block] = (uint8_t)worst;
    bad += worst != KVS_UNIT_GOOD;
  }
  return bad;
}

size_t kvs_decode_blocks(const struct kvs_coding *coding, const void *coded, uint64_t coded_stride,
                         const struct kvs_blocks *to, size_t count, uint8_t *verdicts) {
  size_t bad = 0;
  for (size_t block = 0; block < count; block++) {
    enum kvs_unit_verdict worst = KVS_UNIT_GOOD;
    for (uint64_t page = 0; page < coding->pages; page++) {
      const uint8_t *from = (const uint8_t *)coded + block * coded_stride + page * coding->coded_page_nbytes;
      for (size_t i = 0; i < coding->nunits; i++) {
        enum kvs_unit_verdict one = kvs_unit_decode(&coding->units[i], from, page_of(coding, to, block, page));
        if (one > worst) worst = one;
      }
    }
    verdicts[block] = (uint8_t)worst;
    bad += worst != KVS_UNIT_GOOD;
  }
  return bad;
}
