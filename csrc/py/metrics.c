/* _metrics(): all counters and histograms of the process, as plain dicts for kvswap.metrics. */
#include "../engine/metrics.h"
#include "../files/store.h"
#include "../hostpool/metrics.h"
#include "host_pool_base.h"
#include "module.h"
#include "options.h"

#include <ctype.h>
#include <string.h>

static PyObject *count(uint64_t value) { return PyLong_FromUnsignedLongLong(value); }

static PyObject *seconds(uint64_t ns) { return PyFloat_FromDouble((double)ns * 1e-9); }

/* dict[name] = value. Takes the reference; value may be NULL with an exception set. */
static int put(PyObject *dict, const char *name, PyObject *value) {
  int rc = value == NULL ? -1 : PyDict_SetItemString(dict, name, value);
  Py_XDECREF(value);
  return rc;
}

static int append(PyObject *list, PyObject *value) {
  int rc = value == NULL ? -1 : PyList_Append(list, value);
  Py_XDECREF(value);
  return rc;
}

struct row {
  const char *name;
  uint64_t value;
};

static int put_counts(PyObject *dict, const struct row *rows, size_t nrows) {
  for (size_t i = 0; i < nrows; ++i)
    if (put(dict, rows[i].name, count(rows[i].value)) < 0) return -1;
  return 0;
}

static uint64_t total(const struct kvs_histogram_counts *histogram) {
  uint64_t n = 0;
  for (int i = 0; i <= KVS_HISTOGRAM_BOUNDS; ++i) n += histogram->buckets[i];
  return n;
}

/* {"buckets": [...], "sum": ...}; the buckets count apart from each other. */
static PyObject *histogram(const struct kvs_histogram_counts *counts, bool times) {
  PyObject *buckets = PyList_New(0);
  for (int i = 0; buckets != NULL && i <= KVS_HISTOGRAM_BOUNDS; ++i)
    if (append(buckets, count(counts->buckets[i])) < 0) Py_CLEAR(buckets);
  PyObject *sum = buckets == NULL ? NULL : times ? seconds(counts->sum) : count(counts->sum);
  if (sum == NULL) {
    Py_XDECREF(buckets);
    return NULL;
  }
  return Py_BuildValue("{s:N, s:N}", "buckets", buckets, "sum", sum);
}

/* {"refused": 1}: by the lower-case name of the status; without zeros. */
static PyObject *failures(const uint64_t failed[KVS_STATUSES]) {
  PyObject *dict = PyDict_New();
  for (int i = 0; dict != NULL && i < KVS_STATUSES; ++i) {
    char name[32];
    if (failed[i] == 0) continue;
    snprintf(name, sizeof name, "%s", kvs_status_name(-i));
    for (char *at = name; *at; ++at) *at = (char)tolower((unsigned char)*at);
    if (put(dict, name, count(failed[i])) < 0) Py_CLEAR(dict);
  }
  return dict;
}

/* -- devices ------------------------------------------------------------------------------------------------------- */

static PyObject *path_row(int direction, int path, const struct kvs_path_metrics *metrics) {
  PyObject *dict = Py_BuildValue("{s:s, s:s}", "direction", kvs_py_direction_names[direction], "path",
                                 kvs_path_name((enum kvs_path)path));
  if (dict != NULL &&
      (put(dict, "duration", histogram(&metrics->duration_ns, true)) < 0 ||
       put(dict, "queue", histogram(&metrics->queue_ns, true)) < 0 ||
       put(dict, "size", histogram(&metrics->nbytes, false)) < 0 || put(dict, "blocks", count(metrics->blocks)) < 0 ||
       put(dict, "device_seconds", seconds(metrics->device_ns)) < 0 ||
       put(dict, "failed", failures(metrics->failed)) < 0 ||
       put(dict, "failed_blocks", count(metrics->failed_blocks)) < 0))
    Py_CLEAR(dict);
  return dict;
}

static bool is_used(const struct kvs_path_metrics *metrics) {
  uint64_t failed = 0;
  for (int i = 0; i < KVS_STATUSES; ++i) failed += metrics->failed[i];
  return failed != 0 || total(&metrics->nbytes) != 0;
}

static PyObject *path_rows(const struct kvs_engine_metrics *metrics) {
  PyObject *list = PyList_New(0);
  for (int direction = 0; direction < 3; ++direction)
    for (int path = 0; list != NULL && path < KVS_PATHS; ++path) {
      const struct kvs_path_metrics *row = &metrics->paths[direction][path];
      if (is_used(row) && append(list, path_row(direction, path, row)) < 0) Py_CLEAR(list);
    }
  return list;
}

