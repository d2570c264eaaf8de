/* What fork() does with the process's own locks and lists: one guard a file that has any. */
#ifndef KVS_FORK_H
#define KVS_FORK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* Another thread may hold a lock at fork(), and does not exist in the child. So the child gets a new lock, and in_child
 * empties what it guarded; or fork() itself takes the lock (`hold`), so that in_child finds what it guards complete. A
 * lock that fork() takes must not be held while another such lock is taken. */
struct kvs_fork_guard {
  pthread_mutex_t *lock; /* or NULL: in_child renews what it has */
  pthread_cond_t *cond;  /* or NULL: made ready for kvs_cond_wait() by kvs_fork_watch(), and again in the child */
  bool hold;
  void (*in_child)(void); /* or NULL */
  atomic_bool watched;    /* this and next: kvs_fork_watch() only */
  struct kvs_fork_guard *next;
};

/* Call before the lock is taken for the first time; later calls do nothing. The guard stays for ever. */
void kvs_fork_watch(struct kvs_fork_guard *);

unsigned kvs_fork_generation(void); /* another number in a forked child than in its parent */

#endif
