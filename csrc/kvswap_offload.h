/* Offloading as vLLM means it: a cache of several tensors and groups of layers, whose blocks go to chunks on the host
 * that hold several blocks each. Part of kvswap.h (which includes it). */
#ifndef KVSWAP_OFFLOAD_H
#define KVSWAP_OFFLOAD_H

#include "kvswap.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor on both sides. GPU block b lies at gpu + b * gpu_stride. A chunk is `factor` blocks on the host: block j of
 * chunk c is the cpu_page bytes at cpu + c * cpu_stride + j * cpu_pitch. cpu_pitch is cpu_page where a tensor's chunk
 * lies together, and more where all tensors of a block do. */
struct kvs_offload_tensor {
  uint64_t gpu, gpu_blocks, gpu_stride, gpu_page;
  uint64_t cpu, cpu_stride, cpu_page, cpu_pitch;
};

/* What a group moves of each block: `count` fragments of nbytes bytes, counted in the block's own bytes on each side.
 * Where `writers` ranks hold the same bytes, this one stores those blocks of the host (chunk * factor + j) that leave
 * `writer` when divided by `writers`, and loads all. */
struct kvs_offload_part {
  uint32_t group, tensor;
  uint64_t gpu_offset, cpu_offset, nbytes, count, gpu_pitch, cpu_pitch;
  uint64_t writers, writer; /* 1, 0: alone */
};

/* Everything is copied by kvs_offload_open(). */
struct kvs_offload_layout {
  const struct kvs_offload_tensor *tensors;
  size_t ntensors;
  const struct kvs_offload_part *parts; /* those of one group overlap on neither side */
  size_t nparts, ngroups;
  uint64_t chunks, factor;
  /* A load of what a failed store should have written fails too, until it is stored again. Not where others write to
   * the host's memory as well. */
  bool remember_failures;
  void *owner; /* lives until the map was closed and its transfers have ended; then release(owner), under no lock */
  void (*release)(void *);
};

/* Group after group: group_sizes[g] blocks of gpu_blocks, which are blocks block_indices[g], + 1, ... of a request, so
 * that the first lies at block_indices[g] % factor of the group's first chunk. Each group's chunks follow those of the
 * group before; a chunk is named once for all its blocks. */
struct kvs_offload_job {
  struct kvs_ids gpu_blocks, chunks, group_sizes, block_indices;
  enum kvs_direction direction;
};

/* Keeps the engine. The memory must be known and mapped, now and as long as the map is used. */
struct kvs_offload;
KVS_API int kvs_offload_open(struct kvs_engine *engine, const struct kvs_offload_layout *layout,
                             struct kvs_offload **map, struct kvs_error *err);
KVS_API void kvs_offload_close(struct kvs_offload *map);        /* transfers under way do not need it */
KVS_API size_t kvs_offload_most(const struct kvs_offload *map); /* transfers that one job can be */

/* Submit a job: a transfer for each group, or several where its tensors have different shapes; at least one. They are
 * ordered with all others of this map by the blocks that they touch. Everything is checked before anything is queued.
 *
 * `transfers` has room for kvs_offload_most(); the caller owns a reference to each of the *count that were submitted.
 * On an error after the first, those go on: call again with `*next`, which is where to begin (at first 0), or give the
 * job up. The owner of *options is not looked at. */
KVS_API int kvs_offload_submit(struct kvs_offload *map, const struct kvs_offload_job *job,
                               const struct kvs_options *options, size_t *next, struct kvs_transfer **transfers,
                               size_t *count, struct kvs_error *err);

#ifdef __cplusplus
}
#endif
#endif
