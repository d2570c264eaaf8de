/* The kernels of a CUDA device. */
#ifndef KVS_CUDA_KERNELS_H
#define KVS_CUDA_KERNELS_H

#include "cuda/scope.h"

/* A load failure does not fail the device: info.kernels and info.kernels_note have the result.
 * Call inside a scope. */
void kvs_cuda_kernels_load(struct kvs_cuda_device *);
void kvs_cuda_kernels_unload(struct kvs_cuda_device *);
int kvs_cuda_launch(struct kvs_device *, const struct kvs_launch *, kvs_stream, struct kvs_error *);

#endif
