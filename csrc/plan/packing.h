/* Dividing a transfer into bursts. Each burst fills a slot of device memory so that its host side is a few long runs.
 * Pure.
 *
 * Rows that are contiguous on the host, block by block, form a group: all rows if the host pool keeps the layers of a
 * block together, otherwise each row alone. Pairs of slots are sorted by host slot. A burst has all pairs of one or
 * more groups, or some pairs of one group. Positions in a slot therefore follow from the rows alone (kvs_row in
 * kernels.h), and the kernel needs no further table. */
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

/* Bytes of the longest row in [first, first + count). */
uint64_t kvs_longest_row(const struct kvs_rows *rows, size_t first, size_t count);

/* Bytes on the host's side, and in a slot. */
static inline uint64_t kvs_row_packed_nbytes(const struct kvs_row *row) {
  return row->coded_nbytes ? row->coded_nbytes : row->nbytes;
}
uint64_t kvs_longest_packed(const struct kvs_rows *rows);
/* One past the last row of [first, end) that is coded as the first one is. */
size_t kvs_rows_of_a_coding(const struct kvs_rows *rows, size_t first, size_t end);

/* Host address of a row in slot 0, and the distance of its slots. */
static inline uint64_t kvs_row_host(const struct kvs_row *row, enum kvs_direction direction) {
  return direction == KVS_D2H ? row->dst : row->src;
}
static inline uint64_t kvs_row_host_stride(const struct kvs_row *row, enum kvs_direction direction) {
  return direction == KVS_D2H ? row->dst_stride : row->src_stride;
}

/* Rows [first, first + count): `nbytes` of each block; block s is at host + s * host_stride. */
struct kvs_group {
  size_t first, count;
  uint64_t nbytes, host, host_stride;
};

/* Packed rows and pairs. Zero-initialised is empty; reused from plan to plan. */
struct kvs_packing {
  struct kvs_group *groups;
  size_t ngroups, groups_capacity;
  struct kvs_pair *pairs, *room; /* sorted by host slot */
  size_t npairs, pairs_capacity;
  size_t *ends; /* buffer of kvs_packing_ends() */
  size_t ends_capacity;
  struct kvs_copies copies; /* copies of one burst, between its slot and the host */
};

void kvs_packing_free(struct kvs_packing *packing);
/* Get a buffer for that many ends of kvs_pack_rows(). */
int kvs_packing_ends(struct kvs_packing *packing, size_t count, size_t **ends, struct kvs_error *err);

/* Sort the rows by host address (dst of a D2H transfer, src otherwise), divide rows of more than `most` bytes (a coded
 * row has no more), group them, and set each row's position in the slot. `ends` (`nends` entries, or NULL): rows keep
 * their order and no group crosses an end; no row may then exceed `most` bytes. */
int kvs_pack_rows(struct kvs_rows *rows, enum kvs_direction direction, uint64_t most, const size_t *ends, size_t nends,
                  struct kvs_packing *packing, struct kvs_error *err);

/* Count the contiguous runs of these blocks on the host, with a bitmap of `scratch`. Slots are below `slots`. */
int kvs_pack_count_runs(const struct kvs_packing *packing, const int64_t *host_slots, size_t count, uint64_t slots,
                        struct kvs_plan_scratch *scratch, uint64_t *runs, struct kvs_error *err);

/* Take over the pairs of slots; all slots are below 2^32. */
int kvs_pack_pairs(const int64_t *src, const int64_t *dst, size_t count, struct kvs_packing *packing,
                   struct kvs_error *err);
/* Sort the pairs by host slot. */
void kvs_pack_sort(struct kvs_packing *packing, enum kvs_direction direction);

/* A burst. Grid: rows [first_row, first_row + nrows) of pairs [first, first + count). List: pieces [first, first +
 * count). */
struct kvs_burst {
  size_t first_row, nrows, first, count;
  uint64_t nbytes;
};

/* Whether a transfer of this size is a single burst, so that its stages need not overlap. */
bool kvs_is_one_burst(uint64_t nbytes, uint64_t slot_nbytes);

/* Divides a transfer, or a part of it, into bursts one by one, so that the first can be submitted before the rest is
 * known. */
struct kvs_cutter {
  enum kvs_direction direction;
  uint64_t slot_nbytes;
  uint64_t small;        /* size of a gather's first burst or a scatter's last; 0: as large as the others */
  uint64_t nbytes, left; /* in total; not in a burst yet */
  size_t group, end;     /* grid: group of the next burst; one past the last */
  size_t at;             /* grid: first pair of the next burst; list: first piece */
};

/* For the groups of rows [first_row, rows_end); every row fits into slot_nbytes. `part`: the transfer continues before
 * or after, so no small burst is needed. */
struct kvs_cutter kvs_cut_grid(const struct kvs_packing *packing, size_t first_row, size_t rows_end,
                               enum kvs_direction direction, uint64_t slot_nbytes, bool part);
bool kvs_cut_next(struct kvs_cutter *cutter, const struct kvs_packing *packing, struct kvs_burst *burst);
/* For a list of pieces, in order; every piece fits into a slot. */
struct kvs_cutter kvs_cut_list(uint64_t nbytes, enum kvs_direction direction, uint64_t slot_nbytes, bool part);
bool kvs_cut_next_list(struct kvs_cutter *cutter, const struct kvs_piece *pieces, size_t npieces,
                       struct kvs_burst *burst);

/* Number of parts, and their size, into which the kernel divides each row of a grid burst: `piece` bytes, or more to
 * keep the number of units below 2^31. */
uint64_t kvs_burst_parts(const struct kvs_rows *rows, const struct kvs_burst *burst, uint32_t *piece);

/* Sets packing->copies to the burst's copies between its slot (at that address) and the host, split at seams. For a
 * list also replaces the host side of each piece with its position in the slot. */
int kvs_burst_copies(struct kvs_packing *packing, const struct kvs_burst *burst, enum kvs_direction direction,
                     uint64_t slot, const struct kvs_regions *regions, struct kvs_error *err);
int kvs_burst_list(struct kvs_packing *packing, struct kvs_piece *pieces, const struct kvs_burst *burst,
                   enum kvs_direction direction, uint64_t slot, const struct kvs_regions *regions,
                   struct kvs_error *err);
/* The copies of a burst from `from` on that are rows at one pitch on the host: returns their end, and the 2-D copy of
 * them. A rect of width 0: there is none, they are copied one by one. */
size_t kvs_burst_rows(const struct kvs_copies *copies, size_t from, enum kvs_direction direction, uint64_t max_pitch,
                      const struct kvs_regions *regions, struct kvs_rect *rect);

#endif
