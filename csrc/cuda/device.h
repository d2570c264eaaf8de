/* Opens a GPU. Above the seam, so without types of CUDA. */
#ifndef KVS_CUDA_DEVICE_H
#define KVS_CUDA_DEVICE_H

#include "device/device.h"

int kvs_device_cuda_open(int ordinal, struct kvs_device **, struct kvs_error *);

#endif
