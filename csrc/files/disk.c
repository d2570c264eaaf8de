/* Copies of files on a stream. The stream calls a function of the host, which shares the tasks out to threads and
 * returns when all have been tried. That function may not call the device, and does not. */
#include "files/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/thread.h"

enum { BOUNCE_NBYTES = 1 << 20, ALONE_NBYTES = 256 << 10 }; /* less than the latter is moved by one thread */

/* A file of the call. */
struct disk_file {
  int theirs, fd; /* the caller's descriptor; a duplicate */
  bool reads, writes, direct;
  uint64_t device, inode;
  char path[256]; /* set when a task of it fails */
};

struct disk_result {
  int code;       /* 0, an errno or a KVS_FILE_* code */
  bool writing;   /* the call that failed */
  uint64_t moved; /* bytes before it */
};

struct kvs_disk_copy {
  atomic_uint refs; /* the caller's, and one while queued */
  atomic_bool ended;
  struct kvs_disk_call call; /* tasks: own copy, whose descriptors are positions in `files` */
  struct kvs_disk_task *tasks;
  struct disk_result *results; /* one a task; written by the thread that runs it */
  struct disk_file *files;
  size_t nfiles;
  atomic_size_t next; /* first task that no thread has taken */
};

static struct kvs_file_faults no_faults = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* -- running ------------------------------------------------------------------------------------------------------- */

static int move(struct kvs_disk_copy *copy, int file, bool write, uint64_t offset, void *memory, size_t nbytes,
                struct disk_result *result) {
  const struct disk_file *what = &copy->files[file];
  struct kvs_file_span span = {
      .fd = what->fd, .write = write, .offset = offset, .pieces = {{memory, nbytes}}, .npieces = 1};
  int code = kvs_file_move(&no_faults, &span, what->direct);
  result->moved += code ? nbytes - kvs_file_span_nbytes(&span) : nbytes;
  result->writing = write;
  return result->code = code;
}

static void between_files(struct kvs_disk_copy *copy, const struct kvs_disk_task *task, struct disk_result *result) {
  const size_t room = copy->call.nbytes < BOUNCE_NBYTES ? (size_t)copy->call.nbytes : BOUNCE_NBYTES;
  void *bounce = aligned_alloc(4096, (room + 4095) / 4096 * 4096);
  result->code = bounce ? 0 : ENOMEM;
  for (uint64_t at = 0; !result->code && at < copy->call.nbytes; at += room) {
    size_t part = copy->call.nbytes - at < room ? (size_t)(copy->call.nbytes - at) : room;
    if (move(copy, task->src_fd, false, task->src + at, bounce, part, result)) break;
    result->moved = at;
    (void)move(copy, task->dst_fd, true, task->dst + at, bounce, part, result);
  }
  free(bounce);
}

static void run_task(struct kvs_disk_copy *copy, size_t i) {
  const struct kvs_disk_task *task = &copy->tasks[i];
  struct disk_result *result = &copy->results[i];
  void *memory = (void *)(uintptr_t)(task->dst_fd < 0 ? task->dst : task->src);
  if (task->dst_fd >= 0 && task->src_fd >= 0)
    between_files(copy, task, result);
  else if (task->dst_fd >= 0)
    (void)move(copy, task->dst_fd, true, task->dst, memory, copy->call.nbytes, result);
  else if (move(copy, task->src_fd, false, task->src, memory, copy->call.nbytes, result) && copy->call.clear)
    memset(memory, 0, copy->call.nbytes);
}

static void *run_tasks(void *arg) {
  struct kvs_disk_copy *copy = arg;
  for (size_t i; (i = atomic_fetch_add(&copy->next, 1)) < copy->call.count;) run_task(copy, i);
  return NULL;
}

/* A file of O_TMPFILE has a path too: "/mnt/#1234 (deleted)". */
static void name_files(struct kvs_disk_copy *copy) {
  char link[40];
  for (size_t i = 0; i < copy->nfiles; i++) {
    struct disk_file *file = &copy->files[i];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file->fd);
    ssize_t n = readlink(link, file->path, sizeof file->path - 1);
    if (n <= 0) n = snprintf(file->path, sizeof file->path, "descriptor %d", file->theirs);
    file->path[n] = 0;
  }
}

static void close_files(struct kvs_disk_copy *copy) {
  for (size_t i = 0; i < copy->nfiles; i++)
    if (copy->files[i].fd >= 0) close(copy->files[i].fd);
}

