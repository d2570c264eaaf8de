/* The five swap functions. One implementation: a struct swap_call is filled from the arguments, submitted, and cleared;
 * each function's differences are in its struct swap_kind. */
#include "py/address.h"
#include "py/args.h"
#include "py/device_ids.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/transfer.h"

#include <stdio.h>
#include <string.h>

enum batch { SRC_PTRS, DST_PTRS, SIZES, BATCH };
enum cache {
  GPU_PTR,
  CPU_PTR,
  BLOCK_NBYTES,
  NUM_GPU,
  NUM_CPU,
  GPU_IDS,
  CPU_IDS,
  DIRECTION,
  GPU_STRIDE,
  CPU_STRIDE,
  CACHE
};
enum { COMMON = KVS_PY_COMMON + 1 }; /* the common options, then device */
enum { PER_TENSOR = 5 }; /* numbers that may differ between tensors: block_nbytes, the two counts, the two strides */

#define COMMON_NAMES KVS_PY_COMMON_NAMES, "device"
#define CACHE_NAMES(s)                                                                                                 \
  "gpu_ptr" s, "cpu_ptr" s, "block_nbytes", "num_gpu_blocks", "num_cpu_blocks", "gpu_block_ids", "cpu_block_ids",      \
      "direction", "gpu_stride", "cpu_stride", COMMON_NAMES

static const char *const batch_names[] = {"src_ptrs", "dst_ptrs", "sizes", COMMON_NAMES};
static const char *const layer_names[] = {CACHE_NAMES("")};
static const char *const layers_names[] = {CACHE_NAMES("s"), KVS_PY_LAYER_NAMES};

struct swap_call {
  struct kvs_py_state *state;
  const char *const *names;
  PyObject **values;
  struct kvs_py_list ptrs[2]; /* gpu and cpu, or source and destination */
  struct kvs_py_list numbers[PER_TENSOR];
  struct kvs_tensor single, *tensors;
  struct kvs_ids ids[2];
  PyObject *keep[2]; /* of ids */
  bool on_device;    /* gpu_block_ids */
  int64_t direction;
  struct kvs_engine *engine;
  struct kvs_py_options options;
  struct kvs_transfer *transfer;
};

struct swap_kind {
  struct kvs_py_args args;
  int common; /* index of the first common argument */
  bool many, sync, layered;
  int (*read)(struct swap_call *call, const struct swap_kind *kind);
  int (*submit)(void *call, struct kvs_error *err);
};

static void swap_clear(struct swap_call *call) {
  for (int i = 0; i < 2; i++) {
    Py_XDECREF(call->ptrs[i].keep);
    Py_XDECREF(call->keep[i]);
  }
  for (int i = 0; i < PER_TENSOR; i++) Py_XDECREF(call->numbers[i].keep);
  if (call->tensors != &call->single) PyMem_Free(call->tensors);
  kvs_py_options_clear(&call->options);
  if (call->engine) kvs_engine_unref(call->engine);
}

/* -- lists of pointers --------------------------------------------------------------------------------------------- */

/* Copy sizes that were checked against tensors: they must not change before the core reads them. */
static int keep_sizes(struct kvs_py_list *sizes) {
  uint64_t *copy;
  PyObject *array = kvs_py_uint64_array(sizes->count, &copy);
  if (!array) return -1;
  memcpy(copy, sizes->data, sizes->count * sizeof *copy);
  Py_XDECREF(sizes->keep);
  sizes->data = copy;
  sizes->keep = array;
  return 0;
}

static int check_limits(const struct kvs_py_list *ptrs, const struct kvs_py_list *sizes, const char *name) {
  for (size_t i = 0; ptrs->limits && i < ptrs->count; i++) {
    uint64_t size = sizes->data[sizes->one ? 0 : i];
    if (size > ptrs->limits[i])
      return kvs_py_complain(PyExc_ValueError, name, (Py_ssize_t)i,
                             "is a tensor of %llu bytes, but %llu are to be copied",
                             (unsigned long long)ptrs->limits[i], (unsigned long long)size);
  }
  return 0;
}

