/* The structs behind kvswap_file.h, for the file tier's own sources.
 *
 * Locks, in the order in which they may be taken together: store->lock, then a leaf of queue.lock, faults.lock or the
 * mover's. No call of the file system and none of the device is made under store->lock, and no owner is released. */
#ifndef KVS_FILE_STORE_H
#define KVS_FILE_STORE_H

#include <stdatomic.h>

#include "core/engine.h"
#include "files/engine.h"
#include "files/format.h"
#include "files/index.h"

enum kvs_file_kind { KVS_FILE_PUT, KVS_FILE_GET, KVS_FILE_DROP };

/* What a request of an item is for. */
enum kvs_file_phase {
  KVS_FILE_SCRUB_STALE, /* erase what may be left of an older block of the key, before anything else */
  KVS_FILE_TRANSFER,    /* read, or write, the block; of a delete: erase it */
  KVS_FILE_SCRUB_OLD,   /* a newer block was published: erase the one before */
  KVS_FILE_SCRUB_OWN,   /* the write failed: erase what it may have left */
};

/* One block of a transfer. */
struct kvs_file_item {
  struct kvs_file_request request; /* first: a request is its item */
  struct kvs_file_item *next;      /* in the one list that it is in: of its entry, ready, starved, or the mover's */
  struct kvs_file_item *earlier, *later; /* blocks being written, by sequence */
  struct kvs_file_transfer *transfer;
  struct kvs_file_entry *entry, *victim; /* of its key, and of the block whose slot it takes over */
  uint64_t address;                      /* host memory; with pools: of the staging slot, 0 while it has none */
  uint64_t sequence;
  uint32_t slot, old; /* being read, written or erased; and the one before */
  uint32_t staging;   /* number of its staging slot */
  uint32_t crc;       /* stores, staged in device memory: of the block there */
  enum kvs_file_phase phase;
  uint8_t tries; /* reads that found no whole block, beside a writer */
  bool begun;    /* guarded by lock: it cannot be cancelled any more */
  bool kept, ended;
  bool in_place;    /* its slot is that of the block that it replaces */
  bool written;     /* something may have been: its slot no longer holds what it held */
  int status, code; /* KVS_OK, or why it failed, with an errno */
};

struct kvs_file_items {
  struct kvs_file_item *first, *last;
};

struct kvs_file_transfer {
  atomic_uint refs; /* one for each handle, one while unfinished, one while it is garbage */
  struct kvs_file_store *store;
  struct kvs_file_transfer *earlier, *later; /* guarded by store->lock: unfinished ones */
  struct kvs_file_transfer *next_garbage;    /* guarded by store->lock */
  enum kvs_file_kind kind;
  bool replace;
  struct kvs_pool **pools; /* with references; NULL: host memory */
  size_t npools;
  int64_t *slots;                         /* of the pools, one an item */
  struct kvs_transfer *gate;              /* ends when all has that it starts after; NULL: nothing */
  struct kvs_file_items waiting;          /* guarded by the mover's lock: items that have their key */
  struct kvs_file_transfer *next_waiting; /* guarded by the mover's lock */
  bool cancelled;                         /* guarded by store->lock */
  size_t remaining;                       /* guarded by store->lock: items that have not ended */
  size_t nfailed, nkept;
  uint64_t start_ns, elapsed_ns;
  void *owner;
  void (*release)(void *);
  atomic_int state; /* enum kvs_state; what is read afterwards was written before */
  size_t nitems;
  struct kvs_file_item items[];
};

struct kvs_file_segment {
  int fd;          /* -1: it was removed, and closed */
  uint32_t number; /* in its name */
  bool removed;    /* of a reader: it has no name any more; what is in it is no longer the store's */
  bool suspect;    /* it was cut off: the data of its blocks is compared when it is scanned */
};

struct kvs_file_mover;
struct kvs_gds;

