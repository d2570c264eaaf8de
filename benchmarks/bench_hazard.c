/* What tracking costs on one core: a transfer reads slots of one pool and writes as many of another, random ones. It
 * asks what it must wait for (check) and puts itself down (note): nanoseconds a block, which is one slot on each side.
 * The tables were filled by transfers of 12 lanes, which have all ended or are all under way. Swept: other memory has
 * gone through the caches before each measurement; fresh: other slots than the time before, of tables that the caches
 * hold as far as they fit; again: the same slots. Medians of 21 runs.
 *
 *   cc -O3 -std=c11 -D_GNU_SOURCE -Icsrc -o /tmp/bench_hazard benchmarks/bench_hazard.c csrc/lanes/hazard.c && \
 *      /tmp/bench_hazard [slots] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "lanes/hazard.h"

enum { LANES = 12, MOST_BLOCKS = 8192, ELSEWHERE = 64 << 20 };

static struct kvs_hazards src, dst;
static struct kvs_progress progress;
static struct kvs_needs needs;
static int64_t src_ids[MOST_BLOCKS], dst_ids[MOST_BLOCKS];
static uint64_t sequence[LANES], rng = 1, sum;

static void draw(int64_t *ids, size_t n) {
  for (size_t i = 0; i < n; i++) {
    rng = rng * 6364136223846793005ull + 1442695040888963407ull;
    ids[i] = (int64_t)((rng >> 33) % src.count);
  }
}

static void check(size_t n, unsigned lane) {
  kvs_needs_reset(&needs, LANES);
  kvs_hazards_read(&src, src_ids, n, lane, &progress, &needs);
  kvs_hazards_write(&dst, dst_ids, n, lane, &progress, &needs);
}

static void note(size_t n, unsigned lane) {
  kvs_stamp stamp = kvs_stamp_of(lane, ++sequence[lane]);
  kvs_hazards_note_read(&src, src_ids, n, stamp, &progress);
  kvs_hazards_note_write(&dst, dst_ids, n, stamp);
}

/* Transfers both ways between the two pools, until each slot has been read and written that many times on average. */
static void fill(unsigned times) {
  unsigned lane = 0;
  for (uint64_t moved = 0; moved < 2 * times * src.count; moved += MOST_BLOCKS, lane = (lane + 1) % LANES) {
    struct kvs_hazards swap = src;
    draw(src_ids, MOST_BLOCKS);
    draw(dst_ids, MOST_BLOCKS);
    check(MOST_BLOCKS, lane);
    note(MOST_BLOCKS, lane);
    src = dst;
    dst = swap;
  }
}

static void go_through(const void *memory, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += 64) sum += ((const unsigned char *)memory)[i];
}

enum warmth { SWEPT, FRESH, AGAIN };

static void make_ready(size_t n, enum warmth warmth, const void *memory) {
  if (warmth != AGAIN) draw(src_ids, n), draw(dst_ids, n);
  if (warmth != SWEPT) return;
  go_through(memory, ELSEWHERE);
  go_through(src_ids, sizeof src_ids); /* a caller has just made them */
  go_through(dst_ids, sizeof dst_ids);
}

static void measure(size_t n, enum warmth warmth, const void *memory) {
  static const char *const names[] = {"swept", "fresh", "again"};
  double checks[RUNS], notes[RUNS], both[RUNS], alone[RUNS], per = 1.0 / (double)n;
  fill(1);
  for (int run = -1; run < RUNS; run++) {
    int at = run < 0 ? 0 : run; /* before the first, nothing was there again */
    unsigned lane = (unsigned)(run + 1) % LANES;
    make_ready(n, warmth, memory);
    double t0 = now_ns();
    check(n, lane);
    double t1 = now_ns();
    note(n, lane);
    double t2 = now_ns();
    checks[at] = t1 - t0, notes[at] = t2 - t1, both[at] = t2 - t0;
    make_ready(n, warmth, memory);
    t0 = now_ns();
    note(n, lane);
    alone[at] = now_ns() - t0;
  }
  printf("  %5zu, %s %8.1f %16.1f %10.1f %12.1f\n", n, names[warmth], median(checks) * per, median(notes) * per,
         median(both) * per, median(alone) * per);
}

int main(int argc, char **argv) {
  src.count = dst.count = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
  src.slots = calloc(src.count, sizeof *src.slots);
  dst.slots = calloc(dst.count, sizeof *dst.slots);
  void *memory = malloc(ELSEWHERE);
  if (!src.slots || !dst.slots || !memory) return fprintf(stderr, "no memory\n"), 1;
  memset(memory, 1, ELSEWHERE);
  progress.lanes = LANES;
  printf("%llu slots on each side, %d lanes, ns a block (medians of %d):\n", (unsigned long long)src.count, LANES,
         RUNS);
  fill(4);
  for (int under_way = 0; under_way < 2; under_way++) {
    for (unsigned lane = 0; lane < LANES; lane++) progress.done[lane] = under_way ? 0 : 1ull << 47;
    printf("%-15s   check  note after it   together   note alone\n", under_way ? "all under way" : "all have ended");
    for (size_t n = 512; n <= MOST_BLOCKS; n *= 16)
      for (enum warmth warmth = SWEPT; warmth <= AGAIN; warmth++) measure(n, warmth, memory);
  }
  return sum == 0;
}
