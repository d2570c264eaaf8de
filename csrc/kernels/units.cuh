/* The units of copying kernels: pieces of a list or a grid, and copying a piece by words with one warp. */
#ifndef KVS_UNITS_CUH
#define KVS_UNITS_CUH

#include "common.cuh"

static __device__ __forceinline__ struct kvs_piece listed_piece(const struct kvs_units &units, uint64_t index) {
  struct kvs_piece piece;
  const struct kvs_piece *from = (const struct kvs_piece *)units.pieces + index;
  word_load(&piece.dst, &from->dst);
  word_load(&piece.src, &from->src);
  word_load(&piece.nbytes, &from->nbytes);
  return piece;
}

static __device__ __forceinline__ struct kvs_row row_at(const struct kvs_units &units, uint32_t index) {
  struct kvs_row row;
  const struct kvs_row *from = (const struct kvs_row *)units.rows + index;
  word_load(&row.src, &from->src);
  word_load(&row.dst, &from->dst);
  word_load(&row.src_stride, &from->src_stride);
  word_load(&row.dst_stride, &from->dst_stride);
  word_load(&row.nbytes, &from->nbytes);
  word_load(&row.packed, &from->packed);
  word_load(&row.packed_stride, &from->packed_stride);
  word_load(&row.before, &from->before);
  return row;
}

static __device__ __forceinline__ struct kvs_pair pair_at(uint64_t pairs, uint64_t index) {
  struct kvs_pair pair;
  const struct kvs_pair *from = (const struct kvs_pair *)pairs + index;
  word_load(&pair.src, &from->src);
  word_load(&pair.dst, &from->dst);
  return pair;
}

/* Unit `index` of a copying kernel. Index is 32-bit if possible, since 64-bit division takes several times as long. */
template <typename Index>
static __device__ __forceinline__ struct kvs_piece unit_at(const struct kvs_copy_params &params, Index index) {
  const struct kvs_units &units = params.units;
  if (units.pieces) return listed_piece(units, index);
  const Index part = index % units.parts, line = index / units.parts, block = line / units.nrows;
  const struct kvs_row row = row_at(units, (uint32_t)(line % units.nrows));
  const struct kvs_pair pair = units.pairs ? pair_at(units.pairs, block) : params.inline_pairs[block];
  return kvs_grid_piece(&units, params.by_src, &row, &pair, block, part);
}

/* Each warp's item lies in shared memory, which leaves the registers to values. */
struct code_items {
  struct kvs_code_item of[CODE_THREADS / KVS_WARP];
};

/* The tables are read through L1, because a CTA reads most of their lines again. L1 is empty when a kernel begins. */
template <typename Index>
static __device__ __forceinline__ struct kvs_code_item code_item_of(const struct kvs_code_params &params, Index index) {
  const struct kvs_units &units = params.units;
  const Index part = index % units.parts, line = index / units.parts, block = line / units.nrows;
  const struct kvs_row row = ((const struct kvs_row *)units.rows)[line % units.nrows];
  const struct kvs_pair pair = units.pairs ? ((const struct kvs_pair *)units.pairs)[block] : params.inline_pairs[block];
  const struct kvs_unit unit = ((const struct kvs_unit *)params.table)[part];
  return {unit, kvs_code_pages(&params, &row, &pair, block), block, pair.dst == KVS_BAD_SLOT, pair.src == KVS_BAD_SLOT};
}

/* Unit `index` of kernels CODE and VERIFY. Called by all lanes; it overwrites the warp's last item. */
static __device__ __forceinline__ const struct kvs_code_item &code_item_at(const struct kvs_code_params &params,
                                                                           uint64_t index, struct code_items *items) {
  struct kvs_code_item *item = &items->of[threadIdx.x / KVS_WARP];
  __syncwarp();
  if (threadIdx.x % KVS_WARP == 0)
    *item =
        params.count >> 32 ? code_item_of<uint64_t>(params, index) : code_item_of<uint32_t>(params, (uint32_t)index);
  __syncwarp();
  return *item;
}

/* The piece held by lane `from` of the warp. */
static __device__ __forceinline__ struct kvs_piece piece_of_lane(const struct kvs_piece &held, unsigned from) {
  struct kvs_piece piece;
  piece.dst = __shfl_sync(KVS_ALL_LANES, held.dst, (int)from);
  piece.src = __shfl_sync(KVS_ALL_LANES, held.src, (int)from);
  piece.nbytes = __shfl_sync(KVS_ALL_LANES, held.nbytes, (int)from);
  return piece;
}

