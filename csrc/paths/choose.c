/* The path of a transfer: the one that its caller names, or, for AUTO, the one with the least predicted time among
 * those that keep the promise of its priority. And what the path needs, before any work is queued. */
#include "paths/choose.h"

#include <inttypes.h>
#include <math.h>

#include "device/faults.h"
#include "paths/copies.h"
#include "paths/direct.h"
#include "paths/table.h"
#include "paths/units.h"

/* At most 3 copies: path selection costs more than it can save. */
enum { FEW = 3 };

/* -- options and forms --------------------------------------------------------------------------------------------- */

int kvs_options_resolve(struct kvs_engine *engine, const struct kvs_options *given, struct kvs_options *options,
                        struct kvs_error *err) {
  struct kvs_defaults defaults;
  int status = given ? KVS_CHECK_RESERVED(given, "kvs_options", err) : KVS_OK;
  if (status) return status;
  kvs_engine_get_defaults(engine, &defaults);
  status = KVS_CHECK_RESERVED(&defaults, "kvs_defaults", err);
  if (status) return status;
  *options = given ? *given : (struct kvs_options){0};
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

/* Whether AUTO compares paths for so many blocks of all tensors. */
static bool compares(const struct kvs_engine *engine, uint64_t entries) {
  return entries > FEW && !kvs_prefers_direct(engine);
}

bool kvs_may_stride(const struct kvs_engine *engine, const struct kvs_options *options, uint64_t entries) {
  const struct kvs_path_ops *named = kvs_paths[options->path];
  if (options->device_ids) return false;
  if (kvs_dev_fault_on_copies(engine->device)) return false; /* faults on copies count plain copies only */
  return named ? named->rects : compares(engine, entries) && !engine->disabled.strided;
}

bool kvs_wants_rows(const struct kvs_engine *engine, const struct kvs_options *options, uint64_t entries) {
  const struct kvs_path_ops *named = kvs_paths[options->path];
  if (options->device_ids) return true;
  return named ? named->rows : compares(engine, entries);
}

/* -- AUTO ---------------------------------------------------------------------------------------------------------- */

static bool can_serve(const struct kvs_submission *s, const struct kvs_path_ops *row) {
  if (s->work->codings && !row->codes) return false;
  if (row->needs_host_ids && s->work->on_device.ids) return false;
  if (row->needs_kernels && kvs_kernels_off(s->engine)) return false;
  if (row->needs_lender && !atomic_load(&s->engine->lent_least)) return false;
  return !row->fits || row->fits(s);
}

/* Take what the path holds, and predict its time exactly. True: it is still the fastest; else it holds nothing. */
static bool take_if_faster(struct kvs_submission *s, const struct kvs_path_ops *row, double *least, int *status) {
  if (!row->take(s)) return false;
  s->taken = row;
  *status = row->measure(s);
  double ns = *status ? INFINITY : row->predict(s);
  if (ns < *least) {
    *least = ns;
    return true;
  }
  kvs_release_path(s);
  return false;
}

/* Paths that take something are compared last, since their prediction costs most. The first candidate serves where no
 * costs are known. */
static int fastest(struct kvs_submission *s, enum kvs_path *best) {
  double least = INFINITY;
  int status = KVS_OK;
  *best = KVS_PATH_AUTO;
  for (int takes = 0; takes < 2; takes++)
    for (int path = 1; !status && path < KVS_PATHS; path++) {
      const struct kvs_path_ops *row = kvs_paths[path];
      if (!row->predict || (row->take != NULL) != takes || !can_serve(s, row)) continue;
      if (*best == KVS_PATH_AUTO) *best = (enum kvs_path)path;
      double ns = !row->worth || row->worth(s) ? row->predict(s) : INFINITY;
      if (!(ns < least)) continue;
      if (takes && !take_if_faster(s, row, &least, &status)) continue;
      least = ns < least ? ns : least;
      *best = (enum kvs_path)path;
    }
  return status;
}

/* Coded rows: no time is predicted. */
static int pick_coding(struct kvs_submission *s, enum kvs_path *path) {
  for (int i = 1; i < KVS_PATHS; i++) {
    if (!can_serve(s, kvs_paths[i])) continue;
    *path = (enum kvs_path)i;
    return KVS_OK;
  }
  const char *why = kvs_kernels_off(s->engine);
  return kvs_fail(s->err, KVS_UNSUPPORTED, "pool '%s' is coded, which needs kernels: %s", s->work->coded_pool,
                  why ? why : "no path can serve this transfer");
}

/* A path may claim a transfer. Later rows are asked first: what no other path claims is dma's. */
static int pick(struct kvs_submission *s, enum kvs_path *path) {
  if (s->work->codings) return pick_coding(s, path);
  for (int i = KVS_PATHS - 1; i > 0; i--) {
    const struct kvs_path_ops *row = kvs_paths[i];
    if (row->needs_host_ids && s->work->on_device.ids) continue;
    if (!row->claims || !row->claims(s)) continue;
    *path = (enum kvs_path)i;
    return KVS_OK;
  }
  return fastest(s, path);
}

/* -- refusals ------------------------------------------------------------------------------------------------------ */

/* Ids on the device: a kernel reads them, and only kernels know what to copy. */
static int refuse_ids(const struct kvs_submission *s, const struct kvs_path_ops *named) {
  const struct kvs_ids_side *side = &s->work->on_device;
  const struct kvs_region *region = kvs_pageable(&s->work->scratch->regions);
  const char *why = kvs_kernels_off(s->engine);
  if (named && named->needs_host_ids)
    return kvs_fail(
        s->err, KVS_UNSUPPORTED,
        "path '%s' needs ids in host memory, and %s is on the device: use path 'auto', 'burst' or 'kernel', "
        "or pass a copy in host memory, ids.cpu()",
        named->name, side->name);
  if (why || !s->work->grid)
    return kvs_fail(
        s->err, KVS_UNSUPPORTED,
        "%s is on the device, which needs kernels, and they are off: %s: pass a copy in host memory, ids.cpu()",
        side->name, why ? why : "2^32 blocks or more");
  if (side->ids->count && !s->work->scratch->rows.count)
    return kvs_fail(s->err, KVS_INVALID,
                    "%s is on the device, and there are no tensors: no kernel would check the ids; pass ids.cpu()",
                    side->name);
  if (region)
    return kvs_fail(s->err, KVS_INVALID,
                    "%s is on the device, which needs kernels, and they cannot reach pageable host memory at 0x%" PRIx64
                    ": register() it with the device",
                    side->name, region->base);
  if (s->peer)
    return kvs_fail(s->err, KVS_UNSUPPORTED,
                    "%s is on the device: between two devices ids must be in host memory, ids.cpu()", side->name);
  return KVS_OK;
}

static int refuse(const struct kvs_submission *s, const struct kvs_path_ops *row) {
  char room[KVS_BURST_NOTE];
  if (s->work->codings && !row->codes)
    return kvs_fail(s->err, KVS_UNSUPPORTED,
                    "path '%s' moves bytes as they are, and pool '%s' is coded: use path 'auto', 'burst' or 'kernel'",
                    row->name, s->work->coded_pool);
  if (row->needs_lender && !s->picked && !atomic_load(&s->engine->lent_least))
    return kvs_fail(s->err, KVS_UNSUPPORTED, "path '%s' is off: no device lends its link to %s, as Device.lend() does",
                    row->name, s->engine->name);
  if (row->needs_threads && !s->device->ops->copy_direct)
    return kvs_fail(s->err, KVS_UNSUPPORTED, "path '%s' is for host devices, and %s is none: use path 'auto'",
                    row->name, s->engine->name);
  const char *why = row->why_not ? row->why_not(s, room) : row->needs_kernels ? kvs_kernels_off(s->engine) : NULL;
  if (why) return kvs_fail(s->err, KVS_UNSUPPORTED, "path '%s' is off: %s", row->name, why);
  const struct kvs_region *region = row->needs_pinned ? kvs_pageable(&s->work->scratch->regions) : NULL;
  if (region)
    return kvs_fail(s->err, KVS_INVALID,
                    "path '%s' cannot reach pageable host memory at 0x%" PRIx64
                    ": register() it with the device, or use path 'dma'",
                    row->name, region->base);
  if (row->needs_peer_access && s->peer && !s->peer_direct)
    return kvs_fail(s->err, KVS_UNSUPPORTED,
                    "path '%s' cannot reach 0x%" PRIx64 ", which is memory of device %d: %s has no peer access to "
                    "it; path 'dma' goes through the host",
                    row->name, s->peer->base, s->peer->device, s->engine->name);
  return KVS_OK;
}

/* -- the choice ---------------------------------------------------------------------------------------------------- */

static bool take(struct kvs_submission *s, const struct kvs_path_ops *row) {
  if (!row->take || s->taken) return true;
  if (!row->take(s)) return false;
  s->taken = row;
  return true;
}

int kvs_choose_path(struct kvs_submission *s, enum kvs_path *path) {
  const struct kvs_path_ops *row = kvs_paths[s->options->path];
  *path = s->options->path;
  s->picked = !row;
  int status = s->work->on_device.ids ? refuse_ids(s, row) : KVS_OK;
  if (!status && s->picked) status = pick(s, path);
  if (status) return status;
  row = kvs_paths[*path];
  while (s->work->on_device.ids && row->fits && !row->fits(s)) row = kvs_paths[ *path = row->instead(s)];
  status = refuse(s, row);
  if (status) return status;
  while ((row->fits && !row->fits(s)) || !take(s, row)) row = kvs_paths[ *path = row->instead(s)];
  return row->check ? row->check(s) : KVS_OK;
}

void kvs_release_path(struct kvs_submission *s) {
  if (s->taken) s->taken->release(s);
  s->taken = NULL;
}

int kvs_prepare_path(struct kvs_submission *s) {
  const struct kvs_path_ops *row = kvs_paths[s->transfer->path];
  int status = row->prepare(s);
  bool no_memory = status == KVS_NOMEM || status == KVS_REFUSED;
  if (!no_memory || !s->picked || !row->needs_kernels || s->work->on_device.ids || s->work->codings) return status;
  s->transfer->path = row->after_refusal(s); /* needs no GPU memory, of which there may be none */
  return kvs_paths[s->transfer->path]->prepare(s);
}
