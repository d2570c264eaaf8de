/* Who reads and writes: a queue of requests, loads before stores, and threads that take from it. Two ways, behind one
 * struct of functions: a thread a request (files/engine_threads.c), or io_uring (files/engine_uring.c), where a thread
 * keeps many under way.
 *
 * A request is begun and ended on such a thread: `begin` says where its bytes are, `end` what came of it. Both may take
 * the store's lock, and push further requests. */
#ifndef KVS_FILE_ENGINE_H
#define KVS_FILE_ENGINE_H

#include "files/sys.h"

enum kvs_file_begun {
  KVS_FILE_GO,   /* the span is set: move it, then call end */
  KVS_FILE_SKIP, /* not this one, now: it has ended, or will be pushed again. It is not looked at any more */
};

struct kvs_file_request {
  struct kvs_file_request *next;
  bool urgent;      /* before those that are not */
  uint8_t *scratch; /* set before begin: room of the queue's scratch_nbytes, in whole pages, until end returns */
  struct kvs_file_span span;
  enum kvs_file_begun (*begin)(struct kvs_file_request *);
  void (*end)(struct kvs_file_request *, int code); /* 0, or an errno */
};

struct kvs_file_queue {
  pthread_mutex_t lock;
  pthread_cond_t pushed;
  struct kvs_file_request *first[2], *last[2]; /* guarded by lock: urgent ones are [1] */
  unsigned idle;                               /* guarded by lock: threads that wait for one here */
  unsigned watchers;                           /* guarded by lock: threads that are to be told of one by `wake` */
  int wake;                                    /* an eventfd */
  bool closed;                                 /* guarded by lock */
  struct kvs_file_faults *faults;
  bool direct;
  bool files_stay; /* no file is closed, and its descriptor used for another, before the queue is */
  size_t scratch_nbytes;
  uint8_t *fixed; /* memory that requests will often be for; NULL: none */
  size_t fixed_nbytes;
};
int kvs_file_queue_init(struct kvs_file_queue *, struct kvs_error *);
void kvs_file_queue_destroy(struct kvs_file_queue *);
void kvs_file_queue_push(struct kvs_file_queue *, struct kvs_file_request *);
/* The next one; NULL: there is none, and with `wait`: the queue was closed and is empty. */
struct kvs_file_request *kvs_file_queue_pop(struct kvs_file_queue *, bool wait);
/* For those who wait elsewhere: true if there is a request already. Else a push makes `wake` readable until unwatch. */
bool kvs_file_queue_watch(struct kvs_file_queue *);
void kvs_file_queue_unwatch(struct kvs_file_queue *);
void kvs_file_queue_heard(struct kvs_file_queue *); /* `wake` was readable */
void kvs_file_queue_close(struct kvs_file_queue *); /* threads end once it is empty */

struct kvs_file_worker; /* an engine's threads */

struct kvs_file_engine_ops {
  const char *name;
  /* Why it cannot be used here is told in err. `depth`: requests under way at once, over all threads. */
  int (*open)(struct kvs_file_queue *, unsigned depth, struct kvs_file_worker **, struct kvs_error *);
  void (*close)(struct kvs_file_worker *); /* after the queue was closed: joins the threads */
};
extern const struct kvs_file_engine_ops kvs_file_threads, kvs_file_uring;

/* Pages for scratch, untouched until used; NULL: no memory. */
uint8_t *kvs_file_pages_map(size_t nbytes);
void kvs_file_pages_unmap(uint8_t *pages, size_t nbytes);

#endif
