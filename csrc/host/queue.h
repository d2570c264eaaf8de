/* Streams, events and the work queued on a host device, and who runs it. host/queue.c holds what callers do, host/run.c
 * what runs: workers, or steps inside calls on a deterministic device. */
#ifndef KVS_HOST_QUEUE_H
#define KVS_HOST_QUEUE_H

#include <pthread.h>

#include "base/wait.h"
#include "device/device.h"
#include "host/memory.h"
#include "host/words.h"

#define KVS_HOST_PRIORITY_LOW 0
#define KVS_HOST_PRIORITY_HIGH (-5)
#define KVS_HOST_WORKERS_MAX 4
#define KVS_HOST_NEVER UINT64_MAX

enum kvs_host_kind {
  /* Work: done in slices, outside the lock, by several workers at once. */
  KVS_HOST_COPY,
  KVS_HOST_RECT,
  KVS_HOST_FILL,
  KVS_HOST_KERNEL,
  /* Instants: done under the lock once they are ready. */
  KVS_HOST_DELAY,
  KVS_HOST_RECORD,
  KVS_HOST_WAIT_EVENT,
  KVS_HOST_WRITE32,
  KVS_HOST_WAIT32,
};

/* One recording of an event. Waits hold the mark and not the event, so recording the event again does not move them,
 * and an event may be destroyed at any time. It may be of another device or process, and then nobody tells when it is
 * reached: who waits for it looks again and again. */
struct kvs_host_mark {
  atomic_uint refs; /* of all devices that wait for it */
  atomic_bool done;
  uint64_t ns;                  /* when it was reached; written before `done` */
  struct kvs_host_words *words; /* of an event that processes share, else NULL; constant */
  uint64_t number;              /* of the recording there */
};

/* One queued operation. What it is, is constant once queued; its progress is guarded by the queue's lock. */
struct kvs_host_op {
  struct kvs_host_op *next;
  enum kvs_host_kind kind;
  uint64_t seq; /* position among all operations of the device */
  union {
    struct kvs_rect rect;
    struct {
      uint64_t dst, nwords;
      uint32_t word;
    } fill;
    struct {
      enum kvs_kernel id;
      unsigned grid, threads;
      const void *params; /* behind the operation */
    } kernel;
    struct {
      uint64_t ptr;
      uint32_t value;
    } flag;
    uint64_t delay_ns;
    struct kvs_host_mark *mark;
  } what;
  bool streaming; /* large: write past the cache */

  bool prepared;             /* KERNEL: its addresses were checked */
  bool foreign;              /* WAIT_EVENT: nobody tells this queue when it is reached */
  bool started;              /* DELAY: `until` is set */
  uint64_t until;            /* DELAY: when it ends; WAIT_EVENT: when to look whether its owner lives */
  uint64_t pace_ns;          /* KERNEL: it lasts at least so long */
  uint64_t begun_ns;         /* KERNEL: since when */
  uint64_t units, unit;      /* copies, rows or CTAs: how many, and the first that nobody has taken */
  uint64_t offset;           /* bytes of `unit` that are taken already */
  unsigned running;          /* slices in the hands of workers */
  struct kvs_piece pieces[]; /* COPY: `units` of them. KERNEL: its parameters lie here */
};

struct kvs_host_stream {
  kvs_stream handle;
  uint64_t id;
  int priority;
  uint64_t thread; /* a per-thread stream: whose; else 0 */
  bool capturing;
  bool destroyed;                         /* its handle is gone; freed when it runs dry */
  struct kvs_host_op *head, *tail;        /* FIFO */
  struct kvs_host_stream *before, *after; /* among the active ones */
};

struct kvs_host_event {
  bool timing;
  struct kvs_host_mark *mark;   /* the latest recording, or NULL */
  struct kvs_host_words *words; /* all of its recordings, where processes share it, else NULL */
};

/* All guarded by `lock`, but what stands under "constant". */
struct kvs_host_queue {
  pthread_mutex_t lock;
  pthread_cond_t work; /* something may be runnable */
  pthread_cond_t done; /* everything before `awaited` ended, or the device is lost */