static int read_batch(struct swap_call *call, const struct swap_kind *kind) {
  const char *const *names = kind->args.names;
  struct kvs_py_list *sizes = &call->numbers[0];
  for (int side = SRC_PTRS; side <= DST_PTRS; side++)
    if (kvs_py_pointers(call->state, call->values[side], names[side], side == DST_PTRS, &call->options.hold,
                        &call->ptrs[side]) < 0)
      return -1;
  if (kvs_py_numbers(call->state, call->values[SIZES], "sizes", sizes) < 0) return -1;
  if (kvs_py_same_length("dst_ptrs", call->ptrs[1].count, "src_ptrs", call->ptrs[0].count) < 0) return -1;
  if (!sizes->one && kvs_py_same_length("sizes", sizes->count, "src_ptrs", call->ptrs[0].count) < 0) return -1;
  bool limited = call->ptrs[0].limits || call->ptrs[1].limits;
  if (limited && !sizes->one && keep_sizes(sizes) < 0) return -1;
  if (check_limits(&call->ptrs[0], sizes, "src_ptrs") < 0) return -1;
  return check_limits(&call->ptrs[1], sizes, "dst_ptrs");
}

static int submit_batch(void *arg, struct kvs_error *err) {
  struct swap_call *call = arg;
  const struct kvs_py_list *sizes = &call->numbers[0];
  return kvs_swap_batch(call->engine, call->ptrs[0].data, call->ptrs[1].data, sizes->data, sizes->one,
                        call->ptrs[0].count, &call->options.core, &call->transfer, err);
}

/* -- caches: tensors and ids --------------------------------------------------------------------------------------- */

static int read_tensor(struct swap_call *call, const char *name, PyObject *value, bool write,
                       struct kvs_py_list *list) {
  struct kvs_py_address address;
  if (kvs_py_read_address(call->state, value, name, -1, write, &call->options.hold, &address) < 0) return -1;
  list->single[0] = address.ptr;
  list->single[1] = address.nbytes;
  list->data = &list->single[0];
  list->limits = &list->single[1];
  list->count = 1;
  return 0;
}

static int read_sides(struct swap_call *call, const struct swap_kind *kind) {
  for (int side = GPU_PTR; side <= CPU_PTR; side++) {
    bool write = (call->direction == KVS_H2D) == (side == GPU_PTR);
    struct kvs_py_list *list = &call->ptrs[side];
    const char *name = kind->args.names[side];
    int rc = kind->many ? kvs_py_pointers(call->state, call->values[side], name, write, &call->options.hold, list)
                        : read_tensor(call, name, call->values[side], write, list);
    if (rc < 0) return -1;
  }
  return kind->many ? kvs_py_same_length("cpu_ptrs", call->ptrs[1].count, "gpu_ptrs", call->ptrs[0].count) : 0;
}

static int read_numbers(struct swap_call *call, const struct swap_kind *kind) {
  static const int places[PER_TENSOR] = {BLOCK_NBYTES, NUM_GPU, NUM_CPU, GPU_STRIDE, CPU_STRIDE};
  for (int i = 0; i < PER_TENSOR; i++) {
    struct kvs_py_list *list = &call->numbers[i];
    PyObject *value = call->values[places[i]];
    const char *name = kind->args.names[places[i]];
    if (places[i] >= GPU_STRIDE && !kvs_py_given(value)) {
      list->one = true; /* 0: block_nbytes */
      list->data = list->single;
      continue;
    }
    if (!kind->many) {
      list->one = true;
      list->data = list->single;
      if (kvs_py_uint64(value, name, -1, &list->single[0]) < 0) return -1;
      continue;
    }
    if (kvs_py_numbers(call->state, value, name, list) < 0) return -1;
    if (!list->one && kvs_py_same_length(name, list->count, "gpu_ptrs", call->ptrs[0].count) < 0) return -1;
  }
  return 0;
}

static uint64_t number_at(const struct kvs_py_list *list, size_t i) { return list->data[list->one ? 0 : i]; }

