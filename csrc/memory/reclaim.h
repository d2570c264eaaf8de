/* Reclaiming memory, registrations and mappings that the device may still use. For the core's own files only.
 *
 * The driver's free calls wait without a limit for all work on the device. So no caller makes them: a thread of the
 * engine does, which exists while there are tasks, and a caller waits for its task with its own limit.
 *
 *   WAITING    until the work queued on the device has ended; the caller can still withdraw the task
 *   RUNNING    the thread is in the task's function, which cannot be stopped
 *   ENDED      with a status
 *
 * WAITING -> RUNNING -> ENDED, and RUNNING -> WAITING if the function returns KVS_TIMEOUT (still in use): moved by the
 * engine's thread, under reclaims.lock. A deterministic device has no thread, since its work runs only inside calls: a
 * task is tried by the call that makes it, and again by the call that waits for it. */
#ifndef KVS_RECLAIM_H
#define KVS_RECLAIM_H

#include <stdbool.h>
#include <stdint.h>

#include "kvswap.h"

struct kvs_reclaim;
struct kvs_reclaims; /* lanes/state.h */

void kvs_reclaims_init(struct kvs_reclaims *);
void kvs_reclaims_destroy(struct kvs_reclaims *); /* drops all tasks: the driver frees their memory with the device */

/* Frees `what`. Must not wait. KVS_TIMEOUT: `what` is still in use. */
typedef int kvs_reclaim_function(struct kvs_engine *, void *what, struct kvs_error *);

/* Start a task, or join one whose result was kept for this caller. End with kvs_reclaim_leave(). */
int kvs_reclaim_start(struct kvs_engine *, kvs_reclaim_function *, void *what, struct kvs_reclaim **,
                      struct kvs_error *);
/* The task's status, or why the device could not be synchronized. KVS_TIMEOUT: the task continues. timeout_ns < 0: no
 * limit. */
int kvs_reclaim_wait(struct kvs_reclaim *, int64_t timeout_ns, struct kvs_error *);
enum kvs_leave {
  KVS_LEAVE_WITHDRAW, /* a task whose function has not begun is dropped */
  KVS_LEAVE_RESULT, /* the same; if the function has begun, the status is kept for the next start or forget of the same
                       task */
  KVS_LEAVE_DROP,   /* as KVS_LEAVE_WITHDRAW; if the function has begun, and finds `what` in use, it is not retried */
  KVS_LEAVE_ALONE,  /* the task continues without a caller */
};
/* True: the task was withdrawn, and nothing has changed. */
bool kvs_reclaim_leave(struct kvs_reclaim *, enum kvs_leave);
bool kvs_reclaim_left(struct kvs_engine *, kvs_reclaim_function *,
                      void *what); /* a result of KVS_LEAVE_RESULT exists */
/* Drop a kept result that no caller will ask for. */
void kvs_reclaim_forget(struct kvs_engine *, kvs_reclaim_function *, void *what);

/* Start a task and leave it alone, for destructors. Never waits. Does nothing in the child of a fork or after
 * kvs_shutdown(). Without memory for a task, the memory is freed when the device is closed. */
void kvs_reclaim_later(struct kvs_engine *, kvs_reclaim_function *, void *what);

/* Retry pending tasks on a deterministic device, or where no thread could be started. */
void kvs_reclaim_retry(struct kvs_engine *);
/* Wait until all tasks have ended; after kvs_shutdown() for those that run or have a caller, and for the thread, which
 * then makes no more calls. False: some go on, or no thread could be started, which is not waited for. */
bool kvs_reclaim_drain(struct kvs_engine *, int64_t timeout_ns);
bool kvs_reclaim_pending(struct kvs_engine *);
/* The same, and a thread runs them: it is worth to wait. */
bool kvs_reclaim_goes_on(struct kvs_engine *);

#endif
