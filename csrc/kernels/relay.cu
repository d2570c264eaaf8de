/* The relay: see kernels.h for the flags and who waits for what.
 *
 * A few warps stay for the whole transfer, or for a turn of it. Each does its share of every filling of a slot, then
 * says so; so a filling is ready when all warps have. The memory of the ring is written by the copy engine and by bulk
 * copies (the async proxy), hence a proxy fence between a flag and the bytes, on both sides of it. */
#include "ring.cuh"

/* Looks at flags are few, and at the host's word fewer, by one warp alone: measured, all warps looking ten times as
 * often cost copies in both directions at once an eighth of the link. */
#define POLL_NS 2000u
#define LOOK_AT_HOST_EVERY 16u

static __device__ __forceinline__ void fence_proxies(void) {
#if RING_BULK
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

static __device__ __forceinline__ uint64_t filled_flag(const struct kvs_relay_params &params, uint32_t slot) {
  return params.flags + 4u * slot;
}

static __device__ __forceinline__ uint64_t emptied_flag(const struct kvs_relay_params &params, uint32_t slot) {
  return params.flags + 4u * (KVS_RELAY_SLOTS + slot);
}

static __device__ __forceinline__ uint64_t aborted_flag(const struct kvs_relay_params &params) {
  return params.flags + 4u * (2u * KVS_RELAY_SLOTS);
}

/* Nobody waits for a flag any more. Whoever adds to one later does no harm. */
static __device__ __noinline__ void release_all(const struct kvs_relay_params &params) {
  atomicExch_system((unsigned *)aborted_flag(params), 1u);
  store_release(params.abort_word, 1u); /* not exchanged: a link need not carry atomics to the host */
  __threadfence_system();
  for (uint32_t slot = 0; slot < KVS_RELAY_SLOTS; slot++) {
    atomicExch_system((unsigned *)filled_flag(params, slot), (unsigned)KVS_RELAY_RELEASED);
    atomicExch_system((unsigned *)emptied_flag(params, slot), (unsigned)KVS_RELAY_RELEASED);
  }
}

/* By one lane. False: the relay is given up. */
static __device__ __noinline__ bool wait_for(const struct kvs_relay_params &params, uint64_t flag, uint32_t value) {
  const uint64_t begin = clock_ns();
  const bool watches = blockIdx.x == 0 && threadIdx.x == 0;
  for (unsigned polls = 1; (int32_t)(load_acquire(flag) - value) < 0; polls++) {
    sleep_ns(POLL_NS);
    if (load_acquire(aborted_flag(params))) return false;
    const bool told = watches && polls % LOOK_AT_HOST_EVERY == 0 && load_acquire(params.abort_word);
    if (!told && clock_ns() - begin < params.patience_ns) continue;
    release_all(params);
    return false;
  }
  return load_acquire(aborted_flag(params)) == 0;
}

/* Unit `index` of a segment, between its scattered place and the slot. */
static __device__ __forceinline__ struct kvs_piece
segment_unit(const struct kvs_relay_params &params, const struct kvs_segment &segment, uint64_t slot, uint64_t index) {
  const struct kvs_units &units = params.units;
  struct kvs_piece piece;
  if (units.pieces) {
    uint64_t at;
    piece = listed_piece(units, segment.first + index);
    word_load(&at, (const uint64_t *)params.packed + segment.first + index);
    (params.gather ? piece.dst : piece.src) = slot + at;
    return piece;
  }
  const uint64_t part = index % units.parts, line = index / units.parts, block = line / segment.nrows;
  const struct kvs_row row = row_at(units, segment.first_row + (uint32_t)(line % segment.nrows));
  const struct kvs_pair pair = pair_at(units.pairs, segment.first + block);
  const uint64_t there = slot + segment.base + row.packed + block * row.packed_stride;
  const uint64_t src = params.gather ? row.src + pair.src * row.src_stride : there;
  const uint64_t dst = params.gather ? there : row.dst + pair.dst * row.dst_stride;
  return kvs_row_part(&row, src, dst, part, units.piece);
}

static __device__ __forceinline__ struct kvs_segment segment_at(const struct kvs_relay_params &params, uint32_t index) {
  struct kvs_segment segment;
  const struct kvs_segment *from = (const struct kvs_segment *)params.segments + index;
  word_load(&segment.first, &from->first);
  word_load(&segment.count, &from->count);
  word_load(&segment.base, &from->base);
  word_load(&segment.first_row, &from->first_row);
  word_load(&segment.nrows, &from->nrows);
  word_load(&segment.last, &from->last);
  return segment;
}

/* This warp's share of a segment; `turn` is its first unit there. Returns its first in the next segment. */
static __device__ __forceinline__ uint64_t copy_segment(const struct kvs_relay_params &params,
                                                        const struct kvs_segment &segment, uint64_t slot, uint64_t turn,
                                                        uint64_t all, struct ring *ring, unsigned lane) {
  const uint64_t count =
      params.units.pieces ? segment.count : segment.count * segment.nrows * (uint64_t)params.units.parts;
  for (; turn < count; turn += KVS_WARP * all) {
    const uint64_t mine = turn + lane * all;
    struct kvs_piece held = {0, 0, 0};
    if (mine < count) held = segment_unit(params, segment, slot, mine);
    unsigned i = 0;
    for (; i < KVS_WARP && turn + i * all < count; i++) {
      const struct kvs_piece piece = piece_of_lane(held, i);
      if (piece.nbytes) ring_copy(ring, piece, 0, lane);
    }
    if (i < KVS_WARP) return turn + i * all - count;
  }
  return turn - count;
}

extern "C" __global__ void __launch_bounds__(RING_WARPS *KVS_WARP, 1)
    kvs_kernel_relay(const __grid_constant__ struct kvs_relay_params params) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ struct ring_stage stages[RING_WARPS * RING_STAGES];
  const unsigned lane = threadIdx.x % KVS_WARP, warps = blockDim.x / KVS_WARP;
  const uint64_t all = (uint64_t)gridDim.x * warps;
  struct ring ring = ring_of_warp(memory, stages, params.chunk);
  uint64_t turn = blockIdx.x + (uint64_t)gridDim.x * (threadIdx.x / KVS_WARP);
  /* Of the current filling: which slot, and for the how manyth time. */
  uint32_t slot = (uint32_t)(params.first % params.nslots), use = (uint32_t)(params.first / params.nslots) + 1u;
  bool first = true;
  ring_begin(&ring, lane);
  for (uint32_t i = 0; i < params.nsegments; i++) {
    const struct kvs_segment segment = segment_at(params, i);
    const uint64_t there = params.ring + slot * params.slot_nbytes;
    if (first) {
      bool go = true;
      if (lane == 0)
        go = params.gather ? wait_for(params, emptied_flag(params, slot), use - 1u)
                           : wait_for(params, filled_flag(params, slot), use);
      if (!__shfl_sync(KVS_ALL_LANES, (int)go, 0)) return;
      __syncwarp(); /* what lane 0 acquired, all see: a shuffle orders no memory */
      fence_proxies();
    }
    turn = copy_segment(params, segment, there, turn, all, &ring, lane);
    first = segment.last != 0;
    if (!first) continue;
    ring_drain(&ring, lane);
    fence_proxies();
    __threadfence_system();
    __syncwarp();
    if (lane == 0) {
      __threadfence_system(); /* of what the other lanes did before the barrier, too */
      atomicAdd_system((unsigned *)(params.gather ? filled_flag(params, slot) : emptied_flag(params, slot)), 1u);
    }
    if (++slot == params.nslots) slot = 0, use++;
  }
}
