#include "base/thread.h"

#include <signal.h>

int kvs_thread_start(pthread_t *thread, const char *name, void *(*serve)(void *), void *arg) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* inherited by the thread */
  int code = pthread_create(thread, NULL, serve, arg);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!code && name) pthread_setname_np(*thread, name);
  return code;
}
