/* The monotonic clock, used for all waits, and condition variables on this clock. */
#ifndef KVS_WAIT_H
#define KVS_WAIT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "status.h"

#define KVS_NO_DEADLINE UINT64_MAX

uint64_t kvs_clock_ns(void);
uint64_t kvs_deadline(int64_t timeout_ns);                 /* that far from now; negative: KVS_NO_DEADLINE */
int64_t kvs_time_left(int64_t timeout_ns, uint64_t start); /* of a limit since `start`; of a negative one 0 */

/* Like pthread_cond_init(), for use with kvs_cond_wait(): 0 or an errno. */
int kvs_cond_init(pthread_cond_t *);
/* Call with the lock held. False: the deadline has passed. True: signalled, or a spurious wake-up. */
bool kvs_cond_wait(pthread_cond_t *, pthread_mutex_t *, uint64_t deadline_ns);

/* Poll until poll(arg) is not KVS_NOT_READY, with growing sleeps of at most 500 us. KVS_TIMEOUT after timeout_ns (< 0:
 * never). `stepped`: kvs_device.stepped, no sleeping. */
int kvs_wait_until(int (*poll)(void *arg, struct kvs_error *), void *arg, bool stepped, int64_t timeout_ns,
                   struct kvs_error *err);

/* A thread's interrupt callback, for waits that a caller makes. Such a wait calls it every 50 ms, in this thread and
 * with no lock held. True: the wait ends as if its limit had passed. */
enum { KVS_SLICE_NS = 50 * 1000 * 1000 };
struct kvs_interrupt {
  bool (*call)(void *arg); /* NULL: none */
  void *arg;
};
struct kvs_interrupt kvs_interrupt_set(struct kvs_interrupt); /* returns the one before */
bool kvs_interrupted(void);                                   /* calls it */

/* wait(arg) with a limit, in slices if there is a callback. wait() returns KVS_TIMEOUT where it may be called again. */
typedef int kvs_wait_function(void *arg, int64_t timeout_ns, struct kvs_error *);
int kvs_wait_slices(kvs_wait_function *wait, void *arg, int64_t timeout_ns, struct kvs_error *err);

#endif
