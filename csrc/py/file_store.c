/* kvswap.files.FileStore: an open directory of blocks. What reads or writes the disk runs on a thread of its own, so
 * that Ctrl-C ends the wait. file_calls.c has store(), load() and delete(). */
#include "base/crc32c.h"
#include "files/engine_uring.h"
#include "files/store.h"
#include "py/args.h"
#include "py/codec.h"
#include "py/dicts.h"
#include "py/errors.h"
#include "py/file_calls.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/wait.h"

#include <stdlib.h>
#include <string.h>

/* -- opening ------------------------------------------------------------------------------------------------------- */

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
  int truth = value ? PyObject_IsTrue(value) : 0;
  *flag = truth == 1;
  return truth < 0 ? -1 : 0;
}

static int read_choice(PyObject *value, const char *name, const char *const *choices, int *choice) {
  *choice = 0;
  if (!value) return 0;
  *choice = kvs_py_choice(value, name, choices, 3);
  return *choice < 0 ? -1 : 0;
}

/* layout.codings, a tuple; `codings` has room for KVS_FILE_CODINGS. They live as long as the layout. */
static int read_codings(PyObject *layout, struct kvs_file_settings *settings, const struct kvs_coding **codings) {
  PyObject *given = PyObject_GetAttrString(layout, "codings");
  if (!given && PyErr_ExceptionMatches(PyExc_AttributeError)) return PyErr_Clear(), 0;
  Py_ssize_t count = !given || !PyTuple_Check(given) ? -1 : PyTuple_GET_SIZE(given);
  int rc = 0;
  if (given && (count < 0 || count > KVS_FILE_CODINGS))
    (void)kvs_py_complain(PyExc_TypeError, "layout.codings", -1, "must be a tuple of at most %d", KVS_FILE_CODINGS);
  if (count < 0 || count > KVS_FILE_CODINGS) rc = -1;
  for (Py_ssize_t i = 0; rc == 0 && i < count; i++) {
    codings[i] = kvs_py_coding_from(PyTuple_GET_ITEM(given, i), "layout.codings", i);
    rc = codings[i] ? 0 : -1;
  }
  settings->codings = codings;
  settings->ncodings = rc < 0 ? 0 : (size_t)count;
  Py_XDECREF(given);
  return rc;
}

/* A Layout: any object with text and block_nbytes, and codings if its blocks are coded. *keep owns the text. */
static int read_layout(struct kvs_py_state *state, PyObject *layout, struct kvs_file_settings *settings,
                       const struct kvs_coding **codings, PyObject **keep) {
  PyObject *nbytes = PyObject_GetAttrString(layout, "block_nbytes");
  if (!nbytes && PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();
    bool number = PyIndex_Check(layout);
    return kvs_py_complain(PyExc_TypeError, "layout", -1,
                           "must be a kvswap.files.Layout, not %s: pass Layout(%S, model=..., dtype=...), whose fields "
                           "tell this cache's blocks from others'",
                           Py_TYPE(layout)->tp_name, number ? layout : state->s_nbytes);
  }
  int rc = nbytes ? kvs_py_uint64(nbytes, "layout.block_nbytes", -1, &settings->block_nbytes) : -1;
  Py_XDECREF(nbytes);
  if (rc < 0) return -1;
  *keep = PyObject_GetAttrString(layout, "text");
  settings->layout = *keep ? PyUnicode_AsUTF8(*keep) : NULL;
  return settings->layout ? read_codings(layout, settings, codings) : -1;
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
  struct kvs_file_settings settings; /* owns copies of the texts, and references to the device and the codings */
  struct kvs_file_store *store;
  const struct kvs_coding *codings[KVS_FILE_CODINGS];
  char *more[KVS_FILE_DIRECTORIES];
};

static void free_opening(struct store_opening *opening) {
  if (opening->settings.device) kvs_engine_unref(opening->settings.device);
  free((char *)(uintptr_t)opening->settings.directory);
  free((char *)(uintptr_t)opening->settings.layout);
  free((char *)(uintptr_t)opening->settings.bound);
  for (size_t i = 0; i < KVS_FILE_DIRECTORIES; i++) free(opening->more[i]);
  for (size_t i = 0; i < opening->settings.ncodings; i++) kvs_coding_close((struct kvs_coding *)opening->codings[i]);
  free(opening);
}

