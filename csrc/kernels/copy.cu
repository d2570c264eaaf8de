/* Scattered copies by words: any size, any alignment, any GPU.
 *
 * CTA c takes units c, c + grid, c + 2 grid, ... A unit's body is divided into tiles of WORDS_IN_FLIGHT words a lane (4
 * KiB with 16-byte words). The tiles are numbered through all pieces of the CTA, and assigned to its warps round-robin.
 * So small pieces are copied in parallel, one a warp, and large ones by all warps together. No warp waits for another:
 * there is no barrier and no shared memory. A warp issues all loads of a tile before it stores: 16 CTAs of 16 warps
 * keep 1 MiB in flight, and the link to the host needs 256 KiB.
 *
 * Descriptors are read 32 at a time, one by each lane, and exchanged by shuffles: 32 pieces share one load latency.
 *
 * Each warp computes its pace alone: the tile at byte n of the CTA's work starts no sooner than n bytes' time after the
 * start. A CTA that is late (a busy link) may catch up by CATCH_UP_NS at most, since pacing must prevent bursts at full
 * speed.
 *
 * Launch with a multiple of 32 threads, at most 512, and any grid. Pieces must not overlap. */
#include "units.cuh"

/* Copies tiles `turn`, `turn` + warps, ... of one piece. Returns the warp's first tile in the next piece. */
template <typename Word>
static __device__ __forceinline__ uint64_t copy_piece(const struct kvs_piece &piece, const struct kvs_cut &cut,
                                                      uint64_t turn, struct pace *pace) {
  const unsigned lane = threadIdx.x % KVS_WARP, warps = blockDim.x / KVS_WARP;
  const uint64_t tile = WORDS_IN_FLIGHT * KVS_WARP;
  const uint64_t tiles = cut.words == 0 ? 1 : (cut.words + tile - 1) / tile;
  Word *dst = (Word *)(piece.dst + cut.head);
  const Word *src = (const Word *)(piece.src + cut.head);
  for (; turn < tiles; turn += warps) {
    pace_wait(pace, turn * tile * sizeof(Word));
    if (turn == 0) copy_ends(piece, cut, lane);
    const uint64_t left = cut.words - turn * tile;
    copy_tile(dst + turn * tile + lane, src + turn * tile + lane, (unsigned)(left < tile ? left : tile), lane);
    __syncwarp();
  }
  return turn - tiles;
}

/* A lane's descriptor, to be shuffled to the warp. The lane that reads the piece also computes the cut. */
struct held {
  uint64_t dst, src, nbytes, words;
  uint32_t rest; /* head, tail and width, one byte each */
};

static __device__ __forceinline__ struct held hold_piece(const struct kvs_piece &piece) {
  const struct kvs_cut cut = kvs_cut_piece(piece.dst, piece.src, piece.nbytes);
  return {piece.dst, piece.src, piece.nbytes, cut.words,
          (uint32_t)cut.head | (uint32_t)cut.tail << 8 | cut.width << 16};
}

static __device__ __forceinline__ void take_piece(const struct held &held, unsigned lane, struct kvs_piece *piece,
                                                  struct kvs_cut *cut) {
  piece->dst = __shfl_sync(KVS_ALL_LANES, held.dst, (int)lane);
  piece->src = __shfl_sync(KVS_ALL_LANES, held.src, (int)lane);
  piece->nbytes = __shfl_sync(KVS_ALL_LANES, held.nbytes, (int)lane);
  cut->words = __shfl_sync(KVS_ALL_LANES, held.words, (int)lane);
  const uint32_t rest = __shfl_sync(KVS_ALL_LANES, held.rest, (int)lane);
  cut->head = rest & 0xffu;
  cut->tail = rest >> 8 & 0xffu;
  cut->width = rest >> 16;
}

extern "C" __global__ void __launch_bounds__(512, 1)
    kvs_kernel_copy(const __grid_constant__ struct kvs_copy_params params) {
  const unsigned lane = threadIdx.x % KVS_WARP;
  struct pace pace = pace_begin(params.ns_per_mib);
  uint64_t turn = threadIdx.x / KVS_WARP;
  for (uint64_t first = blockIdx.x; first < params.count; first += (uint64_t)KVS_WARP * gridDim.x) {
    const uint64_t mine = first + (uint64_t)lane * gridDim.x;
    struct held held = {0, 0, 0, 0, 0};
    if (mine < params.count) held = hold_piece(unit_at<uint64_t>(params, mine));
    for (unsigned i = 0; i < KVS_WARP && first + (uint64_t)i * gridDim.x < params.count; i++) {
      struct kvs_piece piece;
      struct kvs_cut cut;
      take_piece(held, i, &piece, &cut);
      if (piece.nbytes == 0) continue;
      switch (cut.width) {
      case 16:
        turn = copy_piece<uint4>(piece, cut, turn, &pace);
        break;
      case 8:
        turn = copy_piece<uint64_t>(piece, cut, turn, &pace);
        break;
      case 4:
        turn = copy_piece<uint32_t>(piece, cut, turn, &pace);
        break;
      case 2:
        turn = copy_piece<uint16_t>(piece, cut, turn, &pace);
        break;
      default:
        turn = copy_piece<uint8_t>(piece, cut, turn, &pace);
        break;
      }
      pace.done += piece.nbytes;
    }
  }
}
