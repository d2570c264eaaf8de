/* Threads of kvswap. */
#ifndef KVS_THREAD_H
#define KVS_THREAD_H

#include <pthread.h>

/* Start a thread: 0 or an errno. All signals are blocked in it, so that the program's signal handlers run on the
 * program's threads. name: at most 15 bytes, shown by ps and debuggers; NULL: the program's name. */
int kvs_thread_start(pthread_t *thread, const char *name, void *(*serve)(void *), void *arg);

#endif
