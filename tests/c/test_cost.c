/* Costs: what a shape is predicted to take, and files of them: what was written comes back, what is damaged is refused,
 * and who could have written it. */
#include "check.h"
#include "paths/calibration.h"
#include "paths/costs_default.h"
#include "paths/predict.h"
#include "paths/table.h"
#include "plan/host_sum.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LARGE = 64 << 10 };
static struct kvs_error err;
static char folder[] = "/tmp/kvs_cost_XXXXXX", file[64];

static double size_at(int i) { return (double)((uint64_t)KVS_COST_LEAST << i); }

/* Every number another one, of three digits after the point at most. */
static struct kvs_costs some_costs(uint64_t seed) {
  struct kvs_costs costs;
  kvs_costs_clear(&costs);
  for (int direction = 0; direction < 2; direction++)
    for (int path = KVS_PATH_DMA; path < KVS_PATHS; path++) {
      struct kvs_path_cost *cost = &costs.paths[direction][path];
      cost->start = (double)check_below(&seed, 1000000000) / 1000;
      if (kvs_paths[path]->has_extra) cost->extra = (double)check_below(&seed, 1000000000) / 1000;
      for (int i = 0; i < KVS_COST_SIZES; i++) cost->each[i] = (double)check_below(&seed, 1000000000) / 1000;
      for (int i = 0; kvs_paths[path]->has_run && i < KVS_COST_SIZES; i++)
        cost->run[i] = (double)check_below(&seed, 1000000000) / 1000;
    }
  costs.tuning = (struct kvs_tuning){
      .link_gbps = {55.5, 0.001},
      .host_links = 4,
      .host_gbps = {156.25, 211, 201.125},
      .kernel = {[KVS_D2H] = {[KVS_PRIORITY_NORMAL] = {7, 39.125, 38.5}, [KVS_PRIORITY_HIGH] = {9, 0, 0}},
                 [KVS_H2D] = {[KVS_PRIORITY_BACKGROUND] = {3, 12.25, 0}, [KVS_PRIORITY_NORMAL] = {6, 0, 41}}}};
  return costs;
}

/* -- prediction ------------------------------------------------------------------------------------------------ */

static bool near(double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); }

/* What four H200 of one host reach (links of 55 GB/s), and other hosts: `busy` by direction. */
static void test_the_hosts_room(void) {
  const enum kvs_direction D2H = KVS_D2H, H2D = KVS_H2D;
  const struct {
    double host[3], busy[2], own;
    enum kvs_direction direction;
    double room;
    bool loads_first;
  } cases[] = {
      {{0, 0, 0}, {0, 0}, 55, D2H, INFINITY, false}, /* unknown */
      {{0, 0, 0}, {110, 165}, 55, D2H, INFINITY, false},
      {{156, 211, 201}, {0, 0}, 55, D2H, 101, false},
      {{156, 211, 201}, {55, 0}, 55, D2H, 46, false}, /* part of a link */
      {{156, 211, 201}, {110, 0}, 55, D2H, 0, false},
      {{156, 211, 201}, {165, 0}, 55, D2H, 0, false}, /* more than the sum: none, not less */
      {{156, 211, 201}, {0, 0}, 55, H2D, 156, false},
      {{156, 211, 201}, {0, 110}, 55, H2D, 46, false},
      {{156, 211, 201}, {156, 0}, 55, H2D, 156, false}, /* stores do not count for loads */
      {{156, 211, 201}, {0, 55}, 55, D2H, 101, false},  /* the host feeds both */
      {{156, 211, 201}, {0, 165}, 55, D2H, 101, true},
      {{156, 211, 201}, {0, 110}, 165, D2H, 0, true}, /* with two borrowed links */
      {{156, 211, 201}, {110, 55}, 55, D2H, 0, true}, /* other stores count */
      {{156, 211, 201}, {156, 0}, 55, D2H, 0, false}, /* no load is in progress */
      {{111, 111, 166}, {0, 0}, 55, D2H, 56, false},  /* two H200: one link each way is there */
      {{111, 111, 166}, {0, 55}, 55, D2H, 56, false},
      {{111, 111, 166}, {0, 110}, 55.5, D2H, 55.5, false},
      {{111, 111, 166}, {0, 111}, 55.5, D2H, 55.5, true},
      {{156, 211, 0}, {0, 211}, 55, D2H, 101, false}, /* of both directions nothing is known */
      {{0, 211, 201}, {0, 211}, 55, D2H, INFINITY, true},
      {{55, 55, 60}, {0, 0}, 55, D2H, 0, false}, /* links behind one switch */
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    CHECK(kvs_host_room(cases[i].host, cases[i].busy, cases[i].direction, cases[i].own) == cases[i].room, "%zu", i);
    CHECK(kvs_host_loads_first(cases[i].host, cases[i].busy, cases[i].own) == cases[i].loads_first, "%zu", i);
  }
}

