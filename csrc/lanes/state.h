/* The structs behind kvswap.h: engine, lane, transfer, pool. For the core's own files only.
 *
 * Locks, in the order in which they are taken together:
 *   0. engine->share_lock   the list of imports
 *      engine->hazard_lock  a pool transfer, from its check until the tables hold it (two engines: lanes/peer.h; all:
 *                           memory/vacate.h)
 *      slots->lock          one transfer at a time is queued through a set of slots; trylock only
 *      engine->lend_lock    a link is lent or taken back; trylock only
 *      way->lock            as slots->lock, for a link that is lent
 *   1. engine->stream_locks one submitter at a time for each stream of the caller
 *   2. lane->submit         one submitter at a time for each lane; held while a transfer is queued on the device
 *   3. engine->lock         the list of lanes
 *   4. lane->lock           a lane's queue and events; held for a poll, never while work is queued on the device
 *   5. tables.lock
 *   6. leaves, never together: engine->memory_lock, cache_lock, range_lock, reclaims.lock
 *   7. under any other lock: the race checker's and that of memory on its way out (memory/vacate.h); nothing is called
 *      under them
 * No callback runs under any of them. */
#ifndef KVS_STATE_H
#define KVS_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/histogram.h"
#include "base/wait.h"
#include "device/device.h"
#include "kvswap.h"
#include "lanes/hazard.h"
#include "lanes/lent.h"
#include "lanes/pool_state.h"
#include "lanes/tables.h"
#include "lanes/work.h"
#include "plan/cost.h"
#include "private.h"

enum {
  KVS_MAX_ENGINES = 64,    /* one bit each in kvs_transfer.dependencies */
  KVS_MAX_LANES = 32,      /* of one direction and one priority */
  KVS_DEFAULT_DEPTH = 128, /* transfers; CUDA holds some 1024 commands a stream, then blocks the caller */
  KVS_STREAM_LOCKS = 16,
  KVS_LANE_POINTS = 64,     /* ended transfers whose race points a lane keeps */
  KVS_STAGING_CLASSES = 16, /* 64 KiB, 128 KiB, ... 2 GiB */
};

struct kvs_transfer {
  atomic_uint refs;    /* of the memory: 1 for all handles together, 1 while queued, 1 while in engine->garbage, 1 a
                          kvs_lane_pin() */
  atomic_uint handles; /* public references: each keeps the engine open */
  struct kvs_engine *engine;
  struct kvs_lane *lane;
  kvs_stream head; /* guarded by lane->submit: the stream on which the transfer's start dependencies are waited for */
  struct kvs_transfer *next; /* in the lane's queue (lane->lock), later in engine->garbage (cache_lock) */
  uint64_t sequence, ticket; /* sequence: within the lane; ticket: over all lanes of the engine */
  enum kvs_direction direction;
  enum kvs_path path;
  uint64_t nbytes, nblocks, link_nbytes;
  uint64_t dependencies; /* dependency mask, bit i for kvs_engine_at(i): engines whose work this transfer comes after */
  struct kvs_bounds {
    uint64_t low, high;
  } gpu, cpu; /* address ranges that the transfer touches: memory of this device, all other memory */
  void *owner;
  void (*release)(void *);
  struct kvs_staging *staging;
  struct kvs_table_of_rows *table; /* the table that its kernels read; NULL: none */
  struct kvs_read_ids *ids;        /* ids that were on the device (read_ids.h); NULL: none */
  struct kvs_verdicts *verdicts;   /* what became of coded blocks (verdicts.h); NULL: none is coded */
  atomic_bool unsettled;           /* the transfer ends only after kvs_late_settle() */
  bool unjoined;        /* the lane stream does not cover all its bursts: it ends once the burst stream is idle too */
  bool lent;            /* some of its bytes go over links of other devices */
  bool steps;           /* its layers wait for start dependencies of their own */
  kvs_event start, end; /* guarded by lane->lock while running; end 0: the transfer ends when the lane stream is idle */
  bool end_shared;      /* guarded by lane->lock: `end` was handed out and belongs to the transfer */
  struct kvs_failure *outcome; /* failure record shared with the written slots when the outcome is known only at
                                  completion; NULL: none */
  unsigned pins; /* guarded by lane->lock: callers about to wait for `end`; the event is not reused before 0 */
  /* Written before `state` leaves RUNNING, constant afterwards. */
  struct kvs_error error; /* status KVS_OK: none */
  uint32_t *failed;       /* ascending positions; NULL with all_failed */
  size_t nfailed;
  bool all_failed;
  struct kvs_race_point *point; /* race checker: the clock at the transfer's end; NULL: none */
  kvs_event *layers;            /* one event a layer, 0: use `end`; constant once submitted */
  size_t nlayers;
  uint64_t elapsed_ns, since_ns, ended_ns; /* since_ns: of the call; ended_ns: when its end was seen */
  atomic_int state;                        /* enum kvs_state */
};