static void serve(void *arg) {
  struct kvs_disk_copy *copy = arg;
  pthread_t threads[KVS_DISK_THREADS];
  unsigned most = copy->call.nbytes * copy->call.count <= ALONE_NBYTES ? 1 : copy->call.threads, n = 0;
  if (most > copy->call.count) most = (unsigned)copy->call.count;
  while (n + 1 < most && kvs_thread_start(&threads[n], "kvswap-disk", run_tasks, copy) == 0) n++;
  (void)run_tasks(copy); /* also if no thread could be started */
  while (n > 0) pthread_join(threads[--n], NULL);
  bool failed = false;
  for (size_t i = 0; i < copy->call.count && !failed; i++) failed = copy->results[i].code != 0;
  if (failed) name_files(copy);
  close_files(copy);
  copy->nfiles = failed ? copy->nfiles : 0;
  for (size_t i = 0; i < copy->nfiles; i++) copy->files[i].fd = -1;
  atomic_store(&copy->ended, true);
  kvs_disk_unref(copy);
}

/* -- checking ------------------------------------------------------------------------------------------------------ */

static int complain(const struct kvs_disk_task *task, size_t i, bool write, const char *what, struct kvs_error *err) {
  return kvs_fail(err, KVS_INVALID, "tasks[%zu].%s: descriptor %d %s", i, write ? "dst" : "src",
                  write ? task->dst_fd : task->src_fd, what);
}

static int look_at(struct disk_file *file, const struct kvs_disk_task *task, size_t i, bool write,
                   struct kvs_error *err) {
  struct stat info;
  const int flags = fcntl(file->theirs, F_GETFL);
  if (flags < 0 || fstat(file->theirs, &info)) return complain(task, i, write, "is not open", err);
  if (!S_ISREG(info.st_mode) && !S_ISBLK(info.st_mode)) return complain(task, i, write, "is no file", err);
  file->reads = (flags & O_ACCMODE) != O_WRONLY;
  file->writes = (flags & O_ACCMODE) != O_RDONLY;
  file->direct = flags & O_DIRECT;
  file->device = info.st_dev;
  file->inode = info.st_ino;
  return KVS_OK;
}

/* The position of the descriptor's file in the list, where it is added if new. Usually the last one is meant. */
static int find_file(struct kvs_disk_copy *copy, size_t i, bool write, int *fd, struct kvs_error *err) {
  const struct kvs_disk_task *task = &copy->tasks[i];
  const uint64_t at = write ? task->dst : task->src;
  size_t k = copy->nfiles;
  while (k > 0 && copy->files[k - 1].theirs != *fd) k--;
  if (k == 0) {
    struct disk_file *grown = realloc(copy->files, (copy->nfiles + 1) * sizeof *grown);
    if (!grown) return kvs_fail(err, KVS_NOMEM, "no memory for a list of files");
    copy->files = grown;
    grown[copy->nfiles] = (struct disk_file){.theirs = *fd, .fd = -1};
    int status = look_at(&grown[copy->nfiles], task, i, write, err);
    if (status) return status;
    k = ++copy->nfiles;
  }
  const struct disk_file *file = &copy->files[k - 1];
  if (write && !file->writes) return complain(task, i, write, "was not opened for writing", err);
  if (!write && !file->reads) return complain(task, i, write, "was not opened for reading", err);
  if (at > INT64_MAX || copy->call.nbytes > INT64_MAX - at)
    return kvs_fail(err, KVS_INVALID, "tasks[%zu].%s: %" PRIu64 " bytes at offset %" PRIu64 " end beyond 2**63", i,
                    write ? "dst" : "src", copy->call.nbytes, at);
  *fd = (int)(k - 1);
  return KVS_OK;
}

struct range {
  uint64_t device, inode, begin; /* memory: device and inode UINT64_MAX */
  size_t task;
  bool write;
};

static int by_place(const void *a, const void *b) {
  const struct range *l = a, *r = b;
  if (l->device != r->device) return l->device > r->device ? 1 : -1;
  if (l->inode != r->inode) return l->inode > r->inode ? 1 : -1;
  if (l->begin != r->begin) return l->begin > r->begin ? 1 : -1;
  return (l->task > r->task) - (l->task < r->task);
}

static struct range range_of(const struct kvs_disk_copy *copy, size_t i, bool write) {
  const struct kvs_disk_task *task = &copy->tasks[i];
  const int file = write ? task->dst_fd : task->src_fd;
  struct range range = {UINT64_MAX, UINT64_MAX, write ? task->dst : task->src, i, write};
  if (file < 0) return range;
  range.device = copy->files[file].device;
  range.inode = copy->files[file].inode;
  return range;
}

/* No order among tasks: what one writes no other may touch. All ranges have one length, so neighbours suffice. */
static int check_overlaps(const struct kvs_disk_copy *copy, struct kvs_error *err) {
  const size_t n = 2 * copy->call.count;
  struct range *ranges = malloc((n + 1) * sizeof *ranges);
  if (!ranges) return kvs_fail(err, KVS_NOMEM, "no memory to check %zu tasks", copy->call.count);
  for (size_t i = 0; i < n; i++) ranges[i] = range_of(copy, i / 2, i % 2);
  qsort(ranges, n, sizeof *ranges, by_place);
  int status = KVS_OK;
  for (size_t i = 1; !status && i < n; i++) {
    const struct range *a = &ranges[i - 1], *b = &ranges[i];
    if (a->device != b->device || a->inode != b->inode || b->begin - a->begin >= copy->call.nbytes) continue;
    if (a->write || b->write)
      status = kvs_fail(err, KVS_INVALID, "tasks[%zu].%s and tasks[%zu].%s overlap: there is no order among tasks",
                        a->task, a->write ? "dst" : "src", b->task, b->write ? "dst" : "src");
  }
  free(ranges);
  return status;
}

