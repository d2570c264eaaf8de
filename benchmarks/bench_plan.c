/* What planning costs on one core: checking and planning a random permutation on both sides (nothing merges), and the
 * overlap check of a raw pointer list, in nanoseconds a block. Medians of 21 runs; the first, which takes the memory,
 * is not counted.
 *
 *   cc -O3 -std=c11 -D_GNU_SOURCE -Icsrc -o /tmp/bench_plan benchmarks/bench_plan.c csrc/plan/plan.c \
 *      csrc/plan/overlap.c csrc/device/region.c csrc/status.c && /tmp/bench_plan [blocks] */
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "plan/overlap.h"
#include "plan/plan.h"

static void permute(int64_t *ids, size_t n, uint64_t *state) {
  for (size_t i = 0; i < n; i++) ids[i] = (int64_t)i;
  for (size_t i = n; i > 1; i--) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    size_t j = (size_t)((*state >> 33) % i);
    int64_t id = ids[i - 1];
    ids[i - 1] = ids[j];
    ids[j] = id;
  }
}

int main(int argc, char **argv) {
  size_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
  int64_t *gpu = malloc(n * sizeof *gpu), *cpu = malloc(n * sizeof *cpu);
  uint64_t *src = malloc(n * sizeof *src), *dst = malloc(n * sizeof *dst), size = 65536, state = 1;
  struct kvs_tensor tensor = {.gpu = 1ull << 40, .cpu = 1ull << 44, .nbytes = size, .gpu_blocks = n, .cpu_blocks = n};
  struct kvs_plan_scratch scratch = {0};
  struct kvs_copies copies = {0};
  struct kvs_plan_bounds bounds;
  struct kvs_error err;
  double plan[RUNS], check[RUNS], batch[RUNS];
  permute(gpu, n, &state);
  permute(cpu, n, &state);
  struct kvs_ids gpu_ids = {gpu, 8, n}, cpu_ids = {cpu, 8, n};
  for (size_t i = 0; i < n; i++)
    src[i] = tensor.gpu + (uint64_t)gpu[i] * size, dst[i] = tensor.cpu + (uint64_t)cpu[i] * size;
  for (int run = -1; run < RUNS; run++) {
    bool disjoint;
    int at = run < 0 ? 0 : run, status;
    copies.count = 0;
    double t0 = now_ns();
    status = kvs_plan_check_tensors(&tensor, 1, KVS_D2H, &scratch, &disjoint, &err) ||
             kvs_plan_check_ids(&tensor, 1, &gpu_ids, &cpu_ids, KVS_D2H, &scratch, &err) ||
             kvs_plan_cache(&tensor, 1, &gpu_ids, &cpu_ids, KVS_D2H, true, &copies, &err);
    double t1 = now_ns();
    if (status || !disjoint || copies.count < n - n / 100 - 8) return fprintf(stderr, "the plan is wrong\n"), 1;
    plan[at] = t1 - t0;
    copies.count = 0;
    t0 = now_ns();
    status = kvs_plan_batch(src, dst, &size, true, n, true, &copies, &bounds, &err);
    t1 = now_ns();
    status = status ||
             kvs_plan_check_disjoint(&copies, &bounds, &(struct kvs_plan_naming){.entry = "entry"}, &scratch, &err);
    double t2 = now_ns();
    if (status) return fprintf(stderr, "%s\n", err.message), 1;
    batch[at] = t1 - t0;
    check[at] = t2 - t1;
  }
  double per = 1.0 / (double)n;
  printf("%zu blocks, random permutation on both sides, ns a block (medians of %d):\n", n, RUNS);
  printf("  ids: check and plan      %6.1f\n", median(plan) * per);
  printf("  raw pointers: plan       %6.1f\n", median(batch) * per);
  printf("  raw pointers: overlap    %6.1f\n", median(check) * per);
  return 0;
}
