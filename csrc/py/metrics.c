/* _metrics(): all counters and histograms of the process, as plain dicts for kvswap.metrics. */
#include "engine/metrics.h"
#include "files/store.h"
#include "hostpool/metrics.h"
#include "py/dicts.h"
#include "py/host_pool_base.h"
#include "py/module.h"
#include "py/options.h"

#include <ctype.h>
#include <string.h>

static uint64_t total(const struct kvs_histogram_counts *histogram) {
  uint64_t n = 0;
  for (int i = 0; i <= KVS_HISTOGRAM_BOUNDS; i++) n += histogram->buckets[i];
  return n;
}

/* {"buckets": [...], "sum": ...}; the buckets count apart from each other. */
static PyObject *histogram(const struct kvs_histogram_counts *counts, PyObject *(*sum)(const void *)) {
  PyObject *dict = PyDict_New(), *buckets = PyList_New(0);
  for (int i = 0; buckets && i <= KVS_HISTOGRAM_BOUNDS; i++)
    if (kvs_py_append(buckets, kvs_py_of_count(&counts->buckets[i])) < 0) Py_CLEAR(buckets);
  if (!dict || kvs_py_put(dict, "buckets", Py_XNewRef(buckets)) < 0 || kvs_py_put(dict, "sum", sum(&counts->sum)) < 0)
    Py_CLEAR(dict);
  Py_XDECREF(buckets);
  return dict;
}

static PyObject *times(const void *member) { return histogram(member, kvs_py_of_seconds); }

static PyObject *sizes(const void *member) { return histogram(member, kvs_py_of_count); }

/* {"refused": 1}: by the lower-case name of the status; without zeros. */
static PyObject *failures(const void *member) {
  const uint64_t *failed = member;
  PyObject *dict = PyDict_New();
  for (int i = 0; dict && i < KVS_STATUSES; i++) {
    char name[32];
    if (failed[i] == 0) continue;
    snprintf(name, sizeof name, "%s", kvs_status_name(-i));
    for (char *at = name; *at; at++) *at = (char)tolower((unsigned char)*at);
    if (kvs_py_put(dict, name, kvs_py_of_count(&failed[i])) < 0) Py_CLEAR(dict);
  }
  return dict;
}

/* -- devices ------------------------------------------------------------------------------------------------------- */

static PyObject *path_row(int direction, int path, const struct kvs_path_metrics *metrics) {
  static const struct kvs_py_field fields[] = {
      {"duration", offsetof(struct kvs_path_metrics, duration_ns), times},
      {"queue", offsetof(struct kvs_path_metrics, queue_ns), times},
      {"size", offsetof(struct kvs_path_metrics, nbytes), sizes},
      KVS_PY_FIELD(struct kvs_path_metrics, blocks),
      {"link_bytes", offsetof(struct kvs_path_metrics, link_nbytes), kvs_py_of_count},
      {"device_seconds", offsetof(struct kvs_path_metrics, device_ns), kvs_py_of_seconds},
      {"failed", offsetof(struct kvs_path_metrics, failed), failures},
      KVS_PY_FIELD(struct kvs_path_metrics, failed_blocks)};
  PyObject *dict = Py_BuildValue("{s:s, s:s}", "direction", kvs_py_direction_names[direction], "path",
                                 kvs_path_name((enum kvs_path)path));
  return KVS_PY_FILL(dict, metrics, fields);
}

static bool is_used(const struct kvs_path_metrics *metrics) {
  uint64_t failed = 0;
  for (int i = 0; i < KVS_STATUSES; i++) failed += metrics->failed[i];
  return failed != 0 || total(&metrics->nbytes) != 0;
}

static PyObject *path_rows(const struct kvs_engine_metrics *metrics) {
  PyObject *list = PyList_New(0);
  for (int direction = 0; direction < 3; direction++)
    for (int path = 0; list && path < KVS_PATHS; path++) {
      const struct kvs_path_metrics *row = &metrics->paths[direction][path];
      if (is_used(row) && kvs_py_append(list, path_row(direction, path, row)) < 0) Py_CLEAR(list);
    }
  return list;
}

