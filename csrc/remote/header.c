/* Sealing, checking, and the keyed code. */
#include "remote/header.h"

#include <stddef.h>
#include <string.h>

#include "base/copy.h"
#include "base/crc32c.h"

_Static_assert(sizeof(struct kvs_remote_header) == KVS_REMOTE_HEADER_NBYTES, "the header has no padding");

enum { PIECE = 64 << 10 }; /* bytes copied and then summed while they are in the cache */

static uint32_t header_crc(const struct kvs_remote_header *header) {
  return kvs_crc32c(0, header, offsetof(struct kvs_remote_header, header_crc));
}

static uint8_t *block_of(void *sealed) { return (uint8_t *)sealed + KVS_REMOTE_HEADER_NBYTES; }

/* The checksum is of the copied bytes: a source that changes meanwhile gives a block that is right or none. */
static uint32_t copy_and_sum(uint8_t *to, const uint8_t *from, uint64_t nbytes) {
  uint32_t crc = 0;
  for (uint64_t at = 0; at < nbytes; at += PIECE) {
    size_t piece = nbytes - at < PIECE ? (size_t)(nbytes - at) : PIECE;
    if (to != from) memcpy(to + at, from + at, piece);
    crc = kvs_crc32c(crc, to + at, piece);
  }
  return crc;
}

/* -- SipHash-2-4 --------------------------------------------------------------------------------------------------- */

struct sip {
  uint64_t a, b, c, d;
};

static uint64_t word_at(const uint8_t *at) {
  uint64_t word;
  memcpy(&word, at, sizeof word);
  return word;
}

static uint64_t turned(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }

static void mix(struct sip *sip) {
  sip->a += sip->b, sip->c += sip->d;
  sip->b = turned(sip->b, 13) ^ sip->a, sip->d = turned(sip->d, 16) ^ sip->c;
  sip->a = turned(sip->a, 32);
  sip->c += sip->b, sip->a += sip->d;
  sip->b = turned(sip->b, 17) ^ sip->c, sip->d = turned(sip->d, 21) ^ sip->a;
  sip->c = turned(sip->c, 32);
}

static void take(struct sip *sip, uint64_t word) {
  sip->d ^= word;
  mix(sip);
  mix(sip);
  sip->a ^= word;
}

/* Of the header's fields up to its checksum, which the checksum's own place ends, and the block. */
static uint64_t mac_of(const struct kvs_remote_header *header, const uint8_t *block, uint64_t nbytes,
                       const uint8_t *secret) {
  uint64_t k0 = word_at(secret), k1 = word_at(secret + 8);
  struct sip sip = {k0 ^ UINT64_C(0x736f6d6570736575), k1 ^ UINT64_C(0x646f72616e646f6d),
                    k0 ^ UINT64_C(0x6c7967656e657261), k1 ^ UINT64_C(0x7465646279746573)};
  const uint8_t *fields = (const uint8_t *)header;
  for (size_t at = 0; at < offsetof(struct kvs_remote_header, mac); at += 8) take(&sip, word_at(fields + at));
  uint64_t at = 0;
  for (; at + 8 <= nbytes; at += 8) take(&sip, word_at(block + at));
  uint64_t last = (offsetof(struct kvs_remote_header, mac) + nbytes) << 56;
  for (int shift = 0; at < nbytes; ++at, shift += 8) last |= (uint64_t)block[at] << shift;
  take(&sip, last);
  sip.c ^= 0xff;
  for (int i = 0; i < 4; ++i) mix(&sip);
  return sip.a ^ sip.b ^ sip.c ^ sip.d;
}

/* -- the two calls ------------------------------------------------------------------------------------------------- */

void kvs_remote_seal(void *sealed, const void *block, const struct kvs_remote_label *label) {
  struct kvs_remote_header header = {.magic = KVS_REMOTE_MAGIC, .codec = label->codec, .nbytes = label->nbytes};
  memcpy(header.identity, label->identity, sizeof header.identity);
  memcpy(header.key, label->key, sizeof header.key);
  header.block_crc = copy_and_sum(block_of(sealed), block, label->nbytes);
  header.header_crc = header_crc(&header);
  if (label->secret != NULL) header.mac = mac_of(&header, block_of(sealed), label->nbytes, label->secret);
  memcpy(sealed, &header, sizeof header);
}

static enum kvs_remote_verdict check(const void *sealed, const uint8_t *block, const struct kvs_remote_label *label) {
  struct kvs_remote_header header;
  memcpy(&header, sealed, sizeof header);
  if (header.magic != KVS_REMOTE_MAGIC || header.header_crc != header_crc(&header)) return KVS_REMOTE_NO_HEADER;
  if (memcmp(header.identity, label->identity, sizeof header.identity) != 0) return KVS_REMOTE_OTHER_IDENTITY;
  if (memcmp(header.key, label->key, sizeof header.key) != 0) return KVS_REMOTE_OTHER_KEY;
  if (header.nbytes != label->nbytes || header.codec != label->codec) return KVS_REMOTE_OTHER_LENGTH;
  if (kvs_crc32c(0, block, label->nbytes) != header.block_crc) return KVS_REMOTE_WRONG_BYTES;
  if (label->secret != NULL && header.mac != mac_of(&header, block, label->nbytes, label->secret))
    return KVS_REMOTE_WRONG_MAC;
  return KVS_REMOTE_RIGHT;
}

enum kvs_remote_verdict kvs_remote_open(const void *sealed, void *block, const struct kvs_remote_label *label,
                                        enum kvs_remote_how how) {
  if (how == KVS_REMOTE_IN_PLACE) return check(sealed, block, label);
  const uint8_t *behind = (const uint8_t *)sealed + KVS_REMOTE_HEADER_NBYTES;
  enum kvs_remote_verdict verdict = check(sealed, behind, label);
  if (verdict != KVS_REMOTE_RIGHT || block == NULL) return verdict;
  kvs_copy_bytes((uintptr_t)block, (uintptr_t)behind, label->nbytes, true);
  kvs_copy_fence();
  return how == KVS_REMOTE_AGAIN ? check(sealed, block, label) : verdict;
}
