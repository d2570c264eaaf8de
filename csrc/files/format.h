/* The store's format on disk, byte by byte; docs/files.md describes it. Pure functions: memory in, memory out.
 *
 * All numbers are little-endian. A page is 4096 bytes. Every non-empty page has zeros after its fields and a CRC-32C
 * over all 4096 bytes, computed with the checksum field as zero, so that a flipped bit anywhere in the page is
 * detected. */
#ifndef KVS_FILE_FORMAT_H
#define KVS_FILE_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kvswap_file.h"

enum {
  KVS_FILE_PAGE = 4096,
  KVS_FILE_VERSION = 1,
};

/* The largest sequence and generation number. A store cannot reach it by writing, so a page with a larger number counts
 * as damaged, and additions to valid numbers cannot overflow. */
#define KVS_FILE_LAST_SEQUENCE ((uint64_t)1 << 62)

/* The geometry of a store, kept in the first page of the store's file and of each segment. */
struct kvs_file_geometry {
  char layout[KVS_FILE_LAYOUT_NBYTES + 1];
  uint8_t layout_hash[16];
  uint64_t block_nbytes;
  uint64_t slot_nbytes;    /* header page and block, rounded up to whole pages */
  uint32_t slots;          /* slots in a segment */
  uint32_t segment;        /* segment number; 0 in the store's file */
  uint64_t segment_nbytes; /* the segment's first page and all slots */
};

/* 128 random bits, which a store and its blocks carry; zeros: the store has no file of it (files/epoch.h). */
struct kvs_file_epoch {
  uint8_t bytes[16];
};
static inline bool kvs_file_epoch_is(const struct kvs_file_epoch *a, const struct kvs_file_epoch *b) {
  return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

/* The header page of one block. */
struct kvs_file_header {
  uint8_t layout_hash[16];
  uint64_t sequence; /* increases with each block written: 1 to KVS_FILE_LAST_SEQUENCE */
  uint64_t nbytes;   /* of the data */
  uint32_t data_crc;
  uint16_t key_nbytes;
  uint8_t key[KVS_FILE_KEY_NBYTES];
  struct kvs_file_epoch epoch; /* of the store when the block was submitted */
};

/* Blocks with a sequence below `sequence` are known to be whole. Of the two checkpoint pages, the one with the higher
 * generation is valid. */
struct kvs_file_checkpoint {
  uint64_t generation; /* 1 to KVS_FILE_LAST_SEQUENCE */
  uint64_t sequence;   /* at most the last block's sequence + 1 */
  bool clean;          /* the store was closed with no write in flight */
};

/* The page of bound.kvs: files/bound.h. */
struct kvs_file_bound_page {
  uint64_t limit;  /* of the bytes of all segments in the directory */
  uint64_t nbytes; /* that they had when the page was written */
  uint64_t turn;   /* rises when the writers should look whether they have to give room back */
};

void kvs_file_geometry_make(const char *layout, uint64_t block_nbytes, uint64_t segment_nbytes,
                            struct kvs_file_geometry *geometry);
static inline uint64_t kvs_file_slot_offset(const struct kvs_file_geometry *g, uint32_t slot) {
  return KVS_FILE_PAGE + (uint64_t)slot * g->slot_nbytes;
}

/* The write functions fill the whole page. */
void kvs_file_geometry_write(const struct kvs_file_geometry *, bool of_segment, void *page);
void kvs_file_header_write(const struct kvs_file_header *, void *page);
void kvs_file_checkpoint_write(const struct kvs_file_checkpoint *, void *page);
void kvs_file_epoch_write(const struct kvs_file_epoch *, void *page);
void kvs_file_bound_write(const struct kvs_file_bound_page *, void *page);

/* Result of decoding a page. No field is used before the page's checksum is verified. */
enum kvs_file_page {
  KVS_FILE_GOOD,
  KVS_FILE_EMPTY,   /* all zeros: never written, or erased */
  KVS_FILE_DAMAGED, /* wrong magic, wrong checksum or an invalid field */
  KVS_FILE_FOREIGN, /* another version of the format: *_read sets no other field */
};
enum kvs_file_page kvs_file_geometry_read(const void *page, bool of_segment, struct kvs_file_geometry *);
enum kvs_file_page kvs_file_header_read(const void *page, struct kvs_file_header *);
enum kvs_file_page kvs_file_checkpoint_read(const void *page, struct kvs_file_checkpoint *);
enum kvs_file_page kvs_file_epoch_read(const void *page, struct kvs_file_epoch *);
enum kvs_file_page kvs_file_bound_read(const void *page, struct kvs_file_bound_page *);

#endif
