/* Tables of rows. An engine's tensors rarely change, so the table that kernels read is uploaded once and found again by
 * its contents. Uploads use a stream of their own that never waits: the first user of a table must not wait for another
 * transfer's dependencies. */
#include "lanes/tables.h"

#include <stdlib.h>
#include <string.h>

#include "lanes/buffers.h"
#include "lanes/state.h"

/* The words of a row are multiplied independently: a serial chain takes most of a microsecond for 80 rows. */
static uint64_t hash_of(const struct kvs_rows *rows) {
  const uint64_t odd = 0x9E3779B97F4A7C15ull;
  uint64_t hash = rows->count;
  for (size_t i = 0; i < rows->count; i++) {
    const struct kvs_row *row = &rows->items[i];
    uint64_t sum = row->src * odd + row->dst * (odd + 2) + row->src_stride * (odd + 4) + row->dst_stride * (odd + 6) +
                   row->nbytes * (odd + 8) + row->packed * (odd + 10) + row->packed_stride * (odd + 12);
    hash = (hash ^ sum) * odd;
    hash ^= hash >> 29;
  }
  return hash;
}

static const void *contents(const struct kvs_table_of_rows *table) {
  return (const void *)(uintptr_t)table->staging->host;
}

static size_t nbytes_of(const struct kvs_rows *rows) { return rows->count * sizeof *rows->items; }

static bool holds(const struct kvs_table_of_rows *table, const struct kvs_rows *rows,
                  const struct kvs_table_tail *tail) {
  const char *held = contents(table);
  return memcmp(held, rows->items, nbytes_of(rows)) == 0 &&
         (!tail->nbytes || memcmp(held + nbytes_of(rows), tail->bytes, tail->nbytes) == 0);
}

/* The table with these rows; else the least recently used free one in *free (NULL: all are in use). */
static struct kvs_table_of_rows *find_locked(struct kvs_tables *tables, const struct kvs_rows *rows,
                                             const struct kvs_table_tail *tail, uint64_t hash,
                                             struct kvs_table_of_rows **free) {
  *free = NULL;
  for (size_t i = 0; i < KVS_TABLES; i++) {
    struct kvs_table_of_rows *table = &tables->items[i];
    if (table->count == rows->count && table->hash == hash && table->tail_nbytes == tail->nbytes &&
        holds(table, rows, tail))
      return table;
    if (!table->users && (!*free || table->last_used < (*free)->last_used)) *free = table;
  }
  return NULL;
}

/* No transfer reads the table, and its last upload has ended. */
static int fill_locked(struct kvs_engine *engine, struct kvs_table_of_rows *table, const struct kvs_rows *rows,
                       const struct kvs_table_tail *tail, uint64_t hash, struct kvs_error *err) {
  size_t nbytes = nbytes_of(rows) + tail->nbytes;
  int status = KVS_OK;
  table->count = 0;
  if (table->staging && table->staging->nbytes < nbytes) {
    /* If recording the event was refused, the upload may still read the old staging. */
    status = kvs_dev_stream_query(engine->device, engine->tables.upload, err);
    if (status) return status;
    kvs_engine_staging_put(engine, table->staging);
    table->staging = NULL;
  }
  if (!table->staging) status = kvs_engine_staging_get(engine, nbytes, &table->staging, err);
  if (status) return status;
  char *to = (char *)(uintptr_t)table->staging->host;
  memcpy(to, rows->items, nbytes_of(rows));
  if (tail->nbytes) memcpy(to + nbytes_of(rows), tail->bytes, tail->nbytes);
  status =
      kvs_dev_copy(engine->device, table->staging->device, table->staging->host, nbytes, engine->tables.upload, err);
  if (!status) status = kvs_dev_event_record(engine->device, table->uploaded, engine->tables.upload, err);
  if (status) return status;
  table->arrived = false;
  table->hash = hash;
  table->tail_nbytes = tail->nbytes;
  table->count = rows->count;
  return KVS_OK;
}

static int wait_locked(struct kvs_engine *engine, struct kvs_table_of_rows *table, kvs_stream stream,
                       struct kvs_error *err) {
  if (table->arrived) return KVS_OK;
  table->arrived = kvs_dev_event_query(engine->device, table->uploaded, err) == KVS_OK;
  return table->arrived ? KVS_OK : kvs_dev_stream_wait(engine->device, stream, table->uploaded, err);
}

int kvs_table_get(struct kvs_engine *engine, const struct kvs_rows *rows, const struct kvs_table_tail *tail,
                  kvs_stream stream, struct kvs_table_of_rows **found, uint64_t *address, struct kvs_error *err) {
  struct kvs_tables *tables = &engine->tables;
  struct kvs_table_of_rows *free;
  uint64_t hash = hash_of(rows);
  int status = KVS_OK;
  pthread_mutex_lock(&tables->lock);
  struct kvs_table_of_rows *table = find_locked(tables, rows, tail, hash, &free);
  if (!table && !free) status = kvs_fail(err, KVS_NOT_READY, "all %d tables of rows are in use", KVS_TABLES);
  if (!table && free) status = fill_locked(engine, table = free, rows, tail, hash, err);
  if (!status) status = wait_locked(engine, table, stream, err);
  if (!status) {
    table->users++;
    table->last_used = ++tables->clock;
    *found = table;
    *address = table->staging->device;
  }
  pthread_mutex_unlock(&tables->lock);
  return status;
}

void kvs_table_put(struct kvs_engine *engine, struct kvs_table_of_rows *table) {
  pthread_mutex_lock(&engine->tables.lock);
  table->users--;
  pthread_mutex_unlock(&engine->tables.lock);
}

int kvs_tables_open(struct kvs_engine *engine, struct kvs_error *err) {
  struct kvs_tables *tables = &engine->tables;
  int status = kvs_dev_stream_create(engine->device, engine->device->info.priority_high, &tables->upload, err);
  for (size_t i = 0; !status && i < KVS_TABLES; i++)
    status = kvs_dev_event_create(engine->device, false, &tables->items[i].uploaded, err);
  return status;
}

void kvs_tables_close(struct kvs_engine *engine) {
  struct kvs_tables *tables = &engine->tables;
  struct kvs_error ignored;
  for (size_t i = 0; i < KVS_TABLES; i++) {
    if (tables->items[i].staging) kvs_engine_staging_put(engine, tables->items[i].staging);
    if (tables->items[i].uploaded) (void)kvs_dev_event_destroy(engine->device, tables->items[i].uploaded, &ignored);
  }
  if (tables->upload) (void)kvs_dev_stream_destroy(engine->device, tables->upload, &ignored);
}

const char *kvs_kernels_off(const struct kvs_engine *engine) {
  if (engine->disabled.kernel) return "KVSWAP_DISABLE names 'kernel'";
  return engine->device->info.kernels ? NULL : engine->device->info.kernels_note;
}