  struct kvs_host_stream legacy;
  struct kvs_host_stream **streams; /* by handle; NULL: free */
  size_t nstreams;
  struct kvs_host_stream **threads; /* per-thread streams */
  size_t nthreads;
  struct kvs_host_event **events; /* by handle; NULL: free */
  size_t nevents;
  struct kvs_host_stream *first, *last; /* streams with work, in the order in which they get their turns */
  uint64_t next_seq;
  uint64_t awaited; /* kvs_host_synchronize waits for all before this `seq` (the least of them), or KVS_HOST_NEVER */

  pthread_t workers[KVS_HOST_WORKERS_MAX];
  unsigned nworkers; /* started */
  unsigned idle;     /* workers that wait */
  uint64_t alarm;    /* when the earliest of them wakes by itself, or KVS_HOST_NEVER */
  bool stopping;

  uint64_t random; /* deterministic: state of the generator */
  uint64_t trace;  /* deterministic: hash of what ran */
  uint64_t clock;  /* deterministic: virtual nanoseconds */

  /* constant */
  bool deterministic;
  unsigned max_workers;
  struct kvs_host_memory *memory;
  atomic_int *lost;
};

int kvs_host_queue_init(struct kvs_host_queue *queue, unsigned max_workers, uint64_t seed,
                        struct kvs_host_memory *memory, atomic_int *lost, struct kvs_error *err);
void kvs_host_queue_destroy(struct kvs_host_queue *queue); /* drops what is queued */

/* An operation of `units` units, with `behind` bytes for its pieces or parameters; NULL with *err filled. */
struct kvs_host_op *kvs_host_op_new(enum kvs_host_kind kind, uint64_t units, size_t behind, struct kvs_error *err);
/* Queue it. Takes the operation over, also on failure. `operation` is the member's name, for errors. */
int kvs_host_enqueue(struct kvs_host_queue *queue, struct kvs_host_op *op, kvs_stream handle, const char *operation,
                     struct kvs_error *err);

int kvs_host_stream_create(struct kvs_host_queue *queue, int priority, kvs_stream *handle, struct kvs_error *err);
int kvs_host_stream_destroy(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_error *err);
int kvs_host_stream_query(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_error *err);
int kvs_host_stream_info(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_stream_info *info,
                         struct kvs_error *err);
int kvs_host_stream_capture(struct kvs_host_queue *queue, kvs_stream handle, bool begin, struct kvs_error *err);
int kvs_host_stream_wait(struct kvs_host_queue *queue, kvs_stream handle, kvs_event event, struct kvs_error *err);
/* For an event of another host device's queue. */
int kvs_host_stream_wait_foreign(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_host_queue *other,
                                 kvs_event event, struct kvs_error *err);
int kvs_host_synchronize(struct kvs_host_queue *queue, const char *operation, struct kvs_error *err);
int kvs_host_event_create(struct kvs_host_queue *queue, bool timing, kvs_event *event, struct kvs_error *err);
/* Takes the words over, also on failure. */
int kvs_host_event_adopt(struct kvs_host_queue *queue, struct kvs_host_words *words, kvs_event *event,
                         struct kvs_error *err);
/* The words of an event, a reference; NULL with *err filled where there are none. */
struct kvs_host_words *kvs_host_event_words(struct kvs_host_queue *queue, kvs_event event, struct kvs_error *err);
int kvs_host_event_destroy(struct kvs_host_queue *queue, kvs_event event, struct kvs_error *err);
int kvs_host_event_record(struct kvs_host_queue *queue, kvs_event event, kvs_stream handle, struct kvs_error *err);
int kvs_host_event_query(struct kvs_host_queue *queue, kvs_event event, struct kvs_error *err);
int kvs_host_event_elapsed(struct kvs_host_queue *queue, kvs_event from, kvs_event to, uint64_t *ns,
                           struct kvs_error *err);

/* Between host/queue.c and host/run.c. */
int kvs_host_workers_start_locked(struct kvs_host_queue *queue, struct kvs_error *err);
void kvs_host_workers_stop(struct kvs_host_queue *queue);
/* How many of so many steps could be run. `jump`: where only time is left to pass, it passes. */
int64_t kvs_host_steps_locked(struct kvs_host_queue *queue, int64_t steps, bool jump);
uint64_t kvs_host_random_locked(struct kvs_host_queue *queue, uint64_t below);
void kvs_host_op_free_locked(struct kvs_host_op *op);
void kvs_host_stream_pop_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream); /* ends the head */
void kvs_host_drop_locked(struct kvs_host_queue *queue); /* a lost device: forget all that nobody is running */

#endif