static double kernel_ns(const struct kvs_costs *costs, uint64_t nbytes, uint64_t pieces) {
  return kvs_cost_ns(costs, &(struct kvs_shape){.direction = KVS_H2D, .nbytes = nbytes, .pieces = pieces},
                     KVS_PATH_KERNEL);
}

static void test_between_points(void) {
  struct kvs_costs costs;
  struct kvs_path_cost *cost = &costs.paths[KVS_H2D][KVS_PATH_KERNEL];
  kvs_costs_clear(&costs);
  cost->start = 1000;
  for (int i = 0; i < KVS_COST_SIZES; i++) cost->each[i] = 90 + size_at(i) / 50;
  for (int i = 0; i < KVS_COST_SIZES; i++)
    CHECK(kernel_ns(&costs, (uint64_t)size_at(i) * 10, 10) == 1000 + 10 * cost->each[i], "point %d", i);
  /* a fixed cost and a bandwidth are met exactly everywhere between the points */
  for (uint64_t nbytes = 512; nbytes < (4 << 20); nbytes = nbytes * 9 / 8 + 1) {
    double expected = 1000 + 3 * (90 + (double)nbytes / 50);
    CHECK(fabs(kernel_ns(&costs, nbytes * 3, 3) - expected) < 1e-6 * expected, "%u bytes", (unsigned)nbytes);
  }
  CHECK(kernel_ns(&costs, 100, 100) == 1000 + 100 * cost->each[0]); /* below: as the least */
  double last = cost->each[KVS_COST_SIZES - 1];
  CHECK(kernel_ns(&costs, 12 << 20, 1) == 1000 + 3 * last); /* above: in proportion */
}

static void test_monotone_and_without_steps(void) {
  struct kvs_costs costs;
  kvs_costs_clear(&costs);
  struct kvs_path_cost *cost = &costs.paths[KVS_H2D][KVS_PATH_KERNEL];
  uint64_t seed = 3;
  for (int i = 0; i < KVS_COST_SIZES; i++)
    cost->each[i] = (i ? cost->each[i - 1] : 0) + (double)check_below(&seed, 100) * size_at(i) / 1000;
  cost->start = 0;
  double before = 0;
  for (uint64_t nbytes = 1; nbytes < (32 << 20); nbytes += nbytes / 64 + 1) {
    double ns = kernel_ns(&costs, nbytes, 1), next = kernel_ns(&costs, nbytes + 1, 1);
    CHECK(ns >= before && next >= ns, "%u bytes: %g after %g", (unsigned)nbytes, ns, before);
    CHECK(next - ns <= 0.3, "%u bytes: a step of %g", (unsigned)nbytes, next - ns); /* the steepest slope is 0.2 */
    before = ns;
  }
}

static void test_dma(void) {
  struct kvs_costs costs = some_costs(1);
  struct kvs_path_cost *dma = &costs.paths[KVS_D2H][KVS_PATH_DMA];
  struct kvs_shape shape = {.direction = KVS_D2H, .nbytes = 4096, .copies = 1};
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_DMA), dma->start + dma->each[3])); /* one is no batch */
  const uint64_t counts[] = {2, KVS_COST_BATCH - 1, KVS_COST_BATCH, KVS_COST_BATCH + 1, 8192};
  for (int i = 0; i < 5; i++) {
    shape.copies = counts[i];
    shape.nbytes = counts[i] * 4096;
    double first = counts[i] < KVS_COST_BATCH ? (double)counts[i] : KVS_COST_BATCH;
    CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_DMA),
               dma->start + first * dma->extra + (double)counts[i] * dma->each[3]),
          "%u copies", (unsigned)counts[i]);
  }
}

static void test_direct(void) {
  struct kvs_costs costs = some_costs(1);
  struct kvs_shape shape = {.direction = KVS_D2H, .nbytes = 16 * 4096, .copies = 16};
  for (int direction = 0; direction < 3; direction++) { /* KVS_OTHER_DIRECTION costs as KVS_D2H */
    const struct kvs_path_cost *direct = &costs.paths[direction == KVS_H2D][KVS_PATH_DIRECT];
    shape.direction = (enum kvs_direction)direction;
    CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_DIRECT), direct->start + 16 * direct->each[3]), "%d", direction);
  }
}

