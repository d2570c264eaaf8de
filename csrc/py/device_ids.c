/* Block ids in GPU memory: arrays of torch, CuPy and others, by DLPack or __cuda_array_interface__. None of these
 * packages is imported.
 *
 * What the ids must come after: DLPack's producer makes a stream wait that it is given. The transfer starts after that
 * stream, which is the caller's `stream`, else the device's compute stream. __cuda_array_interface__ names the
 * producer's stream, which the transfer starts after. */
#include "py/device_ids.h"
#include "py/address.h"
#include "py/args.h"
#include "py/objects.h"

int kvs_py_on_device(struct kvs_py_state *state, PyObject *ids) {
  PyObject *interface;
  if (kvs_py_is_array(ids) || PyList_CheckExact(ids) || PyTuple_CheckExact(ids) || PyType_Check(ids)) return 0;
  int where = kvs_py_dlpack_device(state, ids);
  if (where < 0 && !PyErr_ExceptionMatches(PyExc_Exception)) return -1;
  if (where < 0) PyErr_Clear(); /* no DLPack then */
  if (where > 0) return where == 2;
  int has = kvs_py_attribute(ids, state->s_cuda_array, &interface);
  if (has == 1) Py_DECREF(interface);
  return has;
}

int kvs_py_refuse_on_device(struct kvs_py_state *state, PyObject *ids, const char *name) {
  int on_device = kvs_py_on_device(state, ids);
  if (on_device <= 0) return on_device;
  return kvs_py_complain(PyExc_TypeError, name, -1,
                         "is a GPU array (%s): only ids of the GPU's side may be on the device; pass ids.cpu()",
                         Py_TYPE(ids)->tp_name);
}

static int check(const struct kvs_py_strided *ids, const char *name) {
  if (ids->kind != 'i' || (ids->width != 4 && ids->width != 8))
    return kvs_py_complain(PyExc_TypeError, name, -1,
                           "is a GPU array of %s%u: on the device ids are int32 or int64, in native byte order",
                           ids->kind == 'i'   ? "int"
                           : ids->kind == 'u' ? "uint"
                           : ids->kind == 'f' ? "float"
                                              : "items of another kind, bits: ",
                           8 * ids->width);
  if (ids->ndim != 1 && ids->ndim != 2)
    return kvs_py_complain(PyExc_ValueError, name, -1,
                           "must have one dimension, or two, a row of tokens for each block; not %d", ids->ndim);
  if (ids->tokens < 1)
    return kvs_py_complain(PyExc_ValueError, name, -1, "has rows of no tokens; a block has at least one");
  return 0;
}

/* The stream of the array's own, behind what the caller names. */
static int start_after(struct kvs_py_options *options, uint64_t stream) {
  struct kvs_options *core = &options->core;
  struct kvs_after *more = PyMem_Calloc(core->nafter + 1, sizeof *more);
  if (!more) {
    PyErr_NoMemory();
    return -1;
  }
  for (size_t i = 0; i < core->nafter; i++) more[i] = core->after[i];
  more[core->nafter++] = (struct kvs_after){.kind = KVS_AFTER_STREAM, .handle = stream};
  core->after = options->more_after = more;
  return 0;
}

/* The owner may be a tuple so far. */
static int hold(struct kvs_py_options *options, PyObject *ids, PyObject *keep) {
  PyObject *list = options->hold && PyList_CheckExact(options->hold) ? options->hold : NULL;
  PyObject *before = list ? NULL : options->hold;
  int rc = before ? kvs_py_hold(&list, before) : 0;
  if (rc == 0) rc = kvs_py_hold(&list, ids);
  if (rc == 0) rc = kvs_py_hold(&list, keep);
  Py_XDECREF(before);
  options->hold = list;
  options->core.owner = list;
  options->core.release = list ? kvs_py_release_owner : NULL;
  return rc;
}

int kvs_py_device_ids(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_engine *engine,
                      struct kvs_py_options *options) {
  struct kvs_py_strided ids = {0};
  PyObject *keep = NULL;
  uint64_t stream = options->core.on_stream ? options->core.stream : kvs_engine_compute_stream(engine);
  int has = kvs_py_dlpack_device(state, object);
  if (has < 0 && !PyErr_ExceptionMatches(PyExc_Exception)) return -1;
  if (has < 0) PyErr_Clear(); /* no DLPack then */
  has = has == 2 ? kvs_py_dlpack_ids(state, object, name, stream, &keep, &ids)
                 : kvs_py_interface_ids(state, object, name, &keep, &ids);
  if (has == 0) kvs_py_complain(PyExc_TypeError, name, -1, "is a GPU array that cannot be read");
  int rc = has == 1 ? check(&ids, name) : -1;
  if (rc == 0 && ids.ordered) rc = start_after(options, ids.stream);
  if (rc == 0) rc = hold(options, object, keep);
  Py_XDECREF(keep);
  if (rc < 0) return -1;
  options->device_ids = (struct kvs_device_ids){.ptr = ids.ptr,
                                                .stride = ids.stride,
                                                .count = ids.count,
                                                .width = ids.width,
                                                .tokens = ids.tokens,
                                                .token_stride = ids.step};
  options->core.device_ids = &options->device_ids;
  return 0;
}
