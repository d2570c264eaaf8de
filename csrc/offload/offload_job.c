/* Submitting to an offload map: validate a job, expand its chunks to blocks, and submit one transfer a copy group. All
 * of this runs under the engine's hazard_lock, which also guards the map's lists. */
#include <inttypes.h>
#include <stdlib.h>

#include "calls/swap.h"
#include "lanes/buffers.h"
#include "lanes/failure.h"
#include "lanes/registry.h"
#include "memory/watch.h"
#include "offload/offload.h"
#include "paths/choose.h"
#include "paths/submit.h"

/* -- a job ----------------------------------------------------------------------------------------------------- */

/* The job's lists, in the map's memory, one entry a GPU block. */
struct job_call {
  struct kvs_offload *map;
  const struct kvs_offload_job *job;
  struct kvs_scratch *scratch;
  int64_t *gpu, *cpu;         /* block numbers */
  int64_t *places;            /* index of the host block in map->failures */
  int64_t *moved_gpu;         /* blocks of one copy group */
  int64_t *moved_cpu, *slots; /* block numbers, and host slots */
  size_t count;
  bool fresh;                  /* no part of the job was submitted before this copy group */
  struct kvs_failure *outcome; /* failure record of all copy groups of a store whose outcome is known only at
                                  completion; NULL: not needed */
  /* Of the current copy group: blocks to move, and among all its blocks the positions of those that are lost. */
  size_t nmoved, nlost, nasked, failures; /* failures: index of the group's first entry */
  uint64_t dependencies;                  /* dependency mask of the other blocks */
  uint32_t *lost;
  struct kvs_error why_lost;
};

static int make_room(struct job_call *call, struct kvs_error *err) {
  struct kvs_offload *map = call->map;
  size_t count = call->job->gpu_blocks.count;
  if (count >= UINT32_MAX) return kvs_fail(err, KVS_INVALID, "gpu_blocks has %zu blocks: too many for one job", count);
  if (count > map->capacity) {
    free(map->room);
    map->capacity = 0;
    map->room = calloc(2 * count, 7 * sizeof *map->room);
    if (!map->room) return kvs_fail(err, KVS_NOMEM, "no memory for a job of %zu blocks", count);
    map->capacity = 2 * count;
  }
  call->count = count;
  call->gpu = map->room;
  call->cpu = call->gpu + count;
  call->moved_gpu = call->cpu + count;
  call->moved_cpu = call->moved_gpu + count;
  call->slots = call->moved_cpu + count;
  call->places = call->slots + count;
  call->lost = (uint32_t *)(void *)(call->places + count);
  return KVS_OK;
}

/* Read once, like all lists: another thread may modify the original. */
static int take_group_list(const struct kvs_ids *list, const char *name, size_t ngroups, int64_t *copy,
                           struct kvs_error *err) {
  if (list->count != ngroups)
    return kvs_fail(err, KVS_INVALID, "%s has %zu entries; there are %zu groups", name, list->count, ngroups);
  kvs_ids_copy(list, copy);
  for (size_t i = 0; i < ngroups; i++)
    if (copy[i] < 0) return kvs_fail(err, KVS_RANGE, "%s[%zu] is %" PRId64 ": must be 0 or more", name, i, copy[i]);
  return KVS_OK;
}

static int take_lists(const struct job_call *call, struct kvs_error *err) {
  struct kvs_offload *map = call->map;
  int status = take_group_list(&call->job->group_sizes, "group_sizes", map->ngroups, map->group_sizes, err);
  if (status) return status;
  return take_group_list(&call->job->block_indices, "block_indices", map->ngroups, map->block_indices, err);
}

static int out_of_range(const char *name, size_t i, int64_t id, uint64_t count, const char *what,
                        struct kvs_error *err) {
  return kvs_fail(err, KVS_RANGE, "%s[%zu] is %" PRId64 "; there are %" PRIu64 " %s, 0 to %" PRIu64, name, i, id, count,
                  what, count - 1);
}

