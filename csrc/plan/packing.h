/* Rows of blocks, and how they are packed into the slots of a ring so that the host's side is few long runs. Pure.
 *
 * Rows whose host sides follow one another, block by block, form a group: of a host pool that keeps all layers of a
 * block together, all rows; of one that keeps layers apart, each row by itself. A filling of a slot takes whole blocks
 * of groups, in the order in which they lie on the host. */
#ifndef KVS_PACKING_H
#define KVS_PACKING_H

#include "plan/plan.h"

struct kvs_rows {
  struct kvs_row *items;
  size_t count, capacity;
};

int kvs_rows_reserve(struct kvs_rows *rows, size_t capacity, struct kvs_error *err);
void kvs_rows_free(struct kvs_rows *rows);
static inline void kvs_rows_push(struct kvs_rows *rows, const struct kvs_row *row) {
  rows->items[rows->count++] = *row;
}

/* Where a row of slot 0 lies on the host, and how far its slots are apart there. */
static inline uint64_t kvs_row_host(const struct kvs_row *row, enum kvs_direction direction) {
  return direction == KVS_D2H ? row->dst : row->src;
}
static inline uint64_t kvs_row_host_stride(const struct kvs_row *row, enum kvs_direction direction) {
  return direction == KVS_D2H ? row->dst_stride : row->src_stride;
}

/* Rows [first, first + count): `nbytes` of a block, those of block s from host + s * host_stride. */
struct kvs_group {
  size_t first, count;
  uint64_t nbytes, host, host_stride;
};

/* What rows and pairs become. Zero-initialised is empty; kept from plan to plan. */
struct kvs_packing {
  struct kvs_group *groups;
  size_t ngroups, groups_capacity;
  struct kvs_pair *pairs, *room; /* in the host's order */
  size_t npairs, pairs_capacity;
  struct kvs_segment *segments;
  size_t nsegments, segments_capacity;
  uint64_t *packed; /* of a list: where in its slot a piece lies */
  size_t packed_capacity;
  struct kvs_copies copies; /* between the ring and the host */
  size_t *ends;             /* a filling: the copies of it and of those before */
  size_t nfillings, ends_capacity;
};

void kvs_packing_free(struct kvs_packing *packing);

/* The ring that is packed for. */
struct kvs_ring_shape {
  uint64_t address, slot_nbytes;
  unsigned slots;
};

/* Sort rows by where they lie on the host (dst of a D2H transfer, else src), cut those of more than `most` bytes, group
 * them, and note in each where it lies in its group's block. */
int kvs_pack_rows(struct kvs_rows *rows, enum kvs_direction direction, uint64_t most, struct kvs_packing *packing,
                  struct kvs_error *err);

/* How many contiguous runs the host's side of these blocks has; `scratch` lends a bitmap. The slots are within
 * [0, slots). */
int kvs_pack_count_runs(const struct kvs_packing *packing, const int64_t *host_slots, size_t count, uint64_t slots,
                        struct kvs_plan_scratch *scratch, uint64_t *runs, struct kvs_error *err);

/* Take the pairs of slots; all are below 2^32. */
int kvs_pack_pairs(const int64_t *src, const int64_t *dst, size_t count, struct kvs_packing *packing,
                   struct kvs_error *err);
/* Put them in the order of the host's. */
void kvs_pack_sort(struct kvs_packing *packing, enum kvs_direction direction);

/* Plan the fillings of a grid: segments, and the copies between ring and host, cut at seams. The first fillings of a
 * gather and the last of a scatter are small, since the link waits for the one and the kernel for the other. */
int kvs_pack_grid(struct kvs_packing *packing, enum kvs_direction direction, const struct kvs_ring_shape *ring,
                  const struct kvs_regions *regions, struct kvs_error *err);

/* The same of a list of pieces, none larger than a slot, in the order given. */
int kvs_pack_list(struct kvs_packing *packing, const struct kvs_piece *pieces, size_t npieces,
                  enum kvs_direction direction, const struct kvs_ring_shape *ring, const struct kvs_regions *regions,
                  struct kvs_error *err);

#endif