static void test_strided(void) {
  struct kvs_costs costs = some_costs(1);
  struct kvs_path_cost *dma = &costs.paths[KVS_D2H][KVS_PATH_DMA];
  const struct kvs_path_cost *cost = &costs.paths[KVS_D2H][KVS_PATH_STRIDED];
  struct kvs_shape shape = {
      .direction = KVS_D2H, .nbytes = 64 * 1024, .rects = 8, .rect_rows = 64, .rect_nbytes = 64 * 1024};
  double rects = cost->start + 8 * cost->extra;
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_STRIDED), rects + 64 * cost->each[1]));
  shape.rest_copies = 7;
  shape.nbytes += 7 * 2048;
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_STRIDED), rects + 64 * cost->each[1] + 7 * dma->each[2]));
  shape.apart_rows = 16;
  shape.apart_nbytes = 16 * 1024;
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_STRIDED),
             rects + 48 * cost->each[1] + 16 * cost->run[1] + 7 * dma->each[2]));
  shape.apart_rows = 64;
  shape.apart_nbytes = 64 * 1024;
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_STRIDED), rects + 64 * cost->run[1] + 7 * dma->each[2]));
  dma->start = -1; /* which the rest needs */
  CHECK(isinf(kvs_cost_ns(&costs, &shape, KVS_PATH_STRIDED)));
  CHECK(isinf(kvs_cost_ns(&costs, &shape, KVS_PATH_DMA)));
}

static void test_kernel(void) {
  struct kvs_costs costs = some_costs(1);
  const struct kvs_path_cost *cost = &costs.paths[KVS_D2H][KVS_PATH_KERNEL];
  struct kvs_shape shape = {.direction = KVS_D2H, .nbytes = 10 * 2048, .pieces = 10};
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_KERNEL), cost->start + 10 * cost->each[2]));
  shape.skew_pieces = 4;
  shape.skew_nbytes = 4 * 2048;
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_KERNEL), cost->start + 6 * cost->each[2] + 4 * cost->run[2]));
}

static void test_what_is_not_there_is_never_picked(void) {
  struct kvs_costs costs = some_costs(1);
  const struct kvs_shape none = {.nbytes = 4096};
  for (int path = KVS_PATH_AUTO; path < KVS_PATHS; path++)
    CHECK(isinf(kvs_cost_ns(&costs, &none, (enum kvs_path)path)), "nothing for %d", path);
}

/* Gathering and moving overlap, but for 8 MiB. */
static void test_burst(void) {
  struct kvs_costs costs = some_costs(2);
  struct kvs_path_cost *burst = &costs.paths[KVS_D2H][KVS_PATH_BURST];
  struct kvs_shape shape = {.direction = KVS_D2H, .nbytes = 32 << 20, .rows = 32768, .runs = 128};
  burst->start = 5000;
  burst->extra = 0;
  burst->each[1] = 100;   /* 1 KiB */
  burst->run[9] = 100000; /* 256 KiB */
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_BURST), 5000 + 128 * 100000 + 32768 * 100 / 4.0));
  burst->run[9] = 20000;
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_BURST), 5000 + 32768 * 100 + 128 * 20000 / 4.0));
  shape = (struct kvs_shape){.direction = KVS_D2H, .nbytes = 256 << 10, .rows = 256, .runs = 1};
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_BURST), 5000 + 256 * 100 + 20000)); /* it is all one burst */
  burst->extra = 6400;                                                                /* of a slot's 16 MiB and more */
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_BURST), 5000 + 100 + 256 * 100 + 20000));
  shape = (struct kvs_shape){.direction = KVS_D2H, .nbytes = 64 << 20, .rows = 65536, .runs = 256};
  CHECK(near(kvs_cost_ns(&costs, &shape, KVS_PATH_BURST), 5000 + 6400 + 65536 * 100 + 256 * 20000 / 8.0));
  shape.runs = 0;
  CHECK(isinf(kvs_cost_ns(&costs, &shape, KVS_PATH_BURST)));
}

static void test_the_built_in_costs(void) {
  const struct kvs_costs *costs = kvs_costs_default();
  struct kvs_costs none;
  CHECK(kvs_costs_check(costs, &err) == KVS_OK, "%s", err.message);
  CHECK(costs->tuning.link_gbps[KVS_D2H] > 0 && costs->tuning.link_gbps[KVS_H2D] > 0);
  for (int priority = KVS_PRIORITY_NORMAL; priority < KVS_PRIORITIES; priority++)
    for (int direction = 0; direction < 2; direction++)
      CHECK(costs->tuning.kernel[direction][priority].ctas > 0, "%d %d", direction, priority);
  for (int direction = 0; direction < 2; direction++)
    for (int path = KVS_PATH_DMA; path < KVS_PATHS; path++) {
      double start = costs->paths[direction][path].start; /* -1: a path that was not measured yet; 0: a row left out */
      CHECK(start > 0 || (start == -1 && kvs_path_needs_lender((enum kvs_path)path)), "%d %s: %g", direction,
            kvs_path_name(path), start);
    }
  kvs_costs_clear(&none);
  const struct kvs_shape shape = {
      .nbytes = 4096, .copies = 1, .rects = 1, .rect_rows = 1, .rect_nbytes = 4096, .pieces = 1, .rows = 1, .runs = 1};
  for (int path = 0; path < KVS_PATHS; path++) CHECK(isinf(kvs_cost_ns(&none, &shape, (enum kvs_path)path)));
}

