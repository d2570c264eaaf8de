/* How much memory the machine and its control groups let this process have. Reads files of the kernel and decides;
 * nothing is allocated, no device, no lock. */
#ifndef KVS_BUDGET_H
#define KVS_BUDGET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

struct kvs_budget {
  uint64_t available;     /* bytes that the kernel could give without swapping; UINT64_MAX: it does not say */
  uint64_t total;         /* of the machine; UINT64_MAX */
  uint64_t group_max;     /* of the tightest control group; UINT64_MAX: none limits */
  uint64_t group_used;    /* of that, without what could be dropped */
  char group[256];        /* its folder */
  const char *group_knob; /* the file in it that sets the limit */
  uint64_t memlock;       /* RLIMIT_MEMLOCK; UINT64_MAX: none, or this process may lock what it likes */
};

/* `root` is put before every path: "" for this machine, another tree in tests. What cannot be read limits nothing. */
void kvs_budget_read(const char *root, struct kvs_budget *budget);

/* Bytes that stay free where the caller names none. */
int64_t kvs_budget_reserve(const struct kvs_budget *budget);

/* Whether nbytes more fit, with `reserve` bytes staying free; a negative reserve counts on so many bytes more than are
 * free now. KVS_NOMEM, and the message says what to change. */
int kvs_budget_check(const struct kvs_budget *budget, uint64_t nbytes, int64_t reserve, struct kvs_error *err);

/* Free memory of a NUMA node, UINT64_MAX where the kernel does not say. */
uint64_t kvs_budget_node(const char *root, int node);

/* A list as the kernel writes them ("0-3,8") as bits; returns how many are set. */
size_t kvs_budget_list(const char *text, uint64_t *bits, size_t words);

#endif
