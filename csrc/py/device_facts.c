/* Device.info and Device.stats(). */
#include "device_facts.h"
#include "objects.h"
#include "options.h"
#include "wait.h"

static PyObject *uuid_text(const unsigned char *uuid) {
  char text[40] = "";
  unsigned any = 0;
  for (int i = 0, at = 0; i < 16; ++i) {
    any |= uuid[i];
    at += snprintf(text + at, sizeof text - (size_t)at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                   uuid[i]);
  }
  return PyUnicode_FromString(any != 0 ? text : "");
}

PyObject *kvs_py_device_info_dict(const struct kvs_device_info *info) {
  return Py_BuildValue("{s:s, s:s, s:N, s:K, s:i, s:K, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:N, s:N, s:N, s:s}",
                       "name", info->name, "pci", info->pci, "uuid", uuid_text(info->uuid), "memory",
                       (unsigned long long)info->memory, "memory_gbps", info->memory_gbps, "max_pitch",
                       (unsigned long long)info->max_pitch, "driver", info->driver, "cc_major", info->cc_major,
                       "cc_minor", info->cc_minor, "sms", info->sms, "copy_engines", info->copy_engines, "numa_node",
                       info->numa_node, "priority_low", info->priority_low, "priority_high", info->priority_high,
                       "batch", PyBool_FromLong(info->batch), "memops", PyBool_FromLong(info->memops), "kernels",
                       PyBool_FromLong(info->kernels), "kernels_note", info->kernels_note);
}

/* dict[name] = value. value may be NULL with an exception set. Steals the reference. */
static int set_item(PyObject *dict, const char *name, PyObject *value) {
  int rc = value == NULL ? -1 : PyDict_SetItemString(dict, name, value);
  Py_XDECREF(value);
  return rc;
}

PyObject *kvs_py_device_info(PyObject *self, void *unused) {
  (void)unused;
  struct kvs_engine *engine = kvs_py_device_engine(self);
  char burst[KVS_BURST_NOTE];
  kvs_engine_burst_note(engine, burst);
  PyObject *dict = kvs_py_device_info_dict(&kvs_engine_device(kvs_py_device_engine(self))->info);
  if (dict == NULL) return NULL;
  if (set_item(dict, "burst", PyUnicode_FromString(*burst ? burst : "on")) < 0 ||
      set_item(dict, "slots_nbytes", PyLong_FromUnsignedLongLong(kvs_engine_slots_nbytes(engine))) < 0 ||
      set_item(dict, "costs", PyUnicode_FromString(kvs_engine_costs_note(engine))) < 0)
    Py_CLEAR(dict);
  return dict;
}

static PyObject *path_stats(const struct kvs_path_stats *paths) {
  PyObject *dict = PyDict_New();
  for (int path = 0; dict != NULL && path < KVS_PATHS; ++path) {
    const struct kvs_path_stats *row = &paths[path];
    if (row->transfers == 0) continue;
    PyObject *value = Py_BuildValue("{s:K, s:K, s:K, s:d}", "transfers", (unsigned long long)row->transfers, "blocks",
                                    (unsigned long long)row->blocks, "bytes", (unsigned long long)row->bytes, "seconds",
                                    (double)row->device_ns * 1e-9);
    if (set_item(dict, kvs_path_name((enum kvs_path)path), value) < 0) Py_CLEAR(dict);
  }
  return dict;
}

/* {"d2h": {"dma": {"transfers": 1, ...}}, ...}, without empty rows. */
static PyObject *all_path_stats(const struct kvs_stats *stats) {
  PyObject *dict = PyDict_New();
  for (int direction = 0; dict != NULL && direction < 3; ++direction) {
    PyObject *paths = path_stats(stats->paths[direction]);
    if (paths != NULL && PyDict_GET_SIZE(paths) == 0) {
      Py_DECREF(paths);
      continue;
    }
    if (set_item(dict, kvs_py_direction_names[direction], paths) < 0) Py_CLEAR(dict);
  }
  return dict;
}

PyObject *kvs_py_device_stats(PyObject *self, PyObject *unused) {
  (void)unused;
  struct kvs_engine *engine = kvs_py_device_engine(self);
  struct kvs_stats stats = {0};
  kvs_py_collect(engine);
  KVS_PY_NO_GIL(kvs_engine_stats(engine, &stats));
  const struct {
    const char *name;
    uint64_t value;
  } rows[] = {{"submitted", stats.submitted},
              {"done", stats.done},
              {"failed", stats.failed},
              {"cancelled", stats.cancelled},
              {"bytes_d2h", stats.bytes_d2h},
              {"bytes_h2d", stats.bytes_h2d},
              {"bytes_other", stats.bytes_other},
              {"copies", stats.copies},
              {"merged", stats.merged},
              {"unfinished", stats.unfinished},
              {"lanes", stats.lanes},
              {"refused_full", stats.refused_full},
              {"second_attempts", stats.second_attempts},
              {"staging_nbytes", stats.staging_nbytes},
              {"waits_raw", stats.waits_raw},
              {"waits_war", stats.waits_war},
              {"waits_waw", stats.waits_waw}};
  PyObject *dict = PyDict_New();
  for (size_t i = 0; dict != NULL && i < sizeof rows / sizeof *rows; ++i)
    if (set_item(dict, rows[i].name, PyLong_FromUnsignedLongLong(rows[i].value)) < 0) Py_CLEAR(dict);
  if (dict != NULL && set_item(dict, "paths", all_path_stats(&stats)) < 0) Py_CLEAR(dict);
  return dict;
}
