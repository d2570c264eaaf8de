/* C twins of the kernels: same parameters, same address computation. The caller has checked the memory, and its
 * scheduler implements pace and delay; twins never wait. */
#ifndef KVS_TWINS_H
#define KVS_TWINS_H

#include "kernels.h"

/* Do the work of CTA `cta` of `grid`. CTAs may run in any order and concurrently. DELAY does nothing. */
void kvs_twin_run(enum kvs_kernel kernel, const void *params, unsigned cta, unsigned grid);

struct kvs_piece kvs_twin_unit(const struct kvs_copy_params *params,
                               uint64_t unit); /* COPY, RING and PACK: the piece that a unit moves */

#endif
