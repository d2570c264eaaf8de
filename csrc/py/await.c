/* `await transfer`: kvswap/_await.py has the awaiting, and one thread a process, which waits here for all of them. A
 * connector of kvswap/lmcache has another thread of this kind.
 *
 * The end of work on a device is found by asking, as wait() does. Between two looks the thread sleeps, for a hundredth
 * of the time that it has waited: 50 us to 1 ms. It sleeps without limit while nothing is awaited, until it is told
 * that there is something new to wait for. */
#include "py/await.h"
#include "base/fork.h"
#include "base/wait.h"
#include "py/args.h"
#include "py/module.h"
#include "py/objects.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t told;
static uint64_t news; /* guarded by lock: how often it was told */

static void take_lock(void) {
  static struct kvs_fork_guard guard = {.lock = &lock, .cond = &told};
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&lock);
}

enum { SHORTEST_NS = 50 * 1000, LONGEST_NS = 1000 * 1000, LATE_SHARE = 100 };

struct awaited {
  struct kvs_transfer *transfer; /* or */
  struct kvs_file_transfer *file;
};

struct waiting {
  uint64_t seen; /* news that the caller knows */
  size_t count, nengines;
  struct awaited *items;       /* references: the interpreter may end meanwhile */
  struct kvs_engine **engines; /* of the transfers, each once; borrowed from them */
};

PyObject *kvs_py_await(PyObject *self) {
  PyObject *module = PyImport_ImportModule("kvswap._await");
  PyObject *iterator = module ? PyObject_CallMethod(module, "awaiting", "O", self) : NULL;
  Py_XDECREF(module);
  return iterator;
}

static bool has_ended(const struct awaited *item) {
  struct kvs_transfer_info info;
  if (item->file) return kvs_file_transfer_done(item->file);
  kvs_transfer_get_info(item->transfer, &info);
  return info.state != KVS_STATE_RUNNING;
}

static bool any_ended(const struct waiting *waiting) {
  bool ended = false;
  for (size_t i = 0; i < waiting->nengines; i++) kvs_engine_collect(waiting->engines[i]);
  for (size_t i = 0; i < waiting->count && !ended; i++) ended = has_ended(&waiting->items[i]);
  return ended;
}

static uint64_t next_look(uint64_t start) {
  uint64_t now = kvs_clock_ns(), pause = (now - start) / LATE_SHARE;
  return now + (pause < SHORTEST_NS ? SHORTEST_NS : pause > LONGEST_NS ? LONGEST_NS : pause);
}

static void wait_first(const struct waiting *waiting) {
  uint64_t start = kvs_clock_ns();
  bool over = false;
  while (!over && !any_ended(waiting)) {
    uint64_t look = waiting->count ? next_look(start) : KVS_NO_DEADLINE;
    take_lock();
    while (news == waiting->seen && kvs_cond_wait(&told, &lock, look)) continue;
    over = news != waiting->seen;
    pthread_mutex_unlock(&lock);
  }
}

static void add_engine(struct waiting *waiting, struct kvs_engine *engine) {
  for (size_t i = 0; i < waiting->nengines; i++)
    if (waiting->engines[i] == engine) return;
  waiting->engines[waiting->nengines++] = engine;
}

static int add_item(struct kvs_py_state *state, struct waiting *waiting, PyObject *object) {
  struct awaited *item = &waiting->items[waiting->count];
  if ((PyObject *)Py_TYPE(object) == state->transfer_type) {
    item->transfer = kvs_py_transfer_core(object);
    kvs_transfer_ref(item->transfer);
    add_engine(waiting, kvs_transfer_engine(item->transfer));
  } else if ((PyObject *)Py_TYPE(object) == state->file_transfer_type) {
    item->file = kvs_py_file_transfer_core(object);
    kvs_file_transfer_ref(item->file);
  } else {
    return kvs_py_complain(PyExc_TypeError, "transfers", (Py_ssize_t)waiting->count, "is no transfer");
  }
  waiting->count++;
  return 0;
}

static void drop_items(struct waiting *waiting) {
  Py_BEGIN_ALLOW_THREADS /* the last handle of a store closes it */
  for (size_t i = 0; i < waiting->count; i++) {
    if (waiting->items[i].file) kvs_file_transfer_unref(waiting->items[i].file);
    if (waiting->items[i].transfer) kvs_transfer_unref(waiting->items[i].transfer);
  }
  Py_END_ALLOW_THREADS
  PyMem_Free(waiting->items);
  PyMem_Free(waiting->engines);
}

static PyObject *positions(const struct waiting *waiting) {
  PyObject *list = PyList_New(0);
  for (size_t i = 0; list && i < waiting->count; i++) {
    PyObject *position = has_ended(&waiting->items[i]) ? PyLong_FromSize_t(i) : NULL;
    if (position && PyList_Append(list, position) < 0) Py_CLEAR(list);
    Py_XDECREF(position);
    if (PyErr_Occurred()) Py_CLEAR(list);
  }
  return list;
}

static PyObject *wait_for_first(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"transfers", "seen"};
  static const struct kvs_py_args spec = {"_wait_first", names, 2, 2, 2};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct waiting waiting = {.count = 0};
  PyObject *values[2], *found = NULL;
  int64_t seen;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_int64(values[1], "seen", -1, &seen) < 0) return NULL;
  PyObject *items = PySequence_Tuple(values[0]);
  if (!items) return NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(items);
  waiting.seen = (uint64_t)seen;
  waiting.items = PyMem_Calloc((size_t)count + 1, sizeof *waiting.items);
  waiting.engines = PyMem_Calloc((size_t)count + 1, sizeof(struct kvs_engine *));
  int rc = !waiting.items || !waiting.engines ? -1 : 0;
  if (rc < 0) PyErr_NoMemory();
  for (Py_ssize_t i = 0; rc == 0 && i < count; i++) rc = add_item(state, &waiting, PyTuple_GET_ITEM(items, i));
  if (rc == 0) {
    KVS_PY_NO_GIL(wait_first(&waiting));
    found = positions(&waiting);
  }
  drop_items(&waiting);
  Py_DECREF(items);
  return found;
}

PyDoc_STRVAR(wait_first_doc, "_wait_first($module, /, transfers, seen)\n--\n\n"
                             "Wait until one of the transfers has ended, or _await_news() is not `seen`; returns the "
                             "positions of those\nthat have ended.");

static PyObject *await_news(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
  take_lock();
  uint64_t now = news;
  pthread_mutex_unlock(&lock);
  return PyLong_FromUnsignedLongLong(now);
}

PyDoc_STRVAR(await_news_doc, "_await_news($module, /)\n--\n\nHow often _await_tell() was called.");

static PyObject *await_tell(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
  take_lock();
  news++;
  pthread_cond_broadcast(&told); /* each thread may be the one that is meant */
  pthread_mutex_unlock(&lock);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(await_tell_doc, "_await_tell($module, /)\n--\n\nEnd the sleep of all threads in _wait_first().");

PyMethodDef kvs_py_await_methods[] = {
    {"_wait_first", KVS_PY_FASTCALL(wait_for_first), METH_FASTCALL | METH_KEYWORDS, wait_first_doc},
    {"_await_news", await_news, METH_NOARGS, await_news_doc},
    {"_await_tell", await_tell, METH_NOARGS, await_tell_doc},
    {NULL, NULL, 0, NULL},
};
