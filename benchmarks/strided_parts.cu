// Copies of rows, one a block, given one by one, over several streams, and by batch calls (cuMemcpy3DBatchAsync): the
// measurement behind path strided, and behind what it reaches once more of them wait than a driver's queue holds.
// 80 tensors at equal pitch in one allocation, block-first host, permuted on both sides; medians of 7; bytes are not
// checked here (kvswap bench does that).
//
//   nvcc -O2 -arch=native -o /tmp/strided_parts benchmarks/strided_parts.cu -lcuda && /tmp/strided_parts
#include "streams.cuh"

typedef CUresult (*batch_function)(size_t, CUDA_MEMCPY3D_BATCH_OP *, unsigned long long, CUstream);
enum { TENSORS = 80 };

static batch_function batch;

struct block_copy {
  char *gpu, *host;
};

static CUmemcpy3DOperand operand(char *base, size_t pitch) {
  CUmemcpy3DOperand made = {};
  made.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
  made.op.ptr.ptr = (CUdeviceptr)base;
  made.op.ptr.rowLength = pitch;
  made.op.ptr.layerHeight = TENSORS;
  return made;
}

// part 0: one by one
static void measure(bool h2d, char *gpu, char *host, size_t nbytes, size_t blocks, int splits, size_t part) {
  std::mt19937 random(nbytes);
  std::vector<size_t> from = permuted(blocks, random), to = permuted(blocks, random);
  std::vector<CUDA_MEMCPY3D_BATCH_OP> ops(blocks);
  std::vector<block_copy> copies(blocks);
  const size_t pitch = nbytes * blocks;
  for (size_t i = 0; i < blocks; i++) {
    copies[i] = {gpu + from[i] * nbytes, host + to[i] * nbytes * TENSORS};
    CUmemcpy3DOperand there = operand(copies[i].gpu, pitch), here = operand(copies[i].host, nbytes);
    ops[i] = {};
    ops[i].src = h2d ? here : there;
    ops[i].dst = h2d ? there : here;
    ops[i].extent = {nbytes, TENSORS, 1};
    ops[i].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  }
  int refused = 0;
  times t = measured(splits, [&] {
    for (size_t i = 0, n = 0; i < blocks; i += std::max(part, size_t(1)), n++) {
      cudaStream_t stream = streams[n % splits];
      const block_copy &c = copies[i];
      if (part)
        refused |= batch(std::min(part, blocks - i), &ops[i], 0, (CUstream)stream);
      else if (h2d)
        refused |= cudaMemcpy2DAsync(c.gpu, pitch, c.host, nbytes, nbytes, TENSORS, cudaMemcpyHostToDevice, stream);
      else
        refused |= cudaMemcpy2DAsync(c.host, nbytes, c.gpu, pitch, nbytes, TENSORS, cudaMemcpyDeviceToHost, stream);
    }
  });
  printf("%s %2zu KiB x %5zu, %d stream(s), parts of %5zu: %5.1f GB/s, %6.0f us (%.0f to %.0f), call %6.0f us%s\n",
         h2d ? "H2D" : "D2H", nbytes >> 10, blocks, splits, part, blocks * TENSORS * nbytes / t.total * 1e-3, t.total,
         t.least, t.most, t.call, refused ? ", REFUSED" : "");
}

int main() {
  char *gpu, *host;
  cudaDriverEntryPointQueryResult found;
  cudaFree(0);
  cudaGetDriverEntryPointByVersion("cuMemcpy3DBatchAsync", (void **)&batch, 13000, cudaEnableDefault, &found);
  cudaMalloc(&gpu, 1ull << 30);
  if (!batch || cudaMallocHost(&host, 1ull << 30)) return fprintf(stderr, "no batch call, or no memory\n"), 1;
  open_streams();
  for (int h2d = 0; h2d < 2; h2d++)
    for (size_t kib : {4, 8, 16})
      for (size_t blocks : {size_t(512), (size_t(1) << 30) / TENSORS / (kib << 10)}) {
        const size_t nbytes = kib << 10;
        for (int splits : {1, 2, 4}) measure(h2d, gpu, host, nbytes, blocks, splits, 0);
        for (size_t part : {blocks, size_t(256), size_t(64)}) measure(h2d, gpu, host, nbytes, blocks, 1, part);
        measure(h2d, gpu, host, nbytes, blocks, 2, 64);
      }
  return 0;
}
