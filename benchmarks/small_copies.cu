// How long a model's own small copies, and its kernels, wait behind 512 MiB that another stream copies, by how those
// are given to the driver: the measurement behind csrc/paths/parts.c and gap() in csrc/cuda/device.c. Bytes are not
// checked here. CUDA_DEVICE_MAX_CONNECTIONS in the environment is what else matters.
//
//   nvcc -O2 -arch=native -o /tmp/small_copies benchmarks/small_copies.cu -lcuda && /tmp/small_copies
#include "streams.cuh"

typedef CUresult (*word_function)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
enum : size_t { TOTAL = 512u << 20, SMALL = 64 << 10, MODELS = 24, KERNELS = 20 };

// What stands between two copies.
enum gap { NONE, EVENT, OTHER_STREAM, KERNEL, WRITE, UNFENCED_WRITE, WAIT };
static const char *const GAPS[] = {"nothing",        "an event",        "the other of two streams", "a tiny kernel",
                                   "a word written", "one, no barrier", "a word waited for"};

static word_function write_word, wait_word;
static char *gpu, *host, *small_gpu, *small_host, *word;
static std::vector<cudaStream_t> models(MODELS); // streams of a model, so many that some share a hardware queue
static cudaEvent_t end;

static __global__ void tiny() {}
static __global__ void spin(long long cycles) {
  for (long long begin = clock64(); clock64() - begin < cycles;) continue;
}

static void give(bool h2d, size_t part, gap kind) {
  char *dst = h2d ? gpu : host, *src = h2d ? host : gpu;
  cudaStream_t stream = streams[0];
  for (size_t at = 0; at < TOTAL; at += part) {
    cudaMemcpyAsync(dst + at, src + at, part, cudaMemcpyDefault, stream);
    if (at + part == TOTAL) break;
    CUdeviceptr there = (CUdeviceptr)word;
    if (kind == EVENT || kind == OTHER_STREAM) cudaEventRecord(fork_event, stream);
    if (kind == OTHER_STREAM) {
      stream = stream == streams[0] ? streams[1] : streams[0];
      cudaStreamWaitEvent(stream, fork_event, 0);
    }
    if (kind == KERNEL) tiny<<<1, 1, 0, stream>>>();
    if (kind == WRITE) write_word((CUstream)stream, there, 1, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (kind == UNFENCED_WRITE) write_word((CUstream)stream, there, 1, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER);
    if (kind == WAIT) wait_word((CUstream)stream, there, 0, CU_STREAM_WAIT_VALUE_GEQ);
  }
  cudaEventRecord(end, stream);
}

// Microseconds from its call to its end.
static double timed(cudaStream_t stream, const std::function<void()> &work) {
  double begin = now_us();
  work();
  cudaStreamSynchronize(stream);
  return now_us() - begin;
}

static void report(const char *what, std::vector<double> took) {
  std::sort(took.begin(), took.end());
  if (!took.empty()) printf("; %s %.0f to %.0f us", what, took[took.size() / 2], took.back());
}

static void measure(bool h2d, size_t part, gap kind) {
  std::vector<double> alone, out, in, pushed, kernels;
  for (int run = 0; run <= RUNS; run++) {
    cudaDeviceSynchronize();
    double begin = now_us();
    give(h2d, part, kind);
    cudaEventSynchronize(end);
    if (run) alone.push_back(now_us() - begin);
  }
  std::sort(alone.begin(), alone.end());
  struct {
    std::vector<double> *took;
    std::function<void(cudaStream_t)> work;
  } const all[] = {
      {&out, [](cudaStream_t s) { cudaMemcpyAsync(small_host, small_gpu, 256, cudaMemcpyDeviceToHost, s); }},
      {&in, [](cudaStream_t s) { cudaMemcpyAsync(small_gpu, small_host, SMALL, cudaMemcpyHostToDevice, s); }},
      {&pushed, [](cudaStream_t s) { cudaMemcpyAsync(small_gpu, small_host, SMALL / 4, cudaMemcpyHostToDevice, s); }},
      {&kernels,
       [](cudaStream_t s) {
         for (int i = 0; i < KERNELS; i++) spin<<<1, 32, 0, s>>>(80000);
       }},
  };
  for (auto &one : all)
    for (cudaStream_t model : models) {
      cudaDeviceSynchronize();
      give(h2d, part, kind);
      one.took->push_back(timed(model, [&] { one.work(model); }));
      cudaEventSynchronize(end);
    }
  printf("%s copies of %3zu MiB, between them %-24s: %5.0f us", h2d ? "H2D" : "D2H", part >> 20, GAPS[kind],
         alone[RUNS / 2]);
  report("256 B D2H", out);
  report("64 KiB H2D", in);
  report("16 KiB H2D", pushed);
  report("20 kernels", kernels);
  printf("\n");
}

int main() {
  cudaDriverEntryPointQueryResult found;
  cudaFree(0);
  cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", (void **)&write_word, 12000, cudaEnableDefault, &found);
  cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", (void **)&wait_word, 12000, cudaEnableDefault, &found);
  cudaMalloc(&gpu, TOTAL), cudaMalloc(&small_gpu, SMALL), cudaMalloc(&word, 256);
  cudaMallocHost(&small_host, SMALL);
  if (!write_word || !wait_word || cudaMallocHost(&host, TOTAL))
    return fprintf(stderr, "no such calls, or no memory\n"), 1;
  cudaMemset(word, 0, 256);
  cudaEventCreateWithFlags(&end, cudaEventDisableTiming);
  open_streams();
  for (cudaStream_t &model : models) {
    cudaStreamCreateWithFlags(&model, cudaStreamNonBlocking);
    timed(model, [&] { spin<<<1, 32, 0, model>>>(1); });
  }
  for (bool h2d : {false, true}) {
    measure(h2d, TOTAL, NONE);
    for (size_t mib : {8, 16, 24, 32})
      for (gap kind : {NONE, EVENT, OTHER_STREAM, KERNEL, WRITE, UNFENCED_WRITE, WAIT}) measure(h2d, mib << 20, kind);
  }
  return 0;
}