static int too_short(const char *name, size_t count, size_t group, struct kvs_error *err) {
  return kvs_fail(err, KVS_INVALID, "%s has %zu entries, and group %zu needs more", name, count, group);
}

/* The host blocks of one group. *chunk: index of the group's first chunk; on return, of the next group's first. */
static int expand_group(const struct job_call *call, size_t group, size_t begin, size_t size, size_t *chunk,
                        struct kvs_error *err) {
  const struct kvs_offload *map = call->map;
  const struct kvs_ids *chunks = &call->job->chunks;
  uint64_t j = (uint64_t)call->map->block_indices[group] % map->factor;
  const int64_t failures = (int64_t)kvs_offload_failures(map, group);
  for (size_t i = 0; i < size; (*chunk)++, j = 0) {
    if (*chunk == chunks->count) return too_short("chunks", chunks->count, group, err);
    int64_t id = kvs_id_at(chunks, *chunk);
    if ((uint64_t)id >= map->chunks) return out_of_range("chunks", *chunk, id, map->chunks, "chunks", err);
    for (; j < map->factor && i < size; j++, i++) call->cpu[begin + i] = (int64_t)((uint64_t)id * map->factor + j);
  }
  for (size_t i = 0; i < size; i++) {
    int64_t id = kvs_id_at(&call->job->gpu_blocks, begin + i);
    if ((uint64_t)id >= map->gpu_blocks[group])
      return out_of_range("gpu_blocks", begin + i, id, map->gpu_blocks[group], "blocks", err);
    call->gpu[begin + i] = id;
    call->places[begin + i] = failures + call->cpu[begin + i];
  }
  return KVS_OK;
}

static int check_targets(const struct job_call *call, size_t begin, size_t size, bool keep, struct kvs_error *err) {
  bool store = call->job->direction == KVS_D2H;
  const int64_t *targets = store ? call->cpu : call->gpu;
  uint64_t *bitmap = call->scratch->plan.bitmap;
  int status = KVS_OK;
  size_t i = begin;
  for (; !status && i < begin + size; i++) {
    uint64_t *word = &bitmap[targets[i] >> 6], bit = 1ull << (targets[i] & 63);
    if (*word & bit && store)
      status = kvs_fail(err, KVS_INVALID, "chunk %" PRIu64 " is written twice, by gpu_blocks[%zu] the second time",
                        (uint64_t)targets[i] / call->map->factor, i);
    else if (*word & bit)
      status = kvs_fail(err, KVS_INVALID, "gpu_blocks[%zu] is %" PRId64 ", which is written twice", i, targets[i]);
    *word |= bit;
  }
  for (size_t k = keep ? i : begin; k < i; k++) bitmap[targets[k] >> 6] = 0;
  return status;
}

/* No destination twice, within a group and among groups that share tensors; on the host all groups share blocks. Groups
 * that share nothing are checked first, each with an empty bitmap. */
static int check_all_targets(const struct job_call *call, struct kvs_error *err) {
  const struct kvs_offload *map = call->map;
  bool store = call->job->direction == KVS_D2H;
  const int64_t *targets = store ? call->cpu : call->gpu;
  uint64_t blocks = store ? map->cpu->hazards.count : map->gpu->hazards.count;
  int status = kvs_plan_grow_bitmap(&call->scratch->plan, (size_t)(blocks / 64) + 1, err);
  if (status) return status;
  for (int keep = 0; !status && keep < 2; keep++) {
    size_t begin = 0;
    for (size_t group = 0; !status && group < map->ngroups; group++) {
      size_t size = (size_t)map->group_sizes[group];
      if ((store || map->shares[group]) == keep) status = check_targets(call, begin, size, keep, err);
      begin += size;
    }
  }
  for (size_t i = 0; i < call->count; i++) call->scratch->plan.bitmap[targets[i] >> 6] = 0;
  return status;
}

