/* kvswap._C.OffloadMap, to which kvswap.offload submits jobs. The map and its transfers hold its tensors. */
#include "py/args.h"
#include "py/arrays.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/options.h"
#include "py/races.h"
#include "py/transfer.h"
#include "py/wait.h"

#include <string.h>

struct map_object {
  PyObject_HEAD
  struct kvs_offload *map;
  struct kvs_engine *engine;
};

static struct map_object *as_map(PyObject *self) { return (struct map_object *)self; }

enum { TENSOR_COLUMNS = 8, PART_COLUMNS = 10 };

/* -- making one ---------------------------------------------------------------------------------------------------- */

struct tables {
  struct kvs_py_list numbers[2];
  struct kvs_offload_tensor *tensors;
  struct kvs_offload_part *parts;
};

static int read_table(struct kvs_py_state *state, PyObject *object, const char *name, size_t columns,
                      struct kvs_py_list *list, size_t *rows) {
  if (kvs_py_numbers(state, object, name, list) < 0) return -1;
  if (list->one || list->count % columns != 0)
    return kvs_py_complain(PyExc_ValueError, name, -1, "must be rows of %zu integers, one after another", columns);
  *rows = list->count / columns;
  return 0;
}

static int fill_tensors(struct tables *tables, struct kvs_offload_layout *layout) {
  const uint64_t *row = tables->numbers[0].data;
  tables->tensors = PyMem_Calloc(layout->ntensors + 1, sizeof *tables->tensors);
  if (!tables->tensors) return PyErr_NoMemory() ? 0 : -1;
  for (size_t i = 0; i < layout->ntensors; i++, row += TENSOR_COLUMNS)
    tables->tensors[i] = (struct kvs_offload_tensor){row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7]};
  layout->tensors = tables->tensors;
  return 0;
}

static int fill_parts(struct tables *tables, struct kvs_offload_layout *layout) {
  const uint64_t *row = tables->numbers[1].data;
  tables->parts = PyMem_Calloc(layout->nparts + 1, sizeof *tables->parts);
  if (!tables->parts) return PyErr_NoMemory() ? 0 : -1;
  for (size_t i = 0; i < layout->nparts; i++, row += PART_COLUMNS) {
    if (row[0] > UINT32_MAX || row[1] > UINT32_MAX)
      return kvs_py_complain(PyExc_ValueError, "parts", (Py_ssize_t)i, "names a group or tensor beyond 2**32");
    tables->parts[i] = (struct kvs_offload_part){.group = (uint32_t)row[0],
                                                 .tensor = (uint32_t)row[1],
                                                 .gpu_offset = row[2],
                                                 .cpu_offset = row[3],
                                                 .nbytes = row[4],
                                                 .count = row[5],
                                                 .gpu_pitch = row[6],
                                                 .cpu_pitch = row[7],
                                                 .writers = row[8],
                                                 .writer = row[9]};
  }
  layout->parts = tables->parts;
  return 0;
}

static void tables_clear(struct tables *tables) {
  for (int i = 0; i < 2; i++) Py_XDECREF(tables->numbers[i].keep);
  PyMem_Free(tables->tensors);
  PyMem_Free(tables->parts);
}

static int open_map(struct kvs_py_state *state, struct map_object *self, struct kvs_offload_layout *layout,
                    PyObject *hold) {
  struct kvs_error err = {0};
  int rc;
  layout->owner = Py_NewRef(hold);
  layout->release = kvs_py_release_owner;
  KVS_PY_NO_GIL(rc = kvs_offload_open(self->engine, layout, &self->map, &err));
  if (rc == KVS_OK) return 0;
  self->map = NULL;
  Py_DECREF(hold);
  kvs_py_raise(state, &err);
  return -1;
}

static int read_layout(struct kvs_py_state *state, PyObject *const *values, struct tables *tables,
                       struct kvs_offload_layout *layout) {
  uint64_t groups;
  if (read_table(state, values[0], "tensors", TENSOR_COLUMNS, &tables->numbers[0], &layout->ntensors) < 0) return -1;
  if (read_table(state, values[1], "parts", PART_COLUMNS, &tables->numbers[1], &layout->nparts) < 0) return -1;
  if (kvs_py_uint64(values[2], "num_groups", -1, &groups) < 0) return -1;
  if (kvs_py_uint64(values[3], "num_chunks", -1, &layout->chunks) < 0) return -1;
  if (kvs_py_uint64(values[4], "blocks_per_chunk", -1, &layout->factor) < 0) return -1;
  if (groups > UINT32_MAX) return kvs_py_complain(PyExc_ValueError, "num_groups", -1, "is %R", values[2]);
  layout->ngroups = (size_t)groups;
  return fill_tensors(tables, layout) < 0 ? -1 : fill_parts(tables, layout);
}

