/* kvswap.move_blocks(). Its cost in Python does not grow with the number of blocks, except for reading the lists. */
#include "py/args.h"
#include "py/arrays.h"
#include "py/device_ids.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/transfer.h"

#include <string.h>

enum { SRC, DST, SRC_IDS, DST_IDS, PARTS, MOVE };
enum { FEW = 8 }; /* pairs whose pointers need no allocation */

static const char *const names[] = {
    "src", "dst", "src_ids", "dst_ids", "parts", KVS_PY_COMMON_NAMES, KVS_PY_LAYER_NAMES, "gpu_order", "valid_nbytes",
};
enum { GPU_ORDER = MOVE + KVS_PY_COMMON + KVS_PY_LAYERED, VALID_NBYTES, ARGUMENTS };
static const char *const gpu_orders[] = {"pool", "stream"};

struct move_args {
  struct kvs_py_state *state;
  struct kvs_move move;
  PyObject *sides[2]; /* a Pool, or a tuple of them */
  PyObject *keep[2];  /* of ids */
  int on_device;      /* SRC_IDS or DST_IDS: ids in GPU memory; 0: none */
  struct kvs_pool *few[2 * FEW], **pools;
  struct kvs_part *parts;
  struct kvs_py_options options;
  struct kvs_transfer *transfer;
};

static void move_clear(struct move_args *call) {
  for (int side = 0; side < 2; side++) {
    Py_XDECREF(call->sides[side]);
    Py_XDECREF(call->keep[side]);
  }
  if (call->pools != call->few) PyMem_Free(call->pools);
  PyMem_Free(call->parts);
  kvs_py_options_clear(&call->options);
}

/* -- pools --------------------------------------------------------------------------------------------------------- */

static bool is_pool(const struct move_args *call, PyObject *object) {
  return (PyObject *)Py_TYPE(object) == call->state->pool_type;
}

/* A tuple of a sequence: a list could change while we read it. */
static PyObject *read_side(const struct move_args *call, PyObject *object, const char *name) {
  if (is_pool(call, object)) return Py_NewRef(object);
  /* an array is an argument of the swap functions: refuse it before making a tuple of its items */
  bool other = PyUnicode_Check(object) || PyObject_CheckBuffer(object);
  PyObject *pools = other ? NULL : PySequence_Tuple(object);
  if (pools) return pools;
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return NULL;
    PyErr_Clear();
  }
  kvs_py_complain(PyExc_TypeError, name, -1, "must be a Pool or a sequence of Pools, not %s", Py_TYPE(object)->tp_name);
  return NULL;
}

static size_t count_of(const struct move_args *call, int side) {
  return is_pool(call, call->sides[side]) ? 1 : (size_t)PyTuple_GET_SIZE(call->sides[side]);
}

static int fill_pools(struct move_args *call, int side, size_t count, struct kvs_pool **pools) {
  PyObject *object = call->sides[side];
  bool one = is_pool(call, object);
  for (size_t i = 0; i < count; i++) {
    PyObject *pool = one ? object : PyTuple_GET_ITEM(object, (Py_ssize_t)i);
    Py_ssize_t index = one ? -1 : (Py_ssize_t)i;
    if (!is_pool(call, pool))
      return kvs_py_complain(PyExc_TypeError, names[side], index, "must be a Pool, not %s", Py_TYPE(pool)->tp_name);
    if (side == DST && kvs_py_pool_readonly(pool))
      return kvs_py_complain(PyExc_ValueError, names[side], index,
                             "is the destination, and a pool of read-only memory");
    pools[i] = kvs_py_pool_core(pool);
  }
  return 0;
}

static int read_pools(struct move_args *call, PyObject *const *values) {
  for (int side = SRC; side <= DST; side++)
    if (!(call->sides[side] = read_side(call, values[side], names[side]))) return -1;
  size_t count = count_of(call, SRC);
  if (kvs_py_same_length("dst", count_of(call, DST), "src", count) < 0) return -1;
  if (count == 0) return kvs_py_complain(PyExc_ValueError, "src", -1, "has no pools: at least one pair is needed");
  call->pools = count <= FEW ? call->few : PyMem_Calloc(2 * count, sizeof(struct kvs_pool *));
  if (!call->pools) {
    PyErr_NoMemory();
    return -1;
  }
  call->move.src = call->pools;
  call->move.dst = call->pools + count;
  call->move.npairs = count;
  if (fill_pools(call, SRC, count, call->pools) < 0 || fill_pools(call, DST, count, call->pools + count) < 0) return -1;
  call->options.hold = PyTuple_Pack(2, call->sides[SRC], call->sides[DST]);
  return call->options.hold ? 0 : -1;
}

/* -- the call ------------------------------------------------------------------------------------------------------ */

static int read_lists(struct move_args *call, PyObject *const *values) {
  struct kvs_move *move = &call->move;
  struct kvs_ids *lists[] = {&move->src_ids, &move->dst_ids};
  for (int i = SRC_IDS; i <= DST_IDS; i++) {
    int on_device = kvs_py_on_device(call->state, values[i]);
    if (on_device < 0) return -1;
    if (on_device && call->on_device)
      return kvs_py_complain(
          PyExc_TypeError, "dst_ids", -1,
          "and src_ids are both GPU arrays: ids of the host's side must be in host memory, ids.cpu()");
    if (on_device)
      call->on_device = i;
    else if (kvs_py_ids(call->state, values[i], names[i], lists[i - SRC_IDS], &call->keep[i - SRC_IDS]) < 0)
      return -1;
  }
  if (!call->on_device && kvs_py_same_length("dst_ids", move->dst_ids.count, "src_ids", move->src_ids.count) < 0)
    return -1;
  if (!kvs_py_given(values[PARTS])) return 0;
  if (kvs_py_parts(values[PARTS], "parts", &call->parts, &move->nparts) < 0) return -1;
  move->parts = call->parts;
  return 0;
}

