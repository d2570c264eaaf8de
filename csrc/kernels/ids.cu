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

static __device__ __forceinline__ int64_t read_id(const struct kvs_ids_params &params, uint32_t position) {
  const uint64_t at = params.ids + (uint64_t)(params.stride * (int64_t)position);
  if (params.width == 8u) {
    int64_t id;
    word_load(&id, (const int64_t *)at);
    return id;
  }
  int32_t id;
  word_load(&id, (const int32_t *)at);
  return id;
}

extern "C" __global__ void __launch_bounds__(256) kvs_kernel_ids(const __grid_constant__ struct kvs_ids_params params) {
  struct kvs_pair *pairs = (struct kvs_pair *)params.pairs;
  struct kvs_id_result *results = (struct kvs_id_result *)params.results;
  const uint64_t all = (uint64_t)gridDim.x * blockDim.x;
  bool first;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < params.npairs; i += all) {
    uint32_t *place = params.by_dst ? &pairs[i].dst : &pairs[i].src, slot;
    word_load(&slot, place);
    if (params.step == KVS_IDS_CLAIM) {
      if (slot == KVS_BAD_SLOT || claim_of(params, slot, &first)->twice != 0) continue;
      results[i].verdict = KVS_ID_TWICE;
      *place = KVS_BAD_SLOT;
      continue;
    }
    const int64_t id = read_id(params, slot);
    const bool good = id >= 0 && (uint64_t)id < params.blocks;
    results[i].id = id;
    results[i].position = slot;
    results[i].verdict = good ? KVS_ID_GOOD : KVS_ID_RANGE;
    *place = good ? (uint32_t)id : KVS_BAD_SLOT;
    if (!good || params.claims == 0) continue;
    struct kvs_id_claim *claim = claim_of(params, (uint32_t)id, &first);
    if (!first) *(volatile uint32_t *)&claim->twice = 0;
  }
}
