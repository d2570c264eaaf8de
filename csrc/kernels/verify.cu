/* Compares coded pages with the pages that they were coded from: a CTA a unit, as CODE, after it. */
#include "codecs/verify.cuh"
#include "units.cuh"

extern "C" __global__ void __launch_bounds__(CODE_THREADS)
    kvs_kernel_verify(const __grid_constant__ struct kvs_verify_params params) {
  __shared__ struct code_shared shared;
  const struct kvs_code_params &code = params.code;
  const struct kvs_units &units = code.units;
  const uint64_t scratch = params.scratch + (uint64_t)blockIdx.x * KVS_VERIFY_NBYTES;
  for (uint64_t index = blockIdx.x; index < code.count; index += gridDim.x) {
    const uint64_t line = index / units.parts, block = line / units.nrows;
    const struct kvs_unit unit = ((const struct kvs_unit *)code.table)[index % units.parts];
    const struct kvs_row row = row_at(units, (uint32_t)(line % units.nrows));
    const struct kvs_pair pair = units.pairs ? pair_at(units.pairs, block) : code.inline_pairs[block];
    const struct kvs_piece pages = kvs_code_pages(&code, &row, &pair, block);
    if (pair.dst == KVS_BAD_SLOT) continue;
    const uint64_t valid_nbytes = pair.src == KVS_BAD_SLOT ? 0 : code.valid_nbytes;
    const enum kvs_unit_verdict verdict = verify_unit(unit, pages.src, valid_nbytes, pages.dst, scratch, &shared);
    if (threadIdx.x == 0 && verdict != KVS_UNIT_GOOD) atomicMax((unsigned *)code.verdicts + block, (unsigned)verdict);
    __syncthreads(); /* the next unit uses `shared` and scratch again */
  }
}