static struct store_opening *new_opening(const struct kvs_file_settings *settings) {
  struct store_opening *opening = calloc(1, sizeof *opening);
  if (!opening) return NULL;
  opening->settings = *settings;
  opening->settings.directory = strdup(settings->directory);
  opening->settings.layout = strdup(settings->layout);
  opening->settings.more = (const char *const *)opening->more;
  opening->settings.bound = settings->bound ? strdup(settings->bound) : NULL;
  bool copied = !settings->bound || opening->settings.bound;
  for (size_t i = 0; i < settings->nmore; i++) copied &= (opening->more[i] = strdup(settings->more[i])) != NULL;
  for (size_t i = 0; i < settings->ncodings; i++) opening->codings[i] = kvs_coding_ref(settings->codings[i]);
  opening->settings.codings = opening->codings;
  if (settings->device) kvs_engine_ref(settings->device);
  if (copied && opening->settings.directory && opening->settings.layout) return opening;
  free_opening(opening);
  return NULL;
}

static int do_open(void *arg, struct kvs_error *err) {
  struct store_opening *opening = arg;
  return kvs_file_open(&opening->settings, &opening->store, err);
}

static void discard_opening(void *arg) {
  struct store_opening *opening = arg;
  if (opening->store) kvs_file_unref(opening->store);
  free_opening(opening);
}

/* Log once that threads do io_uring's work, where that costs: with blocks below 1 MiB. Larger ones are as fast. */
static int say_engine(struct kvs_py_state *state, const struct kvs_file_settings *settings,
                      const struct kvs_file_info *about) {
  const struct kvs_file_info info = *about;
  if (settings->engine != KVS_FILE_AUTO || strcmp(info.engine, "threads") != 0 || info.block_nbytes >= 1 << 20 ||
      atomic_exchange(&state->engine_said, true))
    return 0;
  return kvs_py_say("warning",
                    "threads read and write the files, and blocks of 256 KiB load at 0.6 of io_uring's speed in random "
                    "order: %s. engine='threads' asks for them without this note",
                    info.engine_note);
}

/* Log what the bound of a directory is if not the capacity asked for: once, where several stores of the process share
 * the directory. */
static int say_bound(struct kvs_py_state *state, const char *note) {
  uint_fast64_t digest = 1469598103934665603ull;
  for (const char *at = note; *at; at++) digest = (digest ^ (unsigned char)*at) * 1099511628211ull;
  if (note[0] == '\0' || atomic_exchange(&state->bound_said, digest) == digest) return 0;
  return kvs_py_say("warning", "%s", note);
}

static int say_store(struct kvs_py_state *state, const struct kvs_file_settings *settings,
                     struct kvs_file_store *store) {
  struct kvs_file_info info;
  kvs_file_get_info(store, &info);
  return say_engine(state, settings, &info) < 0 ? -1 : say_bound(state, info.bound_note);
}

