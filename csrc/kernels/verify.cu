/* Compares coded pages with the pages that they were coded from: a CTA a unit, as CODE, after it. */
#include "codecs/verify.cuh"
#include "units.cuh"

extern "C" __global__ void __launch_bounds__(CODE_THREADS)
    kvs_kernel_verify(const __grid_constant__ struct kvs_verify_params params) {
  __shared__ struct code_shared shared;
  __shared__ struct code_items items;
  const struct kvs_code_params &code = params.code;
  const uint64_t scratch = params.scratch + (uint64_t)blockIdx.x * KVS_VERIFY_NBYTES;
  for (uint64_t index = blockIdx.x; index < code.count; index += gridDim.x) {
    const struct kvs_code_item &item = code_item_at(code, index, &items);
    if (item.skipped) continue;
    const enum kvs_unit_verdict verdict =
        verify_unit(item.unit, item.pages.src, item.empty ? 0 : code.valid_nbytes, item.pages.dst, scratch, &shared);
    if (threadIdx.x == 0 && verdict != KVS_UNIT_GOOD)
      atomicMax((unsigned *)code.verdicts + item.block, (unsigned)verdict);
    __syncthreads(); /* the next unit uses `shared` and scratch again */
  }
}
