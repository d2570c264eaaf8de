/* io_uring. Stands in where it is not built. */
#include "file_engine.h"

static int open_uring(struct kvs_file_queue *queue, unsigned depth, struct kvs_file_worker **opened,
                      struct kvs_error *err) {
  (void)queue, (void)depth, (void)opened;
  return kvs_fail(err, KVS_UNSUPPORTED, "built without liburing");
}

static void close_uring(struct kvs_file_worker *worker) { (void)worker; }

const struct kvs_file_engine_ops kvs_file_uring = {.name = "io_uring", .open = open_uring, .close = close_uring};
