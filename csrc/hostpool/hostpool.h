/* The struct behind a host pool, for its own files and those of shared pools.
 *
 * A pool is one address range for max_blocks. The used part is in extents: one for the whole pool, or one a layer if
 * the layers can grow. An extent is divided into chunks of whole units (a unit is a block, or a layer's part of one)
 * and of whole pages, so that registrations share neither a block nor a page. A crew of threads populates the chunks
 * piece by piece; the thread that populates a chunk's last piece registers the chunk.
 *
 * States, guarded by pool->lock:
 *
 *    crew_hire               settle_locked: all chunks are ready
 *   -----------> POPULATING -------------------------------------> READY -------+
 *                  ^  |  |   settle_locked: stopped before the end              | kvs_host_pool_close
 *                  |  |  +---------------------------------------> CANCELLED ---+--------------------> CLOSED
 *                  |  |      settle_locked: no memory                           |
 *                  |  +------------------------------------------> FAILED ------+
 *                  |                                                            |
 *                  +------------------------------------------------------------+
 *                     crew_hire, after grow (READY) or shrink (READY, CANCELLED, FAILED)
 *
 * crew_hire moves to CANCELLED if no thread starts. Close stops a crew at work and waits for settle_locked first.
 * `resizing` admits one grow, shrink or close at a time. */
#ifndef KVS_HOSTPOOL_H
#define KVS_HOSTPOOL_H

#include "hostpool/pages.h"
#include "lanes/state.h"

enum { KVS_CREW = 64, KVS_NOTICES = 2000 };

struct kvs_host_chunk {
  uint64_t base, nbytes;
  uint64_t taken; /* bytes assigned to the crew */
  uint64_t left;  /* bytes not populated yet */
  bool ready, registered;
};

struct kvs_shared_file;

struct kvs_host_pool {
  struct kvs_host_pool *next; /* guarded by pools_lock of hostpool.c */
  struct kvs_engine *engine;

  /* Constant after opening. */
  struct kvs_host_pool_options asked;
  uint64_t unit, layer_nbytes, stride;
  uint64_t extents, extent_pitch; /* extent_pitch: bytes from extent to extent */
  uint64_t chunk_units;
  uint64_t map_base, map_nbytes; /* the whole mapping */
  uint64_t base;                 /* address of the first block */
  enum kvs_pages pages;
  struct kvs_shared_file *segment; /* NULL: not shared */

  pthread_mutex_t lock;
  pthread_cond_t changed; /* signalled when `state` or a chunk's `ready` changes */
  /* Guarded by lock. */
  enum kvs_host_pool_state state;
  uint64_t num_blocks;
  int node;                      /* the requested node; -1: any, -2: interleaved */
  struct kvs_host_chunk *chunks; /* sorted by address; the array changes only while no crew runs */
  size_t nchunks, capacity;
  size_t next_chunk;                     /* the first chunk with unassigned bytes */
  uint64_t populated, registered, total; /* bytes */
  bool registering;                      /* register chunks after they are populated */
  bool pinned;
  bool stop;
  bool resizing;    /* a grow, shrink or close is in progress */
  bool closing;     /* new readers of the segment are refused */
  unsigned readers; /* calls that read the segment's words */
  unsigned working; /* crew threads at work */
  unsigned hired;   /* crew threads to join */
  pthread_t crew[KVS_CREW];
  struct kvs_error failure; /* of population */
  struct kvs_error refused; /* of registration */
  char notices[KVS_NOTICES];
  size_t notices_length;
};

/* hostpool.c */
int kvs_host_pool_new(struct kvs_engine *, const struct kvs_host_pool_options *, struct kvs_host_pool **,
                      struct kvs_error *); /* checks the geometry; maps nothing */
void kvs_host_pool_delete(struct kvs_host_pool *);
/* Needs map_base, map_nbytes, base and pages. Binds to NUMA nodes, makes the chunks and starts the crew. */
int kvs_host_pool_start(struct kvs_host_pool *, struct kvs_error *);
void kvs_host_pool_note(struct kvs_host_pool *, const char *format, ...) __attribute__((format(printf, 2, 3)));
uint64_t kvs_host_pool_most(const struct kvs_host_pool *);                   /* upper limit of the pool's blocks */
uint64_t kvs_host_pool_units(const struct kvs_host_pool *, uint64_t blocks); /* in one extent */
uint64_t kvs_host_pool_used(const struct kvs_host_pool *, uint64_t blocks);  /* bytes in one extent, in whole pages */
/* Pages [from, to) of every extent, in bytes: reserve them; bind them to their NUMA nodes. */
int kvs_host_pool_commit(struct kvs_host_pool *, uint64_t from, uint64_t to, struct kvs_error *);
void kvs_host_pool_place(struct kvs_host_pool *, uint64_t from, uint64_t to);
int kvs_host_pool_afford(const struct kvs_host_pool *, uint64_t nbytes, struct kvs_error *); /* checks the budget */
int kvs_host_pool_state_error(const struct kvs_host_pool *, struct kvs_error *);             /* KVS_OK: READY */
uint64_t kvs_host_pool_room(const struct kvs_host_pool *); /* address space in bytes, for max_blocks */

/* hostpool_resize.c */
size_t kvs_host_chunk_find(const struct kvs_host_pool *, uint64_t address); /* the first that ends above it */
/* Make chunks for units [from, to) of an extent; `from` must be page-aligned. */
int kvs_host_chunks_cut(struct kvs_host_pool *, uint64_t extent, uint64_t from, uint64_t to, struct kvs_error *);

/* populate.c */
int kvs_crew_hire(struct kvs_host_pool *, struct kvs_error *); /* start threads for all unpopulated chunks */
void kvs_crew_dismiss(struct kvs_host_pool *);                 /* stop the threads and join them */

/* segment.c: the file behind a shared pool. */
struct kvs_shared_file {
  struct kvs_shared_file *next; /* list of the segments that this process owns */
  char path[128];
  uint64_t device, inode; /* of the file; another file may have the name by now */
  uint64_t generation;
  int64_t owner_pid;
  uint64_t owner_start;
  bool owner;
  uint64_t owners_page; /* the owner's: the mapping that keeps its lock */
  uint64_t map_base, map_nbytes, data_offset;
  uint32_t *words; /* one a block, in the mapping */
  uint64_t num_blocks;
};
int kvs_shared_file_open(const struct kvs_host_pool *, const struct kvs_shared_options *, struct kvs_shared_file **,
                         bool *replaced, struct kvs_error *);
void kvs_shared_file_unlink(struct kvs_shared_file *);
bool kvs_shared_file_owner_alive(const struct kvs_shared_file *);
void kvs_shared_file_close(struct kvs_shared_file *); /* the user of the mapping unmaps it */

#endif
