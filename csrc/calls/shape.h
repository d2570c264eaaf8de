/* The shape of a transfer, from which paths predict their times. */
#ifndef KVS_SHAPE_H
#define KVS_SHAPE_H

#include "lanes/work.h"

/* Compute the shape from the rows and the pairs of slots, without rects. Runs of the host's side are counted later,
 * where they matter. `cpu_slots`: the host's slots are below this. */
void kvs_find_shape(struct kvs_work *, uint64_t cpu_slots);

#endif
