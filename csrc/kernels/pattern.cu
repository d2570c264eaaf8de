/* Writes or checks the test pattern. One CTA handles a whole item, so that any block size uses many lanes.
 *
 * Errors are counted in registers and added to the result once a warp, at the end and only if there are any: the result
 * may be in host memory. The atomics have device scope. The CPU reads the result after the kernel, so they need only be
 * atomic among this GPU's threads, which CUDA guarantees for pinned memory too. */
#include "common.cuh"

struct findings {
  uint64_t wrong, first;
};

/* Compare bytes [0, nbytes) of `found` with `wanted`, at byte `offset` of item `item`. */
static __device__ __forceinline__ void compare(struct findings *findings, uint64_t found, uint64_t wanted,
                                               uint64_t item, uint64_t offset) {
  uint64_t apart = found ^ wanted;
  if (apart == 0) return;
  uint64_t place = item << 40 | (offset + (uint64_t)(__ffsll((long long)apart) - 1) / 8u);
  if (place < findings->first) findings->first = place;
  for (; apart != 0; apart >>= 8) findings->wrong += (apart & 0xffu) != 0;
}

/* Bytes [from, nbytes) of an item, one at a time: the end of an item, or all of an item that is not 8-byte aligned. */
static __device__ void pattern_bytes(const struct kvs_pattern_item &item, uint64_t kind, uint64_t index, uint64_t from,
                                     bool check, struct findings *findings) {
  for (uint64_t i = from + threadIdx.x; i < item.nbytes; i += blockDim.x) {
    uint8_t *at = (uint8_t *)item.ptr + i,
            wanted = (uint8_t)(kvs_pattern_value(kind, item.key, i / 8u) >> (i % 8u * 8u)), found;
    if (check) {
      word_load(&found, at);
      compare(findings, found, wanted, index, i);
    } else {
      word_store(at, &wanted);
    }
  }
}

static __device__ void pattern_item(const struct kvs_pattern_item &item, uint64_t kind, uint64_t index, bool check,
                                    struct findings *findings) {
  const uint64_t words = item.ptr % 8u == 0 ? item.nbytes / 8u : 0;
  uint64_t *at = (uint64_t *)item.ptr;
#pragma unroll 4
  for (uint64_t i = threadIdx.x; i < words; i += blockDim.x) {
    uint64_t wanted = kvs_pattern_value(kind, item.key, i), found;
    if (check) {
      word_load(&found, at + i);
      compare(findings, found, wanted, index, i * 8u);
    } else {
      word_store(at + i, &wanted);
    }
  }
  pattern_bytes(item, kind, index, words * 8u, check, findings);
}

extern "C" __global__ void __launch_bounds__(1024)
    kvs_kernel_pattern(const __grid_constant__ struct kvs_pattern_params params) {
  struct findings findings = {0, UINT64_MAX};
  for (uint64_t index = blockIdx.x; index < params.nitems; index += gridDim.x) {
    const struct kvs_pattern_item *from = (const struct kvs_pattern_item *)params.items + index;
    struct kvs_pattern_item item;
    word_load(&item.ptr, &from->ptr);
    word_load(&item.nbytes, &from->nbytes);
    word_load(&item.key, &from->key);
    pattern_item(item, params.kind, index, params.mode == KVS_PATTERN_CHECK, &findings);
  }
  for (unsigned apart = KVS_WARP / 2; apart != 0; apart /= 2) {
    const uint64_t first = __shfl_xor_sync(KVS_ALL_LANES, findings.first, (int)apart);
    findings.wrong += __shfl_xor_sync(KVS_ALL_LANES, findings.wrong, (int)apart);
    findings.first = first < findings.first ? first : findings.first;
  }
  if (threadIdx.x % KVS_WARP == 0 && findings.wrong != 0) {
    struct kvs_pattern_result *result = (struct kvs_pattern_result *)params.result;
    atomicAdd((unsigned long long *)&result->wrong, (unsigned long long)findings.wrong);
    atomicMin((unsigned long long *)&result->first, (unsigned long long)findings.first);
  }
}
