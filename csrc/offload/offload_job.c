/* Submitting to an offloading map: check a job, expand its chunks to blocks, and submit a transfer a sheet. All of it
 * runs under the engine's hazard_lock, which guards the room that it works in too. */
#include <inttypes.h>
#include <stdlib.h>

#include "core/buffers.h"
#include "core/registry.h"
#include "offload/offload.h"

/* -- a job ----------------------------------------------------------------------------------------------------- */

/* Where the job's lists are in the map's room, one entry a GPU block. */
struct job_call {
  struct kvs_offload *map;
  const struct kvs_offload_job *job;
  struct kvs_scratch *scratch;
  int64_t *gpu, *cpu;         /* block numbers of both sides */
  int64_t *places;            /* of the host's in map->failures */
  int64_t *sheet_gpu;         /* those of one sheet */
  int64_t *sheet_cpu, *slots; /* block numbers and slots of the host */
  size_t count;
  bool fresh;                  /* nothing of it was submitted before this sheet */
  struct kvs_failure *outcome; /* of all its sheets, for the blocks that it stores; NULL: none needs one */
  /* Of that sheet: blocks to be moved, and positions among all that were asked for of those that are lost. */
  size_t nmoved, nlost, nasked, failures; /* failures: where its group's begin */
  uint64_t dependencies;                  /* that the others depend on */
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
  call->sheet_gpu = call->cpu + count;
  call->sheet_cpu = call->sheet_gpu + count;
  call->slots = call->sheet_cpu + count;
  call->places = call->slots + count;
  call->lost = (uint32_t *)(void *)(call->places + count);
  return KVS_OK;
}

/* Read once, as all lists: somebody may write to them meanwhile. */
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

/* Host blocks of one group, from its chunks: *chunk is the next one, and those that follow the group's. */
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

/* No destination twice: within a group, and among groups that share tensors. The host's blocks are all groups'. Those
 * that share nothing come first, each with an empty bitmap. */
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

/* -- one sheet of it ------------------------------------------------------------------------------------------- */

static bool moves(const struct job_call *call, const struct kvs_sheet *sheet, uint64_t block) {
  if (sheet->only != UINT64_MAX && block % call->map->factor != sheet->only) return false;
  return call->job->direction == KVS_H2D || sheet->writers == 1 || block % sheet->writers == sheet->writer;
}

