/* Reads and writes of the file tier: a queue of requests, and threads that serve the queue. Two engines implement one
 * struct of functions: one thread a request (files/engine_threads.c), or io_uring with many requests in flight a thread
 * (files/engine_uring.c).
 *
 * An engine thread calls `begin`, which sets the span to move, then `end` with the result. Both functions may take the
 * store's lock and push further requests. */
#ifndef KVS_FILE_ENGINE_H
#define KVS_FILE_ENGINE_H

#include "files/queue.h"

struct kvs_file_worker; /* an engine's threads */

struct kvs_file_engine_ops {
  const char *name;
  /* On failure err says why the engine cannot be used. `depth`: requests in flight, over all threads. */
  int (*open)(struct kvs_file_queue *, unsigned depth, struct kvs_file_worker **, struct kvs_error *);
  void (*close)(struct kvs_file_worker **); /* joins the threads, sets NULL; the queue is closed already */
  void (*forked)(struct kvs_file_worker *); /* (optional) in the child of a fork: close copies of descriptors */
};
extern const struct kvs_file_engine_ops kvs_file_threads, kvs_file_uring;

#endif