static bool same(struct kvs_kernel_tuning a, struct kvs_kernel_tuning b) {
  return a.ctas == b.ctas && a.pace_gbps == b.pace_gbps && a.gbps == b.gbps;
}

/* What is not known of a machine is as built in, each priority and direction by itself. */
static void test_how_the_kernel_runs(void) {
  const struct kvs_costs *built_in = kvs_costs_default();
  struct kvs_costs costs = some_costs(1);
  const struct kvs_tuning *tuning = &costs.tuning;
  const struct kvs_kernel_tuning *normal = &costs.tuning.kernel[KVS_D2H][KVS_PRIORITY_NORMAL];
  CHECK(same(kvs_kernel_tuning_of(tuning, KVS_D2H, KVS_PRIORITY_NORMAL), *normal));
  CHECK(same(kvs_kernel_tuning_of(tuning, KVS_D2H, KVS_PRIORITY_DEFAULT), *normal));
  CHECK(same(kvs_kernel_tuning_of(tuning, KVS_OTHER_DIRECTION, KVS_PRIORITY_NORMAL),
             tuning->kernel[KVS_D2H][KVS_PRIORITY_HIGH]));
  CHECK(same(kvs_kernel_tuning_of(tuning, KVS_OTHER_DIRECTION, KVS_PRIORITY_BACKGROUND),
             built_in->tuning.kernel[KVS_D2H][KVS_PRIORITY_BACKGROUND]));
  CHECK(kvs_kernel_tuning_of(tuning, KVS_H2D, KVS_PRIORITY_NORMAL).pace_gbps == 0); /* unpaced, which is known */
  CHECK(same(kvs_kernel_tuning_of(tuning, KVS_H2D, KVS_PRIORITY_HIGH),
             built_in->tuning.kernel[KVS_H2D][KVS_PRIORITY_HIGH]));
  kvs_costs_clear(&costs);
  for (int priority = KVS_PRIORITY_NORMAL; priority < KVS_PRIORITIES; priority++)
    for (int direction = 0; direction < 2; direction++)
      CHECK(same(kvs_kernel_tuning_of(tuning, (enum kvs_direction)direction, (enum kvs_priority)priority),
                 built_in->tuning.kernel[direction][priority]));
}

/* On a GPU with less than 4 TB/s path kernel stores to the host at a lower pace, unless a calibration has set it. */
static void test_the_kernel_suits_the_memory(void) {
  static const enum kvs_priority gentle[] = {KVS_PRIORITY_NORMAL, KVS_PRIORITY_BACKGROUND};
  static const int others[] = {0, -1, 4000, 4917};
  const struct kvs_costs *built_in = kvs_costs_default();
  struct kvs_costs costs, known = some_costs(1), expected;
  struct kvs_kernel_tuning *lacked = &costs.tuning.kernel[KVS_D2H][KVS_PRIORITY_BACKGROUND];
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    kvs_costs_fit(&costs, NULL, others[i]);
    CHECK(memcmp(&costs, built_in, sizeof costs) == 0, "%d GB/s", others[i]);
    kvs_costs_fit(&costs, &known, others[i]);
    CHECK(memcmp(&costs, &known, sizeof costs) == 0, "%d GB/s", others[i]);
  }
  for (int gbps = 1; gbps < 4000; gbps += 3998) { /* 3,999 too */
    kvs_costs_fit(&costs, NULL, gbps);
    expected = *built_in;
    for (int i = 0; i < 2; i++) {
      struct kvs_kernel_tuning *kernel = &expected.tuning.kernel[KVS_D2H][gentle[i]];
      CHECK(kernel->pace_gbps > 26);
      kernel->pace_gbps = 26;
      kernel->gbps = 0;
    }
    CHECK(memcmp(&costs, &expected, sizeof costs) == 0, "%d GB/s", gbps); /* and all else as built in */
    kvs_costs_fit(&costs, &known, gbps);
    CHECK(known.tuning.kernel[KVS_D2H][KVS_PRIORITY_BACKGROUND].ctas == 0);
    CHECK(same(*lacked, expected.tuning.kernel[KVS_D2H][KVS_PRIORITY_BACKGROUND]));
    lacked->ctas = 0;
    lacked->pace_gbps = lacked->gbps = 0;
    CHECK(memcmp(&costs, &known, sizeof costs) == 0, "%d GB/s", gbps);
  }
}

/* -- files ----------------------------------------------------------------------------------------------------- */

