/* Chunks of a CUDA device: the functions of device/share.h. */
#ifndef KVS_CUDA_RANGE_H
#define KVS_CUDA_RANGE_H

#include "cuda/scope.h"

int kvs_cuda_chunk_granularity(struct kvs_device *, uint64_t *nbytes, struct kvs_error *);
int kvs_cuda_range_reserve(struct kvs_device *, uint64_t nbytes, uint64_t *ptr, struct kvs_error *);
int kvs_cuda_range_free(struct kvs_device *, uint64_t ptr, uint64_t nbytes, struct kvs_error *);
int kvs_cuda_chunk_map(struct kvs_device *, uint64_t at, uint64_t nbytes, int fd, struct kvs_error *);
int kvs_cuda_chunk_unmap(struct kvs_device *, uint64_t at, uint64_t nbytes, struct kvs_error *);
int kvs_cuda_chunk_query(struct kvs_device *, uint64_t address, uint64_t *base, uint64_t *nbytes, struct kvs_error *);
int kvs_cuda_chunk_share(struct kvs_device *, uint64_t address, int *fd, struct kvs_error *);

#endif
