/* Encodes and decodes pages, a CTA a unit. Launch with CODE_THREADS threads and any grid. A CTA takes units c, c + grid
 * and so on: neighbours in a page, so that writes over the link lie together. Two CTAs an SM: with one decoding is a
 * fifth slower, with three or four it is no faster (H200). */
#include "codecs/unit.cuh"
#include "units.cuh"

extern "C" __global__ void __launch_bounds__(CODE_THREADS, 2)
    kvs_kernel_code(const __grid_constant__ struct kvs_code_params params) {
  __shared__ struct code_shared shared;
  const struct kvs_units &units = params.units;
  for (uint64_t index = blockIdx.x; index < params.count; index += gridDim.x) {
    const uint64_t line = index / units.parts, block = line / units.nrows;
    const struct kvs_unit unit = ((const struct kvs_unit *)params.table)[index % units.parts];
    const struct kvs_row row = row_at(units, (uint32_t)(line % units.nrows));
    const struct kvs_pair pair = units.pairs ? pair_at(units.pairs, block) : params.inline_pairs[block];
    const struct kvs_piece pages = kvs_code_pages(&params, &row, &pair, block);
    if (pair.dst == KVS_BAD_SLOT) continue;
    const bool none = pair.src == KVS_BAD_SLOT;
    const enum kvs_unit_verdict verdict =
        !params.by_src ? encode_unit(unit, pages.src, none ? 0 : params.valid_nbytes, pages.dst, &shared)
        : none         ? decode_nothing(unit, pages.dst)
                       : decode_unit(unit, pages.src, pages.dst);
    if (threadIdx.x == 0 && verdict != KVS_UNIT_GOOD) atomicMax((unsigned *)params.verdicts + block, (unsigned)verdict);
    __syncthreads(); /* the next unit uses `shared` again */
  }
}