static size_t load(char *text) {
  FILE *from = fopen(file, "r");
  size_t n = from ? fread(text, 1, LARGE, from) : 0;
  if (from) fclose(from);
  text[n] = '\0';
  return n;
}

static void store(const char *text, size_t nbytes) {
  FILE *to = fopen(file, "w");
  CHECK(to && fwrite(text, 1, nbytes, to) == nbytes);
  if (to) fclose(to);
  chmod(file, 0600);
}

/* Read a file that must be refused. */
static void refuse(const char *text, size_t nbytes, const char *complaint) {
  struct kvs_costs before = some_costs(9), costs = before;
  store(text, nbytes);
  CHECK(kvs_costs_read(file, &costs, &err) == KVS_INVALID, "%s", complaint);
  CHECK(strstr(err.message, complaint), "'%s' is not in: %s", complaint, err.message);
  CHECK(strstr(err.message, file) == err.message);
  CHECK(memcmp(&costs, &before, sizeof costs) == 0, "costs of a refused file");
}

/* The text with `old` replaced once; returns its length. */
static size_t replaced(char *to, const char *text, const char *old, const char *new) {
  const char *at = strstr(text, old);
  CHECK(at, "%s", old);
  if (!at) return 0;
  return (size_t)snprintf(to, LARGE, "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
}

static void test_written_comes_back(void) {
  for (uint64_t seed = 1; seed < 40; seed++) {
    struct kvs_costs costs = some_costs(seed), back;
    if (seed % 3 == 0) costs.paths[seed & 1][1 + seed % (KVS_PATHS - 1)] = (struct kvs_path_cost){.start = -1};
    if (seed % 5 == 0) costs.tuning = (struct kvs_tuning){0};
    memset(&back, 0xff, sizeof back);
    CHECK(kvs_costs_write(file, &costs, "a machine", &err) == KVS_OK, "%s", err.message);
    CHECK(kvs_costs_read(file, &back, &err) == KVS_OK, "%s", err.message);
    CHECK(memcmp(&costs.paths, &back.paths, sizeof costs.paths) == 0, "seed %u", (unsigned)seed);
    for (int i = 0; i < KVS_TUNINGS; i++) {
      double before[KVS_TUNING_NUMBERS] = {0}, after[KVS_TUNING_NUMBERS] = {0};
      kvs_tuning_get(&costs.tuning, i, before);
      kvs_tuning_get(&back.tuning, i, after);
      CHECK(memcmp(before, after, sizeof before) == 0, "%s", kvs_tuning_names[i]);
    }
  }
}

static void test_the_file_is_the_users_alone(void) {
  char deep[128], text[LARGE + 1];
  struct stat info;
  struct kvs_costs costs = some_costs(1);
  umask(0);
  snprintf(deep, sizeof deep, "%s/a/b/c.txt", folder);
  CHECK(kvs_costs_write(deep, &costs, "m", &err) == KVS_OK, "%s", err.message);
  CHECK(stat(deep, &info) == 0 && (info.st_mode & 07777) == 0600);
  CHECK(unlink(deep) == 0);
  for (int i = 0; i < 2; i++) {
    *strrchr(deep, '/') = '\0';
    CHECK(stat(deep, &info) == 0 && (info.st_mode & 07777) == 0700, "%s", deep);
    CHECK(rmdir(deep) == 0, "something was left in %s: %s", deep, strerror(errno));
  }
  CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_OK);
  const mode_t wide[] = {0602, 0620, 0666};
  for (int i = 0; i < 3; i++) {
    chmod(file, wide[i]);
    CHECK(kvs_costs_read(file, &costs, &err) == KVS_INVALID && strstr(err.message, "others can write it"));
  }
  chmod(file, 0644); /* reading is anybody's */
  CHECK(kvs_costs_read(file, &costs, &err) == KVS_OK);
  CHECK(load(text) > 0);
  if (geteuid() == 0) { /* only root can give files away */
    CHECK(chown(file, 12345, (gid_t)-1) == 0);
    CHECK(kvs_costs_read(file, &costs, &err) == KVS_INVALID && strstr(err.message, "another user (12345)"));
    CHECK(chown(file, 0, (gid_t)-1) == 0);
  }
}

static void test_links_pipes_and_folders(void) {
  char link[80], target[80];
  struct kvs_costs costs = some_costs(1);
  struct stat info;
  snprintf(link, sizeof link, "%s/link", folder);
  snprintf(target, sizeof target, "%s/pipe", folder);
  CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_OK);
  CHECK(symlink(file, link) == 0);
  CHECK(kvs_costs_read(link, &costs, &err) == KVS_OK);
  chmod(file, 0666); /* what the link leads to is what counts */
  CHECK(kvs_costs_read(link, &costs, &err) == KVS_INVALID);
  CHECK(kvs_costs_write(link, &costs, "m", &err) == KVS_OK); /* takes the link's place, touches no other file */
  CHECK(lstat(link, &info) == 0 && S_ISREG(info.st_mode));
  CHECK(stat(file, &info) == 0 && (info.st_mode & 0777) == 0666);
  unlink(link);
  CHECK(mkfifo(target, 0600) == 0);
  CHECK(kvs_costs_read(target, &costs, &err) == KVS_INVALID && strstr(err.message, "plain file"));
  unlink(target);
  CHECK(kvs_costs_read(folder, &costs, &err) == KVS_INVALID && strstr(err.message, "plain file"));
  CHECK(kvs_costs_read(link, &costs, &err) == KVS_RANGE);
}

