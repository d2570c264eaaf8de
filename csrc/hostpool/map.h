/* The memory of a host pool: geometry, limits, pages, NUMA nodes; and notices about them. */
#ifndef KVS_HOSTPOOL_MAP_H
#define KVS_HOSTPOOL_MAP_H

#include "hostpool/state.h"

uint64_t kvs_host_pool_most(const struct kvs_host_pool *);                   /* upper limit of the pool's blocks */
uint64_t kvs_host_pool_units(const struct kvs_host_pool *, uint64_t blocks); /* in one extent */
uint64_t kvs_host_pool_used(const struct kvs_host_pool *, uint64_t blocks);  /* bytes in one extent, in whole pages */
uint64_t kvs_host_pool_room(const struct kvs_host_pool *);          /* address space in bytes, for max_blocks */
void kvs_host_pool_lay_out(struct kvs_host_pool *, enum kvs_pages); /* sets the fields that depend on the page size */

int kvs_host_pool_afford(const struct kvs_host_pool *, uint64_t nbytes, struct kvs_error *); /* checks the budget */
/* Map private memory with the requested pages, or with the next smaller available ones. */
int kvs_host_pool_map(struct kvs_host_pool *, struct kvs_error *);
/* Pages [from, to) of every extent, in bytes: reserve them; bind them to their NUMA nodes. */
int kvs_host_pool_commit(struct kvs_host_pool *, uint64_t from, uint64_t to, struct kvs_error *);
void kvs_host_pool_place(struct kvs_host_pool *, uint64_t from, uint64_t to);

void kvs_host_pool_note(struct kvs_host_pool *, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
