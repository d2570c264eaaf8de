/* The structs behind kvswap_file.h, for the file tier's own sources.
 *
 * Lock order: peers_lock or epochs.looking, then store->lock, then one of queue.lock, faults.lock or the mover's lock.
 * Under store->lock there is no file system call and no device call, and no owner is released. */
#ifndef KVS_FILE_STATE_H
#define KVS_FILE_STATE_H

#include "base/histogram.h"
#include "device/device.h"
#include "files/epoch.h"
#include "files/events.h"
#include "files/format.h"
#include "files/item.h"
#include "files/notices.h"
#include "private.h"
#include "status.h"

/* One of the store's directories. Its path and descriptors are constant while the store is open. */
struct kvs_file_root {
  char *path;
  int folder, state;    /* descriptors of the directory and of the store's file; -1: none */
  int lock_code;        /* errno: the file system has no lock that lasts until a killed process's writes have ended */
  bool fresh;           /* at open: the store's file has no first page, so the directory may be new */
  uint64_t whole_below; /* at open: the sequence of its checkpoint, below which its blocks are whole */
  uint32_t *free_slots; /* guarded by store->lock, as are the fields below */
  size_t nfree, free_capacity;
  size_t nfailed;          /* the first of free_slots could not be written when they were used last */
  uint32_t next_number;    /* segment number from which the search for a free one begins */
  int grow_code;           /* error of the last attempt to make a segment */
  uint64_t grow_again_ns;  /* earliest time of the next attempt */
  int write_code;          /* error of the last failed write of a block */
  unsigned nfailures;      /* writes that failed since the last one that did not */
  uint64_t write_again_ns; /* after many of them: the earliest time of the next write */
  int gone_code;           /* an errno: the directory was removed or replaced */
};

struct kvs_file_segment {
  int fd;         /* guarded by store->lock, as are the next three; -1: not open */
  unsigned users; /* that hold it */
  bool recent;    /* it was used since the last look for one to close */
  bool gone;      /* removed and closed: its place in the list is free */
  uint64_t inode;
  uint32_t number; /* the number in the file name */
  unsigned root;   /* its directory */
  bool removed;    /* the file was unlinked, and its contents are no longer part of the store */
  bool used;       /* guarded by store->lock: a block was loaded or touched since the file's time was set */
  bool leaving;    /* an own segment that takes no further block and is then removed: files/retire.h */
  uint32_t kept;   /* guarded by store->lock: blocks that the last sweep of a leaving segment could not evict */
  bool suspect;    /* the file was truncated: its blocks' data is verified by the scan */
};

/* Another writer of a shared directory. Added by the watcher, and never removed while the store is open. */
enum { KVS_FILE_WRITERS = 256 };
struct kvs_file_peer {
  struct kvs_file_root root;       /* without a state */
  uint32_t number;                 /* in the name of its directory */
  struct kvs_file_notices notices; /* guarded by store->lock, as are the fields below */
  bool unheard;                    /* for the watcher: its notices were cut or removed */
  bool adopt, rescan;              /* for the watcher: open its new segments; read all its headers */
  uint64_t tried;                  /* the notice for which segments were opened last, plus one */
  uint32_t last;                   /* the segment of its last notice */
  int64_t names_ns;                /* for the watcher: when names in its directory changed last; 0: not known */
};

struct kvs_file_mover;
struct kvs_gds;

struct kvs_file_store {
  atomic_uint refs;
  unsigned fork_generation;
  struct kvs_file_settings settings; /* directory, layout and codings are the store's own copies; `more` is NULL */
  const struct kvs_coding **codings; /* settings.codings, with references; NULL behind the last */
  struct kvs_file_geometry geometry;
  int refusal; /* read-only, because the disk refuses writes: why stores and deletes fail, an errno; 0: it does not */
  char readonly_note[240];     /* the same in words */
  bool unwritable;             /* at open: a page of the store's file could not be written */
  bool geometry_known;         /* from a store's file; otherwise taken from the first segment */
  struct kvs_file_root *roots; /* own directories; none: a shared store that is read-only */
  unsigned nroots;
  uint32_t writer;                 /* shared: number in the name of the own directory */
  struct kvs_file_notices notices; /* shared: of the own blocks; published under lock */
  struct kvs_file_peer *peers;     /* shared: room for KVS_FILE_WRITERS; segments name peer i as root nroots + i */
  pthread_mutex_t peers_lock;      /* held by the thread that opens, adopts and scans; taken before `lock` */
  pthread_t watcher;
  bool watched; /* the watcher runs */
  bool direct;
  char direct_note[160], engine_note[160], gds_note[160];
  struct kvs_file_faults faults;
  struct kvs_file_queue queue;
  struct kvs_file_popped popped;
  const struct kvs_file_engine_ops *ops;
  struct kvs_file_worker *worker;
  struct kvs_file_mover *mover; /* NULL: no device */
  struct kvs_gds *gds;          /* NULL: staging is pinned memory; otherwise device memory, moved by libcufile */
  const char *gds_mode;         /* "on", "compat", "off" */
  atomic_uint_fast64_t gds_nbytes[2], gds_by_host; /* see struct kvs_file_stats; [1]: written, [0]: read */
  struct kvs_file_store *next_of_all;              /* guarded by stores_lock of store.c, as is `open` */
  bool open;                                       /* opened, and not being closed */
  atomic_bool noted;                               /* note has what kvs_file_take_note() gives */
  char note[300];                                  /* guarded by lock */
  unsigned readers; /* guarded by stores_lock: threads that read its counters, which keep it in memory */

