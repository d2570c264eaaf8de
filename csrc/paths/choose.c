/* The path of a transfer: the one that its caller names, or, for AUTO, the one with the least predicted time among
 * those that keep the promise of its priority. And what the path needs, before any work is queued. */
#include <inttypes.h>
#include <math.h>

#include "device/hooks.h"
#include "paths/slots.h"
#include "paths/submit.h"
#include "racecheck/racecheck.h"

/* The kernel reads a merged list instead of rows and pairs if the list is this many times shorter. */
enum { LIST_IF_SHORTER = 4 };

/* At most 3 copies: path selection costs more than it can save. */
enum { FEW = 3 };

/* Kernels use SMs that the model needs, those of bursts too, so they must be this much faster than the copy engine
 * alone. Measured beside matrix products (H200, jobs of 256 blocks of 2 MiB): bursts slowed the model by 1.05 D2H and
 * 1.09 H2D, plain copies of the same speed by 1.01 and 1.04. */
static const double BURST_HANDICAP = 1.04, KERNEL_HANDICAP = 1.05;

/* Copies of this size reach 0.96 of a burst's speed and cost a model less. Measured beside a matrix product (H100, 256
 * blocks of 2 MiB D2H): copies slowed the product by 1.014 at 53 GB/s, bursts by 1.056 at 47. A kernel also delays all
 * later kernels of a model's graphs (docs/performance.md, "A model's graphs"). */
static const double LARGE_BURST_HANDICAP = 1.08;
static const uint64_t LARGE_BURST_NBYTES = 512 << 10;

static double burst_handicap(const struct kvs_shape *shape) {
  bool large = shape->copies && shape->nbytes / shape->copies >= LARGE_BURST_NBYTES;
  return large ? LARGE_BURST_HANDICAP : BURST_HANDICAP;
}

/* Layer by layer the kernel is launched several times, and the link idles in between: 12.0 ms for 512 MiB H2D beside
 * the 32 layers of a model that wait for them, where one launch is predicted to take 10.5 (H200). */
static const double LAUNCHES_HANDICAP = 1.15;

/* A copy takes half a microsecond of the driver's time in the caller's thread, and blocks other threads in the driver:
 * 18 ms for 33,000 copies of 32 KiB, which run 20 ms. A kernel runs a quarter longer and is queued in 0.1 ms. Of large
 * copies it is little: 2,048 of 256 KiB, a load layer by layer in a whole vLLM, took 9.9 ms by bursts (H200). */
static const double MANY_HANDICAP = 1.25;
static const uint64_t MANY_COPIES = 1024, LARGE_COPY_NBYTES = 128 << 10;

static double many(uint64_t copies, uint64_t nbytes) {
  return copies > MANY_COPIES && nbytes / copies < LARGE_COPY_NBYTES ? MANY_HANDICAP : 1.0;
}

/* No calibration covers copies between GPUs. Measured between two H200: the copy engine moves 367 GB/s and more from
 * 256 KiB a copy on, 54 at 64 KiB; a kernel 355 at any size (benchmarks/bench_peer.py). */
static const uint64_t PEER_COPY_NBYTES = 256 << 10;

/* The costs were measured with runs of whole pages. Odd sizes cost the copy engine more. */
static double odd_runs(const struct kvs_shape *shape) {
  uint64_t mean = shape->runs ? shape->nbytes / shape->runs : 0;
  bool round = mean % 4096 == 0 && mean * shape->runs == shape->nbytes;
  return mean < 128 << 10 && !round ? 1.15 : 1.0;
}

/* The first copies of a burst, of which the costs were measured with many. Those of path `dma` take no longer from host
 * to device than the other way: 4 to 24 KiB, 4 to 64 copies, within 5 us on an H100; 7 of 27 KiB took 23 us in all on
 * an H200 (benchmarks/bench_few.py). */
static double slow_start(const struct kvs_shape *shape) {
  uint64_t copies = shape->runs, mean = copies > 1 ? shape->nbytes / copies : 0,
           first = copies < KVS_COST_BATCH ? copies : KVS_COST_BATCH;
  bool slow = shape->direction == KVS_H2D && mean < KVS_SLOW_COPY_NBYTES;
  return slow ? (double)(first * mean) / 1024 * KVS_SLOW_COPY_NS_PER_KIB : 0;
}

/* With one hardware queue the model's kernels stay behind those that wait for a copy. Measured, H200, beside a decode
 * step: copies and 2-D copies add nothing to what one bare copy costs, bursts 0.2 and the kernel 0.3 D2H, 0.2 H2D. A
 * shorter copy holds its caller for longer than a kernel that moves as much holds the model. */
