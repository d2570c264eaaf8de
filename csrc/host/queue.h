/* Streams, events and queued work of a host device, and its execution. host/queue.c has the functions for callers;
 * host/run.c executes, with workers, or with steps inside calls on a deterministic device. */
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
  /* Work: executed in slices, without the lock, by several workers at once. */
  KVS_HOST_COPY,
  KVS_HOST_RECT,
  KVS_HOST_FILL,
  KVS_HOST_KERNEL,
  KVS_HOST_CALL,
  /* Instants: executed under the lock when they are ready. */
  KVS_HOST_DELAY,
  KVS_HOST_RECORD,
  KVS_HOST_WAIT_EVENT,
  KVS_HOST_WRITE32,
  KVS_HOST_WAIT32,
};

/* One recording of an event. Waits hold the mark instead of the event, so recording the event again does not affect
 * them, and the event may be destroyed. A mark of another device or process sends no signal on completion: waiters poll
 * it. */
struct kvs_host_mark {
  atomic_uint refs; /* including those of other devices that wait for it */
  atomic_bool done;
  uint64_t ns;                  /* completion time; written before `done` */
  struct kvs_host_words *words; /* constant; NULL: the event is not shared */
  uint64_t number;              /* number of the recording in `words` */
};

/* One queued operation. Its description is constant once queued; its progress is guarded by the queue's lock. */
struct kvs_host_op {
  struct kvs_host_op *next;
  enum kvs_host_kind kind;
  uint64_t seq; /* position among the device's operations */
  union {
    struct kvs_rect rect;
    struct {
      uint64_t dst, nwords;
      uint32_t word;
    } fill;
    struct {
      enum kvs_kernel id;
      unsigned grid, threads;
      const void *params; /* stored behind the operation */
    } kernel;
    struct {
      uint64_t ptr;
      uint32_t value;
    } flag;
    struct {
      void (*function)(void *arg);
      void *arg;
    } call;
    uint64_t delay_ns;
    struct kvs_host_mark *mark;
  } what;
  bool streaming; /* large: use non-temporal stores */

  bool prepared;             /* KERNEL: addresses are checked */
  bool foreign;              /* WAIT_EVENT: no signal on completion, poll */
  bool started;              /* DELAY: `until` is set */
  uint64_t until;            /* DELAY: end time; WAIT_EVENT: next check that the owner is alive */
  uint64_t pace_ns;          /* KERNEL: minimum duration */
  uint64_t begun_ns;         /* KERNEL: start time */
  uint64_t units, unit;      /* number of copies, rows or CTAs; the first not assigned yet */
  uint64_t offset;           /* bytes of `unit` assigned already */
  unsigned running;          /* slices being run by workers */
  struct kvs_piece pieces[]; /* COPY: `units` pieces. KERNEL: the parameters */
};

struct kvs_host_stream {
  kvs_stream handle;
  uint64_t id;
  int priority;
  uint64_t thread; /* per-thread stream: its thread; otherwise 0 */
  bool capturing;
  bool destroyed;                         /* the handle is invalid; freed when the stream is empty */
  struct kvs_host_op *head, *tail;        /* FIFO */
  struct kvs_host_stream *before, *after; /* list of active streams */
};

struct kvs_host_event {
  bool timing;
  struct kvs_host_mark *mark;   /* latest recording, or NULL */
  struct kvs_host_words *words; /* all recordings of a shared event; NULL: not shared */
};

/* Guarded by `lock`, except the fields under "constant". */
struct kvs_host_queue {
  pthread_mutex_t lock;
  pthread_cond_t work; /* signalled when work may be runnable */
  pthread_cond_t done; /* everything before `awaited` has ended, or the device is lost */

  struct kvs_host_stream legacy;
  struct kvs_host_stream **streams; /* indexed by handle; NULL: free */
  size_t nstreams;
  struct kvs_host_stream **threads; /* per-thread streams */
  size_t nthreads;
  struct kvs_host_event **events; /* indexed by handle; NULL: free */
  size_t nevents;
  struct kvs_host_stream *first, *last; /* active streams, in scheduling order */
  uint64_t next_seq;
  uint64_t awaited; /* the smallest `seq` that kvs_host_synchronize() waits for, or KVS_HOST_NEVER */