/* A file of the version before has no lines of the host, and its sums are unknown. */
static void test_a_file_of_the_version_before(void) {
  static char text[LARGE + 1], old[LARGE + 1];
  struct kvs_costs costs = some_costs(4), back;
  costs.tuning.host_links = 0;
  memset(costs.tuning.host_gbps, 0, sizeof costs.tuning.host_gbps);
  CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_OK);
  load(text);
  CHECK(!strstr(text, "host_"));
  store(old, replaced(old, text, "calibration 5", "calibration 4"));
  memset(&back, 0xff, sizeof back);
  CHECK(kvs_costs_read(file, &back, &err) == KVS_OK, "%s", err.message);
  CHECK(memcmp(&costs.paths, &back.paths, sizeof costs.paths) == 0);
  CHECK(back.tuning.host_links == 0 && back.tuning.host_gbps[KVS_HOST_BOTH] == 0);
  CHECK(back.tuning.link_gbps[KVS_D2H] == costs.tuning.link_gbps[KVS_D2H]);
}

/* Cut anywhere, a file is refused, and so is one that lacks any of its lines but those of tuning. */
static void test_cut_files(void) {
  static char text[LARGE + 1], less[LARGE + 1];
  struct kvs_costs costs = some_costs(4);
  CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_OK);
  size_t n = load(text);
  CHECK(n > 1000);
  for (size_t keep = 0; keep < n; keep++) refuse(text, keep, "cut off");
  for (char *line = text, *next; *line; line = next) {
    next = strchr(line, '\n') + 1;
    size_t before = (size_t)(line - text), after = n - (size_t)(next - text);
    memcpy(less, text, before);
    memcpy(less + before, next, after);
    if (strncmp(line, "kernel_", 7) && strncmp(line, "link_", 5) && strncmp(line, "host_", 5)) {
      refuse(less, before + after, "line ");
      continue;
    }
    store(less, before + after);
    CHECK(kvs_costs_read(file, &costs, &err) == KVS_OK, "%s", err.message);
  }
}

static void test_wrong_numbers(void) {
  static char text[LARGE + 1], wrong[LARGE + 1];
  static const char *const numbers[] = {"nan",  "inf",   "-inf", "-1",     "-0",
                                        "1e3",  "0x10",  "+5",   "1.",     ".5",
                                        "1..2", "1.2.3", "1,5",  "1.2345", "12345678901234567",
                                        "five", "1_000"};
  struct kvs_costs costs = some_costs(4);
  costs.paths[KVS_D2H][KVS_PATH_DMA].start = 77777;
  CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_OK);
  load(text);
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    refuse(wrong, replaced(wrong, text, "77777", numbers[i]), "is no number");
  refuse(wrong, replaced(wrong, text, "77777", "10000000001"), "is more than");
  refuse(wrong, replaced(wrong, text, "77777", "1 2"), "more than 1 number");
  refuse(wrong, replaced(wrong, text, "d2h.dma.start 77777", "d2h.dma.start"), "0 of 1 number");
  refuse(wrong, replaced(wrong, text, "d2h.dma.each ", "d2h.dma.each 5 "), "more than 14 numbers");
  static const char normal[] = "normal_d2h 7 39.125 38.5";
  refuse(wrong, replaced(wrong, text, normal, "normal_d2h 1025 1 1"), "kernel_normal_d2h cannot be 1025 1 1");
  refuse(wrong, replaced(wrong, text, normal, "normal_d2h 7.5 1 1"), "kernel_normal_d2h cannot be 7.5 1 1");
  refuse(wrong, replaced(wrong, text, normal, "normal_d2h 7 100001 1"), "kernel_normal_d2h cannot be 7 100001 1");
  refuse(wrong, replaced(wrong, text, normal, "normal_d2h 7 1 100001"), "kernel_normal_d2h cannot be 7 1 100001");
  refuse(wrong, replaced(wrong, text, normal, "normal_d2h 7 39.125"), "2 of 3 numbers");
  refuse(wrong, replaced(wrong, text, normal, "normal_d2h 7 1 1 1"), "more than 3 numbers");
  refuse(wrong, replaced(wrong, text, "link_gbps_d2h 55.5", "link_gbps_d2h 100001"), "link_gbps_d2h cannot be 100001");
  refuse(wrong, replaced(wrong, text, "host_links 4", "host_links 2.5"), "host_links cannot be 2.5");
  refuse(wrong, replaced(wrong, text, "host_gbps_both 201.125", "host_gbps_both 100001"),
         "host_gbps_both cannot be 100001");
  store(wrong, replaced(wrong, text, "77777", "0077777.000"));
  CHECK(kvs_costs_read(file, &costs, &err) == KVS_OK && costs.paths[KVS_D2H][KVS_PATH_DMA].start == 77777);
}

