/* Ranges of chunks on a host device: the functions of device/share.h. */
#ifndef KVS_HOST_RANGE_H
#define KVS_HOST_RANGE_H

#include "host/memory.h"

int kvs_host_range_reserve(struct kvs_host_memory *memory, uint64_t nbytes, uint64_t *ptr, struct kvs_error *err);
int kvs_host_range_free(struct kvs_host_memory *memory, uint64_t ptr, uint64_t nbytes, struct kvs_error *err);
int kvs_host_chunk_map(struct kvs_host_memory *memory, uint64_t at, uint64_t nbytes, int fd, struct kvs_error *err);
int kvs_host_chunk_unmap(struct kvs_host_memory *memory, uint64_t at, uint64_t nbytes, struct kvs_error *err);
int kvs_host_chunk_query(struct kvs_host_memory *memory, uint64_t address, uint64_t *base, uint64_t *nbytes,
                         struct kvs_error *err);
int kvs_host_chunk_share(struct kvs_host_memory *memory, uint64_t address, int *fd, struct kvs_error *err);
void kvs_host_chunks_destroy(struct kvs_host_memory *memory);

#endif
