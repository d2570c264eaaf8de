/* Host memory: the part of kvswap.h (which includes this file) for pools of host memory, private or shared between
 * processes, and for single allocations and registrations. */
#ifndef KVSWAP_MEMORY_H
#define KVSWAP_MEMORY_H

#include "kvswap.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvs_host_pool; /* blocks of host memory, and the threads that populate them */

enum kvs_pages { KVS_PAGES_DEFAULT, KVS_PAGES_TRANSPARENT, KVS_PAGES_2MIB, KVS_PAGES_1GIB, KVS_PAGES_KINDS };
enum kvs_placement {
  KVS_PLACE_AUTO,       /* the NUMA node of the device, where it is known */
  KVS_PLACE_NODE,       /* kvs_host_pool_options.node */
  KVS_PLACE_INTERLEAVE, /* page by page over all nodes with memory */
  KVS_PLACE_ANYWHERE,   /* the system's default */
};

/* Zero-initialised: block-first, one layer, pages and placement as usual, registered with the device. */
struct kvs_host_pool_options {
  uint64_t num_blocks;
  uint64_t slot_nbytes; /* bytes of a slot: one block of all layers; a multiple of `layers` */
  uint64_t layers;      /* 0: 1 */
  bool layer_first;     /* true: all blocks of a layer together; false: all layers of a block */
  uint64_t max_blocks;  /* growth limit; takes address space, no memory. 0: num_blocks */
  enum kvs_pages pages; /* an unavailable kind falls back to the next smaller one, with a notice */
  enum kvs_placement placement;
  int node;
  uint64_t chunk_nbytes; /* approximate size of a registration, in whole blocks. 0: 1 GiB */
  unsigned threads;      /* threads that populate; 0: chosen by the pool */
  bool pageable;         /* do not register */
  bool has_reserve;      /* use `reserve`; else a share of the machine's memory stays free */
  int64_t reserve;       /* bytes to leave free; negative: assume that many more than are free now */
  uint64_t reserved[8];
};

enum kvs_host_pool_state {
  KVS_POOL_POPULATING,
  KVS_POOL_READY,
  KVS_POOL_FAILED,    /* out of memory: shrink the pool or close it */
  KVS_POOL_CANCELLED, /* blocks that were ready can be used */
  KVS_POOL_CLOSED,
};

struct kvs_host_pool_info {
  enum kvs_host_pool_state state;
  uint64_t ptr;           /* of the first byte of the first block */
  uint64_t nbytes;        /* num_blocks * slot_nbytes */
  uint64_t mapped_nbytes; /* the same, rounded up to pages: the memory in use */
  uint64_t num_blocks, max_blocks, slot_nbytes;
  uint64_t layers, layer_nbytes; /* bytes of one block's part in a layer */
  uint64_t layer_pitch;          /* from layer to layer */
  uint64_t stride;               /* from block to block, within a layer */
  uint64_t extent;               /* from ptr to the end of the last layer of the last block */
  bool layer_first, pinned;
  bool refused; /* not pinned because the driver refused a chunk */
  enum kvs_pages pages;
  int node;                           /* requested NUMA node; -1: anywhere, -2: interleaved */
  uint64_t done_nbytes, total_nbytes; /* progress; registering counts as much as populating */
  unsigned chunks;                    /* registrations */
  uint64_t reserved[8];
};

/* Reserve and place the memory, and start threads that populate and register it. KVS_NOMEM: there is not that much
 * memory, and nothing is left behind. Blocks become ready in order of their addresses. */
KVS_API int kvs_host_pool_open(struct kvs_engine *engine, const struct kvs_host_pool_options *options,
                               struct kvs_host_pool **pool, struct kvs_error *err);
KVS_API struct kvs_engine *kvs_host_pool_engine(const struct kvs_host_pool *pool); /* borrowed */
/* KVS_FORKED in the child of a fork, where the pool does not exist; so for all functions of pools that return a status.
 */
KVS_API int kvs_host_pool_get_info(struct kvs_host_pool *pool, struct kvs_host_pool_info *info, struct kvs_error *err);
/* Where the pool differs from its options, a line each; returns the full length. */
KVS_API size_t kvs_host_pool_notices(struct kvs_host_pool *pool, char *text, size_t capacity);
/* Wait until all blocks are ready. KVS_TIMEOUT: populating goes on; KVS_NOMEM, KVS_CANCELLED. timeout_ns < 0: no limit.
 */
KVS_API int kvs_host_pool_wait(struct kvs_host_pool *pool, int64_t timeout_ns, struct kvs_error *err);
/* KVS_OK or KVS_NOT_READY; KVS_RANGE: no such block. Never blocks. */
KVS_API int kvs_host_pool_ready(struct kvs_host_pool *pool, uint64_t block, struct kvs_error *err);
KVS_API void kvs_host_pool_cancel(struct kvs_host_pool *pool); /* populating stops soon; returns at once */
/* Add blocks, up to max_blocks; wait for them as at first. Addresses and contents stay. If the block size is no
 * multiple of a page, old and new blocks share a page: then growing waits for the transfers that use them. */
KVS_API int kvs_host_pool_grow(struct kvs_host_pool *pool, uint64_t num_blocks, int64_t timeout_ns,
                               struct kvs_error *err);
/* Free the last blocks, once no transfer uses them. */
KVS_API int kvs_host_pool_shrink(struct kvs_host_pool *pool, uint64_t num_blocks, int64_t timeout_ns,
                                 struct kvs_error *err);
