/* C twins of the kernels: the same parameters, the same address computation. The caller has checked that the memory is
 * there, and its scheduler keeps the time: no twin waits, and none keeps a pace. */
#ifndef KVS_TWINS_H
#define KVS_TWINS_H

#include "kernels.h"

/* Do what CTA `cta` of `grid` does. CTAs may run in any order and on several threads at once. DELAY does nothing. */
void kvs_twin_run(enum kvs_kernel kernel, const void *params, unsigned cta, unsigned grid);

void kvs_twin_crc(const struct kvs_crc_params *params, unsigned cta); /* a CTA's share, as kvs_twin_run() */

struct kvs_piece kvs_twin_unit(const struct kvs_copy_params *params,
                               uint64_t unit); /* COPY, RING and PACK: what it moves */

#endif
