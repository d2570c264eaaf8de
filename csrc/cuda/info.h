/* The GPUs of this process, without creating a context. Above the seam, so without types of CUDA. */
#ifndef KVS_CUDA_INFO_H
#define KVS_CUDA_INFO_H

#include "device/device.h"

int kvs_cuda_count(int *count, struct kvs_error *); /* 0 and a reason in err->message without a driver */
int kvs_cuda_info(int ordinal, struct kvs_device_info *, struct kvs_error *);
/* Whether the GPU can map memory of the other one. Opens no context. */
int kvs_cuda_can_reach(int ordinal, int other, bool *can, struct kvs_error *);
int kvs_cuda_pointer_device(uint64_t ptr, int *ordinal, struct kvs_error *); /* KVS_INVALID: it belongs to none */
int kvs_cuda_current(int *ordinal, struct kvs_error *); /* the calling thread's current device, else 0 */

#endif