static const uint64_t ONE_QUEUE_COPY_NBYTES = 16 << 10;

/* -- what it looks like ---------------------------------------------------------------------------------------- */

/* Consecutive pairs that continue on both sides become one copy for each tensor without gaps. Returns the number of
 * such sequences. */
static uint64_t count_breaks(const int64_t *src, const int64_t *dst, size_t count) {
  uint64_t breaks = count > 0;
  for (size_t i = 1; i < count; i++) breaks += src[i] != src[i - 1] + 1 || dst[i] != dst[i - 1] + 1;
  return breaks;
}

/* Count rows whose host address is not aligned to the lines that the link moves. The last bits of the slots decide. */
static void find_skew(struct kvs_work *work, const int64_t *host_slots) {
  enum { LINE = KVS_COST_LINE };
  struct kvs_shape *shape = &work->shape;
  const struct kvs_rows *rows = &work->scratch->rows;
  uint64_t slots[LINE] = {0}, off = 0, nbytes = 0;
  unsigned used[LINE], nused = 0; /* the residues that occur */
  bool counted = false;
  for (size_t i = 0; i < rows->count; i++) {
    const struct kvs_row *row = &rows->items[i];
    uint64_t base = kvs_row_host(row, work->direction), stride = kvs_row_host_stride(row, work->direction);
    if (((base | stride) & (LINE - 1)) == 0) continue;
    for (size_t s = 0; !counted && s < work->nslots; s++)
      if (slots[host_slots[s] & (LINE - 1)]++ == 0) used[nused++] = (unsigned)(host_slots[s] & (LINE - 1));
    counted = true;
    for (unsigned u = 0; u < nused; u++)
      if ((base + used[u] * stride) & (LINE - 1)) off += slots[used[u]], nbytes += slots[used[u]] * row->nbytes;
  }
  shape->skew_pieces = shape->rows ? (uint64_t)((double)off * (double)shape->pieces / (double)shape->rows) : 0;
  shape->skew_nbytes = shape->skew_pieces ? nbytes : 0;
}

void kvs_find_shape(struct kvs_work *work, uint64_t cpu_slots) {
  struct kvs_scratch *scratch = work->scratch;
  struct kvs_shape *shape = &work->shape;
  /* Ids on the device: nothing is known to be contiguous. */
  uint64_t breaks = work->on_device.ids ? work->nslots : count_breaks(work->src_slots, work->dst_slots, work->nslots);
  const int64_t *host = work->direction == KVS_D2H ? work->dst_slots : work->src_slots;
  shape->copies = 0;
  for (size_t i = 0; i < scratch->rows.count; i++) {
    const struct kvs_row *row = &scratch->rows.items[i];
    bool packed = row->src_stride == row->nbytes && row->dst_stride == row->nbytes;
    shape->copies += packed ? breaks : work->nslots;
  }
  shape->direction = work->direction;
  shape->nbytes = work->nbytes;
  shape->rows = scratch->rows.count * work->nslots;
  shape->pieces = LIST_IF_SHORTER * shape->copies <= shape->rows ? shape->copies : shape->rows;
  shape->runs = work->grid ? 1 : shape->rows; /* the best case; counted exactly where a burst could win */
  work->cpu_slots = cpu_slots;
  find_skew(work, host);
}

/* -- which way ------------------------------------------------------------------------------------------------- */

/* cuMemcpy from host to host waits for the stream and runs in the caller's thread. */
static bool would_block(const struct kvs_submission *s) {
  const struct kvs_regions *regions = &s->work->scratch->regions;
  bool host = regions->count > 0;
  for (size_t i = 0; i < regions->count; i++) host &= regions->items[i].memory == KVS_MEMORY_PINNED;
  return host && !s->device->ops->copy_direct;
}

static bool prefers_direct(const struct kvs_engine *engine) {
  return engine->device->ops->copy_direct && !engine->device->stepped;
}

static const char *reason_against_kernel(const struct kvs_engine *engine) {
  if (engine->disabled.kernel) return "KVSWAP_DISABLE names it";
  return engine->device->info.kernels ? NULL : engine->device->info.kernels_note;
}

/* Bursts need the host on one side. */
static bool may_burst(const struct kvs_submission *s) {
  return !s->peer && s->work->direction != KVS_OTHER_DIRECTION && atomic_load(&s->engine->bursts);
}

void kvs_release_slots(struct kvs_submission *s) {
  if (s->slots) pthread_mutex_unlock(&s->slots->lock);
  s->slots = NULL;
}