static int check_and_expand(const struct job_call *call, struct kvs_error *err) {
  const struct kvs_offload *map = call->map;
  size_t begin = 0, chunk = 0;
  int status = take_lists(call, err);
  for (size_t group = 0; !status && group < map->ngroups; group++) {
    uint64_t size = (uint64_t)map->group_sizes[group];
    if (size > call->count - begin)
      status = too_short("gpu_blocks", call->count, group, err);
    else
      status = expand_group(call, group, begin, (size_t)size, &chunk, err);
    if (!status) begin += (size_t)size;
  }
  if (status) return status;
  if (begin < call->count)
    return kvs_fail(err, KVS_INVALID, "gpu_blocks has %zu entries, but group_sizes has %zu in all", call->count, begin);
  if (chunk < call->job->chunks.count)
    return kvs_fail(err, KVS_INVALID, "chunks has %zu entries, but the groups need %zu", call->job->chunks.count,
                    chunk);
  return check_all_targets(call, err);
}

static int check(struct job_call *call, struct kvs_error *err) {
  call->scratch = kvs_scratch_get(call->map->engine, err);
  if (!call->scratch) return KVS_NOMEM;
  int status = check_and_expand(call, err);
  kvs_scratch_put(call->map->engine, call->scratch);
  return status;
}

/* -- one copy group -------------------------------------------------------------------------------------------- */

static bool writes_block(const struct job_call *call, const struct kvs_copy_group *copies, uint64_t block) {
  if (copies->only != UINT64_MAX && block % call->map->factor != copies->only) return false;
  return call->job->direction == KVS_H2D || copies->writers == 1 || block % copies->writers == copies->writer;
}

/* The first lost block sets the error. */
static bool is_lost(struct job_call *call, uint64_t block) {
  struct kvs_offload *map = call->map;
  const struct kvs_failure *failure =
      call->job->direction == KVS_H2D ? kvs_failures_get(&map->failures, call->failures + block) : NULL;
  enum kvs_verdict verdict = kvs_failure_verdict(failure);
  if (verdict == KVS_SLOT_OPEN) call->dependencies |= failure->dependencies;
  if (verdict != KVS_SLOT_LOST) return false;
  if (call->nlost++) return true;
  kvs_fail(&call->why_lost, failure->error.status,
           "chunk %" PRIu64 " does not hold what it should since transfer %" PRIu64 " failed: %.200s",
           block / map->factor, failure->transfer, failure->error.message);
  call->why_lost.code = failure->error.code;
  call->why_lost.operation = failure->error.operation;
  return true;
}

/* Lists the blocks of a copy group. */
static void list_blocks(struct job_call *call, const struct kvs_copy_group *copies) {
  uint64_t factor = call->map->factor;
  size_t begin = 0, n = 0;
  for (size_t group = 0; group < copies->group; group++) begin += (size_t)call->map->group_sizes[group];
  size_t end = begin + (size_t)call->map->group_sizes[copies->group];
  call->failures = kvs_offload_failures(call->map, copies->group);
  call->nlost = call->nasked = 0;
  call->dependencies = 0;
  for (size_t i = begin; i < end; i++) {
    uint64_t block = (uint64_t)call->cpu[i];
    if (!writes_block(call, copies, block)) continue;
    if (is_lost(call, block)) {
      call->lost[call->nlost - 1] = (uint32_t)call->nasked++;
      continue;
    }
    call->moved_gpu[n] = call->gpu[i];
    call->moved_cpu[n] = call->cpu[i];
    call->slots[n++] = (int64_t)(block / factor * copies->chunk_slots + block % factor * copies->page_slots);
    call->nasked++;
  }
  call->nmoved = n;
}

struct copy_group_call {
  struct kvs_cache_call cache; /* first member: the planner casts it */
  struct job_call *job;
};

/* Mark all blocks of the job as not stored. */
static void set_unfinished(const struct job_call *call) {
  for (size_t i = 0; i < call->count; i++)
    kvs_failures_set(&call->map->failures, (uint64_t)call->places[i], call->map->unfinished);
}

