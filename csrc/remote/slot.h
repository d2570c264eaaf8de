/* A slot of a remote pool: a header of 64 bytes, then the block. The writer seals a slot. A reader has the bytes of the
 * block that it asked for if, and only if, kvs_remote_check() says KVS_REMOTE_RIGHT. Pure.
 *
 * Integers are little-endian, as both machines are: another order gives no magic number. The caller owns all memory and
 * keeps other threads from it during a call. */
#ifndef KVS_REMOTE_SLOT_H
#define KVS_REMOTE_SLOT_H

#include <stdint.h>

enum { KVS_REMOTE_KEY_NBYTES = 16, KVS_REMOTE_HEADER_NBYTES = 64 };
#define KVS_REMOTE_MAGIC UINT64_C(0x31544f4c5353564b) /* "KVSSLOT1" */

struct kvs_remote_header {
  uint64_t magic;
  uint64_t generation; /* of the claim under which the block was written */
  uint64_t nbytes;     /* of the block */
  uint8_t key[KVS_REMOTE_KEY_NBYTES];
  uint8_t reserved[16];
  uint32_t block_crc;  /* CRC-32C */
  uint32_t header_crc; /* of the fields before it */
};

enum kvs_remote_verdict {
  KVS_REMOTE_RIGHT,
  KVS_REMOTE_NO_HEADER, /* never sealed, voided, or overwritten */
  KVS_REMOTE_OTHER_KEY,
  KVS_REMOTE_OTHER_GENERATION, /* written again since */
  KVS_REMOTE_OTHER_LENGTH,
  KVS_REMOTE_WRONG_BYTES, /* the block does not have the header's checksum */
};

/* Copy a block into the slot, unless it lies there, and write its header. */
void kvs_remote_seal(void *slot, const void *block, uint64_t nbytes, const uint8_t *key, uint64_t generation);

/* generation 0: any. */
enum kvs_remote_verdict kvs_remote_check(const void *slot, uint64_t nbytes, const uint8_t *key, uint64_t generation);

/* Give a checked slot another generation. The checksum of the block remains the writer's. */
void kvs_remote_renumber(void *slot, uint64_t generation);

/* No check succeeds on this slot until it is sealed. */
void kvs_remote_void(void *slot);

#endif