/* Layered transfers do not cut rows, so a slot must hold the longest row. The slot size is known once the set is
 * locked. */
static bool take_slots(struct kvs_submission *s) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  if (!s->slots) s->slots = kvs_slots_take(s->engine, s->lane, s->work->direction);
  if (s->slots && s->work->layered && kvs_longest_row(rows, 0, rows->count) > s->slots->slot_nbytes)
    kvs_release_slots(s);
  return s->slots != NULL;
}

/* Predicted time in nanoseconds. High priority has no handicap for kernels: the model's slowdown does not count. */
static double predict(const struct kvs_submission *s, enum kvs_path path) {
  bool high = s->options->priority == KVS_PRIORITY_HIGH;
  if (path == KVS_PATH_KERNEL)
    return kvs_kernel_ns(s) * (high ? 1 : KERNEL_HANDICAP) * (kvs_is_one_launch(s->work) ? 1 : LAUNCHES_HANDICAP);
  const struct kvs_shape *shape = &s->work->shape;
  double ns = kvs_cost_ns(&s->engine->costs, shape, path);
  if (path == KVS_PATH_BURST)
    ns = (ns * odd_runs(shape) + slow_start(shape)) * many(shape->runs, shape->nbytes) *
         (high ? 1 : burst_handicap(shape));
  if (path == KVS_PATH_DMA) ns *= many(shape->copies, shape->nbytes);
  return ns;
}

/* Count the host's runs, which only bursts need; this costs as much as the rest of the planning. Lists have the count
 * already. */
static int count_runs(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  const int64_t *host = work->direction == KVS_D2H ? work->dst_slots : work->src_slots;
  if (!work->grid || work->packed) return KVS_OK;
  int status = kvs_pack_for_burst(s);
  return status ? status
                : kvs_pack_count_runs(&work->scratch->packing, host, work->nslots, work->cpu_slots,
                                      &work->scratch->plan, &work->shape.runs, s->err);
}

/* Whether kernels keep the priority's promise, or nothing else can move the blocks as well. */
static bool allows_kernels(const struct kvs_submission *s) {
  const struct kvs_shape *shape = &s->work->shape;
  if (!s->engine->one_queue || s->options->priority == KVS_PRIORITY_HIGH) return true;
  return shape->rects == 0 && (!shape->copies || shape->nbytes / shape->copies < ONE_QUEUE_COPY_NBYTES);
}

/* Bursts are last, since their prediction costs most. */
static int fastest(struct kvs_submission *s, enum kvs_path *best) {
  bool kernels = allows_kernels(s);
  const struct {
    enum kvs_path path;
    bool possible;
  } ways[] = {{KVS_PATH_DMA, true},
              {KVS_PATH_STRIDED, s->work->shape.rects > 0},
              {KVS_PATH_KERNEL, kernels && !reason_against_kernel(s->engine)}};
  double least = INFINITY;
  *best = KVS_PATH_DMA;
  for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
    double ns = ways[i].possible ? predict(s, ways[i].path) : INFINITY;
    if (ns < least) least = ns, *best = ways[i].path;
  }
  bool possible = kernels && !kvs_racecheck_on() && may_burst(s) && predict(s, KVS_PATH_BURST) < least;
  if (!possible || !take_slots(s)) return KVS_OK;
  int status = count_runs(s);
  if (!status && predict(s, KVS_PATH_BURST) < least)
    *best = KVS_PATH_BURST;
  else
    kvs_release_slots(s);
  return status;
}

static enum kvs_path pick_for_peer(const struct kvs_submission *s) {
  uint64_t copies = s->work->shape.copies;
  if (!s->peer_direct || reason_against_kernel(s->engine) || !copies) return KVS_PATH_DMA;
  return s->work->nbytes / copies < PEER_COPY_NBYTES ? KVS_PATH_KERNEL : KVS_PATH_DMA;
}

static int pick(struct kvs_submission *s, enum kvs_path *path) {
  struct kvs_engine *engine = s->engine;
  *path = prefers_direct(engine)                             ? KVS_PATH_DIRECT
          : s->peer                                          ? pick_for_peer(s)
          : kvs_pageable(&s->work->scratch->regions)         ? KVS_PATH_DMA /* the driver stages it */
          : would_block(s) && !reason_against_kernel(engine) ? KVS_PATH_KERNEL
                                                             : KVS_PATH_AUTO;
  return *path == KVS_PATH_AUTO ? fastest(s, path) : KVS_OK;
}

