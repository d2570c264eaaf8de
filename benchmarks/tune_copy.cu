// What the copying kernels make of their settings: the measurement behind the constants in csrc/kernels/kernels.h. 512
// MiB a case, random permutations, medians of 5; every byte is checked. Shares are of one 1 GiB copy in the same run.
//
//   nvcc -O2 -std=c++17 -arch=native -Icsrc/kernels -o /tmp/tune_copy benchmarks/tune_copy.cu -lcuda
//   /tmp/tune_copy
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <numeric>
#include <random>
#include <vector>

#include "fatbin.cu"

#define CHECK(call)                                                                                                    \
  do {                                                                                                                 \
    int code_ = (int)(call);                                                                                           \
    if (code_) {                                                                                                       \
      printf("%s: %d\n", #call, code_);                                                                                \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

enum { RUNS = 5 };
static const size_t POOL = 1ull << 30, TOTAL = 512ull << 20;
static char *gpu, *host;
static struct kvs_piece *pieces_host, *pieces;
static unsigned long long *wrong;
static cudaStream_t stream;
static cudaEvent_t start_event, end_event;
static double ceiling[2];

static double now_us() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

__global__ void fill(uint64_t *words, size_t count, uint64_t key) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
    words[i] = kvs_pattern_word(key, i);
}

__global__ void compare(const struct kvs_piece *pieces, size_t count, unsigned long long *wrong) {
  for (size_t p = blockIdx.x; p < count; p += gridDim.x)
    for (size_t i = threadIdx.x; i < pieces[p].nbytes / 8; i += blockDim.x)
      if (((const uint64_t *)pieces[p].dst)[i] != ((const uint64_t *)pieces[p].src)[i]) atomicAdd(wrong, 1ull);
}

template <typename Submit>
static void measure(const char *text, bool load, const std::vector<struct kvs_piece> &list, Submit submit) {
  std::vector<double> device, call;
  memcpy(pieces_host, list.data(), list.size() * sizeof list[0]);
  CHECK(cudaMemcpy(pieces, pieces_host, list.size() * sizeof list[0], cudaMemcpyDefault));
  fill<<<264, 512, 0, stream>>>((uint64_t *)(load ? host : gpu), POOL / 8, now_us());
  CHECK(cudaMemsetAsync(load ? gpu : host, 0x5a, POOL, stream));
  size_t nbytes = 0;
  for (const struct kvs_piece &piece : list) nbytes += piece.nbytes;
  for (int run = 0; run < RUNS; run++) {
    float ms;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventRecord(start_event, stream));
    double begin = now_us();
    submit();
    call.push_back(now_us() - begin);
    CHECK(cudaEventRecord(end_event, stream));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventElapsedTime(&ms, start_event, end_event));
    device.push_back(nbytes / (ms * 1e6));
  }
  *wrong = 0;
  compare<<<528, 256, 0, stream>>>(pieces, list.size(), wrong);
  CHECK(cudaDeviceSynchronize());
  std::sort(device.begin(), device.end());
  std::sort(call.begin(), call.end());
  double gbps = device[RUNS / 2];
  printf("%s %-3s %6.2f GB/s  share %.3f  call %7.1f us%s\n", text, load ? "H2D" : "D2H", gbps,
         ceiling[load] ? gbps / ceiling[load] : 1.0, call[RUNS / 2], *wrong ? "  WRONG BYTES" : "");
  fflush(stdout);
  if (!ceiling[load]) ceiling[load] = gbps;
}

static std::vector<int> permutation(size_t count, unsigned seed) {
  std::vector<int> ids(count);
  std::mt19937 random(seed);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

static void run_kernel(size_t nbytes, bool load, const char *name, unsigned ctas, unsigned warps, unsigned chunk) {
  size_t slots = POOL / nbytes, count = TOTAL / nbytes;
  std::vector<int> from = permutation(slots, 1), to = permutation(slots, 2);
  std::vector<struct kvs_piece> list;
  const size_t piece = nbytes < 32768 ? nbytes : 32768;
  for (size_t i = 0; i < count; i++)
    for (size_t at = 0; at < nbytes; at += piece) {
      uint64_t g = (uint64_t)gpu + from[i] * nbytes + at, h = (uint64_t)host + to[i] * nbytes + at;
      list.push_back({load ? g : h, load ? h : g, piece});
    }
  struct kvs_copy_params params = {};
  params.units.pieces = (uint64_t)pieces;
  params.count = list.size();
  params.chunk = chunk;
  char text[128];
  snprintf(text, sizeof text, "%-6s %5zu bytes  %2u CTAs x %2u warps, %4u bytes a stage", name, nbytes, ctas, warps,
           chunk);
  unsigned shared = warps * RING_STAGES * chunk;
  bool bulk = !strcmp(name, "ring");
  if (bulk) CHECK(cudaFuncSetAttribute(kvs_kernel_ring, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  measure(text, load, list, [&] {
    if (bulk)
      kvs_kernel_ring<<<ctas, warps * 32, shared, stream>>>(params);
    else
      kvs_kernel_copy<<<ctas, warps * 32, 0, stream>>>(params);
    CHECK(cudaGetLastError());
  });
}

int main() {
  CHECK(cudaFree(0));
  CHECK(cudaMalloc(&gpu, POOL));
  CHECK(cudaMallocHost(&host, POOL));
  CHECK(cudaMalloc(&pieces, 1 << 25));
  CHECK(cudaMallocHost(&pieces_host, 1 << 25));
  CHECK(cudaMallocHost(&wrong, 64));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaEventCreate(&start_event));
  CHECK(cudaEventCreate(&end_event));
  for (int load = 0; load < 2; load++) {
    std::vector<struct kvs_piece> one = {{(uint64_t)(load ? gpu : host), (uint64_t)(load ? host : gpu), POOL}};
    measure("one copy of 1 GiB", load, one,
            [&] { CHECK(cudaMemcpyAsync(load ? gpu : host, load ? host : gpu, POOL, cudaMemcpyDefault, stream)); });
  }
  for (size_t kib : {4, 8, 16, 64})
    for (int load = 0; load < 2; load++) {
      for (unsigned ctas : {4, 8, 16}) run_kernel(kib << 10, load, "words", ctas, 16, 0);
      for (unsigned ctas : {2, 4, 8, 16, 32})
        for (unsigned warps : {2, 4, 8})
          for (unsigned chunk : {2, 4, 8})
            if (ctas * warps <= 64 && warps * chunk * 8 <= 224 && chunk <= kib &&
                chunk * 4 >= std::min<size_t>(kib, 16))
              run_kernel(kib << 10, load, "ring", ctas, warps, chunk << 10);
    }
  for (size_t nbytes : {512, 1024, 2048}) // short rows: a CTA's rate of bulk copies is the limit
    for (int load = 0; load < 2; load++) {
      for (unsigned ctas : {2, 4, 8, 16}) run_kernel(nbytes, load, "words", ctas, 16, 0);
      for (unsigned ctas : {2, 4, 8, 16, 32})
        run_kernel(nbytes, load, "ring", ctas, KVS_RING_WARPS, (unsigned)nbytes + KVS_RING_LINE);
    }
  return 0;
}
