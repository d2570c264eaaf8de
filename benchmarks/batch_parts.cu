// What cuMemcpyBatchAsync makes of one list given whole, in parts, and over several streams: the measurement behind the
// part sizes in csrc/core/submit.c. 8192 scattered blocks a case; medians of 7; bytes are not checked here (kvswap
// bench does that).
//
//   nvcc -O2 -arch=native -o /tmp/batch_parts benchmarks/batch_parts.cu -lcuda && /tmp/batch_parts
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <numeric>
#include <random>
#include <vector>

typedef CUresult (*batch_function)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *,
                                   size_t, CUstream);
enum { BLOCKS = 8192, STREAMS = 4, RUNS = 7 };

static batch_function batch;
static cudaStream_t streams[STREAMS];
static cudaEvent_t fork_event, joins[STREAMS];

static double now_us() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static void measure(const char *name, char *dst_base, char *src_base, size_t nbytes, int splits, int part) {
  std::vector<int> src_ids(BLOCKS), dst_ids(BLOCKS);
  std::vector<CUdeviceptr> src(BLOCKS), dst(BLOCKS);
  std::vector<size_t> sizes(BLOCKS, nbytes);
  std::vector<double> total, calling;
  std::mt19937 random(nbytes);
  std::iota(src_ids.begin(), src_ids.end(), 0);
  std::iota(dst_ids.begin(), dst_ids.end(), 0);
  std::shuffle(src_ids.begin(), src_ids.end(), random);
  std::shuffle(dst_ids.begin(), dst_ids.end(), random);
  for (int i = 0; i < BLOCKS; i++) {
    src[i] = (CUdeviceptr)src_base + src_ids[i] * nbytes;
    dst[i] = (CUdeviceptr)dst_base + dst_ids[i] * nbytes;
  }
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t first = 0;
  for (int run = 0; run <= RUNS; run++) {
    cudaDeviceSynchronize();
    double start = now_us();
    cudaEventRecord(fork_event, streams[0]);
    for (int s = 1; s < splits; s++) cudaStreamWaitEvent(streams[s], fork_event, 0);
    for (int from = 0, n = 0; from < BLOCKS; from += part, n++)
      if (batch(&dst[from], &src[from], &sizes[0], std::min(part, BLOCKS - from), &attributes, &first, 1,
                (CUstream)streams[n % splits]))
        printf("refused\n");
    for (int s = 1; s < splits; s++) {
      cudaEventRecord(joins[s], streams[s]);
      cudaStreamWaitEvent(streams[0], joins[s], 0);
    }
    double called = now_us();
    cudaStreamSynchronize(streams[0]);
    if (run == 0) continue;
    total.push_back(now_us() - start);
    calling.push_back(called - start);
  }
  std::sort(total.begin(), total.end());
  std::sort(calling.begin(), calling.end());
  printf("%s %3zu KiB, %d stream(s), parts of %4d: %5.1f GB/s, %6.0f us (%.0f to %.0f), call %6.0f us\n", name,
         nbytes >> 10, splits, part, BLOCKS * nbytes / total[RUNS / 2] * 1e-3, total[RUNS / 2], total[0],
         total[RUNS - 1], calling[RUNS / 2]);
}

int main() {
  char *gpu, *host;
  cudaDriverEntryPointQueryResult found;
  cudaFree(0);
  cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", (void **)&batch, 13000, cudaEnableDefault, &found);
  cudaMalloc(&gpu, 2ull << 30);
  if (!batch || cudaMallocHost(&host, 2ull << 30)) return fprintf(stderr, "no batch call, or no memory\n"), 1;
  cudaEventCreateWithFlags(&fork_event, cudaEventDisableTiming);
  for (int s = 0; s < STREAMS; s++) {
    cudaStreamCreateWithFlags(&streams[s], cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&joins[s], cudaEventDisableTiming);
  }
  for (int h2d = 0; h2d < 2; h2d++)
    for (size_t kib : {4, 8, 16, 24, 32, 64, 256}) {
      const char *name = h2d ? "H2D" : "D2H";
      char *dst = h2d ? gpu : host, *src = h2d ? host : gpu;
      for (int part : {int(BLOCKS), 1024, 256, 128, 64, 32}) measure(name, dst, src, kib << 10, 1, part);
      measure(name, dst, src, kib << 10, STREAMS, BLOCKS / STREAMS);
      measure(name, dst, src, kib << 10, STREAMS, 128);
    }
  return 0;
}
