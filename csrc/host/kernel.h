/* Checks of what a kernel of the host device reads and writes, before it runs. */
#ifndef KVS_HOST_KERNEL_H
#define KVS_HOST_KERNEL_H

#include "host/ops.h"

/* Size of a kernel's parameters; 0: no such kernel. */
size_t kvs_host_kernel_params_nbytes(enum kvs_kernel kernel);

/* False: the kernel would access unmapped memory, which on a GPU is an asynchronous fault; here there is no crash. Sets
 * op->pace_ns, and op->units if the units are not CTAs. Call when the kernel runs, not when it is queued: the function
 * reads the kernel's tables. */
bool kvs_host_kernel_prepare(struct kvs_host_memory *memory, struct kvs_host_op *op);

#endif
