/* Keeps a stream busy for a time. Sleeps, so that other kernels keep their resources. */
#include "common.cuh"

#define DELAY_MAX_NS 10000000000ull

extern "C" __global__ void __launch_bounds__(32)
    kvs_kernel_delay(const __grid_constant__ struct kvs_delay_params params) {
  const uint64_t ns = params.ns < DELAY_MAX_NS ? params.ns : DELAY_MAX_NS, start = clock_ns();
  if (threadIdx.x != 0) return;
  for (uint64_t passed = 0; passed < ns; passed = clock_ns() - start) sleep_ns(ns - passed);
}