/* Called when a store, or the accepted part of it, is queued. The job's blocks count as not stored until all copy
 * groups are queued. */
static void record_failures(const void *arg, const struct kvs_transfer *transfer) {
  const struct job_call *call = ((const struct copy_group_call *)arg)->job;
  struct kvs_offload *map = call->map;
  if (!map->failures.items || call->job->direction != KVS_D2H) return;
  if (call->fresh) set_unfinished(call);
  if (transfer->error.status == KVS_OK) return;
  struct kvs_failure *failure = kvs_failure_new(&transfer->error, transfer->ticket);
  size_t count = transfer->all_failed ? (size_t)transfer->nblocks : transfer->nfailed;
  for (size_t i = 0; failure && i < count; i++) {
    size_t moved = transfer->all_failed ? i : transfer->failed[i];
    kvs_failures_set(&map->failures, call->failures + (uint64_t)call->moved_cpu[moved], failure);
  }
  if (failure) kvs_failure_unref(failure);
}

/* Called when all copy groups of a store are queued. If the store waits for other devices, its outcome is known only at
 * completion. (Copy groups queued by an earlier call for the same job have reported in that call's transfers.) */
static void finish_store(const struct job_call *call) {
  struct kvs_offload *map = call->map;
  if (!map->failures.count || call->job->direction != KVS_D2H) return;
  for (size_t i = 0; i < call->count; i++) {
    uint64_t place = (uint64_t)call->places[i];
    if (map->failures.items[place] != map->unfinished) continue;
    kvs_failures_set(&map->failures, place, call->outcome && call->outcome->dependencies ? call->outcome : NULL);
  }
}

/* Called when no part of a store could be queued. Unless the arguments were wrong, the job has failed and its blocks
 * are not stored. */
static void mark_job_failed(const struct job_call *call, int status) {
  struct kvs_offload *map = call->map;
  enum kvs_exception kind = kvs_status_exception(status);
  bool failed = kind == KVS_EXC_DEVICE || kind == KVS_EXC_QUEUE_FULL || kind == KVS_EXC_BASE;
  if (failed && map->failures.items && call->job->direction == KVS_D2H) set_unfinished(call);
}

static int submit_copy_group(struct job_call *call, const struct kvs_copy_group *copies,
                             const struct kvs_options *options, struct kvs_transfer **transfer, struct kvs_error *err) {
  struct kvs_offload *map = call->map;
  struct kvs_scratch *scratch = call->scratch;
  bool store = call->job->direction == KVS_D2H;
  struct kvs_ids gpu = {call->moved_gpu, 8, 0}, cpu = {call->slots, 8, 0};
  struct copy_group_call arg = {.cache = {copies->tensors, copies->ntensors, &gpu, &cpu, call->job->direction,
                                          map->engine->device->info.max_pitch, options->layer_events},
                                .job = call};
  const struct kvs_touch touches[] = {{.table = map->gpu, .write = !store, .slots = call->moved_gpu},
                                      {.table = map->cpu, .write = store, .slots = call->moved_cpu}};
  struct kvs_work work = {.scratch = scratch,
                          .direction = call->job->direction,
                          .plan = kvs_cache_plan,
                          .layered = options->layer_events,
                          .watch = kvs_watch_copies,
                          .settle = record_failures,
                          .call = &arg,
                          .nlayers = copies->ntensors,
                          .nslots = call->nmoved,
                          .nblocks = call->nasked,
                          .lost = call->lost,
                          .nlost = call->nlost,
                          .lost_error = call->why_lost,
                          .dependencies = call->dependencies,
                          .outcome = &call->outcome,
                          .touches = touches,
                          .ntouches = 2,
                          .foreign = &map->foreign};
  gpu.count = cpu.count = work.nslots;
  work.entries = work.nslots * copies->ntensors;
  work.src_slots = store ? call->moved_gpu : call->slots;
  work.dst_slots = store ? call->slots : call->moved_gpu;
  for (size_t t = 0; t < copies->ntensors; t++) work.nbytes += copies->tensors[t].nbytes * work.nblocks;
  int status = kvs_cache_prepare(map->engine, &work, &arg.cache, options, err);
  if (!status) status = kvs_submit(map->engine, &work, options, transfer, err);
  return status;
}

