#include "remote/slot.h"

#include <stddef.h>
#include <string.h>

#include "base/crc32c.h"

_Static_assert(sizeof(struct kvs_remote_header) == KVS_REMOTE_HEADER_NBYTES, "the header has no padding");

enum { PIECE = 64 << 10 }; /* bytes copied and then summed while they are in the cache */

static uint32_t header_crc(const struct kvs_remote_header *header) {
  return kvs_crc32c(0, header, offsetof(struct kvs_remote_header, header_crc));
}

static uint8_t *block_of(void *slot) { return (uint8_t *)slot + KVS_REMOTE_HEADER_NBYTES; }

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

void kvs_remote_seal(void *slot, const void *block, uint64_t nbytes, const uint8_t *key, uint64_t generation) {
  struct kvs_remote_header header = {.magic = KVS_REMOTE_MAGIC, .generation = generation, .nbytes = nbytes};
  memcpy(header.key, key, sizeof header.key);
  header.block_crc = copy_and_sum(block_of(slot), block, nbytes);
  header.header_crc = header_crc(&header);
  memcpy(slot, &header, sizeof header);
}

enum kvs_remote_verdict kvs_remote_check(const void *slot, uint64_t nbytes, const uint8_t *key, uint64_t generation) {
  struct kvs_remote_header header;
  memcpy(&header, slot, sizeof header);
  if (header.magic != KVS_REMOTE_MAGIC || header.header_crc != header_crc(&header)) return KVS_REMOTE_NO_HEADER;
  if (memcmp(header.key, key, sizeof header.key) != 0) return KVS_REMOTE_OTHER_KEY;
  if (generation != 0 && header.generation != generation) return KVS_REMOTE_OTHER_GENERATION;
  if (header.nbytes != nbytes) return KVS_REMOTE_OTHER_LENGTH;
  uint32_t crc = kvs_crc32c(0, (const uint8_t *)slot + KVS_REMOTE_HEADER_NBYTES, nbytes);
  return crc == header.block_crc ? KVS_REMOTE_RIGHT : KVS_REMOTE_WRONG_BYTES;
}

void kvs_remote_renumber(void *slot, uint64_t generation) {
  struct kvs_remote_header header;
  memcpy(&header, slot, sizeof header);
  header.generation = generation;
  header.header_crc = header_crc(&header);
  memcpy(slot, &header, sizeof header);
}

void kvs_remote_void(void *slot) { memset(slot, 0, KVS_REMOTE_HEADER_NBYTES); }
