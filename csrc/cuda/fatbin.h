/* The compiled kernels, embedded in the library. Without nvcc at build time, nbytes is 0 and archs is "". */
#ifndef KVS_CUDA_FATBIN_H
#define KVS_CUDA_FATBIN_H

#include <stddef.h>

extern const unsigned char kvs_fatbin[];
extern const size_t kvs_fatbin_nbytes;
extern const char kvs_fatbin_archs[]; /* "sm_80 sm_90 compute_80" */

#endif
