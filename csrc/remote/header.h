/* A block of the remote tier: a header of 64 bytes, then the block. The writer seals a block into a buffer. A reader
 * has the bytes that were stored under its identity and key if, and only if, kvs_remote_open() says KVS_REMOTE_RIGHT.
 * Pure.
 *
 * With a secret the header also has a code that only holders of the secret can make (SipHash-2-4 of the header's other
 * fields and the block). Without one, the checksum finds damage, not forgery.
 *
 * Integers are little-endian, as both machines are: another order gives no magic number. The caller owns all memory and
 * keeps other threads from it during a call. */
#ifndef KVS_REMOTE_HEADER_H
#define KVS_REMOTE_HEADER_H

#include <stdint.h>

enum { KVS_REMOTE_HASH_NBYTES = 16, KVS_REMOTE_HEADER_NBYTES = 64 };
#define KVS_REMOTE_MAGIC UINT32_C(0x3152564b) /* "KVR1" */

struct kvs_remote_header {
  uint32_t magic;
  uint32_t codec;  /* 0: the block's own bytes; nothing else yet */
  uint64_t nbytes; /* of the block */
  uint8_t identity[KVS_REMOTE_HASH_NBYTES];
  uint8_t key[KVS_REMOTE_HASH_NBYTES];
  uint32_t block_crc;  /* CRC-32C */
  uint32_t header_crc; /* of the fields before it */
  uint64_t mac;        /* 0: sealed without a secret */
};

enum kvs_remote_verdict {
  KVS_REMOTE_RIGHT,
  KVS_REMOTE_NO_HEADER, /* never sealed, or damaged */
  KVS_REMOTE_OTHER_IDENTITY,
  KVS_REMOTE_OTHER_KEY,
  KVS_REMOTE_OTHER_LENGTH, /* or codec */
  KVS_REMOTE_WRONG_BYTES,  /* the block does not have the header's checksum */
  KVS_REMOTE_WRONG_MAC,    /* sealed without the secret, or with another one */
};

/* What a block must be. secret: 16 bytes; NULL: there is none. */
struct kvs_remote_label {
  const uint8_t *identity, *key, *secret;
  uint64_t nbytes;
  uint32_t codec;
};

/* Copy a block behind the header, unless it lies there, and write the header. */
void kvs_remote_seal(void *sealed, const void *block, const struct kvs_remote_label *label);

enum kvs_remote_how {
  KVS_REMOTE_COPY,     /* the block is behind the header: check it, and copy it if it is right */
  KVS_REMOTE_AGAIN,    /* the same, and check the copy: another writer may change the block meanwhile */
  KVS_REMOTE_IN_PLACE, /* the header only is there: check the block where it is */
};

/* block: NULL: nothing is copied. */
enum kvs_remote_verdict kvs_remote_open(const void *sealed, void *block, const struct kvs_remote_label *label,
                                        enum kvs_remote_how how);

#endif
