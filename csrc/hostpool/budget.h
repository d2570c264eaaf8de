/* How much memory the machine and its control groups permit this process to use. Reads kernel files; allocates nothing,
 * uses no device and no lock. */
#ifndef KVS_BUDGET_H
#define KVS_BUDGET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

struct kvs_budget {
  uint64_t available;     /* bytes available without swapping; UINT64_MAX: unknown */
  uint64_t total;         /* of the machine; UINT64_MAX: unknown */
  uint64_t group_max;     /* limit of the tightest control group; UINT64_MAX: none */
  uint64_t group_used;    /* usage of that group, without reclaimable page cache */
  char group[256];        /* the group's folder */
  const char *group_knob; /* name of the limit's file */
  uint64_t memlock;       /* RLIMIT_MEMLOCK; UINT64_MAX: unlimited, or CAP_IPC_LOCK */
};

/* `root` is prepended to every path: "" for this machine, another tree in tests. Limits that cannot be read do not
 * apply. */
void kvs_budget_read(const char *root, struct kvs_budget *budget);

/* The default reserve: bytes that must stay free. */
int64_t kvs_budget_reserve(const struct kvs_budget *budget);

/* Check that nbytes more fit with `reserve` bytes left free; a negative reserve permits overcommit by that amount.
 * KVS_NOMEM: the message says what to change. */
int kvs_budget_check(const struct kvs_budget *budget, uint64_t nbytes, int64_t reserve, struct kvs_error *err);

/* Free memory of a NUMA node; UINT64_MAX: unknown. */
uint64_t kvs_budget_node(const char *root, int node);

/* Parse a kernel list ("0-3,8") into bits; returns the number of bits set. */
size_t kvs_budget_list(const char *text, uint64_t *bits, size_t words);

#endif
