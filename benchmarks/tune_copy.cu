// What the copying kernels and the relay make of their settings: the measurement behind the constants in
// csrc/kernels/kernels.h and csrc/launch.[ch]. 512 MiB a case, random permutations, medians of 5; every byte is
// checked. Shares are of one 1 GiB copy in the same run.
//
//   nvcc -O2 -std=c++17 -arch=native -Icsrc/kernels -o /tmp/tune_copy benchmarks/tune_copy.cu -lcuda
//   /tmp/tune_copy [kernel|relay|all]
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <numeric>
#include <random>
#include <string>
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

typedef CUresult (*batch_function)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *,
                                   size_t, CUstream);
typedef CUresult (*word_function)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

enum { RUNS = 5, TENSORS = 80 };
static const size_t POOL = 1ull << 30, TOTAL = 512ull << 20;
static char *gpu, *host, *ring;
static struct kvs_piece *pieces_host, *pieces;
static struct kvs_row *rows;
static struct kvs_pair *pairs;
static struct kvs_segment *segments;
static uint32_t *flags, *word;
static unsigned long long *wrong;
static batch_function batch;
static word_function wait32, write32;
static cudaStream_t spine, copying[2];
static cudaEvent_t start_event, end_event, fork_event, join_event[2];
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
  fill<<<264, 512, 0, spine>>>((uint64_t *)(load ? host : gpu), POOL / 8, now_us());
  CHECK(cudaMemsetAsync(load ? gpu : host, 0x5a, POOL, spine));
  size_t nbytes = 0;
  for (const struct kvs_piece &piece : list) nbytes += piece.nbytes;
  for (int run = 0; run < RUNS; run++) {
    float ms;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventRecord(start_event, spine));
    double begin = now_us();
    submit();
    call.push_back(now_us() - begin);
    CHECK(cudaEventRecord(end_event, spine));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventElapsedTime(&ms, start_event, end_event));
    device.push_back(nbytes / (ms * 1e6));
  }
  *wrong = 0;
  compare<<<528, 256, 0, spine>>>(pieces, list.size(), wrong);
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
  snprintf(text, sizeof text, "%-6s %3zu KiB  %2u CTAs x %2u warps, %2u KiB a stage", name, nbytes >> 10, ctas, warps,
           chunk >> 10);
  unsigned shared = warps * RING_STAGES * chunk;
  bool bulk = !strcmp(name, "ring");
  if (bulk) CHECK(cudaFuncSetAttribute(kvs_kernel_ring, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  measure(text, load, list, [&] {
    if (bulk)
      kvs_kernel_ring<<<ctas, warps * 32, shared, spine>>>(params);
    else
      kvs_kernel_copy<<<ctas, warps * 32, 0, spine>>>(params);
    CHECK(cudaGetLastError());
  });
}

struct relay_setting {
  unsigned ctas, warps, chunk, slots, streams;
  size_t slot_nbytes;
  bool ramp; /* gather: the first fillings are small; scatter: the last ones */
};

static void run_relay(size_t nbytes, bool load, bool permuted, const relay_setting &s) {
  const size_t block = TENSORS * nbytes, blocks = TOTAL / block, tensor = POOL / TENSORS / 4096 * 4096;
  const size_t slots = tensor / nbytes;
  std::vector<int> from = permutation(slots, 1), to = permutation(POOL / block, 2);
  if (!permuted) std::iota(to.begin(), to.end(), 0);
  std::vector<struct kvs_piece> list;
  std::vector<struct kvs_row> table(TENSORS);
  std::vector<struct kvs_pair> ids(blocks);
  for (size_t t = 0; t < TENSORS; t++) {
    uint64_t g = (uint64_t)gpu + t * tensor, h = (uint64_t)host + t * nbytes;
    table[t] = {load ? h : g, load ? g : h, load ? block : nbytes, load ? nbytes : block, nbytes, t * nbytes, block};
  }
  for (size_t b = 0; b < blocks; b++) {
    ids[b] = {(uint32_t)(load ? to[b] : from[b]), (uint32_t)(load ? from[b] : to[b])};
    for (size_t t = 0; t < TENSORS; t++)
      list.push_back(
          {table[t].dst + ids[b].dst * table[t].dst_stride, table[t].src + ids[b].src * table[t].src_stride, nbytes});
  }
  const size_t per = std::max<size_t>(1, s.slot_nbytes / block);
  std::vector<struct kvs_segment> parts;
  for (size_t b = 0, n, f = 0; b < blocks; b += n, f++) {
    n = std::min(per, blocks - b);
    const size_t least = std::max<size_t>(1, (1 << 20) / block);
    if (s.ramp && !load && f < 8) n = std::min(n, least << f);
    if (s.ramp && load) n = std::min(n, std::max(least, (blocks - b) / 2));
    parts.push_back({b, n, 0, 0, TENSORS, 1, 0});
  }
  CHECK(cudaMemcpy(rows, table.data(), table.size() * sizeof table[0], cudaMemcpyDefault));
  CHECK(cudaMemcpy(pairs, ids.data(), ids.size() * sizeof ids[0], cudaMemcpyDefault));
  CHECK(cudaMemcpy(segments, parts.data(), parts.size() * sizeof parts[0], cudaMemcpyDefault));
  *word = 0;
  struct kvs_relay_params params = {};
  params.units = {0, (uint64_t)rows, (uint64_t)pairs, TENSORS, 1, (uint32_t)nbytes};
  params.segments = (uint64_t)segments;
  params.ring = (uint64_t)ring;
  params.slot_nbytes = per * block;
  params.flags = (uint64_t)flags;
  params.abort_word = (uint64_t)word;
  params.patience_ns = 250000000;
  params.nsegments = (uint32_t)parts.size();
  params.nslots = s.slots;
  params.gather = !load;
  params.chunk = s.chunk;
  unsigned shared = s.warps * RING_STAGES * s.chunk, all = s.ctas * s.warps;
  CHECK(cudaFuncSetAttribute(kvs_kernel_relay, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  char text[160];
  snprintf(text, sizeof text,
           "relay  %3zu KiB %-8s %2u CTAs x %u warps, %2u KiB a stage, %2u x %4.1f MiB%s, %u streams", nbytes >> 10,
           permuted ? "permuted" : "one run", s.ctas, s.warps, s.chunk >> 10, s.slots, per * block / 1048576.0,
           s.ramp ? " ramped" : "", s.streams);
  measure(text, load, list, [&] {
    CHECK(cudaMemsetAsync(flags, 0, 4 * KVS_RELAY_FLAGS, spine));
    CHECK(cudaEventRecord(fork_event, spine));
    for (unsigned i = 0; i < s.streams; i++) CHECK(cudaStreamWaitEvent(copying[i], fork_event, 0));
    kvs_kernel_relay<<<s.ctas, s.warps * 32, shared, spine>>>(params);
    CHECK(cudaGetLastError());
    for (size_t f = 0; f < parts.size(); f++) {
      unsigned slot = f % s.slots, use = f / s.slots + 1;
      cudaStream_t stream = copying[f % s.streams];
      CUdeviceptr filled = (CUdeviceptr)(flags + slot), emptied = (CUdeviceptr)(flags + KVS_RELAY_SLOTS + slot);
      if (!load) CHECK(wait32(stream, filled, use * all, CU_STREAM_WAIT_VALUE_GEQ));
      if (load && use > 1) CHECK(wait32(stream, emptied, (use - 1) * all, CU_STREAM_WAIT_VALUE_GEQ));
      static CUdeviceptr dst[4096], src[4096];
      static size_t sizes[4096];
      size_t n = 0;
      for (size_t b = parts[f].first; b < parts[f].first + parts[f].count; b++) {
        CUdeviceptr there = (CUdeviceptr)ring + slot * params.slot_nbytes + (b - parts[f].first) * block;
        CUdeviceptr h = (CUdeviceptr)host + to[b] * block;
        if (n && h == (load ? src : dst)[n - 1] + sizes[n - 1]) {
          sizes[n - 1] += block;
          continue;
        }
        dst[n] = load ? there : h, src[n] = load ? h : there, sizes[n++] = block;
      }
      CUmemcpyAttributes attributes = {};
      attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
      size_t zero = 0;
      if (n == 1)
        CHECK(cudaMemcpyAsync((void *)dst[0], (void *)src[0], sizes[0], cudaMemcpyDefault, stream));
      else
        for (size_t at = 0; at < n; at += 256)
          CHECK(batch(dst + at, src + at, sizes + at, std::min<size_t>(256, n - at), &attributes, &zero, 1, stream));
      CHECK(write32(stream, load ? filled : emptied, use, 0));
    }
    for (unsigned i = 0; i < s.streams; i++) {
      CHECK(cudaEventRecord(join_event[i], copying[i]));
      CHECK(cudaStreamWaitEvent(spine, join_event[i], 0));
    }
  });
  if (*word) printf("ABORTED\n");
}

int main(int argc, char **argv) {
  std::string what = argc > 1 ? argv[1] : "all";
  cudaDriverEntryPointQueryResult found;
  CHECK(cudaFree(0));
  CHECK(cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", (void **)&batch, 13000, cudaEnableDefault, &found));
  CHECK(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", (void **)&wait32, 12000, cudaEnableDefault, &found));
  CHECK(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", (void **)&write32, 12000, cudaEnableDefault, &found));
  CHECK(cudaMalloc(&gpu, POOL));
  CHECK(cudaMallocHost(&host, POOL));
  CHECK(cudaMalloc(&ring, 256 << 20));
  CHECK(cudaMalloc(&pieces, 1 << 25));
  CHECK(cudaMallocHost(&pieces_host, 1 << 25));
  CHECK(cudaMalloc(&rows, 1 << 20));
  CHECK(cudaMalloc(&pairs, 1 << 22));
  CHECK(cudaMalloc(&segments, 1 << 20));
  CHECK(cudaMalloc(&flags, 4096));
  CHECK(cudaMallocHost(&word, 64));
  CHECK(cudaMallocHost(&wrong, 64));
  CHECK(cudaStreamCreateWithFlags(&spine, cudaStreamNonBlocking));
  for (int i = 0; i < 2; i++) {
    CHECK(cudaStreamCreateWithFlags(&copying[i], cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&join_event[i], cudaEventDisableTiming));
  }
  CHECK(cudaEventCreate(&start_event));
  CHECK(cudaEventCreate(&end_event));
  CHECK(cudaEventCreateWithFlags(&fork_event, cudaEventDisableTiming));
  for (int load = 0; load < 2; load++) {
    std::vector<struct kvs_piece> one = {{(uint64_t)(load ? gpu : host), (uint64_t)(load ? host : gpu), POOL}};
    measure("one copy of 1 GiB", load, one,
            [&] { CHECK(cudaMemcpyAsync(load ? gpu : host, load ? host : gpu, POOL, cudaMemcpyDefault, spine)); });
  }
  if (what != "relay")
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
  if (what != "kernel")
    for (size_t kib : {4, 8, 16, 64})
      for (int load = 0; load < 2; load++)
        for (int permuted = 0; permuted < 2; permuted++)
          for (unsigned streams : {1, 2})
            for (unsigned mib : {8, 16})
              for (unsigned slots : {3, 4})
                for (unsigned ctas : {4, 8})
                  for (unsigned chunk : {4, 8})
                    for (int ramp = 0; ramp < 2; ramp++)
                      if (chunk <= kib)
                        run_relay(kib << 10, load, permuted,
                                  {ctas, 2, chunk << 10, slots, streams, (size_t)mib << 20, ramp != 0});
  return 0;
}
