/* The end of a process in which clients of Mooncake are open. Its library closes them when the process ends, by a
 * handler of its own, which crashes if a call has not returned, and in the child of a fork(). So the process leaves
 * without that handler then: by _exit(), with its status, after its streams were flushed. Any thread may call. */
#ifndef KVS_REMOTE_EXIT_H
#define KVS_REMOTE_EXIT_H

/* more: 1: a client was opened, whose library has registered its handler; -1: it was closed. */
void kvs_remote_exit_count(int more);

#endif