static void test_wrong_lines(void) {
  static char text[LARGE + 1], wrong[LARGE + 1];
  struct kvs_costs costs = some_costs(4);
  CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_OK);
  size_t n = load(text);
  refuse(wrong, replaced(wrong, text, "calibration 5", "calibration 3"),
         "line 1: the format is version 3, this kvswap reads versions 4 and 5; `kvswap calibrate` makes it anew");
  refuse(wrong, replaced(wrong, text, "calibration 5", "calibration 4"), "'host_links 4' is no key");
  refuse(wrong, replaced(wrong, text, "kvswap cal", "other cal"), "line 1: it is not 'kvswap calibration 5'");
  refuse(wrong, replaced(wrong, text, "machine m\n", ""), "line 2: it does not begin with 'machine '");
  refuse(wrong, replaced(wrong, text, "\nend\n", "\nend\n\n"), "something follows");
  refuse(wrong, replaced(wrong, text, "\nend\n", "\nend\nlink_gbps_h2d 1\n"), "something follows");
  refuse(wrong, replaced(wrong, text, "\nend\n", "\nlink_gbps_h2d 7\nend\n"), "link_gbps_h2d once more");
  refuse(wrong, replaced(wrong, text, "\nend\n", "\n\nend\n"), "'' is no key");
  refuse(wrong, replaced(wrong, text, "\nend\n", "\nring 5\nend\n"), "'ring 5' is no key");
  refuse(wrong, replaced(wrong, text, "\nend\n", "\nkernel_ctas 8\nend\n"), "is no key"); /* as version 2 had it */
  refuse(wrong, replaced(wrong, text, "d2h.dma.start", "d2h.auto.start"), "is no key");
  refuse(wrong, replaced(wrong, text, "\nend\n", "\nd2h.dma.run 5\nend\n"), "is no key"); /* dma has none */
  refuse(wrong, replaced(wrong, text, "\nend\n", "\nd2h.kernel.extra 5\nend\n"), "is no key");
  refuse(wrong, replaced(wrong, text, "machine m", "machine \x1b[2J"), "does not print");
  refuse(wrong, replaced(wrong, text, "machine m\n", "machine m\r\n"), "does not print");
  wrong[0] = '\0';
  size_t long_line = (size_t)snprintf(wrong, LARGE, "kvswap calibration 5\nmachine %0500d\nend\n", 1);
  refuse(wrong, long_line, "longer than");
  memcpy(wrong, text, n);
  wrong[n / 2] = '\0';
  refuse(wrong, n, "line ");
  memset(wrong, 'x', LARGE);
  refuse(wrong, LARGE, "so no calibration");
}