static PyObject *lane_row(int direction, const char *priority, const struct kvs_lane_metrics *lanes) {
  static const struct kvs_py_field fields[] = {
      KVS_PY_FIELD(struct kvs_lane_metrics, lanes),
      KVS_PY_FIELD(struct kvs_lane_metrics, unfinished),
      KVS_PY_AS("bytes", struct kvs_lane_metrics, nbytes),
      KVS_PY_FIELD(struct kvs_lane_metrics, fullest),
      KVS_PY_FIELD(struct kvs_lane_metrics, limit),
      {"oldest_seconds", offsetof(struct kvs_lane_metrics, oldest_ns), kvs_py_of_seconds}};
  PyObject *dict = Py_BuildValue("{s:s, s:s}", "direction", kvs_py_direction_names[direction], "priority", priority);
  return KVS_PY_FILL(dict, lanes, fields);
}

static PyObject *lane_rows(const struct kvs_engine_metrics *metrics) {
  static const char *const priorities[] = {[KVS_PRIORITY_DEFAULT] = "default",
                                           [KVS_PRIORITY_NORMAL] = "normal",
                                           [KVS_PRIORITY_HIGH] = "high",
                                           [KVS_PRIORITY_BACKGROUND] = "background"};
  PyObject *list = PyList_New(0);
  for (int direction = 0; direction < 3; direction++)
    for (int priority = 0; list && priority <= KVS_PRIORITY_BACKGROUND; priority++) {
      const struct kvs_lane_metrics *row = &metrics->lanes[direction][priority];
      if (row->lanes != 0 && kvs_py_append(list, lane_row(direction, priorities[priority], row)) < 0) Py_CLEAR(list);
    }
  return list;
}

#define ENGINE(member) KVS_PY_FIELD(struct kvs_engine_metrics, member)

static PyObject *device_row(struct kvs_engine *engine, struct kvs_engine_metrics *metrics) {
  static const struct kvs_py_field fields[] = {
      ENGINE(lost),
      ENGINE(submitted),
      ENGINE(copies),
      ENGINE(merged),
      ENGINE(refused_full),
      ENGINE(second_attempts),
      ENGINE(waits_raw),
      ENGINE(waits_war),
      ENGINE(waits_waw),
      KVS_PY_AS("lent_bytes_d2h", struct kvs_engine_metrics, lent_d2h_nbytes),
      KVS_PY_AS("lent_bytes_h2d", struct kvs_engine_metrics, lent_h2d_nbytes),
      KVS_PY_AS("borrowed_bytes_d2h", struct kvs_engine_metrics, borrowed_d2h_nbytes),
      KVS_PY_AS("borrowed_bytes_h2d", struct kvs_engine_metrics, borrowed_h2d_nbytes),
      KVS_PY_AS("staging_bytes", struct kvs_engine_metrics, staging_nbytes),
      KVS_PY_AS("slots_bytes", struct kvs_engine_metrics, slots_nbytes),
      KVS_PY_AS("allocated_bytes", struct kvs_engine_metrics, allocated_nbytes),
      KVS_PY_AS("allocated_host_bytes", struct kvs_engine_metrics, allocated_host_nbytes),
      KVS_PY_AS("registered_bytes", struct kvs_engine_metrics, registered_nbytes),
      KVS_PY_AS("imported_bytes", struct kvs_engine_metrics, imported_nbytes),
      ENGINE(pools),
      ENGINE(pool_blocks)};
  KVS_PY_NO_GIL(kvs_engine_get_metrics(engine, metrics));
  PyObject *dict = KVS_PY_FILL(Py_BuildValue("{s:s}", "device", kvs_engine_name(engine)), metrics, fields);
  if (dict && (kvs_py_put(dict, "paths", path_rows(metrics)) < 0 || kvs_py_put(dict, "lanes", lane_rows(metrics)) < 0))
    Py_CLEAR(dict);
  return dict;
}

static PyObject *device_rows(void) {
  PyObject *list = PyList_New(0);
  struct kvs_engine_metrics *metrics = PyMem_Malloc(sizeof *metrics);
  struct kvs_engine *engine;
  if (!metrics) PyErr_NoMemory();
  if (!metrics) Py_CLEAR(list);
  for (unsigned i = 0; list && (engine = kvs_engine_at(i)) != NULL; i++)
    if (!kvs_dev_forked(kvs_engine_device(engine)) && kvs_py_append(list, device_row(engine, metrics)) < 0)
      Py_CLEAR(list);
  PyMem_Free(metrics);
  return list;
}