static PyObject *map_create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"device", "tensors",           "parts", "num_groups", "num_chunks", "blocks_per_chunk",
                          "hold",   "remember_failures", NULL};
  struct kvs_py_state *state = PyType_GetModuleState(type);
  PyObject *device, *values[5], *hold = Py_None;
  struct tables tables = {.tensors = NULL};
  struct kvs_offload_layout layout = {0};
  int remember = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO|$Op:OffloadMap", names, &device, &values[0], &values[1],
                                   &values[2], &values[3], &values[4], &hold, &remember))
    return NULL;
  struct map_object *self = (struct map_object *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  layout.remember_failures = remember != 0;
  bool made = (self->engine = kvs_py_engine_from(state, device)) != NULL &&
              read_layout(state, values, &tables, &layout) == 0 && open_map(state, self, &layout, hold) == 0;
  tables_clear(&tables);
  if (made) return (PyObject *)self;
  Py_DECREF(self);
  return NULL;
}

static void map_dealloc(PyObject *self) {
  struct kvs_offload *map = as_map(self)->map;
  struct kvs_engine *engine = as_map(self)->engine;
  kvs_py_object_free(self);
  Py_BEGIN_ALLOW_THREADS
  if (map) kvs_offload_close(map);
  if (engine) kvs_engine_unref(engine);
  Py_END_ALLOW_THREADS
}

/* -- submitting ---------------------------------------------------------------------------------------------------- */

enum { GPU_BLOCKS, CHUNKS, GROUP_SIZES, BLOCK_INDICES, DIRECTION, COMMON };
enum { FIRST = COMMON + KVS_PY_COMMON, AFTER_COMPUTE, LAYER_EVENTS, ARGUMENTS };
static const char *const names[] = {"gpu_blocks",        "chunks", "group_sizes",   "block_indices", "direction",
                                    KVS_PY_COMMON_NAMES, "first",  "after_compute", "layer_events"};

struct offload_args {
  struct kvs_offload *map;
  struct kvs_offload_job job;
  PyObject *keep[4];
  struct kvs_py_options options;
  size_t next, count;
  struct kvs_transfer **transfers;
  struct kvs_error err;
};

static int read_job(struct kvs_py_state *state, PyObject *const *values, struct offload_args *call) {
  struct kvs_ids *lists[] = {&call->job.gpu_blocks, &call->job.chunks, &call->job.group_sizes,
                             &call->job.block_indices};
  int64_t direction;
  uint64_t next = 0;
  for (int i = GPU_BLOCKS; i <= BLOCK_INDICES; i++)
    if (kvs_py_ids(state, values[i], names[i], lists[i], &call->keep[i]) < 0) return -1;
  if (kvs_py_direction(values[DIRECTION], &direction) < 0) return -1;
  call->job.direction = (enum kvs_direction)direction;
  if (values[FIRST] && kvs_py_uint64(values[FIRST], "first", -1, &next) < 0) return -1;
  call->next = (size_t)next;
  int compute = values[AFTER_COMPUTE] ? PyObject_IsTrue(values[AFTER_COMPUTE]) : 0;
  call->options.core.after_compute = compute == 1;
  return compute < 0 ? -1 : 0;
}

/* The transfers as Python objects. A transfer whose object cannot be created goes on without a handle. */
static PyObject *make_transfers(struct kvs_py_state *state, struct offload_args *call) {
  PyObject *tuple = PyTuple_New((Py_ssize_t)call->count);
  for (size_t i = 0; i < call->count; i++) {
    PyObject *transfer = tuple ? kvs_py_transfer_new(state, call->transfers[i]) : NULL;
    if (!tuple) kvs_transfer_unref(call->transfers[i]);
    if (tuple && !transfer) Py_CLEAR(tuple);
    if (tuple) PyTuple_SET_ITEM(tuple, (Py_ssize_t)i, transfer);
  }
  return tuple;
}

static PyObject *submit(struct kvs_py_state *state, struct map_object *self, struct offload_args *call) {
  int rc;
  call->transfers = PyMem_Calloc(kvs_offload_most(call->map), sizeof(struct kvs_transfer *));
  if (!call->transfers) return PyErr_NoMemory();
  kvs_py_collect(self->engine);
  KVS_PY_NO_GIL(rc = kvs_offload_submit(call->map, &call->job, &call->options.core, &call->next, call->transfers,
                                        &call->count, &call->err));
  if (rc != KVS_OK && call->count == 0) return kvs_py_raise(state, &call->err);
  kvs_py_tell_races(state);
  PyObject *transfers = make_transfers(state, call);
  PyObject *error = rc == KVS_OK ? Py_NewRef(Py_None) : kvs_py_exception(state, &call->err);
  PyObject *result = NULL;
  if (transfers && error) result = Py_BuildValue("(OnO)", transfers, (Py_ssize_t)call->next, error);
  Py_XDECREF(transfers);
  Py_XDECREF(error);
  return result;
}

