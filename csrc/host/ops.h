/* The streams, events and operations of a host device, and what is done to them under the queue's lock. queue.c is the
 * callers' side, run.c executes. */
#ifndef KVS_HOST_OPS_H
#define KVS_HOST_OPS_H

#include <pthread.h>

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
  bool manual;     /* deterministic: calls run nothing; a test chooses each step */

  /* constant */
  bool deterministic;
  unsigned max_workers;
  struct kvs_host_memory *memory;
  atomic_int *lost;
};

/* An operation of `units` units, with `behind` bytes for pieces or parameters; NULL: see *err. */
struct kvs_host_op *kvs_host_op_new(enum kvs_host_kind kind, uint64_t units, size_t behind, struct kvs_error *err);
void kvs_host_mark_unref(struct kvs_host_mark *mark); /* NULL: no effect */
void kvs_host_op_free_locked(struct kvs_host_op *op);
uint64_t kvs_host_oldest_locked(const struct kvs_host_queue *queue); /* `seq` of the oldest unfinished operation */
void kvs_host_stream_push_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream, struct kvs_host_op *op);
void kvs_host_stream_pop_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream); /* removes the head */
void kvs_host_drop_locked(struct kvs_host_queue *queue); /* device lost: drop all operations that are not running */

#endif
