/* Statistics and metrics of an engine. Both are read from atomic counters; metrics take no lock that a submission holds
 * for long, and wait for none. */
#include "engine/metrics.h"

#include "base/wait.h"
#include "lanes/lane.h"
#include "lanes/registry.h"
#include "lanes/state.h"
#include "paths/slots.h"

_Static_assert((int)KVS_HISTOGRAM_BOUNDS == (int)KVS_BOUNDS, "engine/metrics.h and base/histogram.h differ");
_Static_assert(KVS_PRIORITY_BACKGROUND + 1 == KVS_PRIORITIES, "engine/metrics.h lists too few priorities");

const uint64_t *kvs_histogram_time_bounds(void) { return kvs_time_bounds; }

const uint64_t *kvs_histogram_size_bounds(void) { return kvs_size_bounds; }

/* -- statistics ---------------------------------------------------------------------------------------------------- */

static void stats_of_paths(struct kvs_engine *engine, struct kvs_stats *stats) {
  uint64_t *const bytes[] = {&stats->bytes_d2h, &stats->bytes_h2d, &stats->bytes_other};
  for (int direction = 0; direction < 3; direction++)
    for (int path = 0; path < KVS_PATHS; path++) {
      struct kvs_path_stats *row = &stats->paths[direction][path];
      const struct kvs_path_counters *counters = &engine->paths[direction][path];
      uint64_t buckets[KVS_BOUNDS + 1];
      *row = (struct kvs_path_stats){
          .bytes = kvs_histogram_read(&counters->nbytes, buckets),
          .blocks = atomic_load(&counters->blocks),
          .device_ns = atomic_load(&counters->device_ns),
          .link_bytes = atomic_load(&counters->link_nbytes),
      };
      for (int i = 0; i <= KVS_BOUNDS; i++) row->transfers += buckets[i];
      *bytes[direction] += row->bytes;
    }
}

void kvs_engine_stats(struct kvs_engine *engine, struct kvs_stats *stats) {
  if (!kvs_dev_forked(engine->device)) kvs_engine_reap(engine);
  *stats = (struct kvs_stats){
      .submitted = atomic_load(&engine->submitted),
      .done = atomic_load(&engine->done),
      .failed = atomic_load(&engine->failed),
      .cancelled = atomic_load(&engine->cancelled),
      .second_attempts = atomic_load(&engine->second_attempts),
      .copies = atomic_load(&engine->copies),
      .merged = atomic_load(&engine->merged),
      .refused_full = atomic_load(&engine->refused_full),
      .staging_nbytes = atomic_load(&engine->staging_nbytes),
      .waits_raw = atomic_load(&engine->waits[KVS_RAW]),
      .waits_war = atomic_load(&engine->waits[KVS_WAR]),
      .waits_waw = atomic_load(&engine->waits[KVS_WAW]),
      .lent_bytes_d2h = atomic_load(&engine->lent_nbytes[KVS_D2H]),
      .lent_bytes_h2d = atomic_load(&engine->lent_nbytes[KVS_H2D]),
      .borrowed_bytes_d2h = atomic_load(&engine->borrowed_nbytes[KVS_D2H]),
      .borrowed_bytes_h2d = atomic_load(&engine->borrowed_nbytes[KVS_H2D]),
  };
  stats_of_paths(engine, stats);
  if (kvs_dev_forked(engine->device)) return;
  pthread_mutex_lock(&engine->lock);
  for (struct kvs_lane *lane = engine->lanes; lane; lane = lane->next) {
    stats->lanes++;
    pthread_mutex_lock(&lane->lock);
    stats->unfinished += lane->count;
    pthread_mutex_unlock(&lane->lock);
  }
  pthread_mutex_unlock(&engine->lock);
}

/* -- metrics ------------------------------------------------------------------------------------------------------- */

/* The lanes' numbers never change, so no lock is needed to walk them. */
static void reap_without_waiting(struct kvs_engine *engine) {
  struct kvs_error err;
  bool lost = kvs_dev_check(engine->device, &err) == KVS_LOST;
  for (unsigned i = 0; i < atomic_load(&engine->nlanes) && !lost; i++)
    lost = kvs_lane_try_reap(engine->numbered[i], &err) == KVS_LOST;
  if (lost) kvs_engine_lose(engine);
}

static void read_histogram(const struct kvs_histogram *histogram, struct kvs_histogram_counts *counts) {
  counts->sum = kvs_histogram_read(histogram, counts->buckets);
}

