/* CRC-32C of one memory range: see crc.h. Launch with KVS_CRC_THREADS threads and params.bodies + 1 CTAs.
 *
 * Each CTA first computes its table, the factor of one row times each byte of a sum: 4 KiB of shared memory. GROUP rows
 * are loaded at once, since a load from device memory takes as long as the look-ups of many rows. */
#include "common.cuh"

enum { GROUP = 4 };

/* The xor of all threads' sums, in thread 0. All threads of the CTA must call it, once. */
static __device__ __forceinline__ uint32_t crc_gather(uint32_t sum) {
  __shared__ uint32_t warps[KVS_CRC_THREADS / KVS_WARP];
  for (unsigned apart = KVS_WARP / 2; apart != 0; apart /= 2) sum ^= __shfl_xor_sync(KVS_ALL_LANES, sum, (int)apart);
  if (threadIdx.x % KVS_WARP == 0) warps[threadIdx.x / KVS_WARP] = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    for (unsigned warp = 1; warp < KVS_CRC_THREADS / KVS_WARP; warp++) sum ^= warps[warp];
  return sum;
}

static __device__ __forceinline__ void crc_add(const uint32_t table[4][256], uint32_t sums[4], const uint4 &words) {
  sums[0] = kvs_crc_look_up(table, sums[0]) ^ words.x;
  sums[1] = kvs_crc_look_up(table, sums[1]) ^ words.y;
  sums[2] = kvs_crc_look_up(table, sums[2]) ^ words.z;
  sums[3] = kvs_crc_look_up(table, sums[3]) ^ words.w;
}

static __device__ __forceinline__ uint32_t crc_rows(const struct kvs_crc_params &params, const uint32_t table[4][256]) {
  const uint64_t rows = params.nbytes / KVS_CRC_ROW, first = (uint64_t)blockIdx.x * params.rows;
  const uint64_t end = first + params.rows < rows ? first + params.rows : rows;
  const uint4 *column = (const uint4 *)params.data + threadIdx.x;
  uint32_t sums[4] = {0, 0, 0, 0};
  for (uint64_t row = first; row < end; row += GROUP) {
    uint4 words[GROUP];
#pragma unroll
    for (unsigned i = 0; i < GROUP; i++)
      if (row + i < end) word_load(&words[i], column + (row + i) * KVS_CRC_THREADS);
#pragma unroll
    for (unsigned i = 0; i < GROUP; i++)
      if (row + i < end) crc_add(table, sums, words[i]);
  }
  return kvs_crc_times(params.threads[threadIdx.x], kvs_crc_join(sums));
}

static __device__ uint32_t crc_rest(const struct kvs_crc_params &params) {
  uint64_t at;
  const uint32_t count = kvs_crc_rest(&params, threadIdx.x, &at);
  uint32_t sum = 0;
  for (uint32_t i = 0; i < count; i++) {
    uint8_t byte;
    word_load(&byte, (const uint8_t *)params.data + at + i);
    sum = kvs_crc_byte(sum, byte);
  }
  return count == 0 ? 0 : kvs_crc_over(&params, sum, (uint32_t)(params.nbytes - at - count));
}

extern "C" __global__ void __launch_bounds__(KVS_CRC_THREADS)
    kvs_kernel_crc(const __grid_constant__ struct kvs_crc_params params) {
  __shared__ uint32_t table[4][256];
  const bool body = blockIdx.x < params.bodies;
  uint32_t sum;
  if (body) {
    for (unsigned k = 0; k < 4; k++) table[k][threadIdx.x] = kvs_crc_times(params.row, threadIdx.x << (8u * k));
    __syncthreads();
    sum = crc_gather(crc_rows(params, table));
  } else {
    sum = crc_gather(crc_rest(params));
  }
  if (threadIdx.x == 0)
    atomicXor((unsigned *)params.result, body ? kvs_crc_times(params.ctas[blockIdx.x], sum) : sum ^ params.start);
}