/* A tensor of known size must be large enough for all its blocks and, without a stride, exactly as large. */
static int check_cover(const struct kvs_py_list *ptrs, size_t i, const char *name, bool many, uint64_t blocks,
                       uint64_t stride, uint64_t nbytes) {
  uint64_t limit = ptrs->limits ? ptrs->limits[i] : UINT64_MAX;
  uint64_t needed = 0;
  Py_ssize_t index = many ? (Py_ssize_t)i : -1;
  if (limit == UINT64_MAX || nbytes == 0) return 0; /* 0 is refused later */
  if (stride == 0) return kvs_py_check_size(name, index, limit, blocks, nbytes);
  if (blocks == 0) return 0;
  if (__builtin_mul_overflow(blocks - 1, stride, &needed) || __builtin_add_overflow(needed, nbytes, &needed))
    needed = UINT64_MAX;
  if (needed <= limit) return 0;
  return kvs_py_complain(PyExc_ValueError, name, index,
                         "is a tensor of %llu bytes, but %llu blocks of %llu bytes at stride %llu need %llu",
                         (unsigned long long)limit, (unsigned long long)blocks, (unsigned long long)nbytes,
                         (unsigned long long)stride, (unsigned long long)needed);
}

static int fill_tensors(struct swap_call *call, const struct swap_kind *kind) {
  const char *const *names = kind->args.names;
  const struct kvs_py_list *numbers = call->numbers;
  size_t count = call->ptrs[0].count;
  call->tensors = count <= 1 ? &call->single : PyMem_Calloc(count, sizeof *call->tensors);
  if (!call->tensors) {
    PyErr_NoMemory();
    return -1;
  }
  for (size_t i = 0; i < count; i++) {
    struct kvs_tensor tensor = {.gpu = call->ptrs[0].data[i],
                                .cpu = call->ptrs[1].data[i],
                                .nbytes = number_at(&numbers[0], i),
                                .gpu_blocks = number_at(&numbers[1], i),
                                .cpu_blocks = number_at(&numbers[2], i),
                                .gpu_stride = number_at(&numbers[3], i),
                                .cpu_stride = number_at(&numbers[4], i)};
    call->tensors[i] = tensor;
    if (check_cover(&call->ptrs[0], i, names[GPU_PTR], kind->many, tensor.gpu_blocks, tensor.gpu_stride,
                    tensor.nbytes) < 0 ||
        check_cover(&call->ptrs[1], i, names[CPU_PTR], kind->many, tensor.cpu_blocks, tensor.cpu_stride,
                    tensor.nbytes) < 0)
      return -1;
  }
  return 0;
}

/* Without tensors the core does not know how many blocks there are. */
static int check_range(const struct swap_call *call, int side, const struct swap_kind *kind) {
  const struct kvs_ids *ids = &call->ids[side];
  const struct kvs_py_list *blocks = &call->numbers[1 + side];
  if (call->ptrs[0].count > 0 || !blocks->one) return 0;
  for (size_t i = 0; i < ids->count; i++) {
    int64_t id = ids->width == 8 ? ((const int64_t *)ids->data)[i] : ((const int32_t *)ids->data)[i];
    if (id < 0 || (uint64_t)id >= blocks->single[0])
      return kvs_py_complain(PyExc_IndexError, kind->args.names[GPU_IDS + side], (Py_ssize_t)i,
                             "is %lld; that side has %llu blocks", (long long)id,
                             (unsigned long long)blocks->single[0]);
  }
  return 0;
}

static int read_cache(struct swap_call *call, const struct swap_kind *kind) {
  if (kvs_py_direction(call->values[DIRECTION], &call->direction) < 0 || read_sides(call, kind) < 0 ||
      read_numbers(call, kind) < 0)
    return -1;
  int on_device = kvs_py_on_device(call->state, call->values[GPU_IDS]);
  if (on_device < 0 || kvs_py_refuse_on_device(call->state, call->values[CPU_IDS], "cpu_block_ids") < 0) return -1;
  call->on_device = on_device == 1;
  for (int side = call->on_device; side < 2; side++)
    if (kvs_py_ids(call->state, call->values[GPU_IDS + side], kind->args.names[GPU_IDS + side], &call->ids[side],
                   &call->keep[side]) < 0 ||
        check_range(call, side, kind) < 0)
      return -1;
  if (!call->on_device &&
      kvs_py_same_length("cpu_block_ids", call->ids[1].count, "gpu_block_ids", call->ids[0].count) < 0)
    return -1;
  return fill_tensors(call, kind);
}

