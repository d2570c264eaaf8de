/* Units: the pieces into which a coded block is divided. Included by C and CUDA C++: plain data and inline functions.
 *
 * A unit is at most KVS_UNIT_NBYTES of one field of a page: `rows` rows of row_nbytes bytes, `pitch` apart. Its coded
 * form is contiguous, has a fixed size, a multiple of 16, and begins with a head. So each unit can be coded by one CTA,
 * and read without the rest of its block. Unused bytes of the coded form are zeros. All numbers are little-endian. */
#ifndef KVS_CODECS_UNIT_H
#define KVS_CODECS_UNIT_H

#include "codecs/both.h"

enum {
  KVS_UNIT_NBYTES = 32 << 10,
  KVS_UNIT_HEAD = 16, /* sizeof(struct kvs_unit_head) */
  KVS_UNIT_MAGIC = 0x764b,
  KVS_VERIFY_NBYTES = 2 * KVS_UNIT_NBYTES + KVS_UNIT_HEAD, /* a unit's values, and a unit coded anew */
};

/* In heads: numbers stay as they are. */
enum kvs_codec { KVS_CODEC_RAW, KVS_CODEC_EXACT, KVS_CODEC_MXFP8, KVS_CODEC_FP4, KVS_CODECS };

enum {
  KVS_UNIT_RAW_VERSION = 1,
  KVS_UNIT_BF16 = 1, /* KVS_KIND_BF16, of kvswap_codec.h, which a kernel cannot include */
  KVS_UNIT_E4M3 = 3, /* KVS_KIND_E4M3 */
};

/* What a unit's head says of it. */
enum kvs_head_state {
  KVS_HEAD_CODED = 1,
  KVS_HEAD_NOT_STORED = 2, /* the values do not fit: all bytes behind the head are zeros */
};

struct kvs_unit_head {
  uint16_t magic;
  uint8_t version; /* of the codec */
  uint8_t codec;   /* enum kvs_codec */
  uint8_t state;   /* enum kvs_head_state */
  uint8_t kind;    /* enum kvs_kind */
  uint16_t escapes;
  uint32_t nbytes; /* before coding */
  uint32_t reserved;
};

/* What became of a unit, or of a block: the worst of its units. */
enum kvs_unit_verdict {
  KVS_UNIT_GOOD,
  KVS_UNIT_NOT_STORED, /* a unit's values do not fit its coded size */
  KVS_UNIT_DAMAGED,    /* decoding: a unit's head or escapes are wrong */
  KVS_UNIT_MISCODED,   /* verifying: what was coded is not what the unit decodes to */
};

struct kvs_unit {
  uint64_t offset; /* of the first row, in its page */
  uint64_t coded;  /* of the head, in the coded page */
  uint64_t pitch;
  uint32_t row_nbytes, rows;
  uint32_t coded_nbytes; /* with the head */
  uint16_t codec, kind;
};

/* Threads of a CTA that codes units of `nbytes` bytes, or fewer: 64 bytes each. Small CTAs leave no thread idle. */
enum { KVS_CODE_THREADS = KVS_UNIT_NBYTES / 64, KVS_CODE_LEAST_THREADS = 64 };

KVS_BOTH uint32_t kvs_code_threads(uint32_t nbytes) {
  uint32_t threads = KVS_CODE_LEAST_THREADS;
  while (threads * 64u < nbytes) threads *= 2u;
  return threads;
}

KVS_BOTH uint32_t kvs_unit_nbytes(const struct kvs_unit *unit) { return unit->row_nbytes * unit->rows; }

/* The unit's values without the rest of its page, one after the other. Its coded form is where it was. */
KVS_BOTH struct kvs_unit kvs_unit_alone(const struct kvs_unit *unit) {
  struct kvs_unit alone = *unit;
  alone.offset = alone.pitch = 0;
  alone.row_nbytes = kvs_unit_nbytes(unit);
  alone.rows = 1;
  return alone;
}

KVS_BOTH uint32_t kvs_round16(uint32_t nbytes) { return (nbytes + 15u) & ~15u; }

KVS_BOTH struct kvs_unit_head kvs_unit_head_of(const struct kvs_unit *unit, uint8_t version, uint32_t state,
                                               uint32_t escapes) {
  struct kvs_unit_head head;
  head.magic = KVS_UNIT_MAGIC;
  head.version = version;
  head.codec = (uint8_t)unit->codec;
  head.state = (uint8_t)state;
  head.kind = (uint8_t)unit->kind;
  head.escapes = (uint16_t)escapes;
  head.nbytes = kvs_unit_nbytes(unit);
  head.reserved = 0;
  return head;
}

/* What a head says of this unit; GOOD: the bytes behind it can be decoded, once the escapes are checked. */
KVS_BOTH enum kvs_unit_verdict kvs_unit_check(const struct kvs_unit *unit, uint8_t version,
                                              const struct kvs_unit_head *head) {
  const int own = head->magic == KVS_UNIT_MAGIC && head->version == version && head->codec == unit->codec &&
                  head->kind == unit->kind && head->nbytes == kvs_unit_nbytes(unit) && head->reserved == 0;
  if (!own) return KVS_UNIT_DAMAGED;
  if (head->state == KVS_HEAD_NOT_STORED) return KVS_UNIT_NOT_STORED;
  return head->state == KVS_HEAD_CODED ? KVS_UNIT_GOOD : KVS_UNIT_DAMAGED;
}

#endif