static PyObject *lane_row(int direction, const char *priority, const struct kvs_lane_metrics *lanes) {
  const struct row rows[] = {{"lanes", lanes->lanes},
                             {"unfinished", lanes->unfinished},
                             {"bytes", lanes->nbytes},
                             {"fullest", lanes->fullest},
                             {"limit", lanes->limit}};
  PyObject *dict = Py_BuildValue("{s:s, s:s}", "direction", kvs_py_direction_names[direction], "priority", priority);
  if (dict != NULL && (put_counts(dict, rows, sizeof rows / sizeof *rows) < 0 ||
                       put(dict, "oldest_seconds", seconds(lanes->oldest_ns)) < 0))
    Py_CLEAR(dict);
  return dict;
}

static PyObject *lane_rows(const struct kvs_engine_metrics *metrics) {
  static const char *const priorities[] = {[KVS_PRIORITY_DEFAULT] = "default",
                                           [KVS_PRIORITY_NORMAL] = "normal",
                                           [KVS_PRIORITY_HIGH] = "high",
                                           [KVS_PRIORITY_BACKGROUND] = "background"};
  PyObject *list = PyList_New(0);
  for (int direction = 0; direction < 3; ++direction)
    for (int priority = 0; list != NULL && priority <= KVS_PRIORITY_BACKGROUND; ++priority) {
      const struct kvs_lane_metrics *row = &metrics->lanes[direction][priority];
      if (row->lanes != 0 && append(list, lane_row(direction, priorities[priority], row)) < 0) Py_CLEAR(list);
    }
  return list;
}

static PyObject *device_row(struct kvs_engine *engine, struct kvs_engine_metrics *metrics) {
  KVS_PY_NO_GIL(kvs_engine_get_metrics(engine, metrics));
  const struct row rows[] = {{"submitted", metrics->submitted},
                             {"copies", metrics->copies},
                             {"merged", metrics->merged},
                             {"refused_full", metrics->refused_full},
                             {"second_attempts", metrics->second_attempts},
                             {"waits_raw", metrics->waits_raw},
                             {"waits_war", metrics->waits_war},
                             {"waits_waw", metrics->waits_waw},
                             {"staging_bytes", metrics->staging_nbytes},
                             {"slots_bytes", metrics->slots_nbytes},
                             {"allocated_bytes", metrics->allocated_nbytes},
                             {"allocated_host_bytes", metrics->allocated_host_nbytes},
                             {"registered_bytes", metrics->registered_nbytes},
                             {"imported_bytes", metrics->imported_nbytes},
                             {"pools", metrics->pools},
                             {"pool_blocks", metrics->pool_blocks}};
  PyObject *dict =
      Py_BuildValue("{s:s, s:N}", "device", kvs_engine_name(engine), "lost", PyBool_FromLong(metrics->lost));
  if (dict != NULL && (put_counts(dict, rows, sizeof rows / sizeof *rows) < 0 ||
                       put(dict, "paths", path_rows(metrics)) < 0 || put(dict, "lanes", lane_rows(metrics)) < 0))
    Py_CLEAR(dict);
  return dict;
}

static PyObject *device_rows(void) {
  PyObject *list = PyList_New(0);
  struct kvs_engine_metrics *metrics = PyMem_Malloc(sizeof *metrics);
  struct kvs_engine *engine;
  if (metrics == NULL) PyErr_NoMemory();
  if (metrics == NULL) Py_CLEAR(list);
  for (unsigned i = 0; list != NULL && (engine = kvs_engine_at(i)) != NULL; ++i)
    if (!kvs_dev_forked(kvs_engine_device(engine)) && append(list, device_row(engine, metrics)) < 0) Py_CLEAR(list);
  PyMem_Free(metrics);
  return list;
}

/* -- files --------------------------------------------------------------------------------------------------------- */

static PyObject *kind_row(const char *what, const struct kvs_file_kind_metrics *kind) {
  PyObject *dict = Py_BuildValue("{s:s}", "operation", what);
  if (dict != NULL &&
      (put(dict, "duration", histogram(&kind->duration_ns, true)) < 0 ||
       put(dict, "size", histogram(&kind->nbytes, false)) < 0 || put(dict, "failed", count(kind->failed)) < 0 ||
       put(dict, "cancelled", count(kind->cancelled)) < 0 ||
       put(dict, "failed_blocks", failures(kind->failed_blocks)) < 0))
    Py_CLEAR(dict);
  return dict;
}

