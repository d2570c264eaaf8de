/* Pools and the race checker: the part of kvswap.h (which includes this file) about order between transfers. */
#ifndef KVSWAP_POOL_H
#define KVSWAP_POOL_H

#include "kvswap.h"
#include "kvswap_codec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Layout of a pool: block i begins at ptr + i * stride and has `rows` rows of block_nbytes / rows bytes, `pitch` apart.
 * Rows join what lies apart: the layers of a layer-first cache, K and V in separate halves. */
struct kvs_pool_layout {
  uint64_t ptr;
  uint64_t num_blocks;
  uint64_t block_nbytes; /* of all rows; a multiple of rows */
  uint64_t stride;       /* from block to block; 0: one row */
  uint64_t rows;         /* 0: 1 */
  uint64_t pitch;        /* from row to row; ignored with one row; 0: one row */
  /* Another pool with the same number of blocks: the same slot of both belongs to one block, so both share one hazard
   * table (for example, layers that are allocated one by one). NULL: a table of its own. */
  struct kvs_pool *group;
  const char *name; /* for messages, at most 31 bytes; NULL: "pool N" */
  /* The pool holds coded blocks: block_nbytes is their coded size (0: that), and ptr, stride and pitch are multiples of
   * 16. A row is whole coded pages. A transfer between it and a pool that is not coded codes: one of them is in
   * memory of the device, and only the coded one may be in host memory. The pool holds a reference. NULL: not coded. */
  const struct kvs_coding *coding;
  uint64_t reserved[7];
};

/* A part of each block to move: `rows` rows of row_nbytes bytes, row_pitch apart, the first at `offset`. Offsets count
 * within the block's own bytes [0, block_nbytes), row after row. Where one pool is coded they count as in the other,
 * and rows are whole pages. Parts are in ascending order of layer. Parts of one pair are in ascending order of offset
 * and do not overlap. */
struct kvs_part {
  uint32_t pair;  /* index of the pair of pools */
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
  /* Of blocks that are coded on the way, and hold fewer tokens than they could: bytes of each page that count. Those
   * behind are coded as zeros, so that what stands there by chance neither matters nor is kept. 0: all. */
  uint64_t valid_nbytes;
};

/* One access of a race. Unknown texts are empty. */
struct kvs_race_accessor {
  bool write;
  uint64_t transfer; /* number of the transfer, as Transfer.number; 0: from kvs_note_access */
  uint64_t lane;     /* number of its lane */
  uint64_t sequence; /* within the lane */
  char what[24];     /* "D2H by dma", "H2D by kernel", "access" */
  char stream[64];   /* "cuda:0 stream 0x55..." */
  char where[160];   /* kvs_options.where */
};
struct kvs_race {
  char pool[32];
  uint64_t slot;
  struct kvs_race_accessor first, second; /* in the order in which they were queued */
};

/* Pools: memory whose slots are tracked, so transfers between pools are ordered automatically, on any lanes. A transfer
 * that reads a slot waits for the last write to the slot; one that writes waits for the last write and all reads since.
 * At most one wait a lane for any number of blocks. Other work (the model's kernels, kvs_swap_*) is ordered by streams
 * alone.
 *
 * The memory must be known and mapped as for kvs_swap_cache, for as long as the pool is used. Pools of one engine must
 * not share bytes. At most UINT32_MAX blocks. */
KVS_API int kvs_pool_open(struct kvs_engine *engine, const struct kvs_pool_layout *layout, struct kvs_pool **pool,
                          struct kvs_error *err);
KVS_API void kvs_pool_ref(struct kvs_pool *pool);
KVS_API void kvs_pool_unref(struct kvs_pool *pool);                      /* transfers under way do not need it */
KVS_API struct kvs_engine *kvs_pool_engine(const struct kvs_pool *pool); /* borrowed */
KVS_API void kvs_pool_get_layout(const struct kvs_pool *pool, struct kvs_pool_layout *layout); /* borrows name, group */

/* Move blocks between pools: host to device, device to host, or within one kind of memory. Submitted like
 * kvs_swap_cache. Each destination slot is named once, and no slot is both read and written.
 *
 * Failures are passed on. If a failed transfer should have written a source slot, the block is not copied and counts as
 * failed, and so does its destination, until a whole block is written there or kvs_note_access() notes a write. */
KVS_API int kvs_move_blocks(const struct kvs_move *move, const struct kvs_options *options,
                            struct kvs_transfer **transfer, struct kvs_error *err);

/* Note an access by other work: it reads or writes bytes [offset, offset + nbytes) of these blocks (nbytes 0: to the
 * end), on a stream, in stream order. A noted write of whole blocks clears their failures. Everything else is for the
 * race checker only, and cheap when the checker is off. */
KVS_API int kvs_note_access(struct kvs_pool *pool, const struct kvs_ids *ids, bool write, uint64_t offset,
                            uint64_t nbytes, uint64_t stream, const char *where, struct kvs_error *err);
/* Note order made without kvswap: what was queued before `before` (a stream, event or transfer) comes before later work
 * on `stream`; on_host: before what the host queues later, because the host waited. */
KVS_API int kvs_note_order(struct kvs_engine *engine, const struct kvs_after *before, bool on_host, uint64_t stream,
                           struct kvs_error *err);

/* The race checker of the process (racecheck.h). Starts and stops nest. Accesses before the first start are unknown. At
 * most 1000 races are kept until taken; further ones are only counted. */
KVS_API void kvs_racecheck_start(void);
KVS_API void kvs_racecheck_stop(void);
KVS_API bool kvs_racecheck_active(void);
KVS_API uint64_t kvs_racecheck_found(void); /* since the first start */
KVS_API size_t kvs_racecheck_take(struct kvs_race *races,
                                  size_t capacity); /* oldest first; returns how many were written */

#ifdef __cplusplus
}
#endif
#endif
