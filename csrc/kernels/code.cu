/* Encodes and decodes pages, a CTA a unit. Launch with kvs_code_threads() of the largest unit and any grid. A CTA takes
 * units c, c + grid and so on: neighbours in a page, so that writes over the link lie together. */
#include "codecs/unit.cuh"
#include "units.cuh"

extern "C" __global__ void __launch_bounds__(CODE_THREADS, 2)
    kvs_kernel_code(const __grid_constant__ struct kvs_code_params params) {
  __shared__ struct code_shared shared;
  __shared__ struct code_items items;
  uint32_t turn = 0;
  for (uint64_t index = blockIdx.x; index < params.count; index += gridDim.x, turn ^= 1u) {
    const struct kvs_code_item &item = code_item_at(params, index, &items);
    if (item.skipped) continue;
    const enum kvs_unit_verdict verdict =
        !params.by_src ? encode_unit(item.unit, item.pages.src, item.empty ? 0 : params.valid_nbytes, item.pages.dst,
                                     turn, &shared)
        : item.empty   ? decode_nothing(item.unit, item.pages.dst)
                       : decode_unit(item.unit, item.pages.src, item.pages.dst);
    if (threadIdx.x == 0 && verdict != KVS_UNIT_GOOD)
      atomicMax((unsigned *)params.verdicts + item.block, (unsigned)verdict);
  }
}
