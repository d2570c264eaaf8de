#include "base/wait.h"

#include <time.h>

uint64_t kvs_clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t kvs_deadline(int64_t timeout_ns) {
  return timeout_ns < 0 ? KVS_NO_DEADLINE : kvs_clock_ns() + (uint64_t)timeout_ns;
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
