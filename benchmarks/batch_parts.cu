// What cuMemcpyBatchAsync makes of one list given whole, in parts, and over several streams: the measurement behind the
// part sizes in csrc/core/submit.c. 8192 scattered blocks a case; medians of 7; bytes are not checked here (kvswap
// bench does that).
//
//   nvcc -O2 -arch=native -o /tmp/batch_parts benchmarks/batch_parts.cu -lcuda && /tmp/batch_parts
#include "streams.cuh"

typedef CUresult (*batch_function)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *,
                                   size_t, CUstream);
enum { BLOCKS = 8192 };

static batch_function batch;

static void measure(const char *name, char *dst_base, char *src_base, size_t nbytes, int splits, int part) {
  std::mt19937 random(nbytes);
  std::vector<size_t> src_ids = permuted(BLOCKS, random), dst_ids = permuted(BLOCKS, random);
  std::vector<CUdeviceptr> src(BLOCKS), dst(BLOCKS);
  std::vector<size_t> sizes(BLOCKS, nbytes);
  for (int i = 0; i < BLOCKS; i++) {
    src[i] = (CUdeviceptr)src_base + src_ids[i] * nbytes;
    dst[i] = (CUdeviceptr)dst_base + dst_ids[i] * nbytes;
  }
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t first = 0;
  times t = measured(splits, [&] {
    for (int from = 0, n = 0; from < BLOCKS; from += part, n++)
      if (batch(&dst[from], &src[from], &sizes[0], std::min(part, BLOCKS - from), &attributes, &first, 1,
                (CUstream)streams[n % splits]))
        printf("refused\n");
  });
  printf("%s %3zu KiB, %d stream(s), parts of %4d: %5.1f GB/s, %6.0f us (%.0f to %.0f), call %6.0f us\n", name,
         nbytes >> 10, splits, part, BLOCKS * nbytes / t.total * 1e-3, t.total, t.least, t.most, t.call);
}

int main() {
  char *gpu, *host;
  cudaDriverEntryPointQueryResult found;
  cudaFree(0);
  cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", (void **)&batch, 13000, cudaEnableDefault, &found);
  cudaMalloc(&gpu, 2ull << 30);
  if (!batch || cudaMallocHost(&host, 2ull << 30)) return fprintf(stderr, "no batch call, or no memory\n"), 1;
  open_streams();
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
