/* Ranges of chunks. The engine keeps the list of its ranges, to unmap them chunk by chunk; the device knows single
 * chunks only. */
#include "memory/range.h"

#include <inttypes.h>
#include <stdlib.h>

#include "device/share.h"

enum { CHUNK_GRANULES = 16 }; /* chunk size in granules: 32 MiB on GPUs */

struct kvs_range {
  struct kvs_range *next; /* guarded by engine->range_lock */
  struct kvs_engine *engine;
  uint64_t ptr, nbytes, used;
  uint64_t *chunks; /* bytes of each chunk */
  size_t count, capacity;
};

/* -- making ---------------------------------------------------------------------------------------------------- */

int kvs_range_new(struct kvs_engine *engine, uint64_t nbytes, struct kvs_range **made, struct kvs_error *err) {
  struct kvs_range *range = calloc(1, sizeof *range);
  if (!range) return kvs_fail(err, KVS_NOMEM, "no memory for a range of chunks");
  range->engine = engine;
  range->nbytes = nbytes;
  int status = kvs_dev_range_reserve(engine->device, nbytes, &range->ptr, err);
  if (status)
    free(range);
  else
    *made = range;
  return status;
}

int kvs_range_add(struct kvs_range *range, uint64_t nbytes, int fd, struct kvs_error *err) {
  if (nbytes == 0 || nbytes > range->nbytes - range->used)
    return kvs_fail(err, KVS_INVALID, "a chunk of %" PRIu64 " bytes does not fit: %" PRIu64 " of %" PRIu64 " are left",
                    nbytes, range->nbytes - range->used, range->nbytes);
  if (range->count == range->capacity) {
    size_t capacity = range->capacity ? 2 * range->capacity : 64;
    uint64_t *grown = realloc(range->chunks, capacity * sizeof *grown);
    if (!grown) return kvs_fail(err, KVS_NOMEM, "no memory for %zu chunks", capacity);
    range->chunks = grown;
    range->capacity = capacity;
  }
  int status = kvs_dev_chunk_map(range->engine->device, range->ptr + range->used, nbytes, fd, err);
  if (status) return status;
  range->chunks[range->count++] = nbytes;
  range->used += nbytes;
  return KVS_OK;
}

int kvs_range_finish(struct kvs_range *range, uint64_t *ptr, struct kvs_error *err) {
  struct kvs_engine *engine = range->engine;
  if (range->used != range->nbytes)
    return kvs_fail(err, KVS_INVALID, "the chunks have %" PRIu64 " bytes instead of %" PRIu64, range->used,
                    range->nbytes);
  pthread_mutex_lock(&engine->range_lock);
  range->next = engine->ranges;
  engine->ranges = range;
  pthread_mutex_unlock(&engine->range_lock);
  *ptr = range->ptr;
  return KVS_OK;
}

/* Unmap and free everything; returns the first failure. */
static int take_apart(struct kvs_range *range, struct kvs_error *err) {
  struct kvs_device *device = range->engine->device;
  struct kvs_error ignored;
  uint64_t at = range->ptr;
  int status = KVS_OK;
  for (size_t i = 0; i < range->count; at += range->chunks[i++]) {
    int this = kvs_dev_chunk_unmap(device, at, range->chunks[i], status ? &ignored : err);
    if (!status) status = this;
  }
  int freed = kvs_dev_range_free(device, range->ptr, range->nbytes, status ? &ignored : err);
  free(range->chunks);
  free(range);
  return status ? status : freed;
}

void kvs_range_drop(struct kvs_range *range) {
  struct kvs_error ignored;
  (void)take_apart(range, &ignored);
}

int kvs_range_alloc(struct kvs_engine *engine, uint64_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  struct kvs_range *range = NULL;
  uint64_t granule = 0, all;
  int status = kvs_dev_chunk_granularity(engine->device, &granule, err);
  if (status) return status;
  if (__builtin_add_overflow(nbytes, granule - 1, &all))
    return kvs_fail(err, KVS_NOMEM, "%" PRIu64 " bytes are not to be had", nbytes);
  all -= all % granule;
  status = kvs_range_new(engine, all, &range, err);
  if (status) return status;
  while (!status && range->used < all) {
    uint64_t left = all - range->used, chunk = CHUNK_GRANULES * granule;
    status = kvs_range_add(range, left < chunk ? left : chunk, -1, err);
  }
  if (!status) status = kvs_range_finish(range, ptr, err);
  if (status) kvs_range_drop(range);
  return status;
}

/* -- letting go ------------------------------------------------------------------------------------------------ */

bool kvs_range_known(struct kvs_engine *engine, uint64_t ptr) {
  pthread_mutex_lock(&engine->range_lock);
  struct kvs_range *range = engine->ranges;
  while (range && range->ptr != ptr) range = range->next;
  pthread_mutex_unlock(&engine->range_lock);
  return range != NULL;
}

int kvs_range_free(struct kvs_engine *engine, uint64_t ptr, struct kvs_error *err) {
  struct kvs_range *range = NULL;
  pthread_mutex_lock(&engine->range_lock);
  for (struct kvs_range **at = &engine->ranges; *at; at = &(*at)->next)
    if ((*at)->ptr == ptr) {
      range = *at;
      *at = range->next;
      break;
    }
  pthread_mutex_unlock(&engine->range_lock);
  return range ? take_apart(range, err) : kvs_fail(err, KVS_RANGE, "no range begins at 0x%" PRIx64, ptr);
}

void kvs_ranges_destroy(struct kvs_engine *engine) {
  while (engine->ranges) {
    struct kvs_range *range = engine->ranges;
    engine->ranges = range->next;
    kvs_range_drop(range);
  }
}

/* -- looking --------------------------------------------------------------------------------------------------- */

int kvs_range_chunks(struct kvs_engine *engine, uint64_t address, uint64_t nbytes, struct kvs_chunks *found,
                     struct kvs_error *err) {
  uint64_t at = address, end = address + nbytes, base = 0, size = 0;
  *found = (struct kvs_chunks){.count = 0};
  while (at < end) {
    int status = kvs_dev_chunk_query(engine->device, at, &base, &size, err);
    if (status) return status;
    if (found->count == 0) found->base = base;
    found->count++;
    found->nbytes += size;
    at = base + size;
  }
  return KVS_OK;
}
