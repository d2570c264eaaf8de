// What cuMemcpyBatchAsync makes of one list given whole, in parts, and over several streams: the measurement behind
// most_copies() in csrc/paths/parts.c. Scattered blocks, 8192 of them or few; medians of 7; bytes are not checked
// here (kvswap bench does that).
//
//   nvcc -O2 -arch=native -o /tmp/batch_parts benchmarks/batch_parts.cu -lcuda && /tmp/batch_parts
#include "streams.cuh"

typedef CUresult (*batch_function)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *,
                                   size_t, CUstream);
enum { BLOCKS = 8192 };

// A part holds as many copies as were given before it, from `least` to `most`.
struct cut {
  size_t least, most;
};
static const cut CUTS[] = {{8, 8}, {16, 16}, {32, 32}, {128, 128}, {16, 32}, {16, 256}};

static batch_function batch;

static void measure(const char *name, char *dst_base, char *src_base, size_t nbytes, size_t blocks, int splits,
                    cut parts) {
  std::mt19937 random(nbytes);
  std::vector<size_t> src_ids = permuted(BLOCKS, random), dst_ids = permuted(BLOCKS, random);
  std::vector<CUdeviceptr> src(blocks), dst(blocks);
  std::vector<size_t> sizes(blocks, nbytes);
  for (size_t i = 0; i < blocks; i++) {
    src[i] = (CUdeviceptr)src_base + src_ids[i] * nbytes;
    dst[i] = (CUdeviceptr)dst_base + dst_ids[i] * nbytes;
  }
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t first = 0;
  times t = measured(splits, [&] {
    size_t part = 0;
    for (size_t from = 0, n = 0; from < blocks; from += part, n++) {
      part = std::min(std::clamp(from, parts.least, parts.most), blocks - from);
      if (batch(&dst[from], &src[from], &sizes[0], part, &attributes, &first, 1, (CUstream)streams[n % splits]))
        printf("refused\n");
    }
  });
  printf(
      "%s %3zu KiB x %4zu, %d stream(s), parts of %4zu to %4zu: %5.1f GB/s, %6.0f us (%.0f to %.0f), call %6.0f us\n",
      name, nbytes >> 10, blocks, splits, parts.least, parts.most, blocks * nbytes / t.total * 1e-3, t.total, t.least,
      t.most, t.call);
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
      for (size_t part : {int(BLOCKS), 1024, 256, 128, 64, 32})
        measure(name, dst, src, kib << 10, BLOCKS, 1, {part, part});
      measure(name, dst, src, kib << 10, BLOCKS, STREAMS, {BLOCKS / STREAMS, BLOCKS / STREAMS});
      measure(name, dst, src, kib << 10, BLOCKS, STREAMS, {128, 128});
      for (size_t blocks : {16, 45, 180, 2048})
        for (cut cut : CUTS) measure(name, dst, src, kib << 10, blocks, 1, cut);
    }
  return 0;
}
