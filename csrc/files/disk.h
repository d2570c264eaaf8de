/* Copies between files and host memory, or between files, as work of a device's stream: the disk tier of TensorRT-LLM's
 * kv_cache_manager_v2. The caller names open files and offsets; there is no store, no key and no checksum.
 *
 *   queue            the stream reaches it          all tasks have been tried
 *  -------> QUEUED ------------------------> RUNNING -------------------------> ENDED, with a result a task
 *
 * Later work of the stream waits for the end, whatever the results. On a device that is lost before, a copy stays
 * QUEUED. */
#ifndef KVS_FILE_DISK_H
#define KVS_FILE_DISK_H

#include "device/device.h"
#include "files/sys.h"
#include "private.h"

enum { KVS_DISK_THREADS = 64 };

/* fd -1: host memory, by address; else a file, by offset. */
struct kvs_disk_task {
  int dst_fd, src_fd;
  uint64_t dst, src;
};

struct kvs_disk_call {
  const struct kvs_disk_task *tasks;
  size_t count;
  uint64_t nbytes;  /* of each task */
  unsigned threads; /* that move bytes at once, 1 to KVS_DISK_THREADS */
  bool clear;       /* memory of a failed read becomes zeros; it must be mapped then. Otherwise it is undefined */
};

struct kvs_disk_copy; /* reference-counted */

/* Check descriptors, offsets and overlaps: KVS_INVALID names the task. */
int kvs_disk_check(const struct kvs_disk_call *, struct kvs_error *);
/* Check, and queue on the stream. The descriptors are duplicated: they may be closed after the call. Memory must stay
 * mapped until the stream has executed the copy. */
int kvs_disk_queue(struct kvs_engine *, const struct kvs_disk_call *, kvs_stream, struct kvs_disk_copy **,
                   struct kvs_error *);
void kvs_disk_unref(struct kvs_disk_copy *);
bool kvs_disk_ended(const struct kvs_disk_copy *);
/* After the end. Number of failed tasks; the first `capacity` positions. */
size_t kvs_disk_failed(const struct kvs_disk_copy *, uint32_t *positions, size_t capacity);
int kvs_disk_reason(const struct kvs_disk_copy *, size_t position, struct kvs_error *); /* KVS_OK: it has not failed */

#endif