static void read_path(const struct kvs_path_counters *counters, struct kvs_path_metrics *path) {
  read_histogram(&counters->duration, &path->duration_ns);
  read_histogram(&counters->queue, &path->queue_ns);
  read_histogram(&counters->nbytes, &path->nbytes);
  path->blocks = atomic_load(&counters->blocks);
  path->device_ns = atomic_load(&counters->device_ns);
  path->link_nbytes = atomic_load(&counters->link_nbytes);
  path->failed_blocks = atomic_load(&counters->failed_blocks);
  for (int i = 0; i < KVS_STATUSES; i++) path->failed[i] = atomic_load(&counters->failed[i]);
}

static void add_lane(const struct kvs_lane *lane, uint64_t now, struct kvs_lane_metrics *lanes) {
  uint64_t count = atomic_load(&lane->count), oldest = atomic_load(&lane->oldest_ns);
  lanes->lanes++;
  lanes->unfinished += count;
  lanes->nbytes += atomic_load(&lane->nbytes);
  if (count > lanes->fullest) lanes->fullest = count;
  if (lane->depth > lanes->limit) lanes->limit = lane->depth;
  if (oldest && now > oldest && now - oldest > lanes->oldest_ns) lanes->oldest_ns = now - oldest;
}

static void read_memory(struct kvs_engine *engine, struct kvs_engine_metrics *metrics) {
  pthread_mutex_lock(&engine->memory_lock); /* a leaf, held for a look-up */
  for (size_t i = 0; i < engine->regions.count; i++) {
    const struct kvs_region *region = &engine->regions.items[i];
    bool pinned = region->memory != KVS_MEMORY_DEVICE;
    if (region->origin == KVS_ORIGIN_ALLOCATED)
      *(pinned ? &metrics->allocated_host_nbytes : &metrics->allocated_nbytes) += region->nbytes;
    else if (region->origin == KVS_ORIGIN_REGISTERED)
      metrics->registered_nbytes += region->nbytes;
    else if (region->origin == KVS_ORIGIN_IMPORTED)
      metrics->imported_nbytes += region->nbytes;
  }
  for (const struct kvs_pool *pool = engine->pools; pool; pool = pool->next) {
    metrics->pools++;
    metrics->pool_blocks += pool->layout.num_blocks;
  }
  pthread_mutex_unlock(&engine->memory_lock);
}

void kvs_engine_get_metrics(struct kvs_engine *engine, struct kvs_engine_metrics *metrics) {
  *metrics = (struct kvs_engine_metrics){.lost = atomic_load(&engine->device->lost) != 0};
  if (kvs_dev_forked(engine->device)) return;
  reap_without_waiting(engine);
  for (int direction = 0; direction < 3; direction++)
    for (int path = 0; path < KVS_PATHS; path++)
      read_path(&engine->paths[direction][path], &metrics->paths[direction][path]);
  uint64_t now = kvs_clock_ns();
  for (unsigned i = 0; i < atomic_load(&engine->nlanes); i++) {
    const struct kvs_lane *lane = engine->numbered[i];
    add_lane(lane, now, &metrics->lanes[lane->direction][lane->priority]);
  }
  metrics->submitted = atomic_load(&engine->submitted);
  metrics->copies = atomic_load(&engine->copies);
  metrics->merged = atomic_load(&engine->merged);
  metrics->refused_full = atomic_load(&engine->refused_full);
  metrics->second_attempts = atomic_load(&engine->second_attempts);
  metrics->lent_d2h_nbytes = atomic_load(&engine->lent_nbytes[KVS_D2H]);
  metrics->lent_h2d_nbytes = atomic_load(&engine->lent_nbytes[KVS_H2D]);
  metrics->borrowed_d2h_nbytes = atomic_load(&engine->borrowed_nbytes[KVS_D2H]);
  metrics->borrowed_h2d_nbytes = atomic_load(&engine->borrowed_nbytes[KVS_H2D]);
  metrics->staging_nbytes = atomic_load(&engine->staging_nbytes);
  metrics->slots_nbytes = kvs_engine_slots_nbytes(engine);
  metrics->waits_raw = atomic_load(&engine->waits[KVS_RAW]);
  metrics->waits_war = atomic_load(&engine->waits[KVS_WAR]);
  metrics->waits_waw = atomic_load(&engine->waits[KVS_WAW]);
  read_memory(engine, metrics);
}
