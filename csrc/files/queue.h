/* The queue of the file tier's reads and writes.
 *
 * Loads go before stores and deletes, because engines wait for loads. Stores and deletes take turns. Loads that never
 * pause hold up the oldest store and the oldest delete for a limited time only:
 *
 *   overdue   The request has waited 100 ms, and loads of 64 MiB were popped meanwhile; or it has waited 500 ms.
 *   due       It is overdue, and since the last due request of n bytes, loads of 16 n bytes were popped. So stores and
 *             deletes take a sixteenth of what loads get. A due request goes before loads.
 *
 *         push                       pop, no load waits
 *   item ------> STORES or DELETES ----------------------> popped: begin, end
 *                    | due                                    ^   |
 *                    +--------------> FIRST ------------------+   | further requests of a begun item, such as
 *                                       ^                         | the erasure of the block that it replaced
 *                                       +-------------------------+
 *
 * Requests in FIRST go before all others. A request stays in this rank: a due store is not held up again when it needs
 * staging or another request. Waiting begins when the item holds its key. The mover applies the same rule where items
 * wait for staging (files/mover.c). */
#ifndef KVS_FILE_QUEUE_H
#define KVS_FILE_QUEUE_H

#include <stdatomic.h>

#include "files/sys.h"

enum kvs_file_begun {
  KVS_FILE_GO,   /* the span is set: move the bytes, then call end */
  KVS_FILE_SKIP, /* nothing to move: the item has ended or is queued elsewhere; the engine must not touch the request
                    again */
};

enum kvs_file_rank { KVS_FILE_STORES, KVS_FILE_DELETES, KVS_FILE_LOADS, KVS_FILE_FIRST, KVS_FILE_RANKS };

struct kvs_file_request {
  struct kvs_file_request *next;
  enum kvs_file_rank rank;
  uint64_t nbytes;                 /* that it counts: at least 64 KiB, because small requests take about as long */
  uint64_t since_ns, since_nbytes; /* stores and deletes: the time, and the loads popped, when the item got its key */
  uint8_t *scratch; /* set before begin, valid until end returns: page-aligned, scratch_nbytes of the queue */
  struct kvs_file_span span;
  enum kvs_file_begun (*begin)(struct kvs_file_request *);
  void (*end)(struct kvs_file_request *, int code); /* code: 0 or an errno */
};

/* What was popped from all queues of a store. */
struct kvs_file_popped {
  atomic_uint_fast64_t requests, load_nbytes;
};

/* State of the rule above where requests wait: in a queue, or in the mover. */
struct kvs_file_turns {
  struct kvs_file_popped *popped;
  uint64_t next; /* load_nbytes from which the next overdue request is due */
};

struct kvs_file_queue {
  pthread_mutex_t lock;
  pthread_cond_t pushed;
  struct kvs_file_request *first[KVS_FILE_RANKS], *last[KVS_FILE_RANKS]; /* guarded by lock */
  struct kvs_file_turns turns;                                           /* guarded by lock */
  enum kvs_file_rank turn; /* guarded by lock: STORES or DELETES, of which one is popped next if both wait */
  unsigned idle;           /* guarded by lock: threads that sleep in kvs_file_queue_pop() */
  unsigned watchers;       /* guarded by lock: threads that sleep elsewhere and poll `wake` */
  int wake;                /* an eventfd */
  bool closed;             /* guarded by lock */
  struct kvs_file_faults *faults;
  bool direct;
  atomic_bool files_move;         /* a descriptor was closed, and its number may be another file's */
  bool files_stay;                /* until then no file descriptor is closed or reused before the queue is closed */
  int kept[KVS_FILE_DIRECTORIES]; /* descriptors whose locks last until the last request has ended */
  unsigned nkept;
  size_t scratch_nbytes;
  uint8_t *fixed; /* memory of most requests, to be registered with the kernel; NULL: none */
  size_t fixed_nbytes;
};

int kvs_file_queue_init(struct kvs_file_queue *, struct kvs_file_popped *, struct kvs_error *);
void kvs_file_queue_destroy(struct kvs_file_queue *);
void kvs_file_queue_push(struct kvs_file_queue *, struct kvs_file_request *);
/* The next request. NULL: the queue is empty and, with `wait`, closed. */
struct kvs_file_request *kvs_file_queue_pop(struct kvs_file_queue *, bool wait);
/* For threads that sleep elsewhere. True: a request is queued already. False: the next push makes `wake` readable,
 * until unwatch. */
bool kvs_file_queue_watch(struct kvs_file_queue *);
void kvs_file_queue_unwatch(struct kvs_file_queue *);
void kvs_file_queue_drain_wake(struct kvs_file_queue *); /* drain `wake` after it was readable */
void kvs_file_queue_close(struct kvs_file_queue *);      /* threads end when the queue is empty */

uint64_t kvs_file_request_nbytes(uint64_t nbytes); /* what a request that moves so many bytes counts */
void kvs_file_request_wait(struct kvs_file_request *, const struct kvs_file_turns *); /* a store or delete: set since */
/* Whether a waiting store or delete goes before waiting loads now; then its rank is FIRST. With the lock that guards
 * the turns. */
bool kvs_file_request_is_due(struct kvs_file_request *, struct kvs_file_turns *);

/* Page-aligned scratch memory, populated on first use; NULL: no memory. */
uint8_t *kvs_file_pages_map(size_t nbytes);
void kvs_file_pages_unmap(uint8_t *pages, size_t nbytes);

#endif