static int open_store(struct kvs_py_state *state, const struct kvs_file_settings *settings,
                      struct kvs_file_store **store) {
  if (kvs_py_hook_exit(state) < 0) return -1;
  struct store_opening *opening = new_opening(settings);
  if (!opening) {
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
  return say_store(state, settings, *store);
}

/* One path, or a list or tuple of paths. `paths` owns the texts; `more` has room for KVS_FILE_DIRECTORIES. */
static int read_directories(PyObject *object, PyObject **paths, const char **more, struct kvs_file_settings *settings) {
  bool many = PyList_Check(object) || PyTuple_Check(object);
  PyObject *items = many ? PySequence_List(object) : Py_BuildValue("[O]", object);
  Py_ssize_t count = items ? PyList_GET_SIZE(items) : 0;
  *paths = items;
  if (!items) return -1;
  if (count < 1 || count > KVS_FILE_DIRECTORIES)
    return kvs_py_complain(PyExc_ValueError, "directory", -1, "is a list of %zd: must be of 1 to %d", count,
                           KVS_FILE_DIRECTORIES);
  for (Py_ssize_t i = 0; i < count; i++) {
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

/* *store is the caller's to drop, also on failure. */
static int parse_and_open(struct kvs_py_state *state, PyObject *args, PyObject *kwargs, struct kvs_file_store **store) {
  static char *names[] = {"directory", "layout", "capacity",       "device",         "durability", "engine",
                          "depth",     "queue",  "segment_nbytes", "staging_nbytes", "buffered",   "readonly",
                          "gds",       "shared", "events",         "bound",          NULL};
  struct kvs_file_settings settings = {0};
  PyObject *v[ARGUMENTS] = {NULL}, *paths = NULL, *text = NULL, *bound = NULL;
  const char *more[KVS_FILE_DIRECTORIES];
  const struct kvs_coding *codings[KVS_FILE_CODINGS];
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOOOOOOOOOOOO:FileStore", names, &v[DIRECTORY], &v[LAYOUT],
                                   &v[CAPACITY], &v[DEVICE], &v[DURABILITY], &v[ENGINE], &v[DEPTH], &v[QUEUE],
                                   &v[SEGMENT_NBYTES], &v[STAGING_NBYTES], &v[BUFFERED], &v[READONLY], &v[GDS],
                                   &v[SHARED], &v[EVENTS], &v[BOUND]))
    return -1;
  int rc = -1;
  if (read_directories(v[DIRECTORY], &paths, more, &settings) == 0 && read_bound(v[BOUND], &bound, &settings) == 0 &&
      read_layout(state, v[LAYOUT], &settings, codings, &text) == 0 && read_settings(v, &settings) == 0 &&
      (!kvs_py_given(v[DEVICE]) || (settings.device = kvs_py_engine_from(state, v[DEVICE])) != NULL))
    rc = open_store(state, &settings, store);
  if (settings.device) kvs_engine_unref(settings.device); /* the store holds its own reference */
  Py_XDECREF(text);
  Py_XDECREF(paths);
  Py_XDECREF(bound);
  return rc;
}

/* -- the object ---------------------------------------------------------------------------------------------------- */

static PyObject *store_create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  struct kvs_py_store *self = (struct kvs_py_store *)type->tp_alloc(type, 0);
  if (self && parse_and_open(PyType_GetModuleState(type), args, kwargs, &self->store) < 0) Py_CLEAR(self);
  return (PyObject *)self;
}

static void store_dealloc(PyObject *self) {
  struct kvs_file_store *store = kvs_py_file_core(self);
  kvs_py_object_free(self);
  if (!store) return;
  KVS_PY_NO_GIL(kvs_file_unref(store)); /* dropping the last handle closes the store without waiting */
}

/* Arguments of a thread that uses a store, and holds it. */
struct using {
  struct kvs_file_store *store;
  int64_t timeout_ns;
};

static void discard_using(void *arg) {
  struct using *using = arg;
  kvs_file_unref(using->store);
  free(using);
}

static int use_store(PyObject *self, int (*work)(void *, struct kvs_error *), int64_t timeout_ns) {
  struct using *using = malloc(sizeof *using);
  if (!using) return PyErr_NoMemory(), -1;
  *using = (struct using){kvs_py_file_core(self), timeout_ns};
  kvs_file_ref(using->store);
  if (kvs_py_apart(kvs_py_state_of(self), work, discard_using, using) < 0) return -1;
  KVS_PY_NO_GIL(discard_using(using));
  return 0;
}

static int do_close(void *arg, struct kvs_error *err) {
  const struct using *using = arg;
  return kvs_file_close(using->store, using->timeout_ns, err);
}

static int do_refresh(void *arg, struct kvs_error *err) {
  const struct using *using = arg;
  return kvs_file_refresh(using->store, err);
}

static int do_clear(void *arg, struct kvs_error *err) {
  const struct using *using = arg;
  return kvs_file_clear(using->store, err);
}