static PyObject *map_submit(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"submit", names, COMMON, COMMON, ARGUMENTS};
  struct kvs_py_state *state = kvs_py_state_of(self);
  PyObject *values[ARGUMENTS], *result = NULL;
  struct offload_args call = {.map = as_map(self)->map};
  call.options.common = values + COMMON;
  PyObject *layered[2] = {NULL, NULL}; /* after_layers is not taken */
  call.options.layered = layered;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  layered[0] = values[LAYER_EVENTS];
  PyObject *range = kvs_py_trace_begin(state, "OffloadMap.submit");
  if (kvs_py_options_check(&call.options) == 0 && read_job(state, values, &call) == 0 &&
      kvs_py_options_read(state, as_map(self)->engine, 0, &call.options) == 0)
    result = submit(state, as_map(self), &call);
  for (int i = 0; i < 4; i++) Py_XDECREF(call.keep[i]);
  PyMem_Free(call.transfers);
  kvs_py_options_clear(&call.options);
  return kvs_py_trace_end(range, result);
}

/* -- the order of copying ------------------------------------------------------------------------------------------ */

static PyObject *one_transfer(const struct kvs_offload_order *order) {
  PyObject *tensors = PyTuple_New((Py_ssize_t)order->nlayers);
  for (size_t i = 0; tensors && i < order->nlayers; i++) {
    PyObject *tensor = PyLong_FromUnsignedLong(order->tensors[i]);
    if (!tensor) Py_CLEAR(tensors);
    if (tensor) PyTuple_SET_ITEM(tensors, (Py_ssize_t)i, tensor);
  }
  if (!tensors) return NULL;
  return Py_BuildValue("(nNO)", (Py_ssize_t)order->group, tensors, order->every_block ? Py_True : Py_False);
}

static PyObject *map_order(PyObject *self, void *unused) {
  struct kvs_error end;
  struct kvs_offload_order order;
  (void)unused;
  PyObject *list = PyList_New(0);
  for (size_t i = 0; list && kvs_offload_get_order(as_map(self)->map, i, &order, &end) == KVS_OK; i++) {
    PyObject *transfer = one_transfer(&order);
    if (!transfer || PyList_Append(list, transfer) < 0) Py_CLEAR(list);
    Py_XDECREF(transfer);
  }
  PyObject *tuple = list ? PyList_AsTuple(list) : NULL;
  Py_XDECREF(list);
  return tuple;
}

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(
    map_doc,
    "OffloadMap(device, tensors, parts, num_groups, num_chunks, blocks_per_chunk, *, hold=None, "
    "remember_failures=True)\n--\n\n"
    "The places of a cache's blocks on the GPU and on the host, for kvswap.offload.\n\n"
    "tensors: rows of 8 integers, flat: gpu, gpu_blocks, gpu_stride, gpu_page, cpu, cpu_stride, cpu_page, cpu_pitch.\n"
    "  Block j of chunk c is the cpu_page bytes at cpu + c * cpu_stride + j * cpu_pitch.\n"
    "parts: rows of 10: group, tensor, gpu_offset, cpu_offset, nbytes, count, gpu_pitch, cpu_pitch, writers, writer.\n"
    "hold: an object kept until the map is gone and its transfers have ended.\n"
    "remember_failures: a load of a chunk that a failed store was to write fails too, until it is stored again.\n\n"
    "ValueError: a layout that does not fit, or unknown memory. Any thread may use it.");

PyDoc_STRVAR(
    submit_doc,
    "submit($self, /, gpu_blocks, chunks, group_sizes, block_indices, direction, *, stream=None, after=(), "
    "path='auto', priority=None, max_ctas=None, pace_gbps=None, first=0, after_compute=False,\n"
    "layer_events=False)\n--\n\n"
    "Queue a job: (transfers, next, error). error None: all was queued. Else the transfers go on, and the same call "
    "with\n"
    "first=next submits the rest. If nothing was queued, the error is raised.\n\n"
    "gpu_blocks, chunks, group_sizes, block_indices: integer arrays or sequences.\n"
    "direction: 0 or 'D2H' stores, 1 or 'H2D' loads.\n"
    "after_compute: with a stream too, start after the device's compute stream.\n"
    "layer_events: each transfer can be waited for layer by layer, in the order of "
    "`order`.\n" KVS_PY_ORDER_DOC KVS_PY_PATH_DOC "\n" KVS_PY_CHECKED_DOC);

static PyMethodDef methods[] = {
    {"submit", KVS_PY_FASTCALL(map_submit), METH_FASTCALL | METH_KEYWORDS, submit_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"order", map_order, NULL,
     "tuple: an entry for each transfer of a job with blocks in all groups: (group, tensors, every_block). Layer k of "
     "the\n"
     "transfer is a part of tensor tensors[k]. A group without blocks in a load has no transfer; unless every_block, "
     "a\n"
     "load may lack it in any case.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)map_doc}, {Py_tp_new, map_create}, {Py_tp_dealloc, map_dealloc},
    {Py_tp_methods, methods},     {Py_tp_getset, getset},  {0, NULL},
};

PyType_Spec kvs_py_offload_spec = {
    .name = "kvswap._C.OffloadMap",
    .basicsize = sizeof(struct map_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