static void test_costs_that_are_none_are_not_written(void) {
  const double wrong[] = {NAN, INFINITY, -1, 1e11};
  struct kvs_costs good = some_costs(1), costs;
  char path[5000];
  CHECK(kvs_costs_write(file, &good, "m", &err) == KVS_OK);
  for (int i = 0; i < 4; i++) {
    costs = good;
    if (!(wrong[i] < 0))
      costs.paths[0][KVS_PATH_DMA].start = wrong[i]; /* a negative start says unknown */
    else
      costs.paths[0][KVS_PATH_DMA].each[3] = wrong[i];
    CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_INVALID, "%g", wrong[i]);
    costs = good;
    costs.paths[1][KVS_PATH_BURST].run[13] = wrong[i];
    CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_INVALID, "%g", wrong[i]);
    costs = good;
    costs.paths[1][KVS_PATH_STRIDED].extra = wrong[i];
    CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_INVALID, "%g", wrong[i]);
    costs = good;
    costs.tuning.host_gbps[KVS_HOST_BOTH] = wrong[i];
    CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_INVALID, "%g", wrong[i]);
    costs = good;
    costs.tuning.link_gbps[1] = wrong[i];
    CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_INVALID, "%g", wrong[i]);
    costs = good;
    costs.tuning.kernel[KVS_D2H][KVS_PRIORITY_NORMAL].pace_gbps = wrong[i];
    CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_INVALID, "%g", wrong[i]);
    costs = good;
    costs.tuning.kernel[KVS_H2D][KVS_PRIORITY_HIGH].gbps = wrong[i];
    CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_INVALID, "%g", wrong[i]);
  }
  costs = good;
  costs.paths[1][KVS_PATH_KERNEL].extra = 1; /* which no file would keep */
  CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_INVALID);
  costs = good;
  costs.paths[1][KVS_PATH_DMA].run[0] = 1;
  CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_INVALID);
  costs = good;
  costs.tuning.kernel[KVS_H2D][KVS_PRIORITY_BACKGROUND].ctas = 1025;
  CHECK(kvs_costs_write(file, &costs, "m", &err) == KVS_INVALID);
  CHECK(kvs_costs_write(file, &good, "two\nlines", &err) == KVS_INVALID);
  CHECK(kvs_costs_write(file, &good, "", &err) == KVS_INVALID);
  CHECK(kvs_costs_write("/proc/kvs/none.txt", &good, "m", &err) == KVS_INVALID && strstr(err.message, "/proc/kvs"));
  CHECK(kvs_costs_write(folder, &good, "m", &err) == KVS_INVALID); /* a folder is not replaced */
  memset(path, 'x', sizeof path - 1);
  path[sizeof path - 1] = '\0';
  CHECK(kvs_costs_write(path, &good, "m", &err) == KVS_RANGE);
  CHECK(kvs_costs_read(file, &costs, &err) == KVS_OK && memcmp(&costs.paths, &good.paths, sizeof good.paths) == 0);
  unlink(file);
  CHECK(rmdir(folder) == 0, "something was left: %s", strerror(errno));
  CHECK(mkdir(folder, 0700) == 0);
}

/* -- names ----------------------------------------------------------------------------------------------------- */

static void test_names(void) {
  struct kvs_device_info info = {.name = "NVIDIA H200 (PCIe)/../x_y\n", .driver = 13010};
  char what[KVS_COSTS_WHAT], expected[KVS_COSTS_WHAT], path[200];
  kvs_costs_what(&info, what);
  snprintf(expected, sizeof expected, "NVIDIA-H200-PCIe-..-x-y-driver-13.1-kvswap-%s", kvs_version());
  CHECK(strcmp(what, expected) == 0, "%s", what);
  setenv("HOME", "/h", 1);
  unsetenv("XDG_CACHE_HOME");
  unsetenv("KVSWAP_CALIBRATION");
  CHECK(kvs_costs_path("a-1.2", path, sizeof path, &err) == KVS_OK);
  CHECK(strcmp(path, "/h/.cache/kvswap/calibration-a-1.2.txt") == 0, "%s", path);
  CHECK(kvs_costs_path("a", path, strlen("/h/.cache/kvswap/calibration-a.txt"), &err) == KVS_RANGE);
  setenv("XDG_CACHE_HOME", "relative", 1);
  CHECK(kvs_costs_path("a", path, sizeof path, &err) == KVS_OK && strncmp(path, "/h/", 3) == 0);
  setenv("XDG_CACHE_HOME", "/c", 1);
  CHECK(kvs_costs_path("a", path, sizeof path, &err) == KVS_OK);
  CHECK(strcmp(path, "/c/kvswap/calibration-a.txt") == 0, "%s", path);
  setenv("KVSWAP_CALIBRATION", "mine.txt", 1);
  CHECK(kvs_costs_path("a", path, sizeof path, &err) == KVS_OK && strcmp(path, "mine.txt") == 0);
  unsetenv("KVSWAP_CALIBRATION");
  unsetenv("XDG_CACHE_HOME");
  unsetenv("HOME");
  CHECK(kvs_costs_path("a", path, sizeof path, &err) == KVS_RANGE && strstr(err.message, "set HOME"));
  CHECK(kvs_costs_path("a/b", path, sizeof path, &err) == KVS_INVALID);
  CHECK(kvs_costs_path("", path, sizeof path, &err) == KVS_INVALID);
}

int main(void) {
  CHECK(mkdtemp(folder) != NULL);
  snprintf(file, sizeof file, "%s/costs.txt", folder);
  test_between_points();
  test_monotone_and_without_steps();
  test_dma();
  test_direct();
  test_strided();
  test_kernel();
  test_burst();
  test_what_is_not_there_is_never_picked();
  test_the_built_in_costs();
  test_how_the_kernel_runs();
  test_the_kernel_suits_the_memory();
  test_written_comes_back();
  test_the_file_is_the_users_alone();
  test_links_pipes_and_folders();
  test_a_file_of_the_version_before();
  test_the_hosts_room();
  test_cut_files();
  test_wrong_numbers();
  test_wrong_lines();
  test_costs_that_are_none_are_not_written();
  test_names();
  unlink(file);
  CHECK(rmdir(folder) == 0, "something was left in %s: %s", folder, strerror(errno));
  return check_close();
}
