/* kvswap.files.FileStore(): arguments, and a thread that opens the store. */
#include "files.h"

#include <stdlib.h>
#include <string.h>

enum {
  DIRECTORY,
  LAYOUT,
  CAPACITY,
  DEVICE,
  DURABILITY,
  ENGINE,
  DEPTH,
  QUEUE,
  SEGMENT_NBYTES,
  STAGING_NBYTES,
  BUFFERED,
  READONLY,
  GDS,
  SHARED,
  EVENTS,
  BOUND,
  ARGUMENTS
};

static int read_limit(PyObject *value, const char *name, uint64_t most, uint64_t *number) {
  if (!kvs_py_given(value)) return 0;
  if (kvs_py_uint64(value, name, -1, number) < 0) return -1;
  if (*number < 1 || *number > most)
    return kvs_py_complain(PyExc_ValueError, name, -1, "is %R: must be 1 to %llu, or None", value,
                           (unsigned long long)most);
  return 0;
}

static int read_flag(PyObject *value, bool *flag) {
  int truth = value == NULL ? 0 : PyObject_IsTrue(value);
  *flag = truth == 1;
  return truth < 0 ? -1 : 0;
}

static int read_choice(PyObject *value, const char *name, const char *const *choices, int *choice) {
  *choice = 0;
  if (value == NULL) return 0;
  *choice = kvs_py_choice(value, name, choices, 3);
  return *choice < 0 ? -1 : 0;
}

/* A Layout: any object with text and block_nbytes. *keep owns the text. */
static int read_layout(struct kvs_py_state *state, PyObject *layout, struct kvs_file_settings *settings,
                       PyObject **keep) {
  PyObject *nbytes = PyObject_GetAttrString(layout, "block_nbytes");
  if (nbytes == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();
    bool number = PyIndex_Check(layout);
    return kvs_py_complain(PyExc_TypeError, "layout", -1,
                           "must be a kvswap.files.Layout, not %s: pass Layout(%S, model=..., dtype=...), whose fields "
                           "tell this cache's blocks from others'",
                           Py_TYPE(layout)->tp_name, number ? layout : state->s_nbytes);
  }
  int rc = nbytes == NULL ? -1 : kvs_py_uint64(nbytes, "layout.block_nbytes", -1, &settings->block_nbytes);
  Py_XDECREF(nbytes);
  if (rc < 0) return -1;
  *keep = PyObject_GetAttrString(layout, "text");
  settings->layout = *keep == NULL ? NULL : PyUnicode_AsUTF8(*keep);
  return settings->layout == NULL ? -1 : 0;
}

static int read_settings(PyObject *const *values, struct kvs_file_settings *settings) {
  static const char *const durabilities[] = {"none", "flush", "fsync"};
  static const char *const engines[] = {"auto", "threads", "io_uring"}, *const modes[] = {"auto", "compat", "off"};
  const uint64_t most = (uint64_t)1 << 62;
  uint64_t depth = 0, queue = 0;
  int durability, engine, gds;
  if (read_limit(values[CAPACITY], "capacity", most, &settings->capacity) < 0 ||
      read_choice(values[DURABILITY], "durability", durabilities, &durability) < 0 ||
      read_choice(values[ENGINE], "engine", engines, &engine) < 0 || read_choice(values[GDS], "gds", modes, &gds) < 0 ||
      read_limit(values[DEPTH], "depth", 256, &depth) < 0 || read_limit(values[QUEUE], "queue", 65536, &queue) < 0 ||
      read_limit(values[SEGMENT_NBYTES], "segment_nbytes", most, &settings->segment_nbytes) < 0 ||
      read_limit(values[STAGING_NBYTES], "staging_nbytes", most, &settings->staging_nbytes) < 0 ||
      read_flag(values[BUFFERED], &settings->buffered) < 0 ||
      read_limit(values[EVENTS], "events", 1 << 24, &settings->events) < 0 ||
      read_flag(values[READONLY], &settings->readonly) < 0 || read_flag(values[SHARED], &settings->shared) < 0)
    return -1;
  if (!settings->readonly && settings->capacity == 0)
    return kvs_py_complain(PyExc_TypeError, "capacity", -1,
                           "is needed: bytes that the files may take, 500 << 30 for 500 GiB");
  settings->durability = (enum kvs_file_durability)durability;
  settings->engine = (enum kvs_file_engine)engine;
  settings->gds = (enum kvs_file_gds_mode)gds;
  settings->depth = (unsigned)depth;
  settings->queue = (unsigned)queue;
  return 0;
}

/* Arguments of the thread that opens a store. */
struct store_opening {
  struct kvs_file_settings settings; /* owns copies of the texts and a reference to the device */
  struct kvs_file_store *store;
  char *more[KVS_FILE_DIRECTORIES];
};

static void free_opening(struct store_opening *opening) {
  if (opening->settings.device != NULL) kvs_engine_unref(opening->settings.device);
  free((char *)(uintptr_t)opening->settings.directory);
  free((char *)(uintptr_t)opening->settings.layout);
  free((char *)(uintptr_t)opening->settings.bound);
  for (size_t i = 0; i < KVS_FILE_DIRECTORIES; ++i) free(opening->more[i]);
  free(opening);
}

