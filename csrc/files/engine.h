/* Reads and writes of the file tier: a queue of requests, loads before stores, and threads that serve the queue. Two
 * engines implement one struct of functions: one thread a request (files/engine_threads.c), or io_uring with many
 * requests in flight a thread (files/engine_uring.c).
 *
 * An engine thread calls `begin`, which sets the span to move, then `end` with the result. Both functions may take the
 * store's lock and push further requests. */
#ifndef KVS_FILE_ENGINE_H
#define KVS_FILE_ENGINE_H

#include "files/sys.h"

enum kvs_file_begun {
  KVS_FILE_GO,   /* the span is set: move the bytes, then call end */
  KVS_FILE_SKIP, /* nothing to move: the item has ended or is queued elsewhere; the engine must not touch the request
                    again */
};

struct kvs_file_request {
  struct kvs_file_request *next;
  bool urgent;      /* popped before requests that are not urgent */
  uint8_t *scratch; /* set before begin, valid until end returns: page-aligned, scratch_nbytes of the queue */
  struct kvs_file_span span;
  enum kvs_file_begun (*begin)(struct kvs_file_request *);
  void (*end)(struct kvs_file_request *, int code); /* code: 0 or an errno */
};

struct kvs_file_queue {
  pthread_mutex_t lock;
  pthread_cond_t pushed;
  struct kvs_file_request *first[2], *last[2]; /* guarded by lock; [1]: urgent */
  unsigned idle;                               /* guarded by lock: threads that sleep in kvs_file_queue_pop() */
  unsigned watchers;                           /* guarded by lock: threads that sleep elsewhere and poll `wake` */
  int wake;                                    /* an eventfd */
  bool closed;                                 /* guarded by lock */
  struct kvs_file_faults *faults;
  bool direct;
  bool files_stay;                /* no file descriptor is closed or reused before the queue is closed */
  int kept[KVS_FILE_DIRECTORIES]; /* descriptors whose locks last until the last request has ended */
  unsigned nkept;
  size_t scratch_nbytes;
  uint8_t *fixed; /* memory of most requests, to be registered with the kernel; NULL: none */
  size_t fixed_nbytes;
};
int kvs_file_queue_init(struct kvs_file_queue *, struct kvs_error *);
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

struct kvs_file_worker; /* an engine's threads */

struct kvs_file_engine_ops {
  const char *name;
  /* On failure err says why the engine cannot be used. `depth`: requests in flight, over all threads. */
  int (*open)(struct kvs_file_queue *, unsigned depth, struct kvs_file_worker **, struct kvs_error *);
  void (*close)(struct kvs_file_worker **); /* joins the threads, sets NULL; the queue is closed already */
  void (*forked)(struct kvs_file_worker *); /* (optional) in the child of a fork: close copies of descriptors */
};
extern const struct kvs_file_engine_ops kvs_file_threads, kvs_file_uring;

/* Page-aligned scratch memory, populated on first use; NULL: no memory. */
uint8_t *kvs_file_pages_map(size_t nbytes);
void kvs_file_pages_unmap(uint8_t *pages, size_t nbytes);

#endif
