/* How a transfer is cut into bursts, each of which fills a slot of device memory such that the host's side of it is few
 * long runs. Pure.
 *
 * Rows whose host sides follow one another, block by block, form a group: of a host pool that keeps all layers of a
 * block together, all rows; of one that keeps layers apart, each row by itself. Pairs of slots are sorted by the
 * host's. A burst takes either all pairs of one or more groups, or some pairs of one group; so its place in a slot
 * follows from the rows alone (kvs_row in kernels.h), and the kernel needs no table of its own. */
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

/* The bytes of the longest of rows [first, first + count). */
uint64_t kvs_longest_row(const struct kvs_rows *rows, size_t first, size_t count);

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
  size_t *ends; /* room for kvs_packing_ends() */
  size_t ends_capacity;
  struct kvs_copies copies; /* of one burst, between its slot and the host */
};

void kvs_packing_free(struct kvs_packing *packing);
/* Room for that many ends of kvs_pack_rows(). */
int kvs_packing_ends(struct kvs_packing *packing, size_t count, size_t **ends, struct kvs_error *err);

/* Sort rows by where they lie on the host (dst of a D2H transfer, else src), cut those of more than `most` bytes, group
 * them, and note in each where it is packed. `ends`: rows stay in their order, and no group crosses one of these
 * `nends` ends of rows; then none may have more than `most` bytes. NULL: there are none. */
int kvs_pack_rows(struct kvs_rows *rows, enum kvs_direction direction, uint64_t most, const size_t *ends, size_t nends,
                  struct kvs_packing *packing, struct kvs_error *err);

/* How many contiguous runs the host's side of these blocks has; `scratch` lends a bitmap. The slots are within
 * [0, slots). */
int kvs_pack_count_runs(const struct kvs_packing *packing, const int64_t *host_slots, size_t count, uint64_t slots,
                        struct kvs_plan_scratch *scratch, uint64_t *runs, struct kvs_error *err);

/* Take the pairs of slots; all are below 2^32. */
int kvs_pack_pairs(const int64_t *src, const int64_t *dst, size_t count, struct kvs_packing *packing,
                   struct kvs_error *err);
/* Put them in the order of the host's. */
void kvs_pack_sort(struct kvs_packing *packing, enum kvs_direction direction);

/* A burst. Grid: rows [first_row, first_row + nrows) of pairs [first, first + count). List: pieces [first, first +
 * count). */
struct kvs_burst {
  size_t first_row, nrows, first, count;
  uint64_t nbytes;
};

/* Whether a transfer of so many bytes is one burst, whose stages need not overlap. */
bool kvs_is_one_burst(uint64_t nbytes, uint64_t slot_nbytes);

/* Cuts a transfer, or a part of it, into bursts one by one: the first can be on its way before the next is known. */
struct kvs_cutter {
  enum kvs_direction direction;
  uint64_t slot_nbytes;
  uint64_t small;        /* of the first burst of a gather or the last of a scatter; 0: as large as the others */
  uint64_t nbytes, left; /* of all; not yet in a burst */
  size_t group, end;     /* grid: the next burst begins in this group; one past the last */
  size_t at;             /* grid: and with this pair. List: and with this piece */
};

/* Of the groups of rows [first_row, rows_end), all of which are at most slot_nbytes long. `part`: of a transfer that
 * goes on before or after: its ends need no small burst. */
struct kvs_cutter kvs_cut_grid(const struct kvs_packing *packing, size_t first_row, size_t rows_end,
                               enum kvs_direction direction, uint64_t slot_nbytes, bool part);
bool kvs_cut_next(struct kvs_cutter *cutter, const struct kvs_packing *packing, struct kvs_burst *burst);
/* The same of a list of pieces, none larger than a slot, in the order given. */
struct kvs_cutter kvs_cut_list(uint64_t nbytes, enum kvs_direction direction, uint64_t slot_nbytes, bool part);
bool kvs_cut_next_list(struct kvs_cutter *cutter, const struct kvs_piece *pieces, size_t npieces,
                       struct kvs_burst *burst);

/* Into how many parts, of how many bytes at most, the kernel cuts each row of a burst (not of a list): of `piece`
 * bytes, or as many more as keep its units fewer than 2^31. */
uint64_t kvs_burst_parts(const struct kvs_rows *rows, const struct kvs_burst *burst, uint32_t *piece);

/* packing->copies becomes the copies of a burst between the slot at that address and the host, cut at seams. Of a list:
 * and the host's side of each piece becomes its place in the slot. */
int kvs_burst_copies(struct kvs_packing *packing, const struct kvs_burst *burst, enum kvs_direction direction,
                     uint64_t slot, const struct kvs_regions *regions, struct kvs_error *err);
int kvs_burst_list(struct kvs_packing *packing, struct kvs_piece *pieces, const struct kvs_burst *burst,
                   enum kvs_direction direction, uint64_t slot, const struct kvs_regions *regions,
                   struct kvs_error *err);

#endif
