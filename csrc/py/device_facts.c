/* Device.info and Device.stats(). */
#include "py/device_facts.h"
#include "py/dicts.h"
#include "py/objects.h"
#include "py/options.h"
#include "py/wait.h"

static PyObject *uuid_text(const void *member) {
  const unsigned char *uuid = member;
  char text[40] = "";
  unsigned any = 0;
  for (int i = 0, at = 0; i < 16; i++) {
    any |= uuid[i];
    at += snprintf(text + at, sizeof text - (size_t)at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                   uuid[i]);
  }
  return PyUnicode_FromString(any != 0 ? text : "");
}

#define INFO(member) KVS_PY_FIELD(struct kvs_device_info, member)

PyObject *kvs_py_device_info_dict(const struct kvs_device_info *info) {
  static const struct kvs_py_field fields[] = {
      INFO(name),         INFO(pci),           {"uuid", offsetof(struct kvs_device_info, uuid), uuid_text},
      INFO(memory),       INFO(memory_gbps),   INFO(max_pitch),
      INFO(driver),       INFO(cc_major),      INFO(cc_minor),
      INFO(sms),          INFO(copy_engines),  INFO(numa_node),
      INFO(priority_low), INFO(priority_high), INFO(batch),
      INFO(memops),       INFO(kernels),       INFO(kernels_note)};
  return KVS_PY_DICT(info, fields);
}

/* {"cuda:1": {"slot_nbytes": 4194304, ...}}: what other devices lend. */
static PyObject *lenders(struct kvs_engine *engine) {
  struct kvs_engine *lender;
  struct kvs_lending lending;
  PyObject *dict = PyDict_New();
  for (unsigned i = 0; dict && (lender = kvs_engine_lender(engine, i, &lending)) != NULL; i++) {
    PyObject *row = Py_BuildValue("{s:K, s:I, s:d}", "slot_nbytes", (unsigned long long)lending.slot_nbytes, "count",
                                  lending.count, "share", lending.share);
    if (kvs_py_put(dict, kvs_engine_name(lender), row) < 0) Py_CLEAR(dict);
  }
  return dict;
}

PyObject *kvs_py_device_info(PyObject *self, void *unused) {
  (void)unused;
  struct kvs_engine *engine = kvs_py_device_engine(self);
  char burst[KVS_BURST_NOTE];
  kvs_engine_burst_note(engine, burst);
  PyObject *dict = kvs_py_device_info_dict(&kvs_engine_device(kvs_py_device_engine(self))->info);
  if (!dict) return NULL;
  if (kvs_py_put(dict, "burst", PyUnicode_FromString(*burst ? burst : "on")) < 0 ||
      kvs_py_put(dict, "slots_nbytes", PyLong_FromUnsignedLongLong(kvs_engine_slots_nbytes(engine))) < 0 ||
      kvs_py_put(dict, "lenders", lenders(engine)) < 0 ||
      kvs_py_put(dict, "costs", PyUnicode_FromString(kvs_engine_costs_note(engine))) < 0)
    Py_CLEAR(dict);
  return dict;
}

static PyObject *path_stats(const struct kvs_path_stats *paths) {
  static const struct kvs_py_field fields[] = {
      KVS_PY_FIELD(struct kvs_path_stats, transfers),
      KVS_PY_FIELD(struct kvs_path_stats, blocks),
      KVS_PY_FIELD(struct kvs_path_stats, bytes),
      KVS_PY_FIELD(struct kvs_path_stats, link_bytes),
      {"seconds", offsetof(struct kvs_path_stats, device_ns), kvs_py_of_seconds}};
  PyObject *dict = PyDict_New();
  for (int path = 0; dict && path < KVS_PATHS; path++) {
    const struct kvs_path_stats *row = &paths[path];
    if (row->transfers == 0) continue;
    if (kvs_py_put(dict, kvs_path_name((enum kvs_path)path), KVS_PY_DICT(row, fields)) < 0) Py_CLEAR(dict);
  }
  return dict;
}

/* {"d2h": {"dma": {"transfers": 1, ...}}, ...}, without empty rows. */
static PyObject *all_path_stats(const struct kvs_stats *stats) {
  PyObject *dict = PyDict_New();
  for (int direction = 0; dict && direction < 3; direction++) {
    PyObject *paths = path_stats(stats->paths[direction]);
    if (paths && PyDict_GET_SIZE(paths) == 0) {
      Py_DECREF(paths);
      continue;
    }
    if (kvs_py_put(dict, kvs_py_direction_names[direction], paths) < 0) Py_CLEAR(dict);
  }
  return dict;
}

#define STATS(member) KVS_PY_FIELD(struct kvs_stats, member)

PyObject *kvs_py_device_stats(PyObject *self, PyObject *unused) {
  static const struct kvs_py_field fields[] = {STATS(submitted),
                                               STATS(done),
                                               STATS(failed),
                                               STATS(cancelled),
                                               STATS(bytes_d2h),
                                               STATS(bytes_h2d),
                                               STATS(bytes_other),
                                               STATS(copies),
                                               STATS(merged),
                                               STATS(unfinished),
                                               STATS(lanes),
                                               STATS(refused_full),
                                               STATS(second_attempts),
                                               STATS(staging_nbytes),
                                               STATS(waits_raw),
                                               STATS(waits_war),
                                               STATS(waits_waw),
                                               STATS(lent_bytes_d2h),
                                               STATS(lent_bytes_h2d),
                                               STATS(borrowed_bytes_d2h),
                                               STATS(borrowed_bytes_h2d)};
  (void)unused;
  struct kvs_engine *engine = kvs_py_device_engine(self);
  struct kvs_stats stats = {0};
  kvs_py_collect(engine);
  KVS_PY_NO_GIL(kvs_engine_stats(engine, &stats));
  PyObject *dict = KVS_PY_DICT(&stats, fields);
  if (dict && kvs_py_put(dict, "paths", all_path_stats(&stats)) < 0) Py_CLEAR(dict);
  return dict;
}
