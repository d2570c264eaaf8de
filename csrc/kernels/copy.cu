/* Scattered copies, any size, any alignment.
 *
 * CTA c takes pieces c, c + grid, c + 2 grid, ... Their bodies are cut into tiles of WORDS_IN_FLIGHT words a lane (4
 * KiB where words are 16 bytes), and the tiles, numbered through all pieces of the CTA, go to its warps in turn. So
 * small pieces are copied side by side, one a warp, large ones by all warps together, and no warp ever waits for
 * another: there is no barrier and no shared memory. A warp has a whole tile of loads in flight before it stores: 16
 * CTAs of 16 warps keep 1 MiB on the way, where the link to the host needs 256 KiB.
 *
 * Descriptors are read 32 at a time, one by each lane, and handed round by shuffles: their latency is paid once for 32
 * pieces.
 *
 * The pace is a schedule that every warp works out for itself: the tile that begins n bytes into the CTA's work starts
 * no sooner than n bytes' time after the beginning. A CTA that fell behind (a busy link) may catch up CATCH_UP_NS, not
 * more: a burst at full speed is what pacing is there to prevent.
 *
 * Launch with a multiple of 32 threads, at most 512, and any grid. Pieces must not overlap. */
#include "common.cuh"

#define WORDS_IN_FLIGHT 8u
#define CATCH_UP_NS 20000u
#define PACE_MAX_NS_PER_MIB 1000000000u /* keeps the product below 64 bits up to 2^43 bytes a CTA */

struct pace {
  uint64_t ns_per_mib; /* 0: unpaced */
  uint64_t start;
  uint64_t done; /* bytes of the CTA's pieces before the current one */
};

static __device__ __forceinline__ void pace_wait(struct pace *pace, uint64_t offset) {
  if (pace->ns_per_mib == 0) return;
  uint64_t due = pace->start + (((pace->done + offset) >> 10) * pace->ns_per_mib >> 10);
  uint64_t now = clock_ns();
  if (now > due + CATCH_UP_NS) pace->start += now - due - CATCH_UP_NS;
  for (; now < due; now = clock_ns()) sleep_ns(due - now);
  __syncwarp();
}

/* N words a lane, all loaded before the first is stored; dst and src are this lane's first. */
template <unsigned N, typename Word> static __device__ __forceinline__ void copy_words(Word *dst, const Word *src) {
  Word held[N];
#pragma unroll
  for (unsigned i = 0; i < N; i++) word_load(&held[i], src + i * KVS_WARP);
#pragma unroll
  for (unsigned i = 0; i < N; i++) word_store(dst + i * KVS_WARP, &held[i]);
}

/* One tile of `count` words: whole ones at once, the last of a piece by halves and then single words. */
template <typename Word>
static __device__ __forceinline__ void copy_tile(Word *dst, const Word *src, unsigned count, unsigned lane) {
  if (count == WORDS_IN_FLIGHT * KVS_WARP) {
    copy_words<WORDS_IN_FLIGHT>(dst, src);
    return;
  }
  if (count >= WORDS_IN_FLIGHT / 2 * KVS_WARP) {
    copy_words<WORDS_IN_FLIGHT / 2>(dst, src);
    dst += WORDS_IN_FLIGHT / 2 * KVS_WARP;
    src += WORDS_IN_FLIGHT / 2 * KVS_WARP;
    count -= WORDS_IN_FLIGHT / 2 * KVS_WARP;
  }
#pragma unroll 1
  for (unsigned at = lane; at < count; at += KVS_WARP, dst += KVS_WARP, src += KVS_WARP) copy_words<1>(dst, src);
}

/* The fewer than 16 bytes before and after the words: lanes 0 to 15 take the head, the others the tail. */
static __device__ __forceinline__ void copy_ends(const struct kvs_piece &piece, const struct kvs_cut &cut,
                                                 unsigned lane) {
  uint64_t at = lane < 16u ? lane : piece.nbytes - cut.tail + (lane - 16u);
  uint8_t byte;
  if (lane < 16u ? lane >= cut.head : lane - 16u >= cut.tail) return;
  word_load(&byte, (const uint8_t *)piece.src + at);
  word_store((uint8_t *)piece.dst + at, &byte);
}

/* The tiles `turn`, `turn` + warps, ... of one piece. Returns this warp's turn in the next piece. */
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

/* What a lane holds of its descriptor, and hands to its warp. The cut is made once, by the lane that read the piece. */
struct held {
  uint64_t dst, src, nbytes, words;
  uint32_t rest; /* head, tail and width, a byte each */
};

static __device__ __forceinline__ struct held hold_piece(const struct kvs_piece *from) {
  struct held held;
  word_load(&held.dst, &from->dst);
  word_load(&held.src, &from->src);
  word_load(&held.nbytes, &from->nbytes);
  const struct kvs_cut cut = kvs_cut_piece(held.dst, held.src, held.nbytes);
  held.words = cut.words;
  held.rest = (uint32_t)cut.head | (uint32_t)cut.tail << 8 | cut.width << 16;
  return held;
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
  struct pace pace = {params.ns_per_mib < PACE_MAX_NS_PER_MIB ? params.ns_per_mib : PACE_MAX_NS_PER_MIB, clock_ns(), 0};
  uint64_t turn = threadIdx.x / KVS_WARP;
  for (uint64_t first = blockIdx.x; first < params.npieces; first += (uint64_t)KVS_WARP * gridDim.x) {
    const uint64_t mine = first + (uint64_t)lane * gridDim.x;
    struct held held = {0, 0, 0, 0, 0};
    if (mine < params.npieces) held = hold_piece((const struct kvs_piece *)params.pieces + mine);
    for (unsigned i = 0; i < KVS_WARP && first + (uint64_t)i * gridDim.x < params.npieces; i++) {
      struct kvs_piece piece;
      struct kvs_cut cut;
      take_piece(held, i, &piece, &cut);
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
