/* kvswap._C._seam: members of csrc/device/device.h by name, a table row for each: those that the package itself calls.
 * The others are rows of tests/bindings/testing.c. All take numbers, except copy_batch and copy_direct, which take
 * three lists first. */
#include "py/seam.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"

#include <string.h>

/* For `kvswap bench` and engines. */
#define MEMBERS(X)                                                                                                     \
  X(pointer_query, 1, KVS_SEAM_REGION, false, kvs_dev_pointer_query(c->device, c->a[0], &c->region, err))              \
  X(copy, 4, KVS_SEAM_NOTHING, false, kvs_dev_copy(c->device, c->a[0], c->a[1], c->a[2], c->a[3], err))                \
  X(fill, 4, KVS_SEAM_NOTHING, false, kvs_dev_fill(c->device, c->a[0], (uint32_t)c->a[1], c->a[2], c->a[3], err))      \
  X(copy_batch, 1, KVS_SEAM_NOTHING, true,                                                                             \
    kvs_dev_copy_batch(c->device, &c->copies, 0, c->copies.count, c->a[0], err))                                       \
  X(launch_copy, 5, KVS_SEAM_NOTHING, false, launch_copy(c, err))

/* (npieces, address of the pieces, grid, threads, stream) */
static int launch_copy(struct kvs_seam_call *c, struct kvs_error *err) {
  struct kvs_copy_params params = {.units = {.pieces = c->a[1]}, .count = c->a[0]};
  struct kvs_launch launch = {.kernel = KVS_KERNEL_COPY,
                              .grid = (unsigned)c->a[2],
                              .threads = (unsigned)c->a[3],
                              .params = &params,
                              .params_nbytes = sizeof params};
  return kvs_dev_launch(c->device, &launch, c->a[4], err);
}

MEMBERS(KVS_SEAM_FUNCTION)
static const struct kvs_seam_row own[] = {MEMBERS(KVS_SEAM_ROW)};

static const struct kvs_seam_row *find_row(PyObject *operation, const struct kvs_seam_row *more, size_t nmore) {
  const size_t nown = sizeof own / sizeof *own;
  for (size_t i = 0; PyUnicode_Check(operation) && i < nown + nmore; i++) {
    const struct kvs_seam_row *row = i < nown ? &own[i] : &more[i - nown];
    if (PyUnicode_CompareWithASCIIString(operation, row->name) == 0) return row;
  }
  kvs_py_complain(PyExc_ValueError, "operation", -1, "is %R: no member of the seam", operation);
  return NULL;
}

static int read_copies(struct kvs_py_state *state, PyObject *const *args, struct kvs_seam_call *c, PyObject **block) {
  static const char *const names[3] = {"dsts", "srcs", "sizes"};
  uint64_t *words;
  for (int i = 0; i < 3; i++) {
    int rc = kvs_py_pointers(state, args[i], names[i], false, NULL, &c->lists[i]);
    if (rc < 0) return -1;
    if (c->lists[i].count != c->lists[0].count)
      return kvs_py_complain(PyExc_ValueError, names[i], -1, "is not as long as dsts");
  }
  size_t count = c->lists[0].count;
  *block = kvs_py_uint64_array(count, &words); /* twice the size that the indices need */
  if (!*block) return -1;
  uint32_t *indices = (uint32_t *)(void *)words;
  for (size_t i = 0; i < count; i++) indices[i] = (uint32_t)i;
  /* the seam's pointers are not const, but it does not write through them */
  c->copies = (struct kvs_copies){.dst = (uint64_t *)(uintptr_t)c->lists[0].data,
                                  .src = (uint64_t *)(uintptr_t)c->lists[1].data,
                                  .nbytes = (uint64_t *)(uintptr_t)c->lists[2].data,
                                  .block = indices,
                                  .count = count,
                                  .capacity = count};
  return 0;
}