/* -- files --------------------------------------------------------------------------------------------------------- */

static PyObject *kind_row(const char *what, const struct kvs_file_kind_metrics *kind) {
  static const struct kvs_py_field fields[] = {
      {"duration", offsetof(struct kvs_file_kind_metrics, duration_ns), times},
      {"size", offsetof(struct kvs_file_kind_metrics, nbytes), sizes},
      KVS_PY_FIELD(struct kvs_file_kind_metrics, failed),
      KVS_PY_FIELD(struct kvs_file_kind_metrics, cancelled),
      {"failed_blocks", offsetof(struct kvs_file_kind_metrics, failed_blocks), failures}};
  return KVS_PY_FILL(Py_BuildValue("{s:s}", "operation", what), kind, fields);
}

#define FILES(member) KVS_PY_FIELD(struct kvs_file_metrics, member)

static PyObject *file_row(const void *row) {
  static const struct kvs_py_field fields[] = {
      FILES(directory),
      KVS_PY_AS("block_bytes", struct kvs_file_metrics, block_nbytes),
      KVS_PY_AS("capacity_bytes", struct kvs_file_metrics, capacity),
      KVS_PY_AS("file_bytes", struct kvs_file_metrics, stats.file_nbytes),
      KVS_PY_AS("blocks", struct kvs_file_metrics, stats.blocks),
      KVS_PY_AS("slots", struct kvs_file_metrics, stats.slots),
      KVS_PY_AS("pinned", struct kvs_file_metrics, stats.pinned),
      KVS_PY_AS("segments", struct kvs_file_metrics, stats.segments),
      KVS_PY_AS("stored", struct kvs_file_metrics, stats.stored),
      KVS_PY_AS("kept", struct kvs_file_metrics, stats.kept),
      KVS_PY_AS("loaded", struct kvs_file_metrics, stats.loaded),
      KVS_PY_AS("deleted", struct kvs_file_metrics, stats.deleted),
      KVS_PY_AS("evicted", struct kvs_file_metrics, stats.evicted),
      KVS_PY_AS("lost_slots", struct kvs_file_metrics, stats.lost_slots),
      KVS_PY_AS("refused_full", struct kvs_file_metrics, stats.refused_full),
      KVS_PY_AS("unfinished_loads", struct kvs_file_metrics, stats.unfinished_loads),
      KVS_PY_AS("unfinished_stores", struct kvs_file_metrics, stats.unfinished_stores),
      FILES(unfinished_load_blocks),
      FILES(unfinished_store_blocks),
      KVS_PY_AS("gds_read_bytes", struct kvs_file_metrics, stats.gds_read_nbytes),
      KVS_PY_AS("gds_written_bytes", struct kvs_file_metrics, stats.gds_written_nbytes),
      {"oldest_seconds", offsetof(struct kvs_file_metrics, oldest_ns), kvs_py_of_seconds}};
  const struct kvs_file_metrics *metrics = row;
  PyObject *dict = KVS_PY_DICT(metrics, fields), *kinds = PyList_New(0);
  if (!dict || !kinds || kvs_py_append(kinds, kind_row("store", &metrics->stores)) < 0 ||
      kvs_py_append(kinds, kind_row("load", &metrics->loads)) < 0 ||
      kvs_py_append(kinds, kind_row("delete", &metrics->deletes)) < 0 ||
      kvs_py_put(dict, "operations", Py_NewRef(kinds)) < 0)
    Py_CLEAR(dict);
  Py_XDECREF(kinds);
  return dict;
}

/* -- host pools ---------------------------------------------------------------------------------------------------- */

static PyObject *state_name(const void *member) {
  return PyUnicode_FromString(kvs_py_host_state_names[*(const int *)member]);
}