/* The first of them that is not to be moved says why. */
static bool is_lost(struct job_call *call, uint64_t block) {
  const struct kvs_offload *map = call->map;
  bool may_be = call->job->direction == KVS_H2D && map->nfailures;
  const struct kvs_failure *failure = may_be ? map->failures[call->failures + block] : NULL;
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

/* The blocks of a sheet. */
static void list_blocks(struct job_call *call, const struct kvs_sheet *sheet) {
  uint64_t factor = call->map->factor;
  size_t begin = 0, n = 0;
  for (size_t group = 0; group < sheet->group; group++) begin += (size_t)call->map->group_sizes[group];
  size_t end = begin + (size_t)call->map->group_sizes[sheet->group];
  call->failures = kvs_offload_failures(call->map, sheet->group);
  call->nlost = call->nasked = 0;
  call->dependencies = 0;
  for (size_t i = begin; i < end; i++) {
    uint64_t block = (uint64_t)call->cpu[i];
    if (!moves(call, sheet, block)) continue;
    if (is_lost(call, block)) {
      call->lost[call->nlost - 1] = (uint32_t)call->nasked++;
      continue;
    }
    call->sheet_gpu[n] = call->gpu[i];
    call->sheet_cpu[n] = call->cpu[i];
    call->slots[n++] = (int64_t)(block / factor * sheet->chunk_slots + block % factor * sheet->page_slots);
    call->nasked++;
  }
  call->nmoved = n;
}

struct sheet_call {
  struct kvs_cache_call cache; /* first: it is what the planner is given */
  struct job_call *job;
};

static void set_failure(struct kvs_offload *map, size_t place, struct kvs_failure *failure) {
  kvs_offload_forget(map, place);
  atomic_fetch_add(&failure->refs, 1);
  map->failures[place] = failure;
  map->nfailures++;
}

/* No block of the job counts as stored. */
static void set_unfinished(const struct job_call *call) {
  for (size_t i = 0; i < call->count; i++) set_failure(call->map, (size_t)call->places[i], call->map->unfinished);
}

/* A store was queued, or as much of it as the device takes. Until the last of a job was, none of it counts as stored.
 */
static void remember(const void *arg, const struct kvs_transfer *transfer) {
  const struct job_call *call = ((const struct sheet_call *)arg)->job;
  struct kvs_offload *map = call->map;
  if (!map->failures || call->job->direction != KVS_D2H) return;
  if (call->fresh) set_unfinished(call);
  if (transfer->error.status == KVS_OK) return;
  struct kvs_failure *failure = kvs_failure_new(&transfer->error, transfer->ticket);
  size_t count = transfer->all_failed ? (size_t)transfer->nblocks : transfer->nfailed;
  for (size_t i = 0; failure && i < count; i++) {
    size_t moved = transfer->all_failed ? i : transfer->failed[i];
    set_failure(map, call->failures + (size_t)call->sheet_cpu[moved], failure);
  }
  if (failure) kvs_failure_unref(failure);
}

/* All of a store was queued. Where it comes after work of other devices, only its end tells. (What was queued by an
 * earlier call for the same job has told of it in that call's transfers.) */
static void settle_job(const struct job_call *call) {
  struct kvs_offload *map = call->map;
  if (!map->nfailures || call->job->direction != KVS_D2H) return;
  for (size_t i = 0; i < call->count; i++) {
    size_t place = (size_t)call->places[i];
    if (map->failures[place] != map->unfinished) continue;
    if (call->outcome && call->outcome->dependencies)
      set_failure(map, place, call->outcome);
    else
      kvs_offload_forget(map, place);
  }
}

/* Nothing of a store could be queued. Where that is no fault of the arguments it is a job that failed, and what it
 * should have stored is not there. */
static void lose_job(const struct job_call *call, int status) {
  struct kvs_offload *map = call->map;
  enum kvs_exception kind = kvs_status_exception(status);
  bool failed = kind == KVS_EXC_DEVICE || kind == KVS_EXC_QUEUE_FULL || kind == KVS_EXC_BASE;
  if (failed && map->failures && call->job->direction == KVS_D2H) set_unfinished(call);
}

static int submit_sheet(struct job_call *call, const struct kvs_sheet *sheet, const struct kvs_options *options,
                        struct kvs_transfer **transfer, struct kvs_error *err) {
  struct kvs_offload *map = call->map;
  struct kvs_scratch *scratch = call->scratch;
  bool store = call->job->direction == KVS_D2H;
  struct kvs_ids gpu = {call->sheet_gpu, 8, 0}, cpu = {call->slots, 8, 0};
  struct sheet_call arg = {.cache = {sheet->tensors, sheet->ntensors, &gpu, &cpu, call->job->direction,
                                     map->engine->device->info.max_pitch, false},
                           .job = call};
  const struct kvs_touch touches[] = {{.table = map->gpu, .write = !store, .slots = call->sheet_gpu},
                                      {.table = map->cpu, .write = store, .slots = call->sheet_cpu}};
  struct kvs_work work = {.scratch = scratch,
                          .direction = call->job->direction,
                          .plan = kvs_cache_plan,
                          .watch = kvs_watch_copies,
                          .settle = remember,
                          .call = &arg,
                          .nlayers = sheet->ntensors,
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
  work.entries = work.nslots * sheet->ntensors;
  work.src_slots = store ? call->sheet_gpu : call->slots;
  work.dst_slots = store ? call->slots : call->sheet_gpu;
  for (size_t t = 0; t < sheet->ntensors; t++) work.nbytes += sheet->tensors[t].nbytes * work.nblocks;
  int status = kvs_cache_prepare(map->engine, &work, &arg.cache, options, err);
  if (!status) status = kvs_submit(map->engine, &work, options, transfer, err);
  return status;
}

/* -- the call -------------------------------------------------------------------------------------------------- */

static int submit_once(struct job_call *call, const struct kvs_sheet *sheet, const struct kvs_options *options,
                       struct kvs_transfer **transfer, struct kvs_error *err) {
  struct kvs_engine *engine = call->map->engine;
  call->scratch = kvs_scratch_get(engine, err);
  if (!call->scratch) return KVS_NOMEM;
  atomic_fetch_add(&call->map->refs, 1); /* the transfer's */
  int status = submit_sheet(call, sheet, options, transfer, err);
  if (status) kvs_offload_drop(call->map);
  kvs_scratch_put(engine, call->scratch);
  return status;
}

/* Sheets from *next on that have something to move; a job that moves nothing is one transfer all the same. */
static int submit_job(struct job_call *call, const struct kvs_options *options, size_t *next,
                      struct kvs_transfer **transfers, size_t *count, struct kvs_error *err) {
  static const struct kvs_sheet nothing = {.only = UINT64_MAX};
  struct kvs_offload *map = call->map;
  bool any = false;
  int status = KVS_OK;
  for (size_t i = 0; !status && i < map->nsheets; i++) {
    list_blocks(call, &map->sheets[i]);
    call->fresh = !any;
    any |= call->nasked > 0;
    if (i < *next) continue;
    if (call->nasked) status = submit_once(call, &map->sheets[i], options, &transfers[*count], err);
    if (call->nasked && !status) ++*count;
    if (!status) *next = i + 1;
  }
  if (!status && any) settle_job(call);
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
  if (status) return status;
  if (job->direction != KVS_D2H && job->direction != KVS_H2D)
    return kvs_fail(err, KVS_INVALID, "direction is %d; 0 is D2H (store) and 1 is H2D (load)", (int)job->direction);
  if (*next && *next >= map->nsheets)
    return kvs_fail(err, KVS_RANGE, "a job of this map has %zu parts, and none is left from %zu on", map->nsheets,
                    *next);
  kvs_options_resolve(engine, given, &options);
  options.owner = map;
  options.release = kvs_offload_drop;
  struct job_call call = {.map = map, .job = job};
  pthread_mutex_lock(&engine->hazard_lock);
  if (map->foreign.count) kvs_peer_forget(&map->foreign);
  status = make_room(&call, err);
  if (!status) status = check(&call, err);
  if (!status) {
    status = submit_job(&call, &options, next, transfers, count, err);
    if (status && first == 0 && *count == 0) lose_job(&call, status);
  }
  if (call.outcome) kvs_failure_unref(call.outcome);
  pthread_mutex_unlock(&engine->hazard_lock);
  return status;
}
