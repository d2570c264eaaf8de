/* Sharing memory and events of a CUDA device. */
#ifndef KVS_CUDA_SHARE_H
#define KVS_CUDA_SHARE_H

#include "device/share.h"

extern const struct kvs_share_ops kvs_cuda_share_ops;

#endif
