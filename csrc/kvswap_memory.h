/* Host memory: the part of kvswap.h (which includes it) that makes pools of host memory, of this process alone or
 * shared between processes, and hands out and registers single pieces. */
#ifndef KVSWAP_MEMORY_H
#define KVSWAP_MEMORY_H

#include "kvswap.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvs_host_pool; /* blocks of host memory, with the threads that make it ready */

enum kvs_pages { KVS_PAGES_DEFAULT, KVS_PAGES_TRANSPARENT, KVS_PAGES_2MIB, KVS_PAGES_1GIB, KVS_PAGES_KINDS };
enum kvs_placement {
  KVS_PLACE_AUTO,       /* the NUMA node of the device, where it is known */
  KVS_PLACE_NODE,       /* kvs_host_pool_options.node */
  KVS_PLACE_INTERLEAVE, /* page by page over all nodes with memory */
  KVS_PLACE_ANYWHERE,   /* as the system does by itself */
};

/* Zero-initialised: block-first, one layer, pages and placement as usual, registered with the device. */
struct kvs_host_pool_options {
  uint64_t num_blocks;
  uint64_t slot_nbytes; /* of a slot: one block, of all layers; a multiple of `layers` */
  uint64_t layers;      /* 0: 1 */
  bool layer_first;     /* all blocks of a layer together, else all layers of a block */
  uint64_t max_blocks;  /* how far it may grow: address space, no memory. 0: num_blocks */
  enum kvs_pages pages; /* what is not to be had becomes the next smaller kind, with a notice */
  enum kvs_placement placement;
  int node;
  uint64_t chunk_nbytes; /* of a registration: about so many, whole blocks. 0: 1 GiB */
  unsigned threads;      /* that populate; 0: as many as are useful */
  bool pageable;         /* do not register */
  bool has_reserve;      /* else a share of the machine's memory stays free */
  int64_t reserve;       /* bytes to leave free; negative: count on so many more than are free now */
};

enum kvs_host_pool_state {
  KVS_POOL_POPULATING,
  KVS_POOL_READY,
  KVS_POOL_FAILED,    /* there is no memory for it: close it */
  KVS_POOL_CANCELLED, /* blocks that were ready can be used */
  KVS_POOL_CLOSED,
};

struct kvs_host_pool_info {
  enum kvs_host_pool_state state;
  uint64_t ptr;           /* of the first byte of the first block */
  uint64_t nbytes;        /* num_blocks * slot_nbytes */
  uint64_t mapped_nbytes; /* that, rounded up to pages: the memory that it takes */
  uint64_t num_blocks, max_blocks, slot_nbytes;
  uint64_t layers, layer_nbytes; /* bytes of one block's part in a layer */
  uint64_t layer_pitch;          /* from layer to layer */
  uint64_t stride;               /* from block to block, within a layer */
  uint64_t extent;               /* from ptr to the end of the last layer of the last block */
  bool layer_first, pinned;
  bool refused; /* it is not pinned because the driver refused a chunk */
  enum kvs_pages pages;
  int node;                           /* where its pages were asked for; -1: anywhere, -2: interleaved */
  uint64_t done_nbytes, total_nbytes; /* how far it is; registering counts as much as populating */
  unsigned chunks;                    /* registrations */
};

/* Reserve, place, and start to populate and register, by threads. Checks first whether there is that much memory:
 * KVS_NOMEM, and nothing is left behind. Blocks begin to be ready in order of their addresses. */
KVS_API int kvs_host_pool_open(struct kvs_engine *engine, const struct kvs_host_pool_options *options,
                               struct kvs_host_pool **pool, struct kvs_error *err);
KVS_API struct kvs_engine *kvs_host_pool_engine(const struct kvs_host_pool *pool); /* borrowed */
/* KVS_FORKED in the child of a fork, which has none of it; so do all functions of pools that return a status. */
KVS_API int kvs_host_pool_get_info(struct kvs_host_pool *pool, struct kvs_host_pool_info *info, struct kvs_error *err);
/* What had to be done otherwise than asked, a line each; returns the length of all. */
KVS_API size_t kvs_host_pool_notices(struct kvs_host_pool *pool, char *text, size_t capacity);
/* Until all of it is ready: KVS_OK; KVS_TIMEOUT, and it goes on; KVS_NOMEM, KVS_CANCELLED. < 0: no limit. */
KVS_API int kvs_host_pool_wait(struct kvs_host_pool *pool, int64_t timeout_ns, struct kvs_error *err);
/* KVS_OK or KVS_NOT_READY; KVS_RANGE: no such block. Never blocks. */
KVS_API int kvs_host_pool_ready(struct kvs_host_pool *pool, uint64_t block, struct kvs_error *err);
KVS_API void kvs_host_pool_cancel(struct kvs_host_pool *pool); /* populating stops soon; returns at once */
/* Add blocks, up to max_blocks: they are populated as at first (wait for them). Addresses and contents stay. Blocks
 * whose size is no multiple of a page share one with the new ones: then it waits for the transfers that use them. */
KVS_API int kvs_host_pool_grow(struct kvs_host_pool *pool, uint64_t num_blocks, int64_t timeout_ns,
                               struct kvs_error *err);
