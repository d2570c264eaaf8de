/* Scattered copies by bulk copies through shared memory: a few warps keep many bytes in flight and use little of an SM.
 *
 * Units are assigned round-robin to the warps of all CTAs. Each warp drives its own ring (ring.cuh), and no warp waits
 * for another. Descriptors are computed 32 at a time, one by each lane.
 *
 * Launch with at most 8 warps, and RING_STAGES * chunk bytes of dynamic shared memory a warp. */
#include "ring.cuh"

extern "C" __global__ void __launch_bounds__(RING_WARPS *KVS_WARP, 1)
    kvs_kernel_ring(const __grid_constant__ struct kvs_copy_params params) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ struct ring_stage stages[RING_WARPS * RING_STAGES];
  const unsigned lane = threadIdx.x % KVS_WARP, warps = blockDim.x / KVS_WARP;
  const uint64_t all = (uint64_t)gridDim.x * warps;
  struct ring ring = ring_of_warp(memory, stages, params.chunk);
  struct pace pace = pace_begin(params.ns_per_mib * warps);
  ring_begin(&ring, lane);
  for (uint64_t first = blockIdx.x + (uint64_t)gridDim.x * (threadIdx.x / KVS_WARP); first < params.count;
       first += KVS_WARP * all) {
    const uint64_t mine = first + lane * all;
    struct kvs_piece held = {0, 0, 0};
    if (mine < params.count) held = unit_at<uint64_t>(params, mine);
    for (unsigned i = 0; i < KVS_WARP && first + i * all < params.count; i++) {
      const struct kvs_piece piece = piece_of_lane(held, i);
      if (piece.nbytes == 0) continue;
      pace_wait(&pace, 0);
      ring_copy(&ring, piece, params.by_src ? piece.src : piece.dst, lane);
      pace.done += piece.nbytes;
    }
  }
  ring_drain(&ring, lane);
}
