/* Scattered copies within device memory on the whole GPU: packs or unpacks a burst slot.
 *
 * One unit a warp: adjacent warps copy adjacent units, and no warp waits for another. There is no pace: the kernel runs
 * for some tens of microseconds, and its cost to a concurrent model is its duration. So an SM runs as many warps as
 * fit, with few loads in flight each.
 *
 * Launch with a multiple of 32 threads, at most 512, and any grid. Pieces must not overlap; fewer than 2^32. */
#include "units.cuh"

#define PACK_IN_FLIGHT 4u
#define PACK_THREADS 512

/* CTAs an SM: as many as its threads permit, 2048 or 1536. The compiler ignores a number that is larger. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ / 100 != 9 && __CUDA_ARCH__ / 100 != 10
#define PACK_CTAS 3
#else
#define PACK_CTAS 4
#endif

template <typename Word>
static __device__ __forceinline__ void pack_words(const struct kvs_piece &piece, const struct kvs_cut &cut,
                                                  unsigned lane) {
  Word *dst = (Word *)(piece.dst + cut.head);
  const Word *src = (const Word *)(piece.src + cut.head);
  const uint32_t words = (uint32_t)cut.words;
  uint32_t at = lane;
  for (; at + (PACK_IN_FLIGHT - 1u) * KVS_WARP < words; at += PACK_IN_FLIGHT * KVS_WARP)
    copy_words<PACK_IN_FLIGHT>(dst + at, src + at);
#pragma unroll 1
  for (; at < words; at += KVS_WARP) copy_words<1>(dst + at, src + at);
}

extern "C" __global__ void __launch_bounds__(PACK_THREADS, PACK_CTAS)
    kvs_kernel_pack(const __grid_constant__ struct kvs_copy_params params) {
  const unsigned lane = threadIdx.x % KVS_WARP, warps = blockDim.x / KVS_WARP;
  const uint32_t count = (uint32_t)params.count;
  for (uint32_t unit = blockIdx.x * warps + threadIdx.x / KVS_WARP; unit < count; unit += gridDim.x * warps) {
    const struct kvs_piece piece = unit_at<uint32_t>(params, unit);
    const struct kvs_cut cut = kvs_cut_piece(piece.dst, piece.src, piece.nbytes);
    copy_ends(piece, cut, lane);
    switch (cut.width) {
    case 16:
      pack_words<uint4>(piece, cut, lane);
      break;
    case 8:
      pack_words<uint64_t>(piece, cut, lane);
      break;
    case 4:
      pack_words<uint32_t>(piece, cut, lane);
      break;
    case 2:
      pack_words<uint16_t>(piece, cut, lane);
      break;
    default:
      pack_words<uint8_t>(piece, cut, lane);
      break;
    }
  }
}
