/* One block of a file transfer: its struct, its states and the functions that move it between them.
 *
 *   begin_locked          dispatch_locked        item_begin               finish_locked
 *  --------------> WAITING -> READY -----------> QUEUED ------> RUNNING -----------------> ENDED
 *                               |                 ^  ^           | | |                       ^
 *                  start depen- |                 |  +- STARVED <+ | | no slot on disk       |
 *                  dency or     v   serve_waiting |                | |                       |
 *                  staging   STAGING -------------+                | |                       |
 *                               ^                                  | |                       |
 *                               +----------------------------------+ | store of pools        |
 *                                                          ARRIVED <-+ load of pools         |
 *                                                             +------------------------------+ finish_copy
 *
 *   state     held in                              guarded by    leaves by
 *   WAITING   its entry's list: the key is in use  store->lock   release_locked, in FIFO order
 *   READY     store->ready: it holds the key       store->lock   dispatch_locked
 *   STAGING   transfer->waiting; stores: a copy    mover->lock   serve_waiting; stores: finish_copy
 *   QUEUED    store->queue or the GDS queue        queue->lock   an engine thread
 *   RUNNING   no list: an engine thread has it     -             item_end; further requests queue it again
 *   STARVED   store->starved                       store->lock   wake_starved_locked, claimed_ended_locked
 *   ARRIVED   mover->arrived, then a copy          mover->lock   finish_copy
 *   ENDED     no list; may be freed                store->lock   -
 *
 * `progress` says what cancelling and failing mean in these states. An item whose key is free starts READY. Every state
 * but WAITING, QUEUED and STARVED can end early: cancelled, failed, or nothing to do. All moves to ENDED are made by
 * kvs_file_item_finish_locked(). */
#ifndef KVS_FILE_ITEM_H
#define KVS_FILE_ITEM_H

#include <stdatomic.h>

#include "device/device.h"
#include "files/engine.h"
#include "files/format.h"
#include "files/index.h"
#include "private.h"

struct kvs_file_store;

enum kvs_file_kind { KVS_FILE_STORE, KVS_FILE_LOAD, KVS_FILE_DELETE };

/* The purpose of an item's current request. */
enum kvs_file_phase {
  KVS_FILE_SCRUB_STALE, /* before the transfer: erase an older block of the key */
  KVS_FILE_TRANSFER,    /* store, load, or (delete) erase the block */
  KVS_FILE_SCRUB_OLD,   /* the newer block is published: erase the block it replaces */
  KVS_FILE_SCRUB_OWN,   /* the write failed: erase what it may have written; loads: what is left is spoilt */
};

/* How far an item has come; guarded by store->lock, as `kept` is. */
enum kvs_file_progress {
  KVS_FILE_PENDING, /* can be cancelled; a starved item comes back to it */
  KVS_FILE_BEGUN,   /* its bytes move, or are about to */
  KVS_FILE_WRITTEN, /* a write was started: the slot's former contents are lost */
  KVS_FILE_OVER,
};

/* One block of a transfer. */
struct kvs_file_item {
  struct kvs_file_request request;       /* first member: the item is cast to and from its request */
  struct kvs_file_item *next;            /* in the list of the item's state */
  struct kvs_file_item *earlier, *later; /* stores in flight, by sequence */
  struct kvs_file_transfer *transfer;
  struct kvs_file_entry *entry, *victim; /* of the key; of the evicted block, whose slot and key the item holds */
  uint64_t address;                      /* host memory, or the block in the staging slot; 0: no staging slot yet */
  uint64_t sequence;
  uint32_t slot, old; /* the slot to read, write or erase; the slot of the replaced block */
  uint32_t held;      /* the segment that the current request holds; UINT32_MAX: none */
  uint32_t staging;   /* number of the staging slot; UINT32_MAX: none */
  uint32_t crc;       /* stores staged in device memory: the block's checksum */
  enum kvs_file_phase phase;
  struct kvs_file_epoch epoch; /* of the store, when a load found its block, or a store the slot that it overwrites */
  uint8_t tries;               /* failed reads of a reader, which retries; stores: attempts to erase an older block */
  enum kvs_file_progress progress;
  bool kept;        /* a store that left the existing block */
  bool spoilt;      /* a load: the slot can be read, and holds no block that any load could use */
  bool in_place;    /* `slot` is the slot of the block that is replaced */
  int status, code; /* the result; code: an errno or KVS_FILE_* code */
};

struct kvs_file_items {
  struct kvs_file_item *first, *last;
};

static inline void kvs_file_items_append(struct kvs_file_items *list, struct kvs_file_item *item) {
  item->next = NULL;
  *(list->last ? &list->last->next : &list->first) = item;
  list->last = item;
}
/* NULL: the list is empty. */
static inline struct kvs_file_item *kvs_file_items_take(struct kvs_file_items *list) {
  struct kvs_file_item *item = list->first;
  if (item) list->first = item->next;
  if (!list->first) list->last = NULL;
  return item;
}

struct kvs_file_transfer {
  atomic_uint refs; /* one a handle, one while unfinished, one while in `garbage` */
  struct kvs_file_store *store;
  struct kvs_file_transfer *earlier, *later; /* guarded by store->lock: list of unfinished transfers */
  struct kvs_file_transfer *next_garbage;    /* guarded by store->lock */
  enum kvs_file_kind kind;
  bool replace;
  struct kvs_file_epoch epoch; /* of the store, when the transfer was submitted */
  struct kvs_pool **pools;     /* referenced; NULL: the blocks are host memory */
  size_t npools;
  int64_t *slots;                         /* slot in the pools, one an item */
  size_t nparts;                          /* 0: the blocks are not in parts */
  uint64_t *part_nbytes;                  /* nparts; then the parts' addresses, nparts an item */
  struct kvs_transfer *gate;              /* ends when all start dependencies have ended; NULL: none */
  struct kvs_file_items waiting;          /* guarded by the mover's lock: items that hold their key */
  struct kvs_file_transfer *next_waiting; /* guarded by the mover's lock */
  bool cancelled;                         /* guarded by store->lock */
  size_t remaining;                       /* guarded by store->lock: items that have not ended */
  size_t nfailed, nkept;
  uint64_t start_ns, elapsed_ns;
  void *owner;
  void (*release)(void *);
  atomic_int state; /* enum kvs_state; stored last, with release order */
  size_t nitems;
  struct kvs_file_item items[];
};

void kvs_file_item_begin_locked(
    struct kvs_file_item *); /* ask for the key; the item becomes ready when it holds the key */
void kvs_file_run_ready_locked(struct kvs_file_store *); /* dispatch all ready items */
void kvs_file_item_finish_locked(struct kvs_file_item *, int status, int code);
enum kvs_file_begun kvs_file_item_begin(struct kvs_file_request *);
void kvs_file_item_end(struct kvs_file_request *, int code);

#endif