static PyObject *host_pool_row(const void *row) {
  static const struct kvs_py_field fields[] = {
      KVS_PY_FIELD(struct kvs_host_pool_metrics, device),
      KVS_PY_FIELD(struct kvs_host_pool_metrics, shared),
      KVS_PY_FIELD(struct kvs_host_pool_metrics, pinned),
      {"state", offsetof(struct kvs_host_pool_metrics, state), state_name},
      KVS_PY_AS("blocks", struct kvs_host_pool_metrics, num_blocks),
      KVS_PY_AS("bytes", struct kvs_host_pool_metrics, nbytes),
      KVS_PY_AS("populated_bytes", struct kvs_host_pool_metrics, populated_nbytes)};
  return KVS_PY_DICT(row, fields);
}

/* -- the functions ------------------------------------------------------------------------------------------------- */

/* What is counted by the process rather than by a device. */
struct counted {
  size_t nbytes; /* of a row of C */
  size_t (*get)(void *rows, size_t capacity);
  PyObject *(*row)(const void *row);
};

static size_t get_files(void *rows, size_t capacity) { return kvs_file_stores_get_metrics(rows, capacity); }

static size_t get_host_pools(void *rows, size_t capacity) { return kvs_host_pools_get_metrics(rows, capacity); }

static const struct counted files = {sizeof(struct kvs_file_metrics), get_files, file_row};
static const struct counted host_pools = {sizeof(struct kvs_host_pool_metrics), get_host_pools, host_pool_row};

enum { MORE = 8 }; /* opened between the two calls */

static PyObject *rows_of(const struct counted *counted) {
  char *rows;
  size_t capacity, found;
  Py_BEGIN_ALLOW_THREADS
  capacity = counted->get(NULL, 0) + MORE;
  rows = calloc(capacity, counted->nbytes);
  found = rows ? counted->get(rows, capacity) : 0;
  Py_END_ALLOW_THREADS
  PyObject *list = rows ? PyList_New(0) : PyErr_NoMemory();
  for (size_t i = 0; list && i < found && i < capacity; i++)
    if (kvs_py_append(list, counted->row(rows + i * counted->nbytes)) < 0) Py_CLEAR(list);
  free(rows);
  return list;
}

static PyObject *metrics(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *dict = PyDict_New();
  if (dict && (kvs_py_put(dict, "devices", device_rows()) < 0 || kvs_py_put(dict, "files", rows_of(&files)) < 0 ||
               kvs_py_put(dict, "host_pools", rows_of(&host_pools)) < 0))
    Py_CLEAR(dict);
  return dict;
}

static PyObject *bounds_tuple(const uint64_t *bounds, bool seconds) {
  PyObject *tuple = PyTuple_New(KVS_HISTOGRAM_BOUNDS);
  for (int i = 0; tuple && i < KVS_HISTOGRAM_BOUNDS; i++) {
    /* dividing gives the float nearest to the decimal bound */
    PyObject *value = seconds ? PyFloat_FromDouble((double)bounds[i] / 1e9) : kvs_py_of_count(&bounds[i]);
    if (!value)
      Py_CLEAR(tuple);
    else
      PyTuple_SET_ITEM(tuple, i, value);
  }
  return tuple;
}

static PyObject *metrics_bounds(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *seconds = bounds_tuple(kvs_histogram_time_bounds(), true);
  PyObject *nbytes = seconds ? bounds_tuple(kvs_histogram_size_bounds(), false) : NULL;
  if (nbytes) return Py_BuildValue("(NN)", seconds, nbytes);
  Py_XDECREF(seconds);
  return NULL;
}

PyDoc_STRVAR(metrics_doc,
             "_metrics($module, /)\n--\n\n"
             "Counters and histograms of all open devices, file stores and host pools, as dicts: kvswap.metrics has "
             "their types.\nWaits for no transfer. Any thread may call.");
PyDoc_STRVAR(metrics_bounds_doc,
             "_metrics_bounds($module, /)\n--\n\n"
             "The histograms' upper bounds: (seconds, bytes). One more bucket holds what is above them.");

PyMethodDef kvs_py_metrics_methods[] = {
    {"_metrics", metrics, METH_NOARGS, metrics_doc},
    {"_metrics_bounds", metrics_bounds, METH_NOARGS, metrics_bounds_doc},
    {NULL, NULL, 0, NULL},
};
