/* Offloading in vLLM's sense: a cache of several tensors and groups of layers, whose blocks go to host chunks of
 * several blocks each. Part of kvswap.h (which includes this file). */
#ifndef KVSWAP_OFFLOAD_H
#define KVSWAP_OFFLOAD_H

#include "kvswap.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor on both sides. GPU block b lies at gpu + b * gpu_stride. A host chunk holds `factor` blocks: block j of
 * chunk c is the cpu_page bytes at cpu + c * cpu_stride + j * cpu_pitch. cpu_pitch is cpu_page if a tensor's blocks of
 * a chunk are adjacent, and larger if all tensors of a block are adjacent. */
struct kvs_offload_tensor {
  uint64_t gpu, gpu_blocks, gpu_stride, gpu_page;
  uint64_t cpu, cpu_stride, cpu_page, cpu_pitch;
};

/* The part of each block that a group moves: `count` fragments of nbytes bytes; offsets count within the block's own
 * bytes on each side. If `writers` ranks hold the same bytes, this rank stores the host blocks (chunk * factor + j)
 * that leave remainder `writer` modulo `writers`, and loads all blocks. */
struct kvs_offload_part {
  uint32_t group, tensor;
  uint64_t gpu_offset, cpu_offset, nbytes, count, gpu_pitch, cpu_pitch;
  uint64_t writers, writer; /* 1, 0: this rank alone */
};

/* Everything is copied by kvs_offload_open(). */
struct kvs_offload_layout {
  const struct kvs_offload_tensor *tensors;
  size_t ntensors;
  const struct kvs_offload_part *parts; /* parts of one group do not overlap on either side */
  size_t nparts, ngroups;
  uint64_t chunks, factor;
  /* A load of blocks that a failed store should have written fails too, until they are stored again. Leave this false
   * if other processes write to the host memory too. */
  bool remember_failures;
  void *owner; /* kept until the map is closed and its transfers have ended; then release(owner), under no lock */
  void (*release)(void *);
  uint64_t reserved[8];
};

/* gpu_blocks has the blocks of group 0, then those of group 1, and so on: group_sizes[g] blocks for group g. They are
 * consecutive blocks of a request, the first of which is block number block_indices[g] of it. So this block lies at
 * position block_indices[g] % factor of the group's first chunk. `chunks` has the same order of groups, with one entry
 * for all blocks in a chunk. */
struct kvs_offload_job {
  struct kvs_ids gpu_blocks, chunks, group_sizes, block_indices;
  enum kvs_direction direction;
  uint64_t reserved[8];
};

/* Holds a reference to the engine. The memory must be known and mapped as long as the map is used. */
struct kvs_offload;
KVS_API int kvs_offload_open(struct kvs_engine *engine, const struct kvs_offload_layout *layout,
                             struct kvs_offload **map, struct kvs_error *err);
KVS_API void kvs_offload_close(struct kvs_offload *map);        /* transfers under way do not need it */
KVS_API size_t kvs_offload_most(const struct kvs_offload *map); /* upper bound on the transfers of one job */

/* What transfer i of a job moves, for kvs_options.layer_events: layer k of the transfer is tensor tensors[k] of the
 * layout, or a part of that tensor. The numbers i are those of a job with blocks in all groups. A load has no transfer
 * i if its group has no blocks in the job; nor, without every_block, if none of the job's blocks is at the place in a
 * chunk that the transfer moves. KVS_RANGE: i is kvs_offload_most() or more, or the layout has no parts. */
struct kvs_offload_order {
  size_t group;
  const uint32_t *tensors; /* as long as the map is open */
  size_t nlayers;
  bool every_block;
};
KVS_API int kvs_offload_get_order(const struct kvs_offload *map, size_t i, struct kvs_offload_order *order,
                                  struct kvs_error *err);

/* Submit a job: one transfer for each group, or several if its tensors have different shapes; at least one. They are
 * ordered with all other transfers of this map by the blocks that they touch. Everything is checked before anything is
 * queued.
 *
 * `transfers` has room for kvs_offload_most(). The caller owns a reference to each of the *count submitted ones. After
 * an error, submitted transfers go on: call again with *next, which says where to continue (at first 0), or drop the
 * job. The owner in *options is ignored; after_layers is refused. */
KVS_API int kvs_offload_submit(struct kvs_offload *map, const struct kvs_offload_job *job,
                               const struct kvs_options *options, size_t *next, struct kvs_transfer **transfers,
                               size_t *count, struct kvs_error *err);

#ifdef __cplusplus
}
#endif
#endif
