/* Threads of kvswap's own. */
#ifndef KVS_THREAD_H
#define KVS_THREAD_H

#include <pthread.h>

/* Start one: 0, or an errno. It takes no signals, which are for the threads of the program: handlers must not run on
 * ours. name: at most 15 bytes, for those who look at the process; NULL: the program's. */
int kvs_thread_start(pthread_t *thread, const char *name, void *(*serve)(void *), void *arg);

#endif
