#include "base/wait.h"

#include <sys/prctl.h>
#include <time.h>

uint64_t kvs_clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t kvs_deadline(int64_t timeout_ns) {
  return timeout_ns < 0 ? KVS_NO_DEADLINE : kvs_clock_ns() + (uint64_t)timeout_ns;
}

int64_t kvs_time_left(int64_t timeout_ns, uint64_t start) {
  uint64_t waited = kvs_clock_ns() - start;
  return timeout_ns > 0 && waited < (uint64_t)timeout_ns ? timeout_ns - (int64_t)waited : 0;
}

int kvs_cond_init(pthread_cond_t *cond) {
  pthread_condattr_t monotonic;
  int code = pthread_condattr_init(&monotonic);
  if (code) return code;
  code = pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  if (!code) code = pthread_cond_init(cond, &monotonic);
  pthread_condattr_destroy(&monotonic);
  return code;
}

bool kvs_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns) {
  struct timespec at = {(time_t)(deadline_ns / 1000000000u), (long)(deadline_ns % 1000000000u)};
  if (deadline_ns == KVS_NO_DEADLINE) return pthread_cond_wait(cond, lock) == 0;
  return pthread_cond_timedwait(cond, lock, &at) == 0;
}

/* -- polling ------------------------------------------------------------------------------------------------------- */

/* A poll costs a microsecond, a sleep tens of them: short waits spin; longer waits end at most 1 % late. */
#define SPIN_NS 300000u
enum { LATE_SHARE = 100, SLEEP_TO_NS = 500000 };

/* Sleeps with the smallest timer slack, and restores the thread's slack. */
static void nap(uint64_t ns) {
  int slack = prctl(PR_GET_TIMERSLACK);
  (void)prctl(PR_SET_TIMERSLACK, 1ul);
  nanosleep(&(struct timespec){.tv_nsec = (long)ns}, NULL);
  if (slack > 0) (void)prctl(PR_SET_TIMERSLACK, (unsigned long)slack);
}

int kvs_wait_until(int (*poll)(void *arg, struct kvs_error *), void *arg, bool stepped, int64_t timeout_ns,
                   struct kvs_error *err) {
  uint64_t start = kvs_clock_ns();
  for (;;) {
    int status = poll(arg, err);
    if (status != KVS_NOT_READY) return status;
    uint64_t waited = kvs_clock_ns() - start, pause = waited / LATE_SHARE;
    if (timeout_ns >= 0 && waited >= (uint64_t)timeout_ns)
      return kvs_fail(err, KVS_TIMEOUT, "not finished after %.3f s", (double)timeout_ns / 1e9);
    if (stepped || waited < SPIN_NS) continue;
    if (timeout_ns >= 0 && pause > (uint64_t)timeout_ns - waited) pause = (uint64_t)timeout_ns - waited;
    nap(pause < SLEEP_TO_NS ? pause : SLEEP_TO_NS);
  }
}

/* -- interrupts ---------------------------------------------------------------------------------------------------- */

static _Thread_local struct kvs_interrupt interrupt;

struct kvs_interrupt kvs_interrupt_set(struct kvs_interrupt next) {
  struct kvs_interrupt before = interrupt;
  interrupt = next;
  return before;
}

bool kvs_interrupted(void) { return interrupt.call && interrupt.call(interrupt.arg); }

int kvs_wait_slices(kvs_wait_function *wait, void *arg, int64_t timeout_ns, struct kvs_error *err) {
  uint64_t start = kvs_clock_ns();
  for (;;) {
    int64_t left = timeout_ns < 0 ? -1 : kvs_time_left(timeout_ns, start);
    bool last = !interrupt.call || (left >= 0 && left <= KVS_SLICE_NS);
    struct kvs_interrupt here = kvs_interrupt_set((struct kvs_interrupt){NULL, NULL});
    int status = wait(arg, last ? left : KVS_SLICE_NS, err); /* what waits inside has this slice for its limit */
    (void)kvs_interrupt_set(here);
    if (status != KVS_TIMEOUT || last || kvs_interrupted()) return status;
  }
}
