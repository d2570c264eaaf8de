/* Pages of host memory: address space, page sizes, NUMA nodes, population. Independent of devices. Addresses and sizes
 * are whole pages unless stated otherwise. */
#ifndef KVS_PAGES_H
#define KVS_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvswap_memory.h"

enum { KVS_NODE_WORDS = 16 }; /* 1024 NUMA nodes */

struct kvs_nodes {
  uint64_t bits[KVS_NODE_WORDS];
  bool interleave; /* interleave over all nodes; otherwise prefer one of them */
};

uint64_t kvs_page_nbytes(enum kvs_pages pages); /* 4 KiB except for hugetlbfs pages */
static inline bool kvs_pages_huge(enum kvs_pages pages) { return pages == KVS_PAGES_2MIB || pages == KVS_PAGES_1GIB; }
bool kvs_pages_transparent(void); /* the kernel provides transparent huge pages on request */

static inline uint64_t kvs_round_up(uint64_t n, uint64_t step) { return (n + step - 1) / step * step; }

/* Reserve address space that reads as zeros and takes memory only when written. Aligned to `align` (a power of two), at
 * least 2 MiB. */
int kvs_pages_reserve(uint64_t nbytes, uint64_t align, uint64_t *base, struct kvs_error *err);
/* Change a part to that kind of pages; huge pages are taken from the system immediately. KVS_NOMEM: none are left, and
 * nothing has changed. */
int kvs_pages_commit(uint64_t base, uint64_t nbytes, enum kvs_pages pages, struct kvs_error *err);
/* Release the memory; the state is as after reserve. */
int kvs_pages_clear(uint64_t base, uint64_t nbytes, struct kvs_error *err);
void kvs_pages_unmap(uint64_t base, uint64_t nbytes);

/* Request pages from these nodes from now on. */
int kvs_pages_bind(uint64_t base, uint64_t nbytes, const struct kvs_nodes *nodes, struct kvs_error *err);
bool kvs_nodes_with_memory(struct kvs_nodes *nodes); /* false: unknown */
int kvs_pages_node(uint64_t address);                /* the node of a populated page; -1: unknown */
void kvs_run_on_node(int node);                      /* bind the calling thread, if any of its CPUs are there */

/* Populate [base, base + nbytes), keeping the contents. KVS_NOMEM: not enough memory. */
int kvs_pages_populate(uint64_t base, uint64_t nbytes, struct kvs_error *err);
bool kvs_pages_can_populate(void);                    /* populate without touching pages */
void kvs_pages_touch(uint64_t base, uint64_t nbytes); /* populate by writing, for kernels before 5.14 */

#endif
