/* Swaps of tensors' blocks: the calls of kvswap.h, and what offload jobs and moves share with them. */
#ifndef KVS_SWAP_H
#define KVS_SWAP_H

#include "lanes/work.h"

int kvs_cache_plan(const void *call, enum kvs_form, struct kvs_scratch *, struct kvs_error *);
/* Find the regions and the shape of a checked call. The work has its slots already. */
int kvs_cache_prepare(struct kvs_engine *, struct kvs_work *, const struct kvs_cache_call *, const struct kvs_options *,
                      struct kvs_error *);
/* Check options->device_ids (not NULL) and find their memory: they are as many as `count` on the other side. */
int kvs_check_device_ids(struct kvs_engine *, struct kvs_scratch *, const struct kvs_options *, const char *name,
                         const char *other, size_t count, struct kvs_error *);
int kvs_check_layer_options(const struct kvs_options *, size_t nlayers, struct kvs_error *);
bool kvs_wants_layers(const struct kvs_options *);
bool kvs_may_cross_seams(const struct kvs_regions *);
enum kvs_direction kvs_direction_of(const struct kvs_region *src, const struct kvs_region *dst);
const char *kvs_direction_text(enum kvs_direction); /* "device to host" */

#endif