/* The number of layers, for after_layers. The core checks that the parts' layers ascend without gaps. */
static size_t layers_of(const struct kvs_move *move) {
  if (!move->parts) return move->npairs;
  return move->nparts == 0 ? 0 : (size_t)move->parts[move->nparts - 1].layer + 1;
}

static int submit(void *arg, struct kvs_error *err) {
  struct move_args *call = arg;
  return kvs_move_blocks(&call->move, &call->options.core, &call->transfer, err);
}

static int read_gpu_order(struct move_args *call, PyObject *value) {
  if (!value) return 0;
  int order = kvs_py_choice(value, "gpu_order", gpu_orders, 2);
  if (order < 0) return -1;
  if (order == KVS_GPU_ORDER_STREAM && !call->on_device)
    return kvs_py_complain(PyExc_ValueError, "gpu_order", -1,
                           "is 'stream', which is for ids in GPU memory: these are known, and so are their hazards");
  call->options.core.gpu_order = (enum kvs_gpu_order)order;
  return 0;
}

static int read_valid(struct move_args *call, PyObject *value) {
  uint64_t *nbytes = &call->move.valid_nbytes;
  if (!kvs_py_given(value)) return 0;
  if (kvs_py_uint64(value, "valid_nbytes", -1, nbytes) < 0) return -1;
  return *nbytes ? 0 : kvs_py_complain(PyExc_ValueError, "valid_nbytes", -1, "is 0: must be at least 1, or None");
}

static PyObject *move_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"move_blocks", names, 4, 4, ARGUMENTS};
  PyObject *values[ARGUMENTS], *result = NULL;
  struct move_args call = {.state = PyModule_GetState(module)};
  struct kvs_py_options *options = &call.options;
  options->common = values + MOVE;
  options->layered = values + MOVE + KVS_PY_COMMON;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  PyObject *range = kvs_py_trace_begin(call.state, spec.function);
  if (kvs_py_options_check(options) == 0 && read_pools(&call, values) == 0 && read_lists(&call, values) == 0 &&
      read_gpu_order(&call, values[GPU_ORDER]) == 0 && read_valid(&call, values[VALID_NBYTES]) == 0) {
    struct kvs_engine *engine = kvs_pool_engine(call.move.src[0]);
    int ids = call.on_device;
    if (kvs_py_options_read(call.state, engine, layers_of(&call.move), options) == 0 &&
        (!ids || kvs_py_device_ids(call.state, values[ids], names[ids], engine, options) == 0) &&
        kvs_py_submit(call.state, engine, options, submit, &call) == 0)
      result = kvs_py_transfer_new(call.state, call.transfer);
  }
  move_clear(&call);
  return kvs_py_trace_end(range, result);
}

PyDoc_STRVAR(
    move_blocks_doc,
    "move_blocks($module, /, src, dst, src_ids, dst_ids, *, parts=None, layer_events=False, after_layers=None, "
    "stream=None, after=(), path='auto', priority=None, max_ctas=None, pace_gbps=None, gpu_order='pool', "
    "valid_nbytes=None)\n--\n\n"
    "Copy slot src_ids[i] of each source Pool to slot dst_ids[i] of its destination Pool; returns the Transfer.\n"
    "\n"
    "The transfer starts after the transfers between pools, on any lane, that write its source slots, and that read\n"
    "or write its destination slots; streams alone order it with other work. A block fails if its source slot was to\n"
    "be written by a failed transfer. Its destination slot then counts as failed too, until a whole block is written\n"
    "to it or note_access() records a write.\n"
    "\n"
    "src, dst: a Pool each, or sequences of as many Pools, which form pairs, all of one device: GPU to host, host to "
    "GPU, or within\n"
    "  one of them.\n"
    "src_ids, dst_ids: int32 or int64 arrays (n,), or sequences of ints, of one length. No destination slot twice,\n"
    "  and no slot both read and written. Those of the GPU's side may lie in GPU memory.\n" KVS_PY_DEVICE_IDS_DOC
    "gpu_order: with ids in GPU memory. 'pool': the transfer is ordered as if it touched every slot of the GPU's "
    "pools.\n"
    "  'stream': on that side the caller orders it, by stream= and after=.\n"
    "parts: None: whole blocks, pair i being layer i. Else an integer array, shape (p, 6): the parts of each\n"
    "  block to move. Columns: pair, layer, offset, rows, row_nbytes, row_pitch: `rows` rows of row_nbytes bytes,\n"
    "  row_pitch bytes apart, the first at offset. Offsets count the block's own bytes, 0 to block_nbytes, row by "
    "row.\n"
    "  Layers count from 0 without gaps; the parts of a pair ascend in the block and do not overlap.\n"
    "valid_nbytes: of blocks that are coded on the way and hold fewer tokens than they could: the bytes of each page\n"
    "  that count. Those behind are coded as zeros, whatever stands there.\n" KVS_PY_LAYER_DOC
        KVS_PY_ORDER_DOC KVS_PY_PATH_DOC "\nThe pools are held until the transfer ends.\n" KVS_PY_CHECKED_DOC);

PyMethodDef kvs_py_move_methods[] = {
    {"move_blocks", KVS_PY_FASTCALL(move_blocks), METH_FASTCALL | METH_KEYWORDS, move_blocks_doc},
    {NULL, NULL, 0, NULL},
};