static int read_numbers(PyObject *const *args, Py_ssize_t nargs, const struct kvs_seam_row *row,
                        struct kvs_seam_call *c) {
  if (nargs != row->needed) {
    PyErr_Format(PyExc_TypeError, "%s takes %d numbers (%zd given)", row->name, row->needed, nargs);
    return -1;
  }
  for (Py_ssize_t i = 0; i < nargs; i++) {
    int64_t number;
    if (PyBool_Check(args[i])) {
      c->a[i] = args[i] == Py_True;
    } else if (kvs_py_uint64(args[i], "argument", i, &c->a[i]) < 0) {
      if (!PyErr_ExceptionMatches(PyExc_ValueError)) return -1;
      PyErr_Clear(); /* a priority may be negative */
      if (kvs_py_int64(args[i], "argument", i, &number) < 0) return -1;
      c->a[i] = (uint64_t)number;
    }
  }
  return 0;
}

static PyObject *region_dict(const struct kvs_region *region) {
  return Py_BuildValue("{s:K, s:K, s:K, s:K, s:s, s:i, s:N, s:N}", "base", (unsigned long long)region->base, "nbytes",
                       (unsigned long long)region->nbytes, "alias", (unsigned long long)region->alias, "buffer_id",
                       (unsigned long long)region->buffer_id, "memory", kvs_memory_name(region->memory), "device",
                       region->device, "seam", PyBool_FromLong(region->seam), "writable",
                       PyBool_FromLong(region->writable));
}

static PyObject *answer_of(const struct kvs_seam_call *c, enum kvs_seam_answer answer, int rc) {
  switch (answer) {
  case KVS_SEAM_NUMBER:
    return PyLong_FromUnsignedLongLong(c->number);
  case KVS_SEAM_READY:
    return PyBool_FromLong(rc == KVS_OK);
  case KVS_SEAM_STREAM_INFO:
    return Py_BuildValue("(KN)", (unsigned long long)c->stream.id, PyBool_FromLong(c->stream.capturing));
  case KVS_SEAM_REGION:
    return region_dict(&c->region);
  case KVS_SEAM_NOTHING:
    break;
  }
  Py_RETURN_NONE;
}

static PyObject *make_call(struct kvs_py_state *state, const struct kvs_seam_row *row, struct kvs_seam_call *c) {
  struct kvs_error err = {0};
  int rc;
  KVS_PY_NO_GIL(rc = row->call(c, &err));
  if (rc == KVS_OK || (rc == KVS_NOT_READY && row->answer == KVS_SEAM_READY)) return answer_of(c, row->answer, rc);
  return kvs_py_raise(state, &err);
}

PyObject *kvs_py_seam(struct kvs_py_state *state, PyObject *const *args, Py_ssize_t nargs,
                      const struct kvs_seam_row *more, size_t nmore) {
  struct kvs_seam_call c = {0};
  PyObject *block = NULL, *result = NULL;
  if (nargs < 2) {
    PyErr_SetString(PyExc_TypeError, "_seam() takes a device, the name of a member and its arguments");
    return NULL;
  }
  const struct kvs_seam_row *row = find_row(args[1], more, nmore);
  if (!row) return NULL;
  int lists = row->copies ? 3 : 0;
  if (nargs < 2 + lists) {
    PyErr_Format(PyExc_TypeError, "%s takes three lists and a stream", row->name);
    return NULL;
  }
  struct kvs_engine *engine = kvs_py_engine_from(state, args[0]);
  if (!engine) return NULL;
  c.device = kvs_engine_device(engine);
  if ((lists == 0 || read_copies(state, args + 2, &c, &block) == 0) &&
      read_numbers(args + 2 + lists, nargs - 2 - lists, row, &c) == 0)
    result = make_call(state, row, &c);
  for (int i = 0; i < 3; i++) Py_XDECREF(c.lists[i].keep);
  Py_XDECREF(block);
  kvs_engine_unref(engine);
  return result;
}

static PyObject *seam(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
  return kvs_py_seam(PyModule_GetState(module), args, nargs, NULL, 0);
}

PyDoc_STRVAR(seam_doc,
             "_seam($module, device, operation, /, *args)\n--\n\n"
             "Call one member of csrc/device/device.h and return what it returns.\n\n"
             "copy_batch takes (dsts, srcs, sizes, stream), launch_copy (npieces, address of the pieces, grid, "
             "threads,\nstream), all others as they stand.");

PyMethodDef kvs_py_seam_methods[] = {
    {"_seam", (PyCFunction)(void (*)(void))seam, METH_FASTCALL, seam_doc},
    {NULL, NULL, 0, NULL},
};