static PyObject *store_close(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"timeout"};
  static const struct kvs_py_args spec = {"close", names, 0, 1, 1};
  PyObject *value;
  int64_t timeout_ns;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_timeout(value, "timeout", &timeout_ns) < 0) return NULL;
  if (!value) timeout_ns = 60ll * 1000 * 1000 * 1000;
  if (use_store(self, do_close, timeout_ns) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *store_enter(PyObject *self, PyObject *unused) {
  (void)unused;
  return Py_NewRef(self);
}

static PyObject *store_exit(PyObject *self, PyObject *args) {
  (void)args;
  return store_close(self, NULL, 0, NULL);
}

/* -- keys ---------------------------------------------------------------------------------------------------------- */

static PyObject *store_contains(PyObject *self, PyObject *object) {
  struct kvs_py_keys keys = {0};
  struct kvs_error err = {0};
  PyObject *result = NULL;
  bool *found = NULL;
  int rc;
  if (kvs_py_read_keys(object, &keys) == 0 && !(found = PyMem_Calloc(keys.core.count + 1, sizeof *found)))
    PyErr_NoMemory();
  if (found) {
    KVS_PY_NO_GIL(rc = kvs_file_contains(kvs_py_file_core(self), &keys.core, found, &err));
    result = rc != KVS_OK ? kvs_py_raise(kvs_py_state_of(self), &err) : PyList_New((Py_ssize_t)keys.core.count);
    for (size_t i = 0; result && i < keys.core.count; i++)
      PyList_SET_ITEM(result, (Py_ssize_t)i, PyBool_FromLong(found[i]));
  }
  PyMem_Free(found);
  kvs_py_keys_clear(&keys);
  if (result) kvs_py_file_say_note(self);
  return result;
}

enum on_keys { PIN, UNPIN, TOUCH };

static PyObject *on_keys(PyObject *self, PyObject *object, enum on_keys what) {
  struct kvs_file_store *store = kvs_py_file_core(self);
  struct kvs_py_keys keys = {0};
  struct kvs_error err = {0};
  int rc = kvs_py_read_keys(object, &keys);
  if (rc == 0) {
    Py_BEGIN_ALLOW_THREADS
    if (what == TOUCH)
      rc = kvs_file_touch(store, &keys.core, &err);
    else
      rc = kvs_file_pin(store, &keys.core, what == PIN, &err);
    Py_END_ALLOW_THREADS
    if (rc != KVS_OK) kvs_py_raise(kvs_py_state_of(self), &err);
  }
  kvs_py_keys_clear(&keys);
  return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *store_pin(PyObject *self, PyObject *keys) { return on_keys(self, keys, PIN); }

static PyObject *store_unpin(PyObject *self, PyObject *keys) { return on_keys(self, keys, UNPIN); }

static PyObject *store_touch(PyObject *self, PyObject *keys) { return on_keys(self, keys, TOUCH); }

/* Key i ends at ends[i], where the next begins. there NULL: a list of the keys, else of (key, there[i]). Frees them. */
static PyObject *list_of_keys(uint8_t *keys, size_t *ends, bool *there, size_t count) {
  PyObject *list = PyList_New((Py_ssize_t)count);
  for (size_t i = 0, begin = 0; list && i < count; begin = ends[i++]) {
    const char *key = (const char *)keys + begin;
    Py_ssize_t nbytes = (Py_ssize_t)(ends[i] - begin);
    PyObject *item = there ? Py_BuildValue("(y#O)", key, nbytes, there[i] ? Py_True : Py_False)
                           : PyBytes_FromStringAndSize(key, nbytes);
    if (!item)
      Py_CLEAR(list);
    else
      PyList_SET_ITEM(list, (Py_ssize_t)i, item);
  }
  free(keys);
  free(ends);
  free(there);
  return list;
}

static PyObject *store_keys(PyObject *self, PyObject *unused) {
  (void)unused;
  struct kvs_error err = {0};
  uint8_t *keys = NULL;
  size_t *ends = NULL, count = 0;
  int rc;
  KVS_PY_NO_GIL(rc = kvs_file_list(kvs_py_file_core(self), &keys, &ends, &count, &err));
  return rc == KVS_OK ? list_of_keys(keys, ends, NULL, count) : kvs_py_raise(kvs_py_state_of(self), &err);
}

static PyObject *store_take_events(PyObject *self, PyObject *unused) {
  (void)unused;
  struct kvs_error err = {0};
  uint8_t *keys = NULL;
  size_t *ends = NULL, count = 0;
  bool *there = NULL;
  uint64_t lost = 0;
  int rc;
  KVS_PY_NO_GIL(rc = kvs_file_take_events(kvs_py_file_core(self), &keys, &ends, &there, &count, &lost, &err));
  if (rc != KVS_OK) return kvs_py_raise(kvs_py_state_of(self), &err);
  PyObject *list = list_of_keys(keys, ends, there, count);
  return list ? Py_BuildValue("(NK)", list, (unsigned long long)lost) : NULL;
}

static PyObject *store_refresh(PyObject *self, PyObject *unused) {
  (void)unused;
  if (use_store(self, do_refresh, 0) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *store_clear(PyObject *self, PyObject *unused) {
  (void)unused;
  if (use_store(self, do_clear, 0) < 0) return NULL;
  Py_RETURN_NONE;
}

/* -- info and counters --------------------------------------------------------------------------------------------- */

#define STATS(member) KVS_PY_FIELD(struct kvs_file_stats, member)
#define INFO(member) KVS_PY_FIELD(struct kvs_file_info, member)

static PyObject *store_stats(PyObject *self, PyObject *unused) {
  static const struct kvs_py_field fields[] = {STATS(blocks),
                                               STATS(pinned),
                                               STATS(slots),
                                               STATS(segments),
                                               STATS(file_nbytes),
                                               STATS(stored),
                                               STATS(kept),
                                               STATS(loaded),
                                               STATS(deleted),
                                               STATS(evicted),
                                               STATS(missed),
                                               STATS(damaged),
                                               STATS(failed),
                                               STATS(found),
                                               STATS(cut),
                                               STATS(foreign),
                                               STATS(lost_slots),
                                               STATS(unfinished_loads),
                                               STATS(unfinished_stores),
                                               STATS(refused_full),
                                               STATS(gds_read_nbytes),
                                               STATS(gds_written_nbytes),
                                               STATS(gds_by_host),
                                               STATS(directory_nbytes),
                                               STATS(reclaimed_segments),
                                               STATS(retired_segments),
                                               STATS(requests)};
  (void)unused;
  struct kvs_file_stats stats;
  struct kvs_error err = {0};
  if (kvs_file_get_stats(kvs_py_file_core(self), &stats, &err)) return kvs_py_raise(kvs_py_state_of(self), &err);
  kvs_py_file_say_note(self);
  return KVS_PY_DICT(&stats, fields);
}

static PyObject *store_info(PyObject *self, void *unused) {
  static const struct kvs_py_field fields[] = {
      INFO(engine),        INFO(engine_note),  INFO(direct),      INFO(direct_note),
      INFO(gds),           INFO(gds_note),     INFO(checksum),    INFO(readonly),
      INFO(readonly_note), INFO(block_nbytes), INFO(slot_nbytes), INFO(segment_nbytes),
      INFO(capacity),      INFO(depth),        INFO(bound),       INFO(bound_note)};
  (void)unused;
  struct kvs_file_info info;
  kvs_file_get_info(kvs_py_file_core(self), &info);
  return KVS_PY_DICT(&info, fields);
}

static PyObject *store_block_nbytes(PyObject *self, void *unused) {
  (void)unused;
  struct kvs_file_info info;
  kvs_file_get_info(kvs_py_file_core(self), &info);
  return PyLong_FromUnsignedLongLong(info.block_nbytes);
}

/* -- directories --------------------------------------------------------------------------------------------------- */

struct peeking {
  char *directory;
  char layout[KVS_FILE_LAYOUT_NBYTES + 1];
  uint64_t nbytes;
};

static int do_peek(void *arg, struct kvs_error *err) {
  struct peeking *peeking = arg;
  return kvs_file_peek(peeking->directory, peeking->layout, &peeking->nbytes, err);
}

static void discard_peeking(void *arg) {
  struct peeking *peeking = arg;
  free(peeking->directory);
  free(peeking);
}

static int do_clear_directory(void *arg, struct kvs_error *err) {
  const struct peeking *peeking = arg;
  return kvs_file_clear_directory(peeking->directory, err);
}

/* NULL: an exception is set. */
static struct peeking *on_directory(PyObject *module, PyObject *directory, int (*work)(void *, struct kvs_error *)) {
  PyObject *path = NULL;
  if (!PyUnicode_FSConverter(directory, &path)) return NULL;
  struct peeking *peeking = calloc(1, sizeof *peeking);
  if (peeking) peeking->directory = strdup(PyBytes_AS_STRING(path));
  Py_DECREF(path);
  if (!peeking || !peeking->directory) {
    free(peeking);
    PyErr_NoMemory();
    return NULL;
  }
  return kvs_py_apart(PyModule_GetState(module), work, discard_peeking, peeking) < 0 ? NULL : peeking;
}

static PyObject *clear_directory(PyObject *module, PyObject *directory) {
  struct peeking *peeking = on_directory(module, directory, do_clear_directory);
  if (!peeking) return NULL;
  discard_peeking(peeking);
  Py_RETURN_NONE;
}

static PyObject *peek(PyObject *module, PyObject *directory) {
  struct peeking *peeking = on_directory(module, directory, do_peek);
  if (!peeking) return NULL;
  PyObject *found = Py_BuildValue("(sK)", peeking->layout, (unsigned long long)peeking->nbytes);
  discard_peeking(peeking);
  return found;
}

struct limiting {
  char *directory;
  uint64_t limit;
  uint64_t found[3];
};

static int do_limit(void *arg, struct kvs_error *err) {
  struct limiting *limiting = arg;
  return kvs_file_limit(limiting->directory, limiting->limit, limiting->found, err);
}

static void discard_limiting(void *arg) {
  struct limiting *limiting = arg;
  free(limiting->directory);
  free(limiting);
}

static PyObject *limit(PyObject *module, PyObject *args) {
  PyObject *path = NULL;
  unsigned long long nbytes = 0;
  if (!PyArg_ParseTuple(args, "O&K:_file_limit", PyUnicode_FSConverter, &path, &nbytes)) return NULL;
  struct limiting *limiting = calloc(1, sizeof *limiting);
  if (limiting) limiting->directory = strdup(PyBytes_AS_STRING(path));
  Py_DECREF(path);
  if (!limiting || !limiting->directory) {
    free(limiting);
    return PyErr_NoMemory();
  }
  limiting->limit = nbytes;
  if (kvs_py_apart(PyModule_GetState(module), do_limit, discard_limiting, limiting) < 0) return NULL;
  const uint64_t *got = limiting->found;
  PyObject *found =
      Py_BuildValue("(KKK)", (unsigned long long)got[0], (unsigned long long)got[1], (unsigned long long)got[2]);
  discard_limiting(limiting);
  return found;
}

static PyObject *gds(PyObject *module, PyObject *compat) {
  char note[200];
  bool usable;
  int wanted = PyObject_IsTrue(compat);
  (void)module;
  if (wanted < 0) return NULL;
  KVS_PY_NO_GIL(usable = kvs_file_gds(wanted == 1, note));
  return Py_BuildValue("(Os)", usable ? Py_True : Py_False, note);
}

static PyObject *facts(PyObject *module, PyObject *unused) {
  struct kvs_error err = {0};
  (void)module, (void)unused;
  KVS_PY_NO_GIL(kvs_file_uring_try(&err));
  return Py_BuildValue("(ss)", err.message, kvs_crc32c_how());
}

PyDoc_STRVAR(gds_doc,
             "_file_gds($module, compat, /)\n--\n\n"
             "(Whether a store would use GPUDirect Storage, with compat also libcufile's compatibility mode; by "
             "what, or why not), as far as is known without opening libcufile's driver.");
PyDoc_STRVAR(facts_doc, "_file_facts($module, /)\n--\n\n"
                        "(Why files are not read and written by io_uring; empty: they are. What computes checksums.)");
PyDoc_STRVAR(
    limit_doc,
    "_file_limit($module, directory, nbytes, /)\n--\n\n"
    "(limit, bytes of all segments below, running writers) of a directory that bounds stores; nbytes: the new\n"
    "limit, 0: unchanged. Error: it has none.");
PyDoc_STRVAR(peek_doc,
             "_file_peek($module, directory, /)\n--\n\n(text of the layout, block_nbytes) of a store's directory.");

PyDoc_STRVAR(clear_directory_doc,
             "_file_clear($module, directory, /)\n--\n\nBegin a new epoch of a store's directory, or of a shared one.");

PyMethodDef kvs_py_file_methods[] = {
    {"_file_clear", clear_directory, METH_O, clear_directory_doc},
    {"_file_facts", facts, METH_NOARGS, facts_doc},
    {"_file_gds", gds, METH_O, gds_doc},
    {"_file_peek", peek, METH_O, peek_doc},
    {"_file_limit", limit, METH_VARARGS, limit_doc},
    {NULL, NULL, 0, NULL},
};

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

static PyObject *store_repr(PyObject *self) {
  struct kvs_file_stats stats;
  struct kvs_error err;
  if (kvs_file_get_stats(kvs_py_file_core(self), &stats, &err))
    return PyUnicode_FromString("<kvswap.files.FileStore opened before fork()>");
  return PyUnicode_FromFormat("<kvswap.files.FileStore %llu blocks in %llu segments>", (unsigned long long)stats.blocks,
                              (unsigned long long)stats.segments);
}

PyDoc_STRVAR(
    store_doc,
    "FileStore(directory, layout, *, capacity=None, device=None, durability='none', engine='auto', depth=None, "
    "queue=None, segment_nbytes=None, staging_nbytes=None, buffered=False, readonly=False, gds='auto', "
    "shared=False, events=None, bound=None)\n--\n\n"
    "Blocks by key in the files of a directory, which is created if missing (mode 0700).\n\n"
    "directory: a path, or a list of paths on several disks, over which the blocks are spread. A store is opened with\n"
    "  all its directories or not at all; their order does not count.\n"
    "layout: a Layout. A directory of another layout is refused (ValueError) and left unchanged. With coding= the "
    "files\n"
    "  hold coded blocks: those of pools that are not coded are coded on the way, and decoded on the way back; a "
    "block\n"
    "  that does not fit fails alone. Coded pools and arrays go as they are, if they are blocks of that coding.\n"
    "capacity: limit of the files' bytes; beyond it the least recently used blocks are evicted.\n"
    "device: of the Pools whose blocks are stored and loaded: a Device or its name. None: host memory only.\n"
    "durability: when a block counts as stored: 'none': the kernel has it (it survives this process); 'flush': it was\n"
    "  handed to the disk; 'fsync': the disk reports that it survives a power failure.\n"
    "engine: 'threads', 'io_uring', or 'auto': io_uring if build and kernel have it. depth: concurrent reads\n"
    "  and writes, 1 to 256. buffered: use the page cache even if O_DIRECT is possible. `info` says what is used.\n"
    "queue: limit of unfinished loads, of stores and of deletes, each, before QueueFull; None: 128.\n"
    "segment_nbytes: bytes of a file, for a new store. staging_nbytes: memory between pools and files; None: 128 MiB.\n"
    "gds: of pools on a GPU, GPUDirect Storage, with staging on the GPU: 'auto': where the driver says that it is "
    "real;\n"
    "  'compat': else libcufile's compatibility mode, which goes through host memory by itself; 'off'. Where it "
    "cannot\n"
    "  be used staging is pinned host memory; info['gds'] and info['gds_note'] say what is used and why.\n"
    "readonly: read a store that another process writes; refresh() finds its new blocks. One process writes.\n"
    "shared: several processes of a machine store in this directory, and each finds the\n"
    "  blocks of all as they are stored. A key stands for its bytes: all store the same under it. delete()\n"
    "  deletes own blocks only.\n"
    "events: how many events are kept for take_events(); None: none.\n"
    "bound: a directory around this one, at most three folders up: capacity is then the limit of all files below it, "
    "of\n"
    "  every process, model and layout. The first store sets it; later ones go by that, with a warning. None: this\n"
    "  directory where it is shared, otherwise none.\n"
    "\n"
    "Calls on one key take effect in the order of the calls. Between keys there is no order, and loads go first.\n"
    "Error: the directory cannot be used. Any thread may use it.");
PyDoc_STRVAR(
    close_doc,
    "close($self, /, timeout=60.0)\n--\n\n"
    "Refuse new calls, let the transfers end, and close the files. After `timeout` seconds (None: no limit) unbegun\n"
    "blocks are cancelled, and those under way have another minute. A second call does nothing. Ctrl-C ends\n"
    "the wait, and the closing goes on. Dropping the last handle closes the store too, and never waits.");
PyDoc_STRVAR(enter_doc, "__enter__($self, /)\n--\n\nThe store itself.");
PyDoc_STRVAR(exit_doc, "__exit__($self, /, *args)\n--\n\nclose().");
PyDoc_STRVAR(contains_doc,
             "contains($self, keys, /)\n--\n\n"
             "Whether each key's block exists now: a list of bool. An unpinned block may be evicted before "
             "it is loaded.");
PyDoc_STRVAR(pin_doc, "pin($self, keys, /)\n--\n\n"
                      "Keep these blocks from eviction until unpin(); pins are counted. All or none: Error names a "
                      "missing one.");
PyDoc_STRVAR(unpin_doc, "unpin($self, keys, /)\n--\n\nRemove one pin of each block. ValueError: one is not pinned.");
PyDoc_STRVAR(touch_doc, "touch($self, keys, /)\n--\n\nMark these blocks as used now, the first one as the most recent; "
                        "missing ones are skipped.");
PyDoc_STRVAR(keys_doc, "keys($self, /)\n--\n\nThe keys of all blocks, as bytes, least recently used first.");
PyDoc_STRVAR(
    take_events_doc,
    "take_events($self, /)\n--\n\n"
    "([(key, whether its block is there)], lost): which blocks came and went since the last call, in order,\n"
    "those of other writers of a shared directory too. Blocks found at open or in the files of another writer, and\n"
    "those that a clear removed, come in pieces of a few thousand a call: call until the list is empty. Where more\n"
    "than `events` others were not taken, none is given, and lost says how many: keys() has what is there.");
PyDoc_STRVAR(refresh_doc,
             "refresh($self, /)\n--\n\n"
             "Of a reader: find the blocks that the writer has stored since. Transfers may run meanwhile. Any\n"
             "thread may call; Error while another thread is in refresh().");
PyDoc_STRVAR(clear_doc, "clear($self, /)\n--\n\n"
                        "Remove all blocks of this store, for all processes that use it or will: for an update of the "
                        "model's weights. When\n"
                        "it returns, no block that was submitted before is found or loaded any more, by stores and "
                        "loads under way neither;\n"
                        "what is submitted later is stored. Slots become free; the files stay. A reader clears too, "
                        "where it may write the\n"
                        "directory.\n"
                        "\n"
                        "Error: the directory cannot be written, and nothing has changed. Ctrl-C ends the wait only.");
PyDoc_STRVAR(stats_doc, "stats($self, /)\n--\n\nCounters: dict of int; docs/files.md explains each.");

static PyMethodDef methods[] = {
    {"store", KVS_PY_FASTCALL(kvs_py_file_store), METH_FASTCALL | METH_KEYWORDS, kvs_py_file_store_doc},
    {"load", KVS_PY_FASTCALL(kvs_py_file_load), METH_FASTCALL | METH_KEYWORDS, kvs_py_file_load_doc},
    {"delete", kvs_py_file_delete, METH_O, kvs_py_file_delete_doc},
    {"contains", store_contains, METH_O, contains_doc},
    {"pin", store_pin, METH_O, pin_doc},
    {"unpin", store_unpin, METH_O, unpin_doc},
    {"touch", store_touch, METH_O, touch_doc},
    {"keys", store_keys, METH_NOARGS, keys_doc},
    {"take_events", store_take_events, METH_NOARGS, take_events_doc},
    {"refresh", store_refresh, METH_NOARGS, refresh_doc},
    {"clear", store_clear, METH_NOARGS, clear_doc},
    {"stats", store_stats, METH_NOARGS, stats_doc},
    {"close", KVS_PY_FASTCALL(store_close), METH_FASTCALL | METH_KEYWORDS, close_doc},
    {"__enter__", store_enter, METH_NOARGS, enter_doc},
    {"__exit__", store_exit, METH_VARARGS, exit_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"info", store_info, NULL,
     "dict: engine, direct (O_DIRECT), gds, each with the reason if off, checksum, sizes in bytes, depth.", NULL},
    {"block_nbytes", store_block_nbytes, NULL, "int: bytes of a block.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)store_doc},
    {Py_tp_new, store_create},
    {Py_tp_dealloc, store_dealloc},
    {Py_tp_repr, store_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec kvs_py_file_store_spec = {
    .name = "kvswap.files.FileStore",
    .basicsize = sizeof(struct kvs_py_store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
