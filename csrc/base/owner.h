/* Process identity: pid and start time, since pids are reused. */
#ifndef KVS_OWNER_H
#define KVS_OWNER_H

#include <stdbool.h>
#include <stdint.h>

struct kvs_owner {
  int64_t pid;    /* 0: unknown, counts as alive */
  uint64_t start; /* clock ticks since boot; 0: unknown */
};

/* Start time of a process; 0: no such process, or a zombie. Any thread. */
uint64_t kvs_process_start(int64_t pid);
/* Whether the process is alive and has that start time (0: any). If the start time of an existing process cannot be
 * read, the process counts as the same. */
bool kvs_process_alive(int64_t pid, uint64_t start);

struct kvs_owner kvs_owner_self(void);
bool kvs_owner_is_self(const struct kvs_owner *owner);
bool kvs_owner_alive(const struct kvs_owner *owner);

#endif