/* Wait for the transfers that may use the pool. */
KVS_API int kvs_host_pool_drain(struct kvs_host_pool *pool, int64_t timeout_ns, struct kvs_error *err);
/* Free the memory once no transfer uses it; KVS_TIMEOUT: unchanged. Closing twice is no error. keep_range: the
 * addresses stay reserved, and read as zeros, until kvs_host_pool_free(). */
KVS_API int kvs_host_pool_close(struct kvs_host_pool *pool, int64_t timeout_ns, bool keep_range, struct kvs_error *err);
/* Whether growing waits for the transfers that use the pool. */
KVS_API bool kvs_host_pool_grow_waits(struct kvs_host_pool *pool);
/* Close the pool if it is open, and free the object. If the memory is still used after timeout_ns, it is freed later.
 * In a forked child: free the object only. */
KVS_API void kvs_host_pool_free(struct kvs_host_pool *pool, int64_t timeout_ns);
KVS_API void kvs_host_pool_free_later(struct kvs_host_pool *pool); /* for destructors: waits for nothing */

/* Single allocations and registrations, for callers without an object to keep. Each belongs to the engine that made it.
 * Freeing and unregistering wait (60 s) for the transfers that may use the memory. Freeing closes the pools in it. */
KVS_API int kvs_host_alloc(struct kvs_engine *engine, size_t nbytes, uint64_t *ptr, struct kvs_error *err);
KVS_API int kvs_host_free(uint64_t ptr, struct kvs_error *err);
KVS_API int kvs_host_register(struct kvs_engine *engine, uint64_t ptr, size_t nbytes, struct kvs_error *err);
KVS_API int kvs_host_unregister(uint64_t ptr, struct kvs_error *err);

/* Shared pools: several processes of one user map the same memory, from a file in /dev/shm that only this user may
 * open. The process that creates the pool owns it: the name is removed when the owner closes the pool or ends. Each
 * process registers the memory with its own device. All functions of pools above accept shared pools, except growing
 * and shrinking.
 *
 * Each block has a state word that all processes see: empty, being written by a process, or published. One process
 * writes and many read: claim, write, publish; readers wait for the publication. The word orders memory accesses, not
 * device work: publish after the transfer that writes the block has ended. */
enum kvs_shared_mode { KVS_SHARED_CREATE, KVS_SHARED_JOIN, KVS_SHARED_EITHER /* join, or create if there is none */ };
struct kvs_shared_options {
  const char *name; /* letters, digits, '.', '_' and '-'; 1 to 100 */
  enum kvs_shared_mode mode;
  uint64_t generation; /* JOIN: the required generation; 0: any */
  /* Bytes for an index, the same in each opener. Not 0: the segment belongs to all processes that have it open, and its
   * name goes with the last one. */
  uint64_t index_nbytes;
  uint64_t reserved[7];
};
struct kvs_shared_info {
  char path[128];
  uint64_t generation; /* of this segment; differs from other segments of the same name */
  int64_t owner_pid;
  bool owner;       /* this process is the owner */
  bool owner_alive; /* false: no other process can join any more */
  uint64_t reserved[8];
};

/* Pages 2MIB and 1GIB become TRANSPARENT; max_blocks must be 0. A segment whose owner died is replaced; creating one
 * also removes all such segments of this user. KVS_INVALID: the segment exists, does not exist, or has another
 * geometry, version or generation. KVS_UNSUPPORTED: it belongs to another user, or to a running process of another pid
 * namespace. */
KVS_API int kvs_shared_open(struct kvs_engine *engine, const struct kvs_host_pool_options *options,
                            const struct kvs_shared_options *shared, struct kvs_host_pool **pool,
                            struct kvs_error *err);
KVS_API int kvs_shared_get_info(struct kvs_host_pool *pool, struct kvs_shared_info *info, struct kvs_error *err);
KVS_API int kvs_shared_unlink(struct kvs_host_pool *pool,
                              struct kvs_error *err); /* by the owner: no process can join any more */
/* Claim empty blocks, and blocks whose writer died, for this process to write: won[i]. */
KVS_API int kvs_shared_claim(struct kvs_host_pool *pool, const struct kvs_ids *blocks, bool *won,
                             struct kvs_error *err);
/* All blocks or none. KVS_INVALID: another process is writing one. */
KVS_API int kvs_shared_publish(struct kvs_host_pool *pool, const struct kvs_ids *blocks, struct kvs_error *err);
KVS_API int kvs_shared_retract(struct kvs_host_pool *pool, const struct kvs_ids *blocks, struct kvs_error *err);
KVS_API int kvs_shared_published(struct kvs_host_pool *pool, const struct kvs_ids *blocks, bool *published,
                                 struct kvs_error *err);
/* Wait until all blocks are published. KVS_TIMEOUT; KVS_CLOSED: the writer of one died. */
KVS_API int kvs_shared_wait(struct kvs_host_pool *pool, const struct kvs_ids *blocks, int64_t timeout_ns,
                            struct kvs_error *err);
/* Remove this user's segments whose owners died, and list their names, a line each. Returns their number. Stops where
 * there is no room for another name; capacity 0: lists none. */
KVS_API size_t kvs_shared_clean(char *names, size_t capacity);
/* The same in another folder, as /proc/<pid>/root/dev/shm: the /dev/shm of a container. Follows no symbolic link other
 * than /proc/<pid>/root. KVS_INVALID: the folder cannot be opened. */
KVS_API int kvs_shared_clean_folder(const char *folder, char *names, size_t capacity, size_t *count,
                                    struct kvs_error *err);

#ifdef __cplusplus
}
#endif
#endif
