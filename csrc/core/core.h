/* The structs behind kvswap.h: engine, lane, transfer, pool. For the core's own files only.
 *
 * Locks, in the order in which they may be taken together:
 *   0. engine->hazard_lock  transfers between pools, until the tables know of them (core/peer.h: of two); or share_lock
 *      slots->lock          one transfer at a time is queued through a set of slots; only tried, never waited for
 *   1. engine->stream_locks one submitter a caller's stream at a time
 *   2. lane->submit         one submitter a lane at a time; held while a transfer is being queued on the device
 *   3. engine->lock         the list of lanes
 *   4. lane->lock           a lane's queue and events; held for a poll, never while anything is being queued
 *   5. tables.lock
 *   6. leaves, never together: engine->memory_lock, cache_lock, range_lock, reclaims.lock
 *   7. the race checker's, under any other; it calls nothing
 * No callback runs under any of them. */
#ifndef KVS_CORE_H
#define KVS_CORE_H

#include <pthread.h>
#include <stdatomic.h>

#include "core/engine.h"
#include "core/hazard.h"
#include "core/launch.h"
#include "core/pool.h"
#include "core/work.h"
#include "kvswap.h"

enum {
  KVS_MAX_ENGINES = 64,    /* as kvs_transfer.others has bits */
  KVS_MAX_LANES = 32,      /* of one direction and priority */
  KVS_DEFAULT_DEPTH = 128, /* transfers; CUDA holds some 1024 commands a stream, then blocks the caller */
  KVS_STREAM_LOCKS = 16,
  KVS_LANE_POINTS = 64,     /* ended transfers that a lane remembers for the race checker */
  KVS_STAGING_CLASSES = 16, /* 64 KiB, 128 KiB, ... 2 GiB */
};

struct kvs_transfer {
  atomic_uint refs; /* of the memory: 1 for all handles together, 1 while queued, 1 while its owner waits for release */
  atomic_uint handles; /* public references; while there are any, the engine lives */
  struct kvs_engine *engine;
  struct kvs_lane *lane;
  kvs_stream head;           /* guarded by lane->submit: what it starts after is waited for on it */
  struct kvs_transfer *next; /* in the lane's queue (lane->lock), later in the engine's garbage (cache_lock) */
  uint64_t sequence, ticket; /* in its lane; over all lanes */
  enum kvs_direction direction;
  enum kvs_path path;
  uint64_t nbytes, nblocks;
  uint64_t dependencies; /* 1 << number, as kvs_engine_at(): engines whose work it comes after */
  struct kvs_bounds {
    uint64_t low, high;
  } gpu, cpu; /* all that it touches, of the device's own memory and of other memory */
  void *owner;
  void (*release)(void *);
  struct kvs_staging *staging;
  struct kvs_table_of_rows *table; /* that its kernels read; NULL: none */
  bool unjoined; /* bursts of it may outlast all that is on the spine: it ends once its lane's front is idle too */
  kvs_event start, end;        /* guarded by lane->lock while running; end 0: the spine being idle stands for it */
  bool end_shared;             /* guarded by lane->lock: handed out, so it is the transfer's own now */
  struct kvs_failure *outcome; /* what the slots keep that it writes, if only its end tells; NULL: none do */
  unsigned pins; /* guarded by lane->lock: who is about to wait for `end`, which must not be used again meanwhile */
  /* Written before `state` leaves RUNNING, constant afterwards. */
  struct kvs_error error; /* status KVS_OK: none */
  uint32_t *failed;       /* ascending positions; NULL with all_failed */
  size_t nfailed;
  bool all_failed;
  struct kvs_race_point *point; /* for the race checker: what its end stands for; NULL: none */
  kvs_event *layers; /* one a layer, 0: none could be had, then `end` stands for it; constant once submitted */
  size_t nlayers;
  uint64_t elapsed_ns;
  atomic_int state; /* enum kvs_state */
};

struct kvs_ended_point {
  uint64_t sequence;
  struct kvs_race_point *point;
};

struct kvs_event_pair {
  kvs_event start, end;
};

/* Lanes live as long as their engine: an idle one is given to another caller's stream rather than freed. */
struct kvs_lane {
  struct kvs_engine *engine;
  struct kvs_lane *next; /* guarded by engine->lock */
  bool leftovers;        /* guarded by engine->lock: a refused submission may have left waits on the spine */
  unsigned users;        /* guarded by engine->lock: submitters that hold it */
  uint64_t last_used;    /* guarded by engine->lock */
  unsigned number;       /* its place in engine->numbered */
  uint64_t stream_id;    /* guarded by engine->lock: of the caller's stream, 0: none */
  enum kvs_direction direction;
  enum kvs_priority priority;
  kvs_stream stream;       /* its transfers run and complete on it, in order */
  kvs_stream burst_stream; /* the first stage of bursts, whose second one is on the spine */
  bool ahead;     /* guarded by submit: the last transfer's start was waited for on `front`, not on the spine */
  kvs_event fork; /* guarded by submit: recorded on what the spine must wait for */
  pthread_mutex_t submit;
  pthread_mutex_t lock;
  struct kvs_transfer *head, *tail; /* guarded by lock: unfinished, oldest first */
  unsigned count, depth;            /* guarded by lock */
  uint64_t sequence;                /* guarded by submit: of the last transfer */
  uint64_t waited[KVS_LANES];       /* guarded by submit: how far of each other lane the spine has waited for already */
  atomic_uint_fast64_t ended;       /* sequence of the last transfer that ended */
  struct kvs_ended_point points[KVS_LANE_POINTS]; /* guarded by lock: of ended transfers, by sequence */
  struct kvs_event_pair *events;                  /* guarded by lock: free ones; room for depth */
  unsigned nevents;
};

