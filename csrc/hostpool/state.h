/* The struct behind a host pool. For the files of hostpool/ only.
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
#ifndef KVS_HOSTPOOL_STATE_H
#define KVS_HOSTPOOL_STATE_H

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
  struct kvs_host_pool *next; /* guarded by pools_lock of metrics.c */
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

#endif
