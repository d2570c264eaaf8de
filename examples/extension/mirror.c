/* An extension that uses kvswap without Python in between: it takes objects of Python's kvswap and calls C.
 *
 *   mirror.copy(device, src, dst, nbytes, count)   a kvswap.Transfer of `count` pieces, the last one first
 *
 *   mirror.wait_all(transfers, timeout)            wait for a list of transfers at once, without the GIL
 *
 * kvswap_capi.h says what the table has, and who owns what. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <kvswap_capi.h>
#include <stdlib.h>

/* -- copy ---------------------------------------------------------------------------------------------------------- */

/* 0 with a new transfer, or a status with *err filled. */
static int submit(struct kvs_engine *engine, uint64_t src, uint64_t dst, uint64_t nbytes, size_t count,
                  struct kvs_transfer **transfer, struct kvs_error *err) {
  uint64_t *from = malloc(2 * count * sizeof *from), *to = from + count;
  if (from == NULL) return err->message[0] = '\0', err->status = KVS_NOMEM;
  for (size_t i = 0; i < count; i++) {
    from[i] = src + (count - 1 - i) * nbytes;
    to[i] = dst + (count - 1 - i) * nbytes;
  }
  int status = kvswap_api->swap_batch(engine, from, to, &nbytes, true, count, NULL, transfer, err);
  free(from); /* the lists were read during the call */
  return status;
}

static PyObject *mirror_copy(PyObject *module, PyObject *args) {
  PyObject *device;
  unsigned long long src, dst, nbytes, count;
  struct kvs_transfer *transfer = NULL;
  struct kvs_error err = {0};
  int status;
  (void)module;
  if (!PyArg_ParseTuple(args, "OKKKK:copy", &device, &src, &dst, &nbytes, &count)) return NULL;
  if (count == 0 || count > 1000000) return PyErr_Format(PyExc_ValueError, "count is %llu: 1 to 1000000", count);
  struct kvs_engine *engine = kvswap_api->engine_of(device); /* a new reference */
  if (engine == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = submit(engine, src, dst, nbytes, (size_t)count, &transfer, &err);
  kvswap_api->engine_unref(engine);
  Py_END_ALLOW_THREADS
  return status == KVS_OK ? kvswap_api->transfer_object(transfer) : kvswap_api->raise_error(&err);
}

/* -- wait_all ------------------------------------------------------------------------------------------------------ */

/* References of our own: another thread may drop the objects while this one waits without the GIL. */
static Py_ssize_t take(PyObject *list, struct kvs_transfer **transfers) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(list); i++) {
    transfers[i] = kvswap_api->transfer_of(PyTuple_GET_ITEM(list, i)); /* borrowed */
    if (transfers[i] == NULL) return i;
    kvswap_api->transfer_ref(transfers[i]);
  }
  return PyTuple_GET_SIZE(list);
}

static PyObject *mirror_wait_all(PyObject *module, PyObject *args) {
  PyObject *sequence;
  double seconds;
  struct kvs_error err = {0};
  int status = KVS_OK;
  (void)module;
  if (!PyArg_ParseTuple(args, "Od:wait_all", &sequence, &seconds)) return NULL;
  if (!(seconds >= 0 && seconds < 1e9)) return PyErr_Format(PyExc_ValueError, "timeout: 0 to 1e9 seconds");
  PyObject *list = PySequence_Tuple(sequence);
  if (list == NULL) return NULL;
  struct kvs_transfer **transfers = PyMem_Calloc((size_t)PyTuple_GET_SIZE(list) + 1, sizeof(struct kvs_transfer *));
  Py_ssize_t taken = transfers == NULL ? 0 : take(list, transfers);
  bool all = transfers != NULL && taken == PyTuple_GET_SIZE(list);
  Py_BEGIN_ALLOW_THREADS
  for (Py_ssize_t i = 0; all && status == KVS_OK && i < taken; i++)
    status = kvswap_api->transfer_wait(transfers[i], (int64_t)(seconds * 1e9), &err);
  for (Py_ssize_t i = 0; i < taken; i++) {
    kvswap_api->engine_collect(kvswap_api->transfer_engine(transfers[i])); /* drops what the transfers held */
    kvswap_api->transfer_unref(transfers[i]);
  }
  Py_END_ALLOW_THREADS
  PyMem_Free(transfers);
  Py_DECREF(list);
  if (transfers == NULL) return PyErr_NoMemory();
  if (!all) return NULL;
  return status == KVS_OK ? Py_NewRef(Py_None) : kvswap_api->raise_error(&err);
}

/* -- the module ---------------------------------------------------------------------------------------------------- */

static int mirror_exec(PyObject *module) {
  (void)module;
  return import_kvswap();
}

static PyMethodDef methods[] = {
    {"copy", mirror_copy, METH_VARARGS,
     "copy(device, src, dst, nbytes, count, /)\n--\n\nCopy count pieces of nbytes. Addresses; returns a Transfer."},
    {"wait_all", mirror_wait_all, METH_VARARGS,
     "wait_all(transfers, timeout, /)\n--\n\nWait for all of them; timeout: seconds for each."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)mirror_exec},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* kvswap's calls take no GIL, and nothing here relies on it */
#endif
    {0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "mirror", .m_methods = methods,
                                        .m_slots = slots};

PyMODINIT_FUNC PyInit_mirror(void) { return PyModuleDef_Init(&definition); }