static struct store_opening *new_opening(const struct kvs_file_settings *settings) {
  struct store_opening *opening = calloc(1, sizeof *opening);
  if (opening == NULL) return NULL;
  opening->settings = *settings;
  opening->settings.directory = strdup(settings->directory);
  opening->settings.layout = strdup(settings->layout);
  opening->settings.more = (const char *const *)opening->more;
  opening->settings.bound = settings->bound == NULL ? NULL : strdup(settings->bound);
  bool copied = settings->bound == NULL || opening->settings.bound != NULL;
  for (size_t i = 0; i < settings->nmore; ++i) copied &= (opening->more[i] = strdup(settings->more[i])) != NULL;
  if (settings->device != NULL) kvs_engine_ref(settings->device);
  if (copied && opening->settings.directory != NULL && opening->settings.layout != NULL) return opening;
  free_opening(opening);
  return NULL;
}

static int do_open(void *arg, struct kvs_error *err) {
  struct store_opening *opening = arg;
  return kvs_file_open(&opening->settings, &opening->store, err);
}

static void discard_opening(void *arg) {
  struct store_opening *opening = arg;
  if (opening->store != NULL) kvs_file_unref(opening->store);
  free_opening(opening);
}

static int open_store(struct kvs_py_state *state, const struct kvs_file_settings *settings,
                      struct kvs_file_store **store) {
  if (kvs_py_hook_exit(state) < 0) return -1;
  struct store_opening *opening = new_opening(settings);
  if (opening == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  if (kvs_py_apart(state, do_open, discard_opening, opening) < 0) return -1;
  *store = opening->store;
  free_opening(opening);
  struct kvs_file_info info;
  kvs_file_get_info(*store, &info);
  if (info.readonly_note[0] != '\0' &&
      kvs_py_say("warning", "the file store is read-only until it is opened again, and stores and deletes fail: %s",
                 info.readonly_note) < 0)
    return -1;
  return kvs_py_say_store(state, settings, *store);
}

/* One path, or a list or tuple of paths. `paths` owns the texts; `more` has room for KVS_FILE_DIRECTORIES. */
static int read_directories(PyObject *object, PyObject **paths, const char **more, struct kvs_file_settings *settings) {
  bool many = PyList_Check(object) || PyTuple_Check(object);
  PyObject *items = many ? PySequence_List(object) : Py_BuildValue("[O]", object);
  Py_ssize_t count = items == NULL ? 0 : PyList_GET_SIZE(items);
  *paths = items;
  if (items == NULL) return -1;
  if (count < 1 || count > KVS_FILE_DIRECTORIES)
    return kvs_py_complain(PyExc_ValueError, "directory", -1, "is a list of %zd: must be of 1 to %d", count,
                           KVS_FILE_DIRECTORIES);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *path = NULL;
    if (!PyUnicode_FSConverter(PyList_GET_ITEM(items, i), &path)) return -1;
    PyList_SetItem(items, i, path); /* steals it */
    if (i) more[i - 1] = PyBytes_AS_STRING(path);
  }
  settings->directory = PyBytes_AS_STRING(PyList_GET_ITEM(items, 0));
  settings->more = more;
  settings->nmore = (size_t)count - 1;
  return 0;
}

/* A path or None. *keep owns the text. */
static int read_bound(PyObject *object, PyObject **keep, struct kvs_file_settings *settings) {
  if (!kvs_py_given(object)) return 0;
  if (!PyUnicode_FSConverter(object, keep)) return -1;
  settings->bound = PyBytes_AS_STRING(*keep);
  return 0;
}

int kvs_py_file_open(struct kvs_py_state *state, PyObject *args, PyObject *kwargs, struct kvs_file_store **store) {
  static char *names[] = {"directory", "layout", "capacity",       "device",         "durability", "engine",
                          "depth",     "queue",  "segment_nbytes", "staging_nbytes", "buffered",   "readonly",
                          "gds",       "shared", "events",         "bound",          NULL};
  struct kvs_file_settings settings = {0};
  PyObject *v[ARGUMENTS] = {NULL}, *paths = NULL, *text = NULL, *bound = NULL;
  const char *more[KVS_FILE_DIRECTORIES];
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOOOOOOOOOOOO:FileStore", names, &v[DIRECTORY], &v[LAYOUT],
                                   &v[CAPACITY], &v[DEVICE], &v[DURABILITY], &v[ENGINE], &v[DEPTH], &v[QUEUE],
                                   &v[SEGMENT_NBYTES], &v[STAGING_NBYTES], &v[BUFFERED], &v[READONLY], &v[GDS],
                                   &v[SHARED], &v[EVENTS], &v[BOUND]))
    return -1;
  int rc = -1;
  if (read_directories(v[DIRECTORY], &paths, more, &settings) == 0 && read_bound(v[BOUND], &bound, &settings) == 0 &&
      read_layout(state, v[LAYOUT], &settings, &text) == 0 && read_settings(v, &settings) == 0 &&
      (!kvs_py_given(v[DEVICE]) || (settings.device = kvs_py_engine_from(state, v[DEVICE])) != NULL))
    rc = open_store(state, &settings, store);
  if (settings.device != NULL) kvs_engine_unref(settings.device); /* the store holds its own reference */
  Py_XDECREF(text);
  Py_XDECREF(paths);
  Py_XDECREF(bound);
  return rc;
}
