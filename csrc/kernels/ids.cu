/* Reads and checks block ids that lie in device memory: one pair a thread.
 *
 * Step READ reads each id once. Another kernel or a copy engine may write ids again at any time after that, so what the
 * later kernels and the host use is the copy made here. Steps are launched one after the other on one stream. */
#include "common.cuh"

/* The claim of a slot; made if there is none. *first: it was made. */
static __device__ __forceinline__ struct kvs_id_claim *claim_of(const struct kvs_ids_params &params, uint32_t slot,
                                                                bool *first) {
  struct kvs_id_claim *claims = (struct kvs_id_claim *)params.claims;
  uint64_t at = kvs_claim_begin(slot, params.nclaims);
  for (;; at = (at + 1u) & (params.nclaims - 1u)) {
    const uint32_t found = atomicCAS(&claims[at].slot, KVS_BAD_SLOT, slot);
    *first = found == KVS_BAD_SLOT;
    if (*first || found == slot) return &claims[at];
  }
}

static __device__ __forceinline__ int64_t read_id(const struct kvs_ids_params &params, uint64_t at) {
  if (params.width == 8u) {
    int64_t id;
    word_load(&id, (const int64_t *)at);
    return id;
  }
  int32_t id;
  word_load(&id, (const int32_t *)at);
  return id;
}

/* The block at a position; UINT64_MAX: there is none. *id: its number, or its first token. */
static __device__ __forceinline__ uint64_t read_block(const struct kvs_ids_params &params, uint32_t position,
                                                      int64_t *id) {
  const uint64_t at = params.ids + (uint64_t)(params.stride * (int64_t)position);
  uint32_t whole = 1u;
  *id = read_id(params, at);
#pragma unroll 4
  for (uint32_t i = 1; i < params.tokens; i++)
    whole &= (uint64_t)read_id(params, at + (uint64_t)(params.token_stride * (int64_t)i)) == (uint64_t)*id + i;
  const uint64_t block = kvs_block_of_tokens(*id, params.tokens, whole);
  return block < params.blocks ? block : UINT64_MAX;
}

extern "C" __global__ void __launch_bounds__(256) kvs_kernel_ids(const __grid_constant__ struct kvs_ids_params params) {
  const uint64_t *named = (const uint64_t *)params.named;
  struct kvs_pair *pairs = (struct kvs_pair *)params.pairs;
  struct kvs_id_result *results = (struct kvs_id_result *)params.results;
  const uint64_t all = (uint64_t)gridDim.x * blockDim.x;
  bool first;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < params.npairs; i += all) {
    if (params.step == KVS_IDS_CLAIM) {
      uint32_t *place = params.by_dst ? &pairs[i].dst : &pairs[i].src;
      if (*place == KVS_BAD_SLOT || claim_of(params, *place, &first)->twice != 0) continue;
      results[i].verdict = KVS_ID_TWICE;
      *place = KVS_BAD_SLOT;
      continue;
    }
    uint64_t both; /* host memory: each pair in one load, each result in one store */
    word_load(&both, &named[i]);
    struct kvs_pair pair = {(uint32_t)both, (uint32_t)(both >> 32)};
    const uint32_t position = params.by_dst ? pair.dst : pair.src;
    int64_t id;
    const uint64_t block = read_block(params, position, &id);
    const bool good = block != UINT64_MAX;
    const uint32_t slot = good ? (uint32_t)block : KVS_BAD_SLOT;
    if (good) id = (int64_t)block;
    const uint4 result = {(uint32_t)id, (uint32_t)((uint64_t)id >> 32), position,
                          good ? (uint32_t)KVS_ID_GOOD : (uint32_t)KVS_ID_RANGE};
    word_store((uint4 *)&results[i], &result);
    if (params.by_dst)
      pair.dst = slot;
    else
      pair.src = slot;
    pairs[i] = pair;
    if (!good || params.claims == 0) continue;
    struct kvs_id_claim *claim = claim_of(params, slot, &first);
    if (!first) *(volatile uint32_t *)&claim->twice = 0;
  }
}