struct kvs_engine {
  atomic_uint refs;
  struct kvs_device *device;
  char name[32];
  void (*destroy)(struct kvs_engine *); /* engine.c: nobody holds it any more */
  bool immortal;                        /* in the registry: lives until the process ends */
  atomic_bool closed;
  pthread_mutex_t
      stream_locks[KVS_STREAM_LOCKS]; /* by stream id: transfers of one caller's stream are queued one by one */
  kvs_stream compute_stream;          /* guarded by lock */
  uint64_t compute_id;                /* guarded by lock: of that stream, 0: unknown */
  bool compute_kept;                  /* guarded by lock: nobody else is left to destroy it */
  kvs_stream *retired; /* guarded by lock: kept ones that were replaced; a submitter may still look at them */
  size_t nretired;
  atomic_uint_fast64_t tickets;
  atomic_uint depth; /* of new lanes */

  struct kvs_defaults defaults; /* guarded by lock */
  struct kvs_disabled disabled;
  struct kvs_costs costs;
  char costs_note[240]; /* where they are from */
  struct kvs_tables tables;
  struct kvs_slots slots[2 * KVS_SLOT_SETS]; /* those of D2H, then those of H2D */
  pthread_mutex_t note_lock;                 /* a leaf */
  char burst_note[KVS_BURST_NOTE];           /* guarded by note_lock: why there are no slots, or few; else empty */

  pthread_mutex_t lock;
  struct kvs_lane *lanes; /* guarded by lock */
  uint64_t clock;         /* guarded by lock: counts acquisitions, for last_used */

  struct kvs_lane *numbered[KVS_LANES]; /* written once a place, under lock */
  atomic_uint nlanes;

  pthread_mutex_t hazard_lock;
  struct kvs_needs needs;       /* guarded by hazard_lock: of the transfer that is being submitted */
  struct kvs_progress progress; /* guarded by hazard_lock: as of its beginning */
  atomic_uint skipped_hazards;  /* 1 << enum kvs_hazard: left out, for tests */
  atomic_uint_fast64_t waits[KVS_HAZARDS];

  pthread_mutex_t memory_lock;
  struct kvs_regions regions;                  /* guarded by memory_lock: allocated or registered here */
  struct kvs_pool *pools;                      /* guarded by memory_lock */
  pthread_mutex_t share_lock;                  /* held while the list of imports changes, never over a wait */
  struct kvs_import *imports;                  /* guarded by share_lock */
  void (*forget_imports)(struct kvs_engine *); /* their own end, with that of the engine; NULL: there never was one */
  pthread_mutex_t range_lock;                  /* a leaf */
  struct kvs_range *ranges;                    /* guarded by range_lock */
  struct kvs_reclaims reclaims;

  pthread_mutex_t cache_lock;
  struct kvs_scratch *scratch;                      /* guarded by cache_lock */
  struct kvs_staging *staging[KVS_STAGING_CLASSES]; /* guarded by cache_lock */
  struct kvs_transfer *garbage;                     /* guarded by cache_lock: owners to release */
  kvs_event *events;                                /* guarded by cache_lock: free ones, for layers */
  size_t nevents, events_capacity;
  atomic_bool has_garbage, bursts; /* bursts: there are slots, or others in a moment; written under note_lock */
  atomic_uint_fast64_t submitted, done, failed, cancelled, refused_full, copies, merged, staging_nbytes;
  atomic_uint_fast64_t second_attempts;
  struct {
    atomic_uint_fast64_t transfers, blocks, bytes, device_ns;
  } paths[3][KVS_PATHS]; /* by direction and path, of transfers done */
};

/* watch.c: for the race checker, who works on a stream (`where` may be NULL); and, which blocks of which pools lie
 * under plain copies. */
struct kvs_race_party kvs_watch_accessor(const struct kvs_engine *, kvs_stream, const char *where);
void kvs_watch_copies(const void *unused, const struct kvs_transfer *, size_t layer, const struct kvs_copies *,
                      const struct kvs_rects *, const struct kvs_race_party *);

/* move.c */
void kvs_move_scratch_free(struct kvs_move_scratch *);

/* memory.c */
void kvs_memory_destroy(struct kvs_engine *);
/* Into the engine's table of regions, of which the driver says the size (nbytes 0) or it is known; and out of it if no
 * transfer can use it any more (KVS_TIMEOUT: it stays). */
int kvs_memory_add(struct kvs_engine *, uint64_t ptr, uint64_t nbytes, enum kvs_origin, struct kvs_error *);
int kvs_memory_retire(struct kvs_engine *, uint64_t ptr, enum kvs_origin, struct kvs_region *, struct kvs_error *);

#endif
