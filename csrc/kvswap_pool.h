/* Pools and the race checker: the part of kvswap.h (which includes it) that is about order between transfers. */
#ifndef KVSWAP_POOL_H
#define KVSWAP_POOL_H

#include "kvswap.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Blocks of one pool: block i, all of it within [ptr + i * stride, ...), is `rows` rows of block_nbytes / rows bytes,
 * `pitch` apart. Rows make a block of what lies apart: the layers of a layer-first cache, K and V in separate halves.
 */
struct kvs_pool_layout {
  uint64_t ptr;
  uint64_t num_blocks;
  uint64_t block_nbytes; /* of all rows; a multiple of rows */
  uint64_t stride;       /* from block to block; 0: one row */
  uint64_t rows;         /* 0: 1 */
  uint64_t pitch;        /* from row to row; ignored with one row; 0: one row */
  /* Another pool with as many blocks: the same slot of both belongs to one block, they are moved together and tracked
   * as one (the layers of a model that are allocated one by one). NULL: a table of its own. */
  struct kvs_pool *group;
  const char *name; /* for messages, at most 31 bytes; NULL: "pool N" */
};

/* What of each block is moved: `rows` rows of row_nbytes bytes, row_pitch apart, the first at `offset`, all counted in
 * the block's own bytes [0, block_nbytes), in the order of its rows. Parts go in ascending order of layer, and
 * those of one pair in ascending order of offset, each after the end of the one before. */
struct kvs_part {
  uint32_t pair;  /* which pair of pools */
  uint32_t layer; /* from 0, no gaps, ascending */
  uint64_t offset, rows, row_nbytes, row_pitch;
};

/* Slots src_ids[i] of each pair's source pool -> slot dst_ids[i] of its destination pool. */
struct kvs_move {
  struct kvs_pool *const *src, *const *dst;
  size_t npairs;
  const struct kvs_part *parts; /* NULL: whole blocks, pair i is layer i */
  size_t nparts;
  struct kvs_ids src_ids, dst_ids;
};

/* An access that the race checker found unordered. Texts are empty where something is not known. */
struct kvs_race_party {
  bool write;
  uint64_t transfer; /* its number, as Transfer.number; 0: told by kvs_note_access */
  uint64_t lane;     /* number of its lane */
  uint64_t sequence; /* within the lane */
  char what[24];     /* "D2H by dma", "H2D by kernel", "access" */
  char stream[64];   /* "cuda:0 stream 0x55..." */
  char where[160];   /* kvs_options.where */
};
struct kvs_race {
  char pool[32];
  uint64_t slot;
  struct kvs_race_party first, second; /* in the order in which they were queued */
};

/* Pools: memory whose slots are tracked, so that transfers between pools are ordered with each other by themselves,
 * on whatever lanes they are: a transfer that reads a slot waits for the last write to it, one that writes it for the
 * last write and all reads since. At most one wait a lane, whatever the number of blocks. Work of anybody else's (the
 * model's kernels, kvs_swap_*) is ordered by streams alone.
 *
 * The memory must be known and mapped as for kvs_swap_cache, and stay so as long as the pool is used. Pools of one
 * engine must not share bytes. Up to UINT32_MAX blocks. */
KVS_API int kvs_pool_open(struct kvs_engine *engine, const struct kvs_pool_layout *layout, struct kvs_pool **pool,
                          struct kvs_error *err);
KVS_API void kvs_pool_ref(struct kvs_pool *pool);
KVS_API void kvs_pool_unref(struct kvs_pool *pool);                      /* transfers under way do not need it */
KVS_API struct kvs_engine *kvs_pool_engine(const struct kvs_pool *pool); /* borrowed */
KVS_API void kvs_pool_get_layout(const struct kvs_pool *pool, struct kvs_pool_layout *layout); /* borrows name, group */

/* Move blocks between pools of one engine: host to device, device to host, or within one kind of memory. Submitted like
 * kvs_swap_cache; each destination slot once, and no slot both read and written.
 *
 * Failure travels: a block whose source slot holds what a failed transfer should have written is not copied, counts as
 * failed, and so does its destination, until a whole block is written there or kvs_note_access() tells of a write. */
KVS_API int kvs_move_blocks(const struct kvs_move *move, const struct kvs_options *options,
                            struct kvs_transfer **transfer, struct kvs_error *err);

/* Somebody else's work reads or writes bytes [offset, offset + nbytes) of these blocks (nbytes 0: all to the end), on a
 * stream, now: in the stream's order. A write of whole blocks ends what a failed transfer left there. Apart from that
 * it concerns the race checker alone and is cheap where that is off. */
KVS_API int kvs_note_access(struct kvs_pool *pool, const struct kvs_ids *ids, bool write, uint64_t offset,
                            uint64_t nbytes, uint64_t stream, const char *where, struct kvs_error *err);
/* What was queued before `before` (a stream, event or transfer) comes before what is queued on `stream` from now on;
 * on_host: before what the host queues from now on, because it waited. For order made without kvswap's help. */
KVS_API int kvs_note_order(struct kvs_engine *engine, const struct kvs_after *before, bool on_host, uint64_t stream,
                           struct kvs_error *err);

/* The race checker of the process (racecheck.h): start and stop nest. Accesses from before the first start are unknown
 * to it. At most 1000 races are kept until they are taken; more are counted only. */
KVS_API void kvs_racecheck_start(void);
KVS_API void kvs_racecheck_stop(void);
KVS_API bool kvs_racecheck_active(void);
KVS_API uint64_t kvs_racecheck_found(void);                                 /* since the first start */
KVS_API size_t kvs_racecheck_take(struct kvs_race *races, size_t capacity); /* oldest first; how many were written */

#ifdef __cplusplus
}
#endif
#endif
