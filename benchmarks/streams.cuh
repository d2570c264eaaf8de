// What batch_parts.cu and small_copies.cu share: work that is given to the driver over several streams, begun together
// and joined again, how long it takes, and how long giving it takes; medians of RUNS.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

enum { STREAMS = 4, RUNS = 7 };

static cudaStream_t streams[STREAMS];
static cudaEvent_t fork_event, joins[STREAMS];

struct times {
  double total, least, most, call; // microseconds; medians, and the least and most total
};

static double now_us() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static void open_streams() {
  cudaEventCreateWithFlags(&fork_event, cudaEventDisableTiming);
  for (int s = 0; s < STREAMS; s++) {
    cudaStreamCreateWithFlags(&streams[s], cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&joins[s], cudaEventDisableTiming);
  }
}

// 0 to n - 1 in a random order.
static std::vector<size_t> permuted(size_t n, std::mt19937 &random) {
  std::vector<size_t> ids(n);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

// `give` uses streams[0] to streams[splits - 1]. The first run is not counted.
static times measured(int splits, const std::function<void()> &give) {
  std::vector<double> total, calling;
  for (int run = 0; run <= RUNS; run++) {
    cudaDeviceSynchronize();
    double start = now_us();
    cudaEventRecord(fork_event, streams[0]);
    for (int s = 1; s < splits; s++) cudaStreamWaitEvent(streams[s], fork_event, 0);
    give();
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
  return {total[RUNS / 2], total[0], total[RUNS - 1], calling[RUNS / 2]};
}
