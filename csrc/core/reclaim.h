/* Giving back what the device may still use: memory, registrations, mappings. For the core's own files only.
 *
 * A driver's free waits, without a limit, for what runs on the device. So no caller makes that call: a thread of the
 * engine does, which exists while there are tasks, and a caller waits for its task as long as it likes.
 *
 *   WAITING    until what was queued on the device has ended. Its caller can still withdraw the task
 *   RUNNING    the thread is in the task's function, which cannot be called back
 *   ENDED      with a status
 *
 * WAITING -> RUNNING -> ENDED, and RUNNING -> WAITING if the function answers KVS_TIMEOUT (something uses it still):
 * the engine's thread, under reclaims.lock. A deterministic device has no thread: its work runs only inside calls, so
 * a task is tried where it is made. */
#ifndef KVS_RECLAIM_H
#define KVS_RECLAIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "kvswap.h"

struct kvs_reclaim;

struct kvs_reclaims {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct kvs_reclaim *first; /* guarded by lock: all tasks that have not ended, and results that were left (below) */
  bool threaded;             /* guarded by lock: the thread is there */
};

void kvs_reclaims_init(struct kvs_reclaims *);
void kvs_reclaims_destroy(struct kvs_reclaims *); /* forgets tasks: what they stand for goes with the device */

/* What gives `what` back. It must not wait: KVS_TIMEOUT if something uses it still. */
typedef int kvs_reclaim_function(struct kvs_engine *, void *what, struct kvs_error *);

/* Start a task, or join the one that the same caller left behind. Ends with leave. */
int kvs_reclaim_start(struct kvs_engine *, kvs_reclaim_function *, void *what, struct kvs_reclaim **,
                      struct kvs_error *);
/* The task's status, or why the device could not be waited for; KVS_TIMEOUT: it goes on. timeout_ns < 0: no limit. */
int kvs_reclaim_wait(struct kvs_reclaim *, int64_t timeout_ns, struct kvs_error *);
enum kvs_leave {
  KVS_LEAVE_WITHDRAW, /* if its function has not begun, it never does */
  KVS_LEAVE_RESULT,   /* the same; if it has begun, its status is kept for the next start or forget of the same */
  KVS_LEAVE_ALONE,    /* it is done in any case, without the caller */
};
/* True: it was withdrawn, and nothing has changed. */
bool kvs_reclaim_leave(struct kvs_reclaim *, enum kvs_leave);
bool kvs_reclaim_left(struct kvs_engine *, kvs_reclaim_function *, void *what); /* there is one with KVS_LEAVE_RESULT */
/* Results that were left and that nobody will ask for. */
void kvs_reclaim_forget(struct kvs_engine *, kvs_reclaim_function *, void *what);

/* Start and leave alone: for destructors. Never waits; nothing is done in the child of a fork, or after kvs_shutdown().
 * Without memory for a task nothing is given back before the device is closed. */
void kvs_reclaim_later(struct kvs_engine *, kvs_reclaim_function *, void *what);

/* Try again what is left on a deterministic device, or where no thread could be started. */
void kvs_reclaim_retry(struct kvs_engine *);
/* Wait until all tasks have ended, or after kvs_shutdown() all that run: false if some go on. */
bool kvs_reclaim_drain(struct kvs_engine *, int64_t timeout_ns);
bool kvs_reclaim_pending(struct kvs_engine *);

#endif