static void free_copy(struct kvs_disk_copy *copy) {
  free(copy->files);
  free(copy->tasks);
  free(copy->results);
  free(copy);
}

static int make(const struct kvs_disk_call *call, struct kvs_disk_copy **made, struct kvs_error *err) {
  struct kvs_disk_copy *copy = calloc(1, sizeof *copy);
  if (copy) {
    copy->tasks = malloc((call->count + 1) * sizeof *copy->tasks);
    copy->results = calloc(call->count + 1, sizeof *copy->results);
  }
  if (!copy || !copy->tasks || !copy->results) {
    if (copy) free_copy(copy);
    return kvs_fail(err, KVS_NOMEM, "no memory for %zu tasks", call->count);
  }
  atomic_init(&copy->refs, 1);
  copy->call = *call;
  memcpy(copy->tasks, call->tasks, call->count * sizeof *copy->tasks);
  int status = KVS_OK;
  for (size_t i = 0; !status && i < call->count; i++) {
    struct kvs_disk_task *task = &copy->tasks[i];
    if (task->src_fd != -1) status = find_file(copy, i, false, &task->src_fd, err);
    if (!status && task->dst_fd != -1) status = find_file(copy, i, true, &task->dst_fd, err);
  }
  if (!status) status = check_overlaps(copy, err);
  if (status)
    free_copy(copy);
  else
    *made = copy;
  return status;
}

int kvs_disk_check(const struct kvs_disk_call *call, struct kvs_error *err) {
  struct kvs_disk_copy *copy;
  int status = make(call, &copy, err);
  if (!status) free_copy(copy);
  return status;
}

/* -- queueing ------------------------------------------------------------------------------------------------------ */

static int duplicate(struct kvs_disk_copy *copy, struct kvs_error *err) {
  for (size_t i = 0; i < copy->nfiles; i++) {
    copy->files[i].fd = fcntl(copy->files[i].theirs, F_DUPFD_CLOEXEC, 3);
    if (copy->files[i].fd < 0) return kvs_file_fail(err, errno, "duplicating descriptor %d", copy->files[i].theirs);
  }
  return KVS_OK;
}

int kvs_disk_queue(struct kvs_engine *engine, const struct kvs_disk_call *call, kvs_stream stream,
                   struct kvs_disk_copy **queued, struct kvs_error *err) {
  struct kvs_device *device = kvs_engine_device(engine);
  struct kvs_stream_info info;
  struct kvs_disk_copy *copy;
  int status = kvs_stream_ask(device, stream, "stream", &info, err);
  if (!status) status = make(call, &copy, err);
  if (status) return status;
  status = duplicate(copy, err);
  atomic_store(&copy->refs, 2);
  if (!status) status = kvs_dev_call(device, serve, copy, stream, err);
  if (status) {
    close_files(copy);
    free_copy(copy);
    return status;
  }
  *queued = copy;
  return KVS_OK;
}

void kvs_disk_unref(struct kvs_disk_copy *copy) {
  if (atomic_fetch_sub(&copy->refs, 1) == 1) free_copy(copy);
}

/* -- results ------------------------------------------------------------------------------------------------------- */

bool kvs_disk_ended(const struct kvs_disk_copy *copy) { return atomic_load(&copy->ended); }

size_t kvs_disk_failed(const struct kvs_disk_copy *copy, uint32_t *positions, size_t capacity) {
  size_t n = 0;
  if (!kvs_disk_ended(copy)) return 0;
  for (size_t i = 0; i < copy->call.count; i++) {
    if (!copy->results[i].code) continue;
    if (n < capacity) positions[n] = (uint32_t)i;
    n++;
  }
  return n;
}

int kvs_disk_reason(const struct kvs_disk_copy *copy, size_t position, struct kvs_error *err) {
  if (!kvs_disk_ended(copy) || !copy->results[position].code) return KVS_OK;
  const struct kvs_disk_task *task = &copy->tasks[position];
  const struct disk_result *result = &copy->results[position];
  const bool write = result->writing;
  const struct disk_file *file = &copy->files[write ? task->dst_fd : task->src_fd];
  return kvs_file_fail(
      err, result->code, "%s %" PRIu64 " bytes at offset %" PRIu64 " of %.120s, after %" PRIu64 " of them",
      write ? "writing" : "reading", copy->call.nbytes, write ? task->dst : task->src, file->path, result->moved);
}
