/* Where the bytes of a block lie: from parts of blocks to runs at fixed distances from a block's beginning. Pure. */
#ifndef KVS_LAYOUT_H
#define KVS_LAYOUT_H

#include "kvswap.h"

/* What a part means for two given pools: `rows` rows of row_nbytes bytes; those of block s of the source lie at
 * s * stride + src, src + src_pitch, ... from the pool's address, and likewise at the destination. */
struct kvs_run {
  uint64_t src, dst;
  uint64_t rows, row_nbytes, src_pitch, dst_pitch;
};

struct kvs_run_list {
  struct kvs_run *items;
  size_t count, capacity;
};

/* Check a layout, and fill in what it leaves at 0. */
int kvs_layout_check(struct kvs_pool_layout *layout, struct kvs_error *err);

/* One past the last byte of all blocks, counted from the pool's address; the layout was checked. */
uint64_t kvs_layout_extent(const struct kvs_pool_layout *layout);

/* Whether two pools share a byte. *sure: both layouts are simple enough to say; if not, the answer is yes. */
bool kvs_layouts_overlap(const struct kvs_pool_layout *a, const struct kvs_pool_layout *b, bool *sure);

/* One past the last byte of a checked part. */
static inline uint64_t kvs_part_end(const struct kvs_part *part) {
  return part->offset + (part->rows - 1) * part->row_pitch + part->row_nbytes;
}

/* Check a part against the pair of pools that it names; `index` is for the message. */
int kvs_layout_check_part(const struct kvs_part *part, size_t index, const struct kvs_pool_layout *src,
                          const struct kvs_pool_layout *dst, struct kvs_error *err);

/* Append the runs of a checked part, as few as there can be. */
int kvs_layout_runs(const struct kvs_part *part, const struct kvs_pool_layout *src, const struct kvs_pool_layout *dst,
                    struct kvs_run_list *runs, struct kvs_error *err);

/* The block, and the byte within it, that lies at `offset` from the pool's address, and how many bytes follow it there
 * without a gap. False: no block's byte, and the next block can only begin *follow bytes further on. */
bool kvs_layout_locate(const struct kvs_pool_layout *layout, uint64_t offset, uint64_t *block, uint64_t *byte,
                       uint64_t *follow);

#endif
