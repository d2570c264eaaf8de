/* C twins of the kernels: the same parameters, the same address computation, one CTA a call. */
#ifndef KVS_TWINS_H
#define KVS_TWINS_H

#include "kernels.h"

/* Do what CTA `cta` of `grid` does. CTAs may run in any order and on several threads at once. The caller has checked
 * that the memory is there; DELAY does nothing, and no pace is kept: time belongs to the scheduler of the caller. */
void kvs_twin_run(enum kvs_kernel kernel, const void *params, unsigned cta, unsigned grid);

#endif