/* Give the memory of the last blocks back, once no transfer uses it. */
KVS_API int kvs_host_pool_shrink(struct kvs_host_pool *pool, uint64_t num_blocks, int64_t timeout_ns,
                                 struct kvs_error *err);
/* Wait for the transfers that may use it. */
KVS_API int kvs_host_pool_drain(struct kvs_host_pool *pool, int64_t timeout_ns, struct kvs_error *err);
/* Give its memory back, once no transfer uses it; KVS_TIMEOUT: it is as before. Closing twice is no error. keep_range:
 * the addresses stay taken, and read as zeros, until kvs_host_pool_free(). */
KVS_API int kvs_host_pool_close(struct kvs_host_pool *pool, int64_t timeout_ns, bool keep_range, struct kvs_error *err);
/* Whether growing has to wait for the transfers that use it. */
KVS_API bool kvs_host_pool_grow_waits(const struct kvs_host_pool *pool);
/* Close, if that is still to do, and forget the pool. Where something still uses it after timeout_ns, that is done once
 * it can be. In a forked child: forget only. */
KVS_API void kvs_host_pool_free(struct kvs_host_pool *pool, int64_t timeout_ns);
KVS_API void kvs_host_pool_free_later(struct kvs_host_pool *pool); /* for destructors: waits for nothing */

/* Single pieces, for callers without an object to keep. A piece belongs to the engine that made it; freeing and
 * unregistering wait (60 s) for the transfers that may use it. */
KVS_API int kvs_host_alloc(struct kvs_engine *engine, size_t nbytes, uint64_t *ptr, struct kvs_error *err);
KVS_API int kvs_host_free(uint64_t ptr, struct kvs_error *err);
KVS_API int kvs_host_register(struct kvs_engine *engine, uint64_t ptr, size_t nbytes, struct kvs_error *err);
KVS_API int kvs_host_unregister(uint64_t ptr, struct kvs_error *err);

/* Shared pools: a pool whose memory several processes of one user map, from a file in /dev/shm that nobody else may
 * open. Who creates it owns it: its name goes when the owner closes it or ends. Each process registers the memory with
 * its own device. All functions of pools above take them too, but for growing and shrinking.
 *
 * Each block has a word that all processes see: empty, being written by a process, or published. One writes, many
 * read: claim, write, publish; readers wait for that. Memory is ordered by it, work of devices is not: publish after
 * the transfer that writes the block has ended. */
enum kvs_shared_mode { KVS_SHARED_CREATE, KVS_SHARED_JOIN, KVS_SHARED_EITHER /* join, or create it first */ };
struct kvs_shared_options {
  const char *name; /* letters, digits, '.', '_' and '-'; 1 to 100 */
  enum kvs_shared_mode mode;
  uint64_t generation; /* JOIN: only this one; 0: any */
};
struct kvs_shared_info {
  char path[128];
  uint64_t generation; /* of this segment: another one of the same name has another */
  int64_t owner_pid;
  bool owner;       /* this process is it */
  bool owner_alive; /* else: nobody will find the segment any more, but those who have it */
};

/* pages 2MIB and 1GIB become TRANSPARENT; max_blocks must be 0. A segment whose owner died is replaced, and so are all
 * others of this user when one is created. KVS_INVALID: it exists, does not exist, or is of another geometry, version
 * or generation. KVS_UNSUPPORTED: it is another user's, or of another pid namespace. */
KVS_API int kvs_shared_open(struct kvs_engine *engine, const struct kvs_host_pool_options *options,
                            const struct kvs_shared_options *shared, struct kvs_host_pool **pool,
                            struct kvs_error *err);
KVS_API int kvs_shared_get_info(struct kvs_host_pool *pool, struct kvs_shared_info *info, struct kvs_error *err);
KVS_API int kvs_shared_unlink(struct kvs_host_pool *pool,
                              struct kvs_error *err); /* by the owner: nobody joins any more */
/* Blocks that are empty, or whose writer died, become this process's to write: won[i]. */
KVS_API int kvs_shared_claim(struct kvs_host_pool *pool, const struct kvs_ids *blocks, bool *won,
                             struct kvs_error *err);
/* All or nothing; KVS_INVALID: another process is writing one. */
KVS_API int kvs_shared_publish(struct kvs_host_pool *pool, const struct kvs_ids *blocks, struct kvs_error *err);
KVS_API int kvs_shared_retract(struct kvs_host_pool *pool, const struct kvs_ids *blocks, struct kvs_error *err);
KVS_API int kvs_shared_published(struct kvs_host_pool *pool, const struct kvs_ids *blocks, bool *published,
                                 struct kvs_error *err);
/* Until all are published. KVS_TIMEOUT; KVS_CLOSED: who wrote one died. */
KVS_API int kvs_shared_wait(struct kvs_host_pool *pool, const struct kvs_ids *blocks, int64_t timeout_ns,
                            struct kvs_error *err);
/* Remove this user's segments whose owners died; their names, a line each, as far as there is room. Returns how many.
 */
KVS_API size_t kvs_shared_clean(char *names, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
