/* Marks functions that C and CUDA C++ compile from the same text, so that host devices and GPUs agree bit for bit. */
#ifndef KVS_CODECS_BOTH_H
#define KVS_CODECS_BOTH_H

#include <stdint.h>

#if defined(__CUDACC__)
#define KVS_BOTH __host__ __device__ static __forceinline__
#else
#define KVS_BOTH static inline
#endif

#endif
