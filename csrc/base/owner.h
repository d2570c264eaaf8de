/* A process as one tells it from a later one with the same number: by when it started. */
#ifndef KVS_OWNER_H
#define KVS_OWNER_H

#include <stdbool.h>
#include <stdint.h>

struct kvs_owner {
  int64_t pid;    /* 0: not known, and counted as running */
  uint64_t start; /* clock ticks from the machine's start; 0: not known */
};

/* When that process started; 0 where there is none, or it has ended and is only waiting to be reaped. Any thread. */
uint64_t kvs_process_start(int64_t pid);
/* Whether it runs, and started then (0: whenever). Where the kernel does not say when one that is there started, it is
 * taken for it. */
bool kvs_process_alive(int64_t pid, uint64_t start);

struct kvs_owner kvs_owner_self(void);
bool kvs_owner_is_self(const struct kvs_owner *owner);
bool kvs_owner_alive(const struct kvs_owner *owner);

#endif