  pthread_mutex_t lock;
  pthread_cond_t ended; /* signalled when a transfer ends, a call leaves or the store stops; monotonic clock */
  bool closing;         /* guarded by lock, as are the fields below; new calls are refused */
  bool stopping, stopped, refreshing;
  unsigned entered; /* calls in progress outside the lock: teardown waits until there are none */
  struct kvs_file_index index;
  struct kvs_file_segment *segments;
  uint32_t nsegments, segments_capacity, max_segments;
  uint32_t nremoved;            /* segments that are gone */
  uint32_t nown;                /* segments of own directories */
  uint64_t came_back;           /* blocks that were put into leaving segments */
  bool any_used;                /* some segment is `used` */
  struct kvs_file_bound *bound; /* files/bound.h; NULL: the store bounds its own segments only */
  uint32_t nidle, nheld, hand;  /* segments that are open and not held; that are held; the next to look at */
  struct kvs_file_items parked; /* items that wait for a descriptor */
  struct kvs_file_events events;
  struct kvs_file_epochs epochs;
  unsigned npeers;
  pthread_cond_t watch; /* for the watcher: a peer's flag was set, or the store stops */
  bool watch_now, watch_stop;
  unsigned next_root;                                /* takes the next block, if it has room */
  bool growing;                                      /* a thread is making a segment */
  uint64_t sequence;                                 /* of the last block written */
  struct kvs_file_item *oldest_write, *newest_write; /* stores in flight, by sequence */
  uint64_t unchecked_nbytes;                         /* bytes written since the last checkpoint */
  bool checkpointing;
  uint64_t generation;  /* of the last checkpoint */
  uint64_t whole_below; /* upper limit for checkpoints: a block from this sequence on may be torn and could not be read
                           or erased */
  bool unread_segments; /* the first page of some segment could not be read at open */
  size_t granted, nstarved;       /* items that hold their key, and those of them that wait for a slot */
  struct kvs_file_items ready;    /* items with their key, to be dispatched */
  struct kvs_file_items starved;  /* items that wait for a slot */
  struct kvs_file_entry *claimed; /* its block, read by loads now, goes to the oldest starved item; or NULL */
  struct kvs_file_transfer *oldest, *newest; /* unfinished transfers */
  unsigned unfinished[3];                    /* by enum kvs_file_kind */
  size_t unfinished_blocks[3];
  struct kvs_file_transfer *garbage;
  struct kvs_file_stats stats;
  struct kvs_file_kind_counters {
    struct kvs_histogram duration, nbytes; /* of transfers done */
    uint64_t failed, cancelled, failed_blocks[KVS_STATUSES];
  } kinds[3]; /* by enum kvs_file_kind */
};

/* Own directories first, then those of peers. */
static inline struct kvs_file_root *kvs_file_root_at(const struct kvs_file_store *store, unsigned root) {
  return root < store->nroots ? &store->roots[root] : &store->peers[root - store->nroots].root;
}
/* Whether another process writes the slot. */
static inline bool kvs_file_is_foreign(const struct kvs_file_store *store, uint32_t slot) {
  return store->settings.readonly || store->segments[slot / store->geometry.slots].root >= store->nroots;
}
static inline struct kvs_file_root *kvs_file_root_of(const struct kvs_file_store *store, uint32_t slot) {
  return &store->roots[store->segments[slot / store->geometry.slots].root];
}
static inline uint64_t kvs_file_slot_at(const struct kvs_file_store *store, uint32_t slot) {
  return kvs_file_slot_offset(&store->geometry, slot % store->geometry.slots);
}

static inline void kvs_file_note_used_locked(struct kvs_file_store *store, uint32_t slot) {
  store->segments[slot / store->geometry.slots].used = store->any_used = true;
}

#endif