int kvs_options_resolve(struct kvs_engine *engine, const struct kvs_options *given, struct kvs_options *options,
                        struct kvs_error *err) {
  struct kvs_defaults defaults;
  int status = given ? KVS_CHECK_RESERVED(given, "kvs_options", err) : KVS_OK;
  if (status) return status;
  kvs_engine_get_defaults(engine, &defaults);
  status = KVS_CHECK_RESERVED(&defaults, "kvs_defaults", err);
  if (status) return status;
  *options = given ? *given : (struct kvs_options){.path = KVS_PATH_AUTO};
  if (options->path == KVS_PATH_AUTO) options->path = defaults.path;
  if (options->priority == KVS_PRIORITY_DEFAULT) options->priority = defaults.priority;
  if (options->priority == KVS_PRIORITY_DEFAULT) options->priority = KVS_PRIORITY_NORMAL;
  if (options->max_ctas == 0) options->max_ctas = defaults.max_ctas;
  if (options->pace_gbps <= 0) options->pace_gbps = defaults.pace_gbps;
  if ((unsigned)options->path >= KVS_PATHS)
    return kvs_fail(err, KVS_INVALID, "path is %d; this kvswap has 0 to %d", (int)options->path, KVS_PATHS - 1);
  if ((unsigned)options->priority > KVS_PRIORITY_BACKGROUND)
    return kvs_fail(err, KVS_INVALID, "priority is %d; it is 0 to %d", (int)options->priority, KVS_PRIORITY_BACKGROUND);
  if ((unsigned)options->gpu_order > KVS_GPU_ORDER_STREAM)
    return kvs_fail(err, KVS_INVALID, "gpu_order is %d; it is 0 or 1", (int)options->gpu_order);
  return KVS_OK;
}

bool kvs_may_stride(const struct kvs_engine *engine, const struct kvs_options *options, uint64_t entries) {
  if (options->device_ids) return false;
  if (kvs_dev_fault_on_copies(engine->device)) return false; /* faults on copies count plain copies only */
  return options->path == KVS_PATH_STRIDED ||
         (options->path == KVS_PATH_AUTO && entries > FEW && !prefers_direct(engine) && !engine->disabled.strided);
}

bool kvs_wants_rows(const struct kvs_engine *engine, const struct kvs_options *options, uint64_t entries) {
  if (options->device_ids) return true;
  return options->path == KVS_PATH_KERNEL || options->path == KVS_PATH_BURST ||
         (options->path == KVS_PATH_AUTO && entries > FEW && !prefers_direct(engine));
}

static int refuse_path(const struct kvs_submission *s, enum kvs_path path, const char *why) {
  return kvs_fail(s->err, KVS_UNSUPPORTED, "path '%s' is off: %s", kvs_path_name(path), why);
}

/* A warp of PACK takes no more than KVS_KERNEL_PIECE. */
static bool fits_burst(const struct kvs_submission *s) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  uint64_t lines = rows->count * s->work->nslots, parts = kvs_longest_row(rows, 0, rows->count) / KVS_KERNEL_PIECE + 1,
           units;
  return !__builtin_mul_overflow(lines, parts, &units) && units < (uint64_t)1 << 31;
}

/* Ids on the device: a kernel reads them, and only kernels know what to copy. */
static int pick_for_ids(struct kvs_submission *s, enum kvs_path *path) {
  const struct kvs_ids_side *side = &s->work->on_device;
  const struct kvs_region *region = kvs_pageable(&s->work->scratch->regions);
  const char *why = reason_against_kernel(s->engine);
  if (*path != KVS_PATH_AUTO && *path != KVS_PATH_BURST && *path != KVS_PATH_KERNEL)
    return kvs_fail(
        s->err, KVS_UNSUPPORTED,
        "path '%s' needs ids in host memory, and %s is on the device: use path 'auto', 'burst' or 'kernel', "
        "or pass a copy in host memory, ids.cpu()",
        kvs_path_name(*path), side->name);
  if (why || !s->work->grid)
    return kvs_fail(
        s->err, KVS_UNSUPPORTED,
        "%s is on the device, which needs kernels, and they are off: %s: pass a copy in host memory, ids.cpu()",
        side->name, why ? why : "2^32 blocks or more");
  if (region)
    return kvs_fail(s->err, KVS_INVALID,
                    "%s is on the device, which needs kernels, and they cannot reach pageable host memory at 0x%" PRIx64
                    ": register() it with the device",
                    side->name, region->base);
  if (s->peer)
    return kvs_fail(s->err, KVS_UNSUPPORTED,
                    "%s is on the device: between two devices ids must be in host memory, ids.cpu()", side->name);
  bool burst = *path != KVS_PATH_KERNEL && s->work->nslots && may_burst(s) && fits_burst(s);
  if (*path == KVS_PATH_BURST && burst) return KVS_OK;
  bool faster = burst && predict(s, KVS_PATH_BURST) < predict(s, KVS_PATH_KERNEL);
  *path = KVS_PATH_KERNEL;
  if (!faster || !take_slots(s)) return KVS_OK;
  int status = count_runs(s);
  if (!status && predict(s, KVS_PATH_BURST) < predict(s, KVS_PATH_KERNEL))
    *path = KVS_PATH_BURST;
  else
    kvs_release_slots(s);
  return status;
}

