/* C twins of the kernels: the same parameters, the same address computation. The caller has checked that the memory is
 * there, and its scheduler keeps the time: no twin waits, and none keeps a pace. */
#ifndef KVS_TWINS_H
#define KVS_TWINS_H

#include <stdbool.h>

#include "kernels.h"

/* Do what CTA `cta` of `grid` does. CTAs may run in any order and on several threads at once. DELAY does nothing, and
 * RELAY neither: that is run by fillings. */
void kvs_twin_run(enum kvs_kernel kernel, const void *params, unsigned cta, unsigned grid);

void kvs_twin_crc(const struct kvs_crc_params *params, unsigned cta); /* a CTA's share, as kvs_twin_run() */

/* COPY and RING: what unit `unit` moves, and whether they move anything at all. */
struct kvs_piece kvs_twin_unit(const struct kvs_copy_params *params, uint64_t unit);
bool kvs_twin_copies(const struct kvs_copy_params *params);

/* RELAY, where one call does the part of all its warps. Units of a segment: how many, and what one moves between its
 * place and a slot that begins at `slot`. */
struct kvs_segment kvs_twin_segment(const struct kvs_relay_params *params, uint64_t index);
uint64_t kvs_twin_segment_units(const struct kvs_relay_params *params, const struct kvs_segment *segment);
struct kvs_piece kvs_twin_segment_unit(const struct kvs_relay_params *params, const struct kvs_segment *segment,
                                       uint64_t slot, uint64_t unit);
uint64_t kvs_twin_slot(const struct kvs_relay_params *params, uint64_t filling); /* where its slot begins */

bool kvs_twin_relay_told(const struct kvs_relay_params *params);                  /* to give up */
bool kvs_twin_relay_may(const struct kvs_relay_params *params, uint64_t filling); /* does its flag say so? */
/* Copy a filling, whose first segment is `segment`, and add `warps` to its flag. */
void kvs_twin_relay_fill(const struct kvs_relay_params *params, uint64_t filling, uint64_t segment, uint32_t warps);
void kvs_twin_relay_release(const struct kvs_relay_params *params); /* give up */

#endif
