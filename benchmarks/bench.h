/* What the benchmarks in C share: the clock, and medians of RUNS runs. */
#ifndef KVS_BENCH_H
#define KVS_BENCH_H

#include <stdlib.h>
#include <time.h>

enum { RUNS = 21 };

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values) {
  qsort(values, RUNS, sizeof *values, by_value);
  return values[RUNS / 2];
}

#endif