struct kvs_file_store {
  atomic_uint refs;
  unsigned fork_generation;
  struct kvs_file_settings settings; /* its directory is the store's own copy, its layout is geometry's */
  struct kvs_file_geometry geometry;
  bool geometry_known; /* from the store's file; else the first segment that is adopted says it */
  int folder, state;   /* descriptors of the directory and of the store's file; -1: none */
  bool direct;
  char direct_note[160], engine_note[160], gds_note[160];
  struct kvs_file_faults faults;
  struct kvs_file_queue queue;
  const struct kvs_file_engine_ops *ops;
  struct kvs_file_worker *worker;
  struct kvs_file_mover *mover; /* NULL: no device */
  struct kvs_gds *gds;          /* staging is device memory, and moved by libcufile; NULL: it is pinned */
  const char *gds_mode;         /* "on", "compat", "off" */
  atomic_uint_fast64_t gds_nbytes[2], gds_by_host; /* as in the stats: written [1], read [0] */
  struct kvs_file_store *next_of_all;              /* guarded by the lock of the list of stores, as is `open` */
  bool open;                                       /* it was opened, and nobody closes it */

  pthread_mutex_t lock;
  pthread_cond_t ended; /* a transfer did, a call left, or the store; waiters use the monotonic clock */
  bool closing;         /* guarded by lock, as is all that follows: it takes no calls */
  bool stopping, stopped;
  bool refreshing;
  unsigned entered; /* calls that use more than what the lock guards: until they leave, nothing is taken down */
  struct kvs_file_index index;
  struct kvs_file_segment *segments;
  uint32_t nsegments, segments_capacity, max_segments;
  uint32_t next_number; /* of a segment: where the search for a free one begins */
  uint32_t nremoved;    /* of the segments those with fd -1 */
  uint32_t *free_slots;
  size_t nfree, free_capacity;
  bool growing;                                      /* a thread makes a segment */
  int grow_code;                                     /* why the last one could not be made */
  uint64_t grow_again_ns;                            /* not before */
  uint64_t sequence;                                 /* of the last block written */
  struct kvs_file_item *oldest_write, *newest_write; /* under way, by sequence */
  uint64_t unchecked_nbytes;                         /* written since the last checkpoint */
  bool checkpointing;
  uint64_t generation;  /* of the last checkpoint */
  uint64_t whole_below; /* a checkpoint may say no more: from here on something may be torn that could not be read at
                           open, or not be erased */
  bool unread_segments; /* whose first page could not be read at open */
  size_t granted, nstarved;                  /* items that have their key; those among them that wait for a slot */
  struct kvs_file_items ready;               /* have their key and wait to be looked at */
  struct kvs_file_items starved;             /* wait for a slot */
  struct kvs_file_transfer *oldest, *newest; /* unfinished */
  unsigned unfinished[2];                    /* loads [1], others [0] */
  size_t unfinished_blocks[2];
  struct kvs_file_transfer *garbage;
  struct kvs_file_stats stats;
};

static inline int kvs_file_slot_fd(const struct kvs_file_store *store, uint32_t slot) {
  return store->segments[slot / store->geometry.slots].fd;
}
static inline uint64_t kvs_file_slot_at(const struct kvs_file_store *store, uint32_t slot) {
  return kvs_file_slot_offset(&store->geometry, slot % store->geometry.slots);
}

/* files/store.c */
int kvs_file_check_fork(const struct kvs_file_store *, struct kvs_error *);
/* Around a call that uses the mover or the files: KVS_CLOSED, KVS_FORKED. */
int kvs_file_enter(struct kvs_file_store *, struct kvs_error *);
void kvs_file_leave_locked(struct kvs_file_store *);

/* files/segment.c: files of the directory. */
int kvs_file_open_directory(struct kvs_file_store *,
                            struct kvs_error *); /* folder, state, geometry, direct, segments */
void kvs_file_close_directory(struct kvs_file_store *);
/* Close the file that the directory is locked by. `everywhere`: the lock goes, also where a child of a fork still has
 * the descriptor; else only this process's copy. Safe in the child of a fork. */
void kvs_file_unlock_directory(struct kvs_file_store *, bool everywhere);
int kvs_file_adopt_new(struct kvs_file_store *, struct kvs_error *); /* segments that came, or went, since */
void kvs_file_close_removed(struct kvs_file_store *); /* those that went, unless a transfer may still read there */
/* A new segment, with the first free number from *number on, not yet in the store's list: 0 or an errno. Called without
 * the lock, by one thread at a time. */