static PyObject *file_row(const void *row) {
  const struct kvs_file_metrics *metrics = row;
  const struct kvs_file_stats *stats = &metrics->stats;
  const struct row rows[] = {{"block_bytes", metrics->block_nbytes},
                             {"capacity_bytes", metrics->capacity},
                             {"file_bytes", stats->file_nbytes},
                             {"blocks", stats->blocks},
                             {"slots", stats->slots},
                             {"pinned", stats->pinned},
                             {"segments", stats->segments},
                             {"stored", stats->stored},
                             {"kept", stats->kept},
                             {"loaded", stats->loaded},
                             {"deleted", stats->deleted},
                             {"evicted", stats->evicted},
                             {"lost_slots", stats->lost_slots},
                             {"refused_full", stats->refused_full},
                             {"unfinished_loads", stats->unfinished_loads},
                             {"unfinished_stores", stats->unfinished_stores},
                             {"unfinished_load_blocks", metrics->unfinished_load_blocks},
                             {"unfinished_store_blocks", metrics->unfinished_store_blocks},
                             {"gds_read_bytes", stats->gds_read_nbytes},
                             {"gds_written_bytes", stats->gds_written_nbytes}};
  PyObject *dict = PyDict_New(), *kinds = PyList_New(0);
  bool made = dict != NULL && kinds != NULL && append(kinds, kind_row("store", &metrics->stores)) == 0 &&
              append(kinds, kind_row("load", &metrics->loads)) == 0 &&
              append(kinds, kind_row("delete", &metrics->deletes)) == 0 &&
              put(dict, "directory",
                  PyUnicode_DecodeUTF8(metrics->directory, (Py_ssize_t)strlen(metrics->directory), "replace")) == 0 &&
              put_counts(dict, rows, sizeof rows / sizeof *rows) == 0 &&
              put(dict, "oldest_seconds", seconds(metrics->oldest_ns)) == 0 &&
              put(dict, "operations", Py_XNewRef(kinds)) == 0;
  Py_XDECREF(kinds);
  if (!made) Py_CLEAR(dict);
  return dict;
}

/* -- host pools ---------------------------------------------------------------------------------------------------- */

static PyObject *host_pool_row(const void *row) {
  const struct kvs_host_pool_metrics *pool = row;
  return Py_BuildValue("{s:s, s:N, s:N, s:s, s:K, s:K, s:K}", "device", pool->device, "shared",
                       PyBool_FromLong(pool->shared), "pinned", PyBool_FromLong(pool->pinned), "state",
                       kvs_py_host_state_names[pool->state], "blocks", (unsigned long long)pool->num_blocks, "bytes",
                       (unsigned long long)pool->nbytes, "populated_bytes", (unsigned long long)pool->populated_nbytes);
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
  found = rows == NULL ? 0 : counted->get(rows, capacity);
  Py_END_ALLOW_THREADS
  PyObject *list = rows == NULL ? PyErr_NoMemory() : PyList_New(0);
  for (size_t i = 0; list != NULL && i < found && i < capacity; ++i)
    if (append(list, counted->row(rows + i * counted->nbytes)) < 0) Py_CLEAR(list);
  free(rows);
  return list;
}

static PyObject *metrics(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *dict = PyDict_New();
  if (dict != NULL && (put(dict, "devices", device_rows()) < 0 || put(dict, "files", rows_of(&files)) < 0 ||
                       put(dict, "host_pools", rows_of(&host_pools)) < 0))
    Py_CLEAR(dict);
  return dict;
}

static PyObject *bounds_tuple(const uint64_t *bounds, bool times) {
  PyObject *tuple = PyTuple_New(KVS_HISTOGRAM_BOUNDS);
  for (int i = 0; tuple != NULL && i < KVS_HISTOGRAM_BOUNDS; ++i) {
    /* dividing gives the float nearest to the decimal bound */
    PyObject *value = times ? PyFloat_FromDouble((double)bounds[i] / 1e9) : count(bounds[i]);
    if (value == NULL)
      Py_CLEAR(tuple);
    else
      PyTuple_SET_ITEM(tuple, i, value);
  }
  return tuple;
}

static PyObject *metrics_bounds(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *times = bounds_tuple(kvs_histogram_time_bounds(), true);
  PyObject *sizes = times == NULL ? NULL : bounds_tuple(kvs_histogram_size_bounds(), false);
  if (sizes != NULL) return Py_BuildValue("(NN)", times, sizes);
  Py_XDECREF(times);
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
