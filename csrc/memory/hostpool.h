/* The struct behind a host pool: for its own files and those of shared pools.
 *
 * Memory is one range of addresses with room for max_blocks. What is used of it lies in extents: one for the whole
 * pool, or one a layer where layers have room to grow. Each is cut into chunks of whole units (a unit: a block, or a
 * layer's part of one), of whole pages too, so that registrations share neither a block nor a page. Chunks are
 * populated piece by piece by a crew of threads; who populates a chunk's last piece registers it. */
#ifndef KVS_HOSTPOOL_H
#define KVS_HOSTPOOL_H

#include "core/core.h"
#include "memory/pages.h"

enum { KVS_CREW = 64, KVS_NOTICES = 2000 };

struct kvs_host_chunk {
  uint64_t base, nbytes;
  uint64_t taken; /* bytes handed out to the crew */
  uint64_t left;  /* bytes that are not populated yet */
  bool ready, registered;
};

struct kvs_shared_file;

struct kvs_host_pool {
  struct kvs_engine *engine;

  /* Constant once it is open. */
  struct kvs_host_pool_options asked;
  uint64_t unit, layer_nbytes, stride;
  uint64_t extents, extent_pitch; /* bytes from extent to extent */
  uint64_t chunk_units;
  uint64_t map_base, map_nbytes; /* all that is mapped */
  uint64_t base;                 /* of the first block */
  enum kvs_pages pages;
  struct kvs_shared_file *segment; /* NULL: of this process alone */

  pthread_mutex_t lock;
  pthread_cond_t changed; /* state, or a chunk became ready */
  /* Guarded by lock. */
  enum kvs_host_pool_state state;
  uint64_t num_blocks;
  int node;                      /* where its pages were asked for; -1: anywhere, -2: interleaved */
  struct kvs_host_chunk *chunks; /* by address; the array changes only while no crew is at work */
  size_t nchunks, capacity;
  size_t next_chunk;                     /* the first with something to hand out */
  uint64_t populated, registered, total; /* bytes */
  bool registering;                      /* chunks are registered as they are populated */
  bool pinned;
  bool stop;
  bool resizing;    /* one grow, shrink or close at a time */
  bool closing;     /* nobody begins to look at the segment any more */
  unsigned readers; /* calls that look at it */
  unsigned working; /* of the crew */
  unsigned hired;   /* threads to join */
  pthread_t crew[KVS_CREW];
  struct kvs_error failure; /* why it has no memory */
  struct kvs_error refused; /* why the driver registers no more of it */
  char notices[KVS_NOTICES];
  size_t notices_length;
};

/* hostpool.c */
int kvs_host_pool_new(struct kvs_engine *, const struct kvs_host_pool_options *, struct kvs_host_pool **,
                      struct kvs_error *); /* checks the geometry; nothing is mapped */
void kvs_host_pool_delete(struct kvs_host_pool *);
/* With map_base, map_nbytes, base and pages set: place, cut into chunks, hire. */
int kvs_host_pool_start(struct kvs_host_pool *, struct kvs_error *);
void kvs_host_pool_note(struct kvs_host_pool *, const char *format, ...) __attribute__((format(printf, 2, 3)));
uint64_t kvs_host_pool_most(const struct kvs_host_pool *);                   /* blocks that it may grow to */
uint64_t kvs_host_pool_units(const struct kvs_host_pool *, uint64_t blocks); /* of one extent, for so many blocks */
uint64_t kvs_host_pool_used(const struct kvs_host_pool *, uint64_t blocks);  /* bytes of it, in whole pages */
/* Pages [from, to) of every extent, given as bytes within it: get them, ask for them on the right nodes. */
int kvs_host_pool_commit(struct kvs_host_pool *, uint64_t from, uint64_t to, struct kvs_error *);
void kvs_host_pool_place(struct kvs_host_pool *, uint64_t from, uint64_t to);
int kvs_host_pool_afford(const struct kvs_host_pool *, uint64_t nbytes, struct kvs_error *); /* is there so much? */
int kvs_host_pool_state_error(const struct kvs_host_pool *, struct kvs_error *);             /* KVS_OK: it is ready */
uint64_t kvs_host_pool_room(const struct kvs_host_pool *); /* bytes of addresses, for max_blocks */

/* hostpool_resize.c */
size_t kvs_host_chunk_find(const struct kvs_host_pool *, uint64_t address); /* the first that ends above it */
/* Make chunks for units [from, to) of an extent; `from` begins a page. */
int kvs_host_chunks_cut(struct kvs_host_pool *, uint64_t extent, uint64_t from, uint64_t to, struct kvs_error *);

/* populate.c */
int kvs_crew_hire(struct kvs_host_pool *, struct kvs_error *); /* for all chunks that are not populated */
void kvs_crew_dismiss(struct kvs_host_pool *);                 /* stop, and wait until they are gone */

/* shared_file.c: the file behind a shared pool. */
struct kvs_shared_file {
  struct kvs_shared_file *next; /* in the list of those that this process owns */
  char path[128];
  uint64_t device, inode; /* of the file: another one may have its name by now */
  uint64_t generation;
  int64_t owner_pid;
  uint64_t owner_start;
  bool owner;
  uint64_t map_base, map_nbytes, data_offset;
  uint32_t *words; /* one a block, in the mapping */
  uint64_t num_blocks;
};
int kvs_shared_file_open(const struct kvs_host_pool *, const struct kvs_shared_options *, struct kvs_shared_file **,
                         bool *replaced, struct kvs_error *);
void kvs_shared_file_unlink(struct kvs_shared_file *);
void kvs_shared_file_close(struct kvs_shared_file *); /* forget it; what it mapped is its user's to unmap */

#endif