int kvs_file_segment_make(struct kvs_file_store *, uint32_t *number, int *fd);
int kvs_file_segment_append(struct kvs_file_store *, uint32_t number, int fd, bool cut); /* under the lock; ENOMEM */
int kvs_file_erase(struct kvs_file_store *, int fd, uint64_t offset); /* a header page: 0 or an errno */
uint64_t kvs_file_whole_below_locked(const struct kvs_file_store *);  /* which sequence a checkpoint may tell now */
int kvs_file_save_checkpoint(struct kvs_file_store *, uint64_t sequence, bool clean); /* 0 or an errno */
bool kvs_file_free_push(struct kvs_file_store *, uint32_t slot); /* under the lock; false: no memory, it is lost */

/* files/scan.c: an index from the headers of all segments; of a writer the free slots too. */
int kvs_file_scan(struct kvs_file_store *, struct kvs_file_index *, struct kvs_error *);

/* files/item.c: what becomes of one block. */
void kvs_file_item_begin_locked(struct kvs_file_item *); /* ask for its key; it is ready once it has it */
void kvs_file_run_ready_locked(struct kvs_file_store *); /* until nothing is ready */
void kvs_file_item_finish_locked(struct kvs_file_item *, int status, int code);
enum kvs_file_begun kvs_file_item_begin(struct kvs_file_request *);
void kvs_file_item_end(struct kvs_file_request *, int code);

/* files/slot.c: slots of the store for blocks to be written. */
enum kvs_file_slot_answer { KVS_FILE_SLOT, KVS_FILE_WAIT, KVS_FILE_NONE_LEFT };
/* item->slot, and item->victim where one had to go. WAIT: the item is in the list of starved ones. May give the lock
 * back for a while. NONE_LEFT: *code is the errno, 0: all blocks are pinned. */
enum kvs_file_slot_answer kvs_file_slot_take_locked(struct kvs_file_item *, int *code);
void kvs_file_slot_return_locked(struct kvs_file_item *); /* nothing was written to it: all is as before it was taken */
void kvs_file_slot_give_locked(struct kvs_file_store *, uint32_t slot);
void kvs_file_wake_starved_locked(struct kvs_file_store *);

/* files/transfer.c */
void kvs_file_transfer_drop(struct kvs_file_transfer *);         /* one reference */
void kvs_file_transfer_ended_locked(struct kvs_file_transfer *); /* its last item did */
size_t kvs_file_cancel_all(struct kvs_file_store *);

/* files/mover.c: blocks of pools, through staging. */
int kvs_file_mover_open(struct kvs_file_store *, struct kvs_error *);
void kvs_file_mover_close(struct kvs_file_store *); /* nothing is under way any more */
int kvs_file_mover_prepare(struct kvs_file_transfer *, const struct kvs_file_blocks *, const struct kvs_file_options *,
                           struct kvs_error *);      /* pools, slots and gate of a transfer that is not submitted yet */
void kvs_file_mover_push(struct kvs_file_item *);    /* it has its key: staging is next */
void kvs_file_mover_arrived(struct kvs_file_item *); /* read and checked: to the device */
void kvs_file_mover_release(struct kvs_file_item *); /* under store->lock: its staging slot is free again */

/* files/gds.c: GPUDirect Storage. */
/* Staging in device memory, and store->gds; false, with store->gds_note: staging has to be pinned. */
bool kvs_file_gds_open(struct kvs_file_store *, size_t staging_nbytes, uint64_t *staging);
void kvs_file_gds_close(struct kvs_file_store *);    /* nothing is under way any more; the staging goes too */
void kvs_file_gds_push(struct kvs_file_item *);      /* it has staging: instead of to the store's queue */
bool kvs_file_gds_has(const struct kvs_file_item *); /* its request is begun by a thread of that queue */
/* Of the block in the item's staging, by the thread that has its request. Else why not, with the driver's code. */
int kvs_file_gds_checksum(struct kvs_file_item *, uint32_t *crc, int *code);

#endif