/* -- by words -------------------------------------------------------------------------------------------------- */

#define WORDS_IN_FLIGHT 8u

/* N words a lane, all loaded before the first store; dst and src are this lane's first words. */
template <unsigned N, typename Word> static __device__ __forceinline__ void copy_words(Word *dst, const Word *src) {
  Word held[N];
#pragma unroll
  for (unsigned i = 0; i < N; i++) word_load(&held[i], src + i * KVS_WARP);
#pragma unroll
  for (unsigned i = 0; i < N; i++) word_store(dst + i * KVS_WARP, &held[i]);
}

/* A tile of `count` words: full tiles at once, the last one of a piece by halves and then single words. */
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

/* The fewer than 16 bytes before and after the words: lanes 0 to 15 copy the head, the others the tail. */
static __device__ __forceinline__ void copy_ends(const struct kvs_piece &piece, const struct kvs_cut &cut,
                                                 unsigned lane) {
  uint64_t at = lane < 16u ? lane : piece.nbytes - cut.tail + (lane - 16u);
  uint8_t byte;
  if (lane < 16u ? lane >= cut.head : lane - 16u >= cut.tail) return;
  word_load(&byte, (const uint8_t *)piece.src + at);
  word_store((uint8_t *)piece.dst + at, &byte);
}

template <typename Word>
static __device__ __forceinline__ void warp_copy_words(const struct kvs_piece &piece, const struct kvs_cut &cut,
                                                       unsigned lane) {
  const unsigned tile = WORDS_IN_FLIGHT * KVS_WARP;
  Word *dst = (Word *)(piece.dst + cut.head);
  const Word *src = (const Word *)(piece.src + cut.head);
  for (uint64_t at = 0; at < cut.words; at += tile) {
    const uint64_t left = cut.words - at;
    copy_tile(dst + at + lane, src + at + lane, (unsigned)(left < tile ? left : tile), lane);
    __syncwarp();
  }
}

/* Copies a piece with one warp: any size, any alignment. */
static __device__ __noinline__ void warp_copy(const struct kvs_piece &piece, unsigned lane) {
  const struct kvs_cut cut = kvs_cut_piece(piece.dst, piece.src, piece.nbytes);
  copy_ends(piece, cut, lane);
  switch (cut.width) {
  case 16:
    warp_copy_words<uint4>(piece, cut, lane);
    break;
  case 8:
    warp_copy_words<uint64_t>(piece, cut, lane);
    break;
  case 4:
    warp_copy_words<uint32_t>(piece, cut, lane);
    break;
  case 2:
    warp_copy_words<uint16_t>(piece, cut, lane);
    break;
  default:
    warp_copy_words<uint8_t>(piece, cut, lane);
    break;
  }
  __syncwarp();
}

/* -- pace ------------------------------------------------------------------------------------------------------ */

#define CATCH_UP_NS 20000u
#define PACE_MAX_NS_PER_MIB 1000000000u /* keeps the product below 64 bits for up to 2^43 bytes */

/* A schedule: work at byte n starts no sooner than n bytes' time after the start. A late CTA (a busy link) may catch up
 * by CATCH_UP_NS at most, since pacing must prevent bursts at full speed. */
struct pace {
  uint64_t ns_per_mib; /* 0: unpaced */
  uint64_t start;
  uint64_t done; /* bytes before the current piece */
};

static __device__ __forceinline__ struct pace pace_begin(uint64_t ns_per_mib) {
  return {ns_per_mib < PACE_MAX_NS_PER_MIB ? ns_per_mib : PACE_MAX_NS_PER_MIB, clock_ns(), 0};
}

static __device__ __forceinline__ void pace_wait(struct pace *pace, uint64_t offset) {
  if (pace->ns_per_mib == 0) return;
  uint64_t due = pace->start + (((pace->done + offset) >> 10) * pace->ns_per_mib >> 10);
  uint64_t now = clock_ns();
  if (now > due + CATCH_UP_NS) pace->start += now - due - CATCH_UP_NS;
  for (; now < due; now = clock_ns()) sleep_ns(due - now);
  __syncwarp();
}

#endif