static int submit_cache(void *arg, struct kvs_error *err) {
  struct swap_call *call = arg;
  return kvs_swap_cache(call->engine, call->tensors, call->ptrs[0].count, &call->ids[0], &call->ids[1],
                        (enum kvs_direction)call->direction, &call->options.core, &call->transfer, err);
}

/* -- contents taken for addresses ---------------------------------------------------------------------------------- */

/* The items of an integer array are addresses, so that a tensor given by mistake is read as addresses. Where one of
 * them cannot be an address, add that to the ValueError of the core. */
static void explain_words(const struct swap_call *call, const struct swap_kind *kind) {
  const uint64_t lowest = 1 << 16, highest = (uint64_t)1 << 57; /* no process or GPU has memory outside */
  for (int side = 0; side < 2 && PyErr_ExceptionMatches(PyExc_ValueError); side++) {
    const struct kvs_py_list *list = &call->ptrs[side];
    size_t i = 0;
    while (list->words && i < list->count && list->data[i] >= lowest && list->data[i] < highest) i++;
    if (!list->words || i == list->count) continue;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_Format(PyExc_ValueError,
                 "%S (%s[%zu] is %lld, which is no address: the items of an integer array are read as addresses; to "
                 "pass the tensor itself, pass [tensor])",
                 value ? value : Py_None, kind->args.names[side], i, (long long)list->data[i]);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return;
  }
}

/* -- the call ------------------------------------------------------------------------------------------------------ */

/* The given device, else the device of the pointers: of a cache the GPU side's, of a batch either side's. */
static struct kvs_engine *find_engine(struct swap_call *call, PyObject *device, bool batch) {
  if (kvs_py_given(device) || call->ptrs[0].count == 0) return kvs_py_engine_from(call->state, device);
  const uint64_t first[2] = {call->ptrs[0].data[0], call->ptrs[1].data[0]};
  return kvs_py_engine_of(call->state, first, batch ? 2 : 1);
}

