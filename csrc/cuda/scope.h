/* The struct of a CUDA device, and the scope of every driver call: enter (make the device's primary context current and
 * relax the thread's capture mode), one driver call, leave (restore both and translate the code to a status). So any
 * thread may call, whatever context is current, and a graph capture elsewhere in the process stays valid. */
#ifndef KVS_CUDA_SCOPE_H
#define KVS_CUDA_SCOPE_H

#include "cuda/driver.h"
#include "device/device.h"

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

/* Checks the ordinal (KVS_UNSUPPORTED). Needs no context. */
int kvs_cuda_device_get(const struct kvs_cuda_driver *cu, int ordinal, kvs_cu_device *handle, struct kvs_error *err);

static inline kvs_cu_stream kvs_cuda_stream(kvs_stream stream) { return (kvs_cu_stream)(uintptr_t)stream; }
static inline kvs_cu_event kvs_cuda_event(kvs_event event) { return (kvs_cu_event)(uintptr_t)event; }
static inline void *kvs_cuda_pointer_of(uint64_t address) { return (void *)(uintptr_t)address; }

#endif