/* A kernel that knows no single copy takes the addresses of the host as they are. */
static int check_alias(const struct kvs_submission *s, enum kvs_path path) {
  if (!s->work->on_device.ids || path != KVS_PATH_KERNEL || !kvs_regions_aliased(&s->work->scratch->regions))
    return KVS_OK;
  return kvs_fail(s->err, KVS_UNSUPPORTED,
                  "%s is on the device: path 'kernel' then needs host memory that the device sees at the host's own "
                  "addresses; allocate it by the device, or pass ids.cpu()",
                  s->work->on_device.name);
}

int kvs_choose_path(struct kvs_submission *s, enum kvs_path *path) {
  *path = s->options->path;
  s->picked = *path == KVS_PATH_AUTO;
  int status = s->work->on_device.ids ? pick_for_ids(s, path) : s->picked ? pick(s, path) : KVS_OK;
  if (status) return status;
  if (*path == KVS_PATH_STRIDED && s->work->shape.rects == 0) *path = KVS_PATH_DMA; /* there are no rects */
  if (*path == KVS_PATH_DIRECT && !s->device->ops->copy_direct)
    return kvs_fail(s->err, KVS_UNSUPPORTED, "path 'direct' is for host devices; %s has 'dma', 'burst' and 'kernel'",
                    s->engine->name);
  if (*path != KVS_PATH_KERNEL && *path != KVS_PATH_BURST) return KVS_OK;
  char off[KVS_BURST_NOTE];
  const char *why = *path == KVS_PATH_KERNEL         ? reason_against_kernel(s->engine)
                    : kvs_bursts_off(s->engine, off) ? off
                                                     : NULL;
  if (why) return refuse_path(s, *path, why);
  const struct kvs_region *region = kvs_pageable(&s->work->scratch->regions);
  if (region)
    return kvs_fail(s->err, KVS_INVALID,
                    "path '%s' cannot reach pageable host memory at 0x%" PRIx64
                    ": register() it with the device, or use path 'dma'",
                    kvs_path_name(*path), region->base);
  if (s->peer && !s->peer_direct && *path == KVS_PATH_KERNEL)
    return kvs_fail(s->err, KVS_UNSUPPORTED,
                    "path 'kernel' cannot reach 0x%" PRIx64 ", which is memory of device %d: %s has no peer access to "
                    "it; path 'dma' goes through the host",
                    s->peer->base, s->peer->device, s->engine->name);
  if (*path == KVS_PATH_BURST && (!may_burst(s) || !take_slots(s))) /* for example, both sets wait for other lanes */
    *path = s->peer && !s->peer_direct ? KVS_PATH_DMA : KVS_PATH_KERNEL;
  return check_alias(s, *path);
}

/* -- what the path needs ------------------------------------------------------------------------------------------- */

/* The form of the plan, and the memory, that the path needs. */
int kvs_prepare_path(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  enum kvs_path path = s->transfer->path;
  if (path == KVS_PATH_KERNEL || path == KVS_PATH_BURST) {
    int status = path == KVS_PATH_BURST ? kvs_prepare_burst(s)
                 : kvs_wants_list(s)    ? kvs_prepare_list(s)
                                        : kvs_prepare_grid(s);
    if (!s->picked || work->on_device.ids || (status != KVS_NOMEM && status != KVS_REFUSED)) return status;
    s->transfer->path = KVS_PATH_DMA; /* needs no GPU memory, of which there may be none */
  }
  if (path == KVS_PATH_STRIDED) {
    int status = work->plan(work->call, KVS_FORM_RECTS, work->scratch, s->err);
    if (!status && work->scratch->rects.count == 0)
      s->transfer->path = KVS_PATH_DMA; /* no pitch that the driver accepts */
    return status;
  }
  return work->planned ? KVS_OK : work->plan(work->call, KVS_FORM_COPIES, work->scratch, s->err);
}