struct kvs_ended_point {
  uint64_t sequence;
  struct kvs_race_point *point;
};

struct kvs_event_pair {
  kvs_event start, end;
};

/* A lane lives as long as its engine. An idle lane is given to another stream of the caller, not freed.
 *
 * States of a lane, what moves it, and the locks:
 *   ABSENT -> IDLE                  kvs_lane_acquire() makes the lane            engine->lock
 *   IDLE -> IDLE, another stream    kvs_lane_acquire(), without spare streams    engine->lock
 *   IDLE -> HELD (users > 0)        kvs_lane_acquire()                           engine->lock
 *   HELD -> BUSY (count > 0)        kvs_lane_append()                            lane->submit, lane->lock
 *   HELD -> IDLE                    kvs_lane_release(), if nothing was queued    engine->lock
 *   BUSY -> IDLE (count 0, users 0) kvs_lane_reap(), kvs_engine_lose()           lane->lock
 *   IDLE -> freed                   kvs_lanes_destroy()                          none: the engine has no users
 * After a refused submission (leftovers), an idle lane serves no other stream until both its streams are idle. */
struct kvs_lane {
  struct kvs_engine *engine;
  struct kvs_lane *next; /* guarded by engine->lock */
  bool leftovers;        /* guarded by engine->lock: a refused submission may have left waits on the streams */
  unsigned users;        /* guarded by engine->lock: submitters that hold the lane */
  uint64_t last_used;    /* guarded by engine->lock */
  unsigned number;       /* its place in engine->numbered */
  uint64_t stream_id;    /* guarded by engine->lock: the driver's id of the caller's stream, 0: none */
  enum kvs_direction direction;
  enum kvs_priority priority;
  kvs_stream stream;       /* the lane stream: transfers run and complete on it in order */
  kvs_stream burst_stream; /* the burst stream: the first stage of bursts; the second stage runs on `stream` */
  bool ahead;              /* guarded by submit: the last transfer's head was the burst stream */
  uint64_t unbroken;       /* guarded by submit: bytes that the copy engine was given since the last gap */
  kvs_event fork;          /* guarded by submit: recorded on a stream that another one is to wait for */
  pthread_mutex_t submit;
  pthread_mutex_t lock;
  struct kvs_transfer *head, *tail; /* guarded by lock: unfinished, oldest first */
  unsigned depth;                   /* guarded by lock */
  atomic_uint count; /* of unfinished ones; this and the next two are written under lock and read without it */
  atomic_uint_fast64_t nbytes, oldest_ns; /* of unfinished ones: their bytes; since_ns of the oldest, 0: none */
  uint64_t sequence;                      /* guarded by submit: of the last transfer */
  uint64_t waited[KVS_LANES]; /* guarded by submit: for each lane, the last sequence that a head of this lane has waited
                                 for */
  atomic_uint_fast64_t ended; /* sequence of the last transfer that ended */
  struct kvs_ended_point
      points[KVS_LANE_POINTS];   /* guarded by lock: of ended transfers, at sequence % KVS_LANE_POINTS */
  struct kvs_event_pair *events; /* guarded by lock: free ones; room for depth */
  unsigned nevents;
};

/* Memory to be freed by a thread of the engine: memory/reclaim.h. */
struct kvs_reclaims {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct kvs_reclaim *first; /* guarded by lock: all tasks that have not ended, and results kept by KVS_LEAVE_RESULT */
  bool threaded;             /* guarded by lock: the thread exists */
};

struct kvs_engine {
  atomic_uint refs;
  struct kvs_device *device;
  char name[32];
  void (*destroy)(struct kvs_engine *); /* engine.c; called when refs reaches 0 */
  bool immortal;                        /* in the registry: never destroyed */
  atomic_bool closed;
  pthread_mutex_t
      stream_locks[KVS_STREAM_LOCKS]; /* by stream id: transfers of one stream of the caller are queued one by one */
  kvs_stream compute_stream;          /* guarded by lock */
  uint64_t compute_id;                /* guarded by lock: the driver's id of that stream, 0: unknown */
  bool compute_kept;                  /* guarded by lock: the engine destroys this stream */
  kvs_stream *retired; /* guarded by lock: streams to destroy; a submission may still use one as compute stream */
  size_t nretired;
  atomic_uint_fast64_t tickets;
  atomic_uint depth; /* lane depth, for new lanes */

