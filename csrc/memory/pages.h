/* Pages of host memory, as the operating system gives them: address space, kinds of pages, NUMA nodes, population.
 * Knows no device. Addresses and sizes are whole pages unless it says otherwise. */
#ifndef KVS_PAGES_H
#define KVS_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvswap_memory.h"

enum { KVS_NODE_WORDS = 16 }; /* 1024 NUMA nodes */

struct kvs_nodes {
  uint64_t bits[KVS_NODE_WORDS];
  bool interleave; /* over all of them; else each page on one of them, if there is room, or elsewhere */
};

uint64_t kvs_page_nbytes(enum kvs_pages pages); /* 4 KiB where pages are not of huge page file systems */
const char *kvs_pages_name(enum kvs_pages pages);
static inline bool kvs_pages_huge(enum kvs_pages pages) { return pages == KVS_PAGES_2MIB || pages == KVS_PAGES_1GIB; }
bool kvs_pages_transparent(void); /* whether the kernel gives huge pages to who asks */

static inline uint64_t kvs_round_up(uint64_t n, uint64_t step) { return (n + step - 1) / step * step; }

/* Address space that reads as zeros and costs nothing until it is written. Aligned to `align` (a power of two), 2 MiB
 * at least. */
int kvs_pages_reserve(uint64_t nbytes, uint64_t align, uint64_t *base, struct kvs_error *err);
/* Make a part of it be of that kind of pages; huge pages are taken from the system at once. KVS_NOMEM: there are none;
 * it is as it was then. */
int kvs_pages_commit(uint64_t base, uint64_t nbytes, enum kvs_pages pages, struct kvs_error *err);
/* Give the memory behind it back; it is as after reserve. */
int kvs_pages_clear(uint64_t base, uint64_t nbytes, struct kvs_error *err);
void kvs_pages_unmap(uint64_t base, uint64_t nbytes);

/* Ask for pages on these nodes from now on. */
int kvs_pages_bind(uint64_t base, uint64_t nbytes, const struct kvs_nodes *nodes, struct kvs_error *err);
bool kvs_nodes_with_memory(struct kvs_nodes *nodes); /* false: the kernel does not say */
int kvs_pages_node(uint64_t address);                /* the node of a page that is there; -1: unknown */
void kvs_run_on_node(int node);                      /* the calling thread, if any of its processors are there */

/* Have pages behind [base, base + nbytes), contents kept. KVS_NOMEM: there are none. */
int kvs_pages_populate(uint64_t base, uint64_t nbytes, struct kvs_error *err);
bool kvs_pages_can_populate(void);                    /* without touching */
void kvs_pages_touch(uint64_t base, uint64_t nbytes); /* the same by writing to each, for kernels before 5.14 */

#endif