  pthread_t workers[KVS_HOST_WORKERS_MAX];
  unsigned nworkers; /* number started */
  unsigned idle;     /* workers that sleep */
  uint64_t alarm;    /* earliest wake-up time of a sleeping worker, or KVS_HOST_NEVER */
  bool stopping;

  uint64_t random; /* deterministic: random state */
  uint64_t trace;  /* deterministic: hash of what has run */
  uint64_t clock;  /* deterministic: virtual time in ns */

  /* constant */
  bool deterministic;
  unsigned max_workers;
  struct kvs_host_memory *memory;
  atomic_int *lost;
};

int kvs_host_queue_init(struct kvs_host_queue *queue, unsigned max_workers, uint64_t seed,
                        struct kvs_host_memory *memory, atomic_int *lost, struct kvs_error *err);
void kvs_host_queue_destroy(struct kvs_host_queue *queue); /* drops queued work */

/* An operation of `units` units, with `behind` bytes for pieces or parameters; NULL: see *err. */
struct kvs_host_op *kvs_host_op_new(enum kvs_host_kind kind, uint64_t units, size_t behind, struct kvs_error *err);
/* Queue the operation and take it over, also on failure. `operation` is the device function's name, for errors. */
int kvs_host_enqueue(struct kvs_host_queue *queue, struct kvs_host_op *op, kvs_stream handle, const char *operation,
                     struct kvs_error *err);

int kvs_host_stream_create(struct kvs_host_queue *queue, int priority, kvs_stream *handle, struct kvs_error *err);
int kvs_host_stream_destroy(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_error *err);
int kvs_host_stream_query(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_error *err);
int kvs_host_stream_info(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_stream_info *info,
                         struct kvs_error *err);
int kvs_host_stream_capture(struct kvs_host_queue *queue, kvs_stream handle, bool begin, struct kvs_error *err);
int kvs_host_stream_wait(struct kvs_host_queue *queue, kvs_stream handle, kvs_event event, struct kvs_error *err);
/* For an event of another host device. */
int kvs_host_stream_wait_foreign(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_host_queue *other,
                                 kvs_event event, struct kvs_error *err);
int kvs_host_synchronize(struct kvs_host_queue *queue, const char *operation, struct kvs_error *err);
int kvs_host_event_create(struct kvs_host_queue *queue, bool timing, kvs_event *event, struct kvs_error *err);
/* Takes over the reference to the words, also on failure. */
int kvs_host_event_adopt(struct kvs_host_queue *queue, struct kvs_host_words *words, kvs_event *event,
                         struct kvs_error *err);
/* The words of an event, with a reference; NULL: the event is not shared, see *err. */
struct kvs_host_words *kvs_host_event_words(struct kvs_host_queue *queue, kvs_event event, struct kvs_error *err);
int kvs_host_event_destroy(struct kvs_host_queue *queue, kvs_event event, struct kvs_error *err);
int kvs_host_event_record(struct kvs_host_queue *queue, kvs_event event, kvs_stream handle, struct kvs_error *err);
int kvs_host_event_query(struct kvs_host_queue *queue, kvs_event event, struct kvs_error *err);
int kvs_host_event_elapsed(struct kvs_host_queue *queue, kvs_event from, kvs_event to, uint64_t *ns,
                           struct kvs_error *err);

/* run.c */
/* Shared by host/queue.c and host/run.c. */
int kvs_host_workers_start_locked(struct kvs_host_queue *queue, struct kvs_error *err);
void kvs_host_workers_stop(struct kvs_host_queue *queue);
/* Runs up to `steps` steps; returns how many. `jump`: if only delays are left, advance the virtual time. */
int64_t kvs_host_steps_locked(struct kvs_host_queue *queue, int64_t steps, bool jump);
uint64_t kvs_host_random_locked(struct kvs_host_queue *queue, uint64_t below);
/* queue.c */
void kvs_host_op_free_locked(struct kvs_host_op *op);
void kvs_host_stream_pop_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream); /* removes the head */
void kvs_host_drop_locked(struct kvs_host_queue *queue); /* device lost: drop all operations that are not running */

#endif