  struct kvs_defaults defaults; /* guarded by lock */
  struct kvs_disabled disabled;
  bool verifies;  /* KVSWAP_VERIFY_CODEC is 1: what was coded is decoded and compared */
  bool one_queue; /* CUDA_DEVICE_MAX_CONNECTIONS is 1: the driver has one hardware queue for all streams */
  struct kvs_costs costs;
  char costs_note[240]; /* where the costs come from */
  struct kvs_tables tables;
  struct kvs_slots slots[2 * KVS_SLOT_SETS]; /* sets of D2H, then sets of H2D */
  struct kvs_lent lent[KVS_LENDERS];         /* links of other devices, for transfers of this one */
  pthread_mutex_t lend_lock;                 /* one change of `lent` at a time */
  atomic_uint_fast64_t lent_least;           /* bytes of the smallest slot of these links; 0: none is lent */
  atomic_uint_fast64_t lent_nbytes[2];       /* by direction: queued on this device's link by others */
  atomic_uint_fast64_t borrowed_nbytes[2];   /* of this device's transfers, on links of others */
  atomic_uint lent_pieces[2];                /* of other processes, on the link now */
  pthread_mutex_t note_lock;                 /* a leaf */
  char burst_note[KVS_BURST_NOTE]; /* guarded by note_lock: why there are no slots, or smaller ones than wanted; else
                                      empty */

  pthread_mutex_t lock;
  struct kvs_lane *lanes;  /* guarded by lock */
  uint64_t clock;          /* guarded by lock: counts acquisitions, for last_used */
  struct kvs_spare *spare; /* lane.c; guarded by lock: streams for lanes to come */

  struct kvs_lane *numbered[KVS_LANES]; /* each entry is written once, under lock */
  atomic_uint nlanes;

  pthread_mutex_t hazard_lock;
  struct kvs_needs needs;       /* guarded by hazard_lock: of the transfer that is being submitted */
  struct kvs_progress progress; /* guarded by hazard_lock: read when that submission began */
  struct kvs_late *late;        /* guarded by hazard_lock: transfers to be settled, oldest first (late.h) */
  atomic_uint nlate;            /* their number; written under hazard_lock */
  atomic_uint skipped_hazards;  /* 1 << enum kvs_hazard: waits left out, for tests */
  atomic_uint_fast64_t waits[KVS_HAZARDS];

  pthread_mutex_t memory_lock;
  struct kvs_regions regions; /* guarded by memory_lock: allocated, registered or opened by this engine */
  struct kvs_pool *pools;     /* guarded by memory_lock */
  pthread_mutex_t share_lock; /* held while the list of imports changes, never over a wait */
  struct kvs_import *imports; /* guarded by share_lock */
  void (*free_imports)(struct kvs_engine *); /* frees the imports when the engine is destroyed; NULL: there are none */
  pthread_mutex_t range_lock;                /* a leaf */
  struct kvs_range *ranges;                  /* guarded by range_lock */
  struct kvs_reclaims reclaims;

  pthread_mutex_t cache_lock;
  struct kvs_scratch *scratch;                      /* guarded by cache_lock */
  struct kvs_staging *staging[KVS_STAGING_CLASSES]; /* guarded by cache_lock */
  struct kvs_transfer *garbage; /* guarded by cache_lock: ended transfers whose owners are to be released */
  kvs_event *events;            /* guarded by cache_lock: free events, for layers */
  size_t nevents, events_capacity;
  atomic_bool has_garbage, resizing_slots, bursts; /* bursts: slots exist or will soon; written under note_lock */
  atomic_uint_fast64_t submitted, done, failed, cancelled, refused_full, copies, merged, staging_nbytes;
  atomic_uint_fast64_t second_attempts;
  struct kvs_path_counters {
    struct kvs_histogram duration, queue, nbytes;        /* of transfers done */
    atomic_uint_fast64_t blocks, device_ns, link_nbytes; /* the same */
    atomic_uint_fast64_t failed[KVS_STATUSES], failed_blocks;
  } paths[3][KVS_PATHS]; /* by direction and path */
};

#endif
