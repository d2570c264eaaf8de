#include "base/fork.h"

#include "base/wait.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvs_fork_guard *newest;               /* guarded by lock */
static _Thread_local struct kvs_fork_guard *forked; /* the newest guard whose lock this thread's fork() takes */
static unsigned generation;                         /* written only in a child, where one thread exists */

/* This file's lock comes last: a guard may be added while another lock is held. */
static void before(void) {
  pthread_mutex_lock(&lock);
  forked = newest;
  pthread_mutex_unlock(&lock);
  for (struct kvs_fork_guard *guard = forked; guard; guard = guard->next)
    if (guard->hold) pthread_mutex_lock(guard->lock);
  pthread_mutex_lock(&lock);
}

static void in_parent(void) {
  pthread_mutex_unlock(&lock);
  for (struct kvs_fork_guard *guard = forked; guard; guard = guard->next)
    if (guard->hold) pthread_mutex_unlock(guard->lock);
}

static void in_child(void) {
  bool held = false; /* not those that were added after before() had looked */
  generation++;
  pthread_mutex_unlock(&lock);
  for (struct kvs_fork_guard *guard = newest; guard; guard = guard->next) {
    held |= guard == forked;
    if (guard->cond) (void)kvs_cond_init(guard->cond);
    if (guard->in_child) guard->in_child();
    if (guard->hold && held)
      pthread_mutex_unlock(guard->lock);
    else if (guard->lock)
      pthread_mutex_init(guard->lock, NULL);
  }
}

static void watch(void) { pthread_atfork(before, in_parent, in_child); }

static void watch_once(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, watch);
}

void kvs_fork_watch(struct kvs_fork_guard *guard) {
  if (atomic_load(&guard->watched)) return;
  watch_once();
  pthread_mutex_lock(&lock);
  if (!atomic_load(&guard->watched)) {
    if (guard->cond) (void)kvs_cond_init(guard->cond);
    guard->next = newest;
    newest = guard;
    atomic_store(&guard->watched, true);
  }
  pthread_mutex_unlock(&lock);
}

unsigned kvs_fork_generation(void) {
  watch_once();
  return generation;
}
