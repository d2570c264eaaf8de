/* Addresses of a block's bytes: converts parts of blocks to runs at fixed distances from a block's start. Pure. */
#ifndef KVS_LAYOUT_H
#define KVS_LAYOUT_H

#include "kvswap.h"

/* A part, for a given pair of pools: `rows` rows of row_nbytes bytes. The rows of source block s are at s * stride +
 * src, + src_pitch, ... from the pool's address; the destination's accordingly. */
struct kvs_run {
  uint64_t src, dst;
  uint64_t rows, row_nbytes, src_pitch, dst_pitch;
};

struct kvs_run_list {
  struct kvs_run *items;
  size_t count, capacity;
};

/* Check a layout, and fill in the defaults of fields that are 0. */
int kvs_layout_check(struct kvs_pool_layout *layout, struct kvs_error *err);

/* One past the last byte of all blocks, from the pool's address. The layout must be checked. */
uint64_t kvs_layout_extent(const struct kvs_pool_layout *layout);

/* Whether two pools share a byte. *sure: false if the layouts are too complex to decide; the answer is then true. */
bool kvs_layouts_overlap(const struct kvs_pool_layout *a, const struct kvs_pool_layout *b, bool *sure);

/* One past the last byte of a checked part. */
static inline uint64_t kvs_part_end(const struct kvs_part *part) {
  return part->offset + (part->rows - 1) * part->row_pitch + part->row_nbytes;
}

/* Check a part of blocks of so many bytes; `index` is for the message. */
int kvs_layout_check_part(const struct kvs_part *part, size_t index, uint64_t block_nbytes, struct kvs_error *err);

/* Offset in memory of a block's byte, from the block's start. */
uint64_t kvs_layout_place(const struct kvs_pool_layout *layout, uint64_t byte);
/* Whether no row of a block ends within one of its pages of so many bytes. */
bool kvs_layout_has_pages(const struct kvs_pool_layout *layout, uint64_t page_nbytes);

/* Append the runs of a checked part, as few as possible. */
int kvs_layout_runs(const struct kvs_part *part, const struct kvs_pool_layout *src, const struct kvs_pool_layout *dst,
                    struct kvs_run_list *runs, struct kvs_error *err);

/* The block and the byte in it at `offset` from the pool's address, and in *follow the contiguous bytes from there.
 * False: the offset is in no block, and the next block is at least *follow bytes away. */
bool kvs_layout_locate(const struct kvs_pool_layout *layout, uint64_t offset, uint64_t *block, uint64_t *byte,
                       uint64_t *follow);

#endif
