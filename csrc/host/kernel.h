/* What a kernel of the host device reads and writes, checked before it runs. */
#ifndef KVS_HOST_KERNEL_H
#define KVS_HOST_KERNEL_H

#include "host/queue.h"

/* How large the parameters of a kernel are; 0 for one that does not exist. */
size_t kvs_host_kernel_params_nbytes(enum kvs_kernel kernel);

/* False if the kernel would touch memory that is not there: on a device an asynchronous fault, here one without a
 * crash. Sets op->pace_ns, and op->units where they are not the CTAs. Reads the kernel's tables: to be called when the
 * kernel runs, not when it is queued. */
bool kvs_host_kernel_prepare(struct kvs_host_memory *memory, struct kvs_host_op *op);

#endif