/* -- the call -------------------------------------------------------------------------------------------------- */

static int submit_once(struct job_call *call, const struct kvs_copy_group *copies, const struct kvs_options *options,
                       struct kvs_transfer **transfer, struct kvs_error *err) {
  struct kvs_engine *engine = call->map->engine;
  call->scratch = kvs_scratch_get(engine, err);
  if (!call->scratch) return KVS_NOMEM;
  atomic_fetch_add(&call->map->refs, 1); /* for the transfer */
  int status = submit_copy_group(call, copies, options, transfer, err);
  if (status) kvs_offload_drop(call->map);
  kvs_scratch_put(engine, call->scratch);
  return status;
}

/* Submit the copy groups from *next on that have blocks to move. A job without blocks is one empty transfer. */
static int submit_job(struct job_call *call, const struct kvs_options *options, size_t *next,
                      struct kvs_transfer **transfers, size_t *count, struct kvs_error *err) {
  static const struct kvs_copy_group nothing = {.only = UINT64_MAX};
  struct kvs_offload *map = call->map;
  bool any = false;
  int status = KVS_OK;
  for (size_t i = 0; !status && i < map->ncopy_groups; i++) {
    list_blocks(call, &map->copy_groups[i]);
    call->fresh = !any;
    any |= call->nasked > 0;
    if (i < *next) continue;
    if (call->nasked) status = submit_once(call, &map->copy_groups[i], options, &transfers[*count], err);
    if (call->nasked && !status) ++*count;
    if (!status) *next = i + 1;
  }
  if (!status && any) finish_store(call);
  if (status || any) return status;
  call->fresh = false;
  status = submit_once(call, &nothing, options, &transfers[0], err);
  *count = !status;
  return status;
}

int kvs_offload_submit(struct kvs_offload *map, const struct kvs_offload_job *job, const struct kvs_options *given,
                       size_t *next, struct kvs_transfer **transfers, size_t *count, struct kvs_error *err) {
  struct kvs_engine *engine = map->engine;
  struct kvs_options options;
  size_t first = *next;
  *count = 0;
  int status = kvs_open_for_work(engine, err);
  if (!status) status = KVS_CHECK_RESERVED(job, "kvs_offload_job", err);
  if (!status) status = kvs_options_resolve(engine, given, &options, err);
  if (!status && options.device_ids)
    status = kvs_fail(err, KVS_INVALID, "an offload job has its ids in host memory, and takes no device_ids");
  if (status) return status;
  if (job->direction != KVS_D2H && job->direction != KVS_H2D)
    return kvs_fail(err, KVS_INVALID, "direction is %d; 0 is D2H (store) and 1 is H2D (load)", (int)job->direction);
  if (options.nafter_layers)
    return kvs_fail(err, KVS_INVALID,
                    "after_layers: a job may be several transfers, so its layers have no such events");
  if (*next && *next >= map->ncopy_groups)
    return kvs_fail(err, KVS_RANGE, "a job of this map has %zu parts, and none is left from %zu on", map->ncopy_groups,
                    *next);
  options.owner = map;
  options.release = kvs_offload_drop;
  struct job_call call = {.map = map, .job = job};
  pthread_mutex_lock(&engine->hazard_lock);
  if (map->foreign.count) kvs_peer_forget(&map->foreign);
  status = make_room(&call, err);
  if (!status) status = check(&call, err);
  if (!status) {
    status = submit_job(&call, &options, next, transfers, count, err);
    if (status && first == 0 && *count == 0) mark_job_failed(&call, status);
  }
  if (call.outcome) kvs_failure_unref(call.outcome);
  pthread_mutex_unlock(&engine->hazard_lock);
  return status;
}
