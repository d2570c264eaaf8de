/* The CUDA device behind device.h, shared by the files of this folder: cuda/device.c (queueing, opening, closing),
 * cuda/memory.c, cuda/kernels.c, cuda/info.c, cuda/range.c, cuda/share.c. */
#ifndef KVS_CUDA_DEVICE_H
#define KVS_CUDA_DEVICE_H

#include "cuda/driver.h"
#include "device/device.h"
#include "device/share.h"

enum { KVS_CUDA_PEERS = 64 };
enum kvs_cuda_peer { KVS_CUDA_PEER_UNKNOWN, KVS_CUDA_PEER_DIRECT, KVS_CUDA_PEER_STAGED };

struct kvs_cuda_device {
  struct kvs_device base;
  const struct kvs_cuda_driver *cu;
  kvs_cu_device handle;
  kvs_cu_context context; /* primary context: retained at open, released at close */
  kvs_cu_module module;   /* NULL: no kernels */
  kvs_cu_function functions[KVS_KERNELS];
  atomic_uchar peers[KVS_CUDA_PEERS]; /* indexed by ordinal: enum kvs_cuda_peer */
  kvs_cu_deviceptr scratch;           /* a word that is 1, from the test of stream memory operations */
};

/* Thread state that a call changes and restores: the current context and the capture mode. */
struct kvs_cuda_scope {
  const struct kvs_cuda_driver *cu;
  struct kvs_cuda_device *device;
  int mode;
};

int kvs_cuda_enter(struct kvs_cuda_scope *scope, struct kvs_device *device, struct kvs_error *err);

/* Restores the thread state. Returns the status of `code`, the result of `operation` inside the scope. */
int kvs_cuda_leave(struct kvs_cuda_scope *scope, int code, const char *operation, struct kvs_error *err);

/* memory.c */
/* Memory: cuda/memory.c */
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

/* Sharing with other processes: cuda/share.c */
extern const struct kvs_share_ops kvs_cuda_share_ops;

/* range.c */
/* Chunks: cuda/range.c */
int kvs_cuda_chunk_granularity(struct kvs_device *, uint64_t *nbytes, struct kvs_error *);
int kvs_cuda_range_reserve(struct kvs_device *, uint64_t nbytes, uint64_t *ptr, struct kvs_error *);
int kvs_cuda_range_free(struct kvs_device *, uint64_t ptr, uint64_t nbytes, struct kvs_error *);
int kvs_cuda_chunk_map(struct kvs_device *, uint64_t at, uint64_t nbytes, int fd, struct kvs_error *);
int kvs_cuda_chunk_unmap(struct kvs_device *, uint64_t at, uint64_t nbytes, struct kvs_error *);
int kvs_cuda_chunk_query(struct kvs_device *, uint64_t address, uint64_t *base, uint64_t *nbytes, struct kvs_error *);
int kvs_cuda_chunk_share(struct kvs_device *, uint64_t address, int *fd, struct kvs_error *);

/* kernels.c */
/* Kernels: cuda/kernels.c. A load failure does not fail the device: info.kernels and info.kernels_note have the result.
 * Call inside a scope. */
void kvs_cuda_kernels_load(struct kvs_cuda_device *);
void kvs_cuda_kernels_unload(struct kvs_cuda_device *);
int kvs_cuda_launch(struct kvs_device *, const struct kvs_launch *, kvs_stream, struct kvs_error *);

/* info.c */
/* Functions that need no context: cuda/info.c. Checks the ordinal (KVS_RANGE). */
int kvs_cuda_device_get(const struct kvs_cuda_driver *cu, int ordinal, kvs_cu_device *handle, struct kvs_error *err);

static inline kvs_cu_stream kvs_cuda_stream(kvs_stream stream) { return (kvs_cu_stream)(uintptr_t)stream; }
static inline kvs_cu_event kvs_cuda_event(kvs_event event) { return (kvs_cu_event)(uintptr_t)event; }
static inline void *kvs_cuda_pointer_of(uint64_t address) { return (void *)(uintptr_t)address; }

#endif
