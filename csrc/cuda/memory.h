/* Memory of a CUDA device: the functions of device.h, and what the driver knows of an address. */
#ifndef KVS_CUDA_MEMORY_H
#define KVS_CUDA_MEMORY_H

#include "cuda/scope.h"

int kvs_cuda_alloc(struct kvs_device *, size_t nbytes, uint64_t *ptr, struct kvs_error *);
int kvs_cuda_free(struct kvs_device *, uint64_t ptr, struct kvs_error *);
int kvs_cuda_host_alloc(struct kvs_device *, size_t nbytes, uint64_t *ptr, struct kvs_error *);
int kvs_cuda_host_free(struct kvs_device *, uint64_t ptr, struct kvs_error *);
int kvs_cuda_host_register(struct kvs_device *, uint64_t ptr, size_t nbytes, struct kvs_error *);
int kvs_cuda_host_unregister(struct kvs_device *, uint64_t ptr, struct kvs_error *);
int kvs_cuda_pointer_query(struct kvs_device *, uint64_t ptr, struct kvs_region *, struct kvs_error *);

/* All pointer attributes, by one call in the current context. `known` is false for memory that CUDA neither allocated
 * nor registered; the rest is then zero. */
struct kvs_cuda_pointer {
  bool known, managed;
  int memory;  /* KVS_CU_MEMORY_HOST or _DEVICE */
  int ordinal; /* -1: none */
  uint64_t base, nbytes, device_pointer, buffer_id;
};
int kvs_cuda_pointer_attributes(const struct kvs_cuda_driver *cu, uint64_t ptr, struct kvs_cuda_pointer *pointer);

#endif
