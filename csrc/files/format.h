/* What stands on disk, byte by byte (docs/files.md is its description for people). Pure: memory in, memory out.
 *
 * All numbers are little-endian. A page is 4096 bytes. Every page that has a meaning ends in nothing but zeros after
 * its fields, and carries a CRC-32C of all its 4096 bytes, counted with the checksum's own field as zero: so that a
 * flipped bit anywhere in it shows. */
#ifndef KVS_FILE_FORMAT_H
#define KVS_FILE_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvswap_file.h"

enum {
  KVS_FILE_PAGE = 4096,
  KVS_FILE_VERSION = 1,
};

/* The last number of a block, and of a checkpoint. No store gets there by writing; a page with a higher number is
 * damaged. So no number that is read can overflow where it is counted on. */
#define KVS_FILE_LAST_SEQUENCE ((uint64_t)1 << 62)

/* What a store holds: in the first page of the store's file and of each segment. */
struct kvs_file_geometry {
  char layout[KVS_FILE_LAYOUT_NBYTES + 1];
  uint8_t layout_hash[16];
  uint64_t block_nbytes;
  uint64_t slot_nbytes;    /* a header page and the block, in whole pages */
  uint32_t slots;          /* of a segment */
  uint32_t segment;        /* its number; of the store's file 0 */
  uint64_t segment_nbytes; /* the header page and all slots */
};

/* The header page of one block. */
struct kvs_file_header {
  uint8_t layout_hash[16];
  uint64_t sequence; /* rises with each block that is written: 1 to KVS_FILE_LAST_SEQUENCE */
  uint64_t nbytes;   /* of the data */
  uint32_t data_crc;
  uint16_t key_nbytes;
  uint8_t key[KVS_FILE_KEY_NBYTES];
};

/* How far the store is known to be whole: blocks below `sequence` are; of two such pages the one with the higher
 * generation counts. */
struct kvs_file_checkpoint {
  uint64_t generation; /* 1 to KVS_FILE_LAST_SEQUENCE */
  uint64_t sequence;   /* at most one more than a block's */
  bool clean;          /* the store was closed: nothing was under way */
};

/* The hash of a layout: FNV-1a of 128 bits over the format's version and block_nbytes (8 bytes each) and the text. */
void kvs_file_layout_hash(const char *layout, uint64_t block_nbytes, uint8_t hash[16]);

void kvs_file_geometry_make(const char *layout, uint64_t block_nbytes, uint64_t segment_nbytes,
                            struct kvs_file_geometry *geometry);
static inline uint64_t kvs_file_slot_offset(const struct kvs_file_geometry *g, uint32_t slot) {
  return KVS_FILE_PAGE + (uint64_t)slot * g->slot_nbytes;
}

/* Writing fills all of the page. */
void kvs_file_geometry_write(const struct kvs_file_geometry *, bool of_segment, void *page);
void kvs_file_header_write(const struct kvs_file_header *, void *page);
void kvs_file_checkpoint_write(const struct kvs_file_checkpoint *, void *page);

/* What a page turned out to be. Reading trusts no field before the checksum of the page is right. */
enum kvs_file_page {
  KVS_FILE_GOOD,
  KVS_FILE_EMPTY,   /* nothing was written here, or it was erased: all zeros */
  KVS_FILE_DAMAGED, /* its magic number, its checksum or a field is wrong */
  KVS_FILE_FOREIGN, /* it is of another version of the format: *_read says nothing more */
};
enum kvs_file_page kvs_file_geometry_read(const void *page, bool of_segment, struct kvs_file_geometry *);
enum kvs_file_page kvs_file_header_read(const void *page, struct kvs_file_header *);
enum kvs_file_page kvs_file_checkpoint_read(const void *page, struct kvs_file_checkpoint *);

#endif