static PyObject *finish(struct swap_call *call, const struct swap_kind *kind) {
  if (!kind->sync) return kvs_py_transfer_new(call->state, call->transfer);
  int rc = kvs_py_transfer_wait(call->state, call->transfer, -1);
  kvs_transfer_unref(call->transfer);
  if (rc < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *swap(const struct swap_kind *kind, PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames) {
  PyObject *values[CACHE + COMMON + KVS_PY_LAYERED], *result = NULL;
  PyObject *const *common = values + kind->common, *const *device = common + KVS_PY_COMMON;
  struct swap_call call = {.state = PyModule_GetState(module), .names = kind->args.names, .values = values};
  struct kvs_py_options *options = &call.options;
  options->common = common;
  options->patient = kind->sync;
  options->layered = kind->layered ? device + 1 : NULL;
  if (kvs_py_args_parse(&kind->args, args, nargs, kwnames, values) < 0) return NULL;
  PyObject *range = kvs_py_trace_begin(call.state, kind->args.function);
  if (kvs_py_options_check(options) == 0 && kind->read(&call, kind) == 0) {
    if ((call.engine = find_engine(&call, *device, kind->common == BATCH)) != NULL &&
        kvs_py_options_read(call.state, call.engine, call.ptrs[0].count, options) == 0 &&
        (!call.on_device ||
         kvs_py_device_ids(call.state, values[GPU_IDS], "gpu_block_ids", call.engine, options) == 0) &&
        kvs_py_submit(call.state, call.engine, options, kind->submit, &call) == 0)
      result = finish(&call, kind);
    else
      explain_words(&call, kind);
  }
  swap_clear(&call);
  return kvs_py_trace_end(range, result);
}

#define TOTAL(begin, layered) ((begin) + COMMON + ((layered) ? KVS_PY_LAYERED : 0))
#define FUNCTION(name, table, begin, needed, many_, sync_, layered_, read_, submit_)                                   \
  static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {                \
    static const struct swap_kind kind = {                                                                             \
        {#name, table, needed, needed, TOTAL(begin, layered_)}, begin, many_, sync_, layered_, read_, submit_};        \
    return swap(&kind, module, args, nargs, kwnames);                                                                  \
  }
FUNCTION(swap_blocks_batch, batch_names, BATCH, 3, true, false, false, read_batch, submit_batch)
FUNCTION(swap_cache_per_layer, layer_names, CACHE, 8, false, true, false, read_cache, submit_cache)
FUNCTION(swap_cache_per_layer_async, layer_names, CACHE, 8, false, false, false, read_cache, submit_cache)
FUNCTION(swap_cache_all_layers, layers_names, CACHE, 8, true, true, false, read_cache, submit_cache)
FUNCTION(swap_cache_all_layers_async, layers_names, CACHE, 8, true, false, true, read_cache, submit_cache)

/* -- copy_blocks() ------------------------------------------------------------------------------------------------- */

/* Whether a copy from src to dst, addresses or tensors, goes from host memory to the device's, and the name of
 * the device: dropping an object of it would collect what has ended. */
static PyObject *way(PyObject *module, PyObject *args) {
  struct kvs_py_state *state = PyModule_GetState(module);
  PyObject *src, *dst, *device;
  struct kvs_py_address from, to;
  enum kvs_direction direction = KVS_OTHER_DIRECTION;
  struct kvs_error err = {0};
  if (!PyArg_ParseTuple(args, "OOO", &src, &dst, &device) ||
      kvs_py_read_address(state, src, "src", -1, false, NULL, &from) < 0 ||
      kvs_py_read_address(state, dst, "dst", -1, false, NULL, &to) < 0)
    return NULL;
  const uint64_t ptrs[2] = {from.ptr, to.ptr};
  bool given = kvs_py_given(device);
  struct kvs_engine *engine = given ? kvs_py_engine_from(state, device) : kvs_py_engine_of(state, ptrs, 2);
  if (!engine) return NULL;
  int rc = kvs_direction_between(engine, from.ptr, to.ptr, &direction, &err);
  PyObject *result = rc != KVS_OK
                         ? kvs_py_raise(state, &err)
                         : Py_BuildValue("(Os)", direction == KVS_H2D ? Py_True : Py_False, kvs_engine_name(engine));
  kvs_engine_unref(engine);
  return result;
}

/* -- docs ---------------------------------------------------------------------------------------------------------- */

#define COMMON_SIGNATURE "stream=None, after=(), device=None, path='auto', priority=None, max_ctas=None, pace_gbps=None"
#define SIGNATURE_END ")\n--\n\n"
#define CACHE_SIGNATURE(s)                                                                                             \
  "($module, /, gpu_ptr" s ", cpu_ptr" s ", block_nbytes, num_gpu_blocks, num_cpu_blocks, gpu_block_ids, "             \
  "cpu_block_ids, direction, *, gpu_stride=None, cpu_stride=None, " COMMON_SIGNATURE
#define COMMON_DOC                                                                                                     \
  KVS_PY_ORDER_DOC                                                                                                     \
  "device: Device, or what Device() takes; None: the pointers' GPU, else host:0.\n" KVS_PY_PATH_DOC
#define TAIL_DOC                                                                                                       \
  "\nTensors are held until the transfer ends; the caller keeps the memory of plain addresses valid until "            \
  "done().\n" KVS_PY_CHECKED_DOC
#define CACHE_DOC                                                                                                      \
  "Block i of a tensor lies at its pointer + i * stride bytes (stride None: block_nbytes) and is block_nbytes long.\n" \
  "A tensor without a stride must have exactly (number of blocks) * block_nbytes bytes.\n"                             \
  "gpu_block_ids, cpu_block_ids: integer arrays (n,), or sequences of ints, of one length. int32 and int64 arrays "    \
  "are\n"                                                                                                              \
  "  read in place.\n"                                                                                                 \
  "gpu_block_ids may lie in GPU memory. " KVS_PY_DEVICE_IDS_DOC                                                        \
  "direction: Direction.D2H, 0 or 'D2H'; Direction.H2D, 1 or 'H2D'.\n"

PyDoc_STRVAR(
    swap_blocks_batch_doc,
    "swap_blocks_batch($module, /, src_ptrs, dst_ptrs, sizes, *, " COMMON_SIGNATURE SIGNATURE_END
    "Copy sizes[i] bytes from src_ptrs[i] to dst_ptrs[i], in any order; returns the Transfer at once.\n\n"
    "src_ptrs, dst_ptrs: int64 or uint64 arrays (n,), or sequences of addresses and tensors. sizes: bytes, an array "
    "or\n"
    "  sequence (n,), or one int for all.\n" COMMON_DOC TAIL_DOC);
#define LAYER_DOC                                                                                                      \
  "gpu_ptr, cpu_ptr: an address or a tensor. block_nbytes, num_gpu_blocks, num_cpu_blocks: ints.\n" CACHE_DOC COMMON_DOC
#define LAYERS_DOC                                                                                                     \
  "gpu_ptrs, cpu_ptrs: int64 or uint64 arrays (t,), or sequences of addresses and tensors. block_nbytes,\n"            \
  "  num_gpu_blocks, num_cpu_blocks, gpu_stride, cpu_stride: one int, or t of them.\n" CACHE_DOC COMMON_DOC
#define LAYER_HEAD SIGNATURE_END "Copy block gpu_block_ids[i] <-> block cpu_block_ids[i] of one tensor"
#define LAYERS_HEAD SIGNATURE_END "Copy block gpu_block_ids[i] <-> block cpu_block_ids[i] of every tensor"
#define AT_ONCE "; returns the Transfer at once.\n\n"
#define WHEN_DONE                                                                                                      \
  "; returns None when the copy is\ndone, or raises its error. Ctrl-C works, and the transfer then goes on. In a "     \
  "full lane it waits for room, at most\n60 s, and then raises QueueFull.\n\n"

PyDoc_STRVAR(swap_cache_per_layer_doc,
             "swap_cache_per_layer" CACHE_SIGNATURE("") LAYER_HEAD WHEN_DONE LAYER_DOC TAIL_DOC);
PyDoc_STRVAR(swap_cache_per_layer_async_doc,
             "swap_cache_per_layer_async" CACHE_SIGNATURE("") LAYER_HEAD AT_ONCE LAYER_DOC TAIL_DOC);
PyDoc_STRVAR(swap_cache_all_layers_doc,
             "swap_cache_all_layers" CACHE_SIGNATURE("s") LAYERS_HEAD WHEN_DONE LAYERS_DOC TAIL_DOC);
PyDoc_STRVAR(
    swap_cache_all_layers_async_doc,
    "swap_cache_all_layers_async" CACHE_SIGNATURE(
        "s") ", layer_events=False, after_layers=None" LAYERS_HEAD AT_ONCE LAYERS_DOC
             "A layer is one tensor of the lists; layers are copied in this order:\n" KVS_PY_LAYER_DOC TAIL_DOC);

PyDoc_STRVAR(way_doc, "_way($module, src, dst, device, /)\n--\n\n"
                      "(whether a copy from src to dst goes from host memory to the device's, name of the device). "
                      "device None: that of the "
                      "pointers.");

#define ROW(name) {#name, KVS_PY_FASTCALL(name), METH_FASTCALL | METH_KEYWORDS, name##_doc}
PyMethodDef kvs_py_swap_methods[] = {
    ROW(swap_blocks_batch),     ROW(swap_cache_per_layer),        ROW(swap_cache_per_layer_async),
    ROW(swap_cache_all_layers), ROW(swap_cache_all_layers_async), {"_way", way, METH_VARARGS, way_doc},
    {NULL, NULL, 0, NULL},
};
