/* kvswap.Pool: blocks in memory, with a hazard table of their slots. A Pool holds its tensor and the pool of its group.
 * Transfers between pools hold the pools. */
#include "py/pool.h"
#include "base/wait.h"
#include "py/address.h"
#include "py/args.h"
#include "py/codec.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/wait.h"

#include <string.h>
#include <structmember.h>

#define DROPPED_NS INT64_C(1000000000)

static struct kvs_py_pool *as_pool(PyObject *self) { return (struct kvs_py_pool *)self; }

/* -- making one ---------------------------------------------------------------------------------------------------- */

enum { DEVICE, PTR, NUM_BLOCKS, BLOCK_NBYTES, STRIDE, ROWS, PITCH, GROUP, NAME, CODING, ARGUMENTS };

static int read_numbers(PyObject *const *values, struct kvs_pool_layout *layout) {
  if (kvs_py_uint64(values[NUM_BLOCKS], "num_blocks", -1, &layout->num_blocks) < 0) return -1;
  if (kvs_py_uint64(values[BLOCK_NBYTES], "block_nbytes", -1, &layout->block_nbytes) < 0) return -1;
  if (kvs_py_given(values[STRIDE]) && kvs_py_uint64(values[STRIDE], "stride", -1, &layout->stride) < 0) return -1;
  if (values[PITCH] && kvs_py_uint64(values[PITCH], "pitch", -1, &layout->pitch) < 0) return -1;
  layout->rows = 1;
  if (values[ROWS] && kvs_py_uint64(values[ROWS], "rows", -1, &layout->rows) < 0) return -1;
  if (layout->rows == 0) return kvs_py_complain(PyExc_ValueError, "rows", -1, "is 0: a block has at least one row");
  return 0;
}

static int read_name(PyObject *value, struct kvs_pool_layout *layout) {
  Py_ssize_t length;
  if (!kvs_py_given(value)) return 0;
  if (!PyUnicode_Check(value))
    return kvs_py_complain(PyExc_TypeError, "name", -1, "must be a str or None, not %s", Py_TYPE(value)->tp_name);
  layout->name = PyUnicode_AsUTF8AndSize(value, &length);
  if (!layout->name) return -1;
  if (length < 1 || length > 31 || strlen(layout->name) != (size_t)length)
    return kvs_py_complain(PyExc_ValueError, "name", -1, "is %R: must be 1 to 31 bytes of UTF-8, none of them 0",
                           value);
  return 0;
}

static int read_group(struct kvs_py_state *state, PyObject *value, struct kvs_pool_layout *layout) {
  if (!kvs_py_given(value)) return 0;
  if ((PyObject *)Py_TYPE(value) != state->pool_type)
    return kvs_py_complain(PyExc_TypeError, "group", -1, "must be a Pool or None, not %s", Py_TYPE(value)->tp_name);
  layout->group = kvs_py_pool_core(value);
  return 0;
}

static int read_coding(PyObject *value, struct kvs_pool_layout *layout) {
  if (!kvs_py_given(value)) return 0;
  layout->coding = kvs_py_coding_from(value, "coding", -1);
  return layout->coding ? 0 : -1;
}

/* Bytes from the first byte of the first block to the last byte of the last block; UINT64_MAX on overflow. */
static uint64_t extent_of(const struct kvs_pool_layout *layout) {
  uint64_t row = layout->block_nbytes / layout->rows, rows = 0, blocks = 0, all;
  if (__builtin_mul_overflow(layout->rows - 1, layout->pitch != 0 ? layout->pitch : row, &rows) ||
      __builtin_mul_overflow(layout->num_blocks - 1, layout->stride != 0 ? layout->stride : row, &blocks) ||
      __builtin_add_overflow(rows, blocks, &all) || __builtin_add_overflow(all, row, &all))
    return UINT64_MAX;
  return all;
}

/* A tensor of known size must be large enough for all its blocks and, without a stride, exactly as large. */
static int check_cover(const struct kvs_pool_layout *layout, uint64_t limit) {
  if (limit == UINT64_MAX || layout->num_blocks == 0 || layout->block_nbytes == 0) return 0; /* or refused later */
  uint64_t row = layout->block_nbytes / layout->rows, needed = extent_of(layout);
  if (layout->stride == 0 && layout->rows == 1)
    return kvs_py_check_size("ptr", -1, limit, layout->num_blocks, layout->block_nbytes);
  if (needed <= limit) return 0;
  return kvs_py_complain(
      PyExc_ValueError, "ptr", -1,
      "is a tensor of %llu bytes, but %llu blocks of %llu bytes at stride %llu, in %llu rows at "
      "pitch %llu, need %llu",
      (unsigned long long)limit, (unsigned long long)layout->num_blocks, (unsigned long long)layout->block_nbytes,
      (unsigned long long)(layout->stride != 0 ? layout->stride : row), (unsigned long long)layout->rows,
      (unsigned long long)(layout->pitch != 0 ? layout->pitch : row), (unsigned long long)needed);
}

/* Pool(device, tensor): Python code reads the counts and the stride from the shape. Returns a tuple that owns the
 * values. */
static PyObject *read_counts(PyObject **values) {
  for (int i = NUM_BLOCKS; i <= PITCH; i++)
    if (kvs_py_given(values[i]))
      return kvs_py_complain(PyExc_TypeError, i == BLOCK_NBYTES ? "num_blocks" : "block_nbytes", -1,
                             "is missing: give both counts, or only a tensor, from which both are read"),
             NULL;
  PyObject *module = PyImport_ImportModule("kvswap._copy");
  PyObject *counts = module ? PyObject_CallMethod(module, "pool_blocks", "O", values[PTR]) : NULL;
  Py_XDECREF(module);
  if (counts &&
      !PyArg_ParseTuple(counts, "OOOO", &values[PTR], &values[NUM_BLOCKS], &values[BLOCK_NBYTES], &values[STRIDE]))
    Py_CLEAR(counts);
  return counts;
}

static int read_layout(struct kvs_py_state *state, PyObject *const *values, struct kvs_py_pool *self,
                       struct kvs_pool_layout *layout) {
  struct kvs_py_address address;
  if (kvs_py_read_address(state, values[PTR], "ptr", -1, false, &self->hold, &address) < 0) return -1;
  layout->ptr = address.ptr;
  self->readonly = address.readonly;
  if (read_numbers(values, layout) < 0 || read_name(values[NAME], layout) < 0) return -1;
  if (read_coding(values[CODING], layout) < 0) return -1;
  if (read_group(state, values[GROUP], layout) < 0 || check_cover(layout, address.nbytes) < 0) return -1;
  if (layout->coding) self->coding = Py_NewRef(values[CODING]);
  if (layout->group) self->group = Py_NewRef(values[GROUP]);
  return 0;
}

/* KVS_OK also when the time is over: the caller tries again in any case. */
static int await_slice(void *until, int64_t timeout_ns, struct kvs_error *err) {
  int rc = kvs_release_wait(timeout_ns, err);
  return rc == KVS_TIMEOUT && kvs_clock_ns() >= *(uint64_t *)until ? KVS_OK : rc;
}

/* A Pool that its owner has dropped may still be held by transfers that have ended, until some thread releases what
 * they hold; its blocks are free then. */
static int await_dropped(struct kvs_py_state *state, struct kvs_engine *engine) {
  uint64_t until = kvs_clock_ns() + DROPPED_NS;
  kvs_py_collect(engine);
  return kvs_py_wait(state, await_slice, &until, -1, "another thread's release");
}

/* Hidden from gc.get_objects(), by which another thread could use it half made, until open_pool() tracks it. */
static struct kvs_py_pool *alloc_pool(PyTypeObject *type) {
  PyObject *self = type->tp_alloc(type, 0);
  if (self) PyObject_GC_UnTrack(self);
  return (struct kvs_py_pool *)self;
}

struct opening {
  struct kvs_engine *engine;
  const struct kvs_pool_layout *layout;
  struct kvs_pool **opened;
  struct kvs_error err;
  int rc;
};

/* KVS_OK also when the opening has failed: in its turn. */
static int open_slice(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  struct opening *opening = arg;
  opening->rc = kvs_pool_open_within(opening->engine, opening->layout, timeout_ns, opening->opened, &opening->err);
  if (opening->rc == KVS_TIMEOUT) *err = opening->err;
  return opening->rc == KVS_TIMEOUT ? KVS_TIMEOUT : KVS_OK;
}

/* Steals the reference to engine, which is NULL if an exception is set. */
static int open_pool(struct kvs_py_state *state, struct kvs_engine *engine, struct kvs_py_pool *self,
                     const struct kvs_pool_layout *layout) {
  static const char freed[] = "another thread's free of this memory";
  struct opening opening = {.engine = engine, .layout = layout, .opened = &self->pool};
  if (!engine) return -1;
  int waited = kvs_py_wait(state, open_slice, &opening, KVS_POOL_PATIENCE_NS, freed);
  if (waited == 0 && opening.rc == KVS_INVALID && (waited = await_dropped(state, engine)) == 0)
    waited = kvs_py_wait(state, open_slice, &opening, KVS_POOL_PATIENCE_NS, freed);
  KVS_PY_NO_GIL(kvs_engine_unref(engine));
  if (waited == 0 && opening.rc == KVS_OK) {
    PyObject_GC_Track(self);
    return 0;
  }
  self->pool = NULL;
  if (!PyErr_Occurred()) kvs_py_raise(state, &opening.err);
  return -1;
}

static PyObject *pool_create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"device", "ptr",   "num_blocks", "block_nbytes", "stride", "rows",
                          "pitch",  "group", "name",       "coding",       NULL};
  struct kvs_py_state *state = PyType_GetModuleState(type);
  struct kvs_pool_layout layout = {0};
  PyObject *values[ARGUMENTS] = {NULL};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OO$OOOOOO:Pool", names, &values[DEVICE], &values[PTR],
                                   &values[NUM_BLOCKS], &values[BLOCK_NBYTES], &values[STRIDE], &values[ROWS],
                                   &values[PITCH], &values[GROUP], &values[NAME], &values[CODING]))
    return NULL;
  bool counted = kvs_py_given(values[NUM_BLOCKS]) && kvs_py_given(values[BLOCK_NBYTES]);
  PyObject *counts = counted ? NULL : read_counts(values);
  struct kvs_py_pool *self = counted || counts ? alloc_pool(type) : NULL;
  if (self && (read_layout(state, values, self, &layout) < 0 ||
               open_pool(state, kvs_py_engine_from(state, values[DEVICE]), self, &layout) < 0))
    Py_CLEAR(self);
  Py_XDECREF(counts);
  return (PyObject *)self;
}

PyObject *kvs_py_pool_over(struct kvs_py_state *state, struct kvs_engine *engine, struct kvs_pool_layout *layout,
                           PyObject *name, PyObject *coding, PyObject *hold) {
  PyTypeObject *type = (PyTypeObject *)state->pool_type;
  struct kvs_py_pool *self = hold ? alloc_pool(type) : NULL;
  if (!self) {
    Py_XDECREF(hold);
    kvs_engine_unref(engine);
    return NULL;
  }
  self->hold = hold;
  bool read = read_name(name, layout) == 0 && read_coding(coding, layout) == 0;
  if (layout->coding) self->coding = Py_NewRef(coding);
  if (!read)
    kvs_engine_unref(engine);
  else if (open_pool(state, engine, self, layout) == 0)
    return (PyObject *)self;
  Py_DECREF(self);
  return NULL;
}

/* -- destruction --------------------------------------------------------------------------------------------------- */

static int pool_traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_pool(self)->hold);
  Py_VISIT(as_pool(self)->group);
  Py_VISIT(as_pool(self)->coding);
  return 0;
}

static int pool_clear(PyObject *self) {
  Py_CLEAR(as_pool(self)->hold);
  Py_CLEAR(as_pool(self)->group);
  Py_CLEAR(as_pool(self)->coding);
  return 0;
}

static void pool_dealloc(PyObject *self) {
  struct kvs_pool *pool = kvs_py_pool_core(self);
  PyObject *hold = as_pool(self)->hold, *group = as_pool(self)->group, *coding = as_pool(self)->coding;
  PyObject_GC_UnTrack(self);
  if (as_pool(self)->weakrefs) PyObject_ClearWeakRefs(self);
  kvs_py_object_free(self);
  if (pool) {
    KVS_PY_NO_GIL(kvs_pool_unref(pool)); /* a submission may hold the lock of the pools */
  }
  Py_XDECREF(coding);
  Py_XDECREF(group);
  Py_XDECREF(hold);
}

/* -- attributes ---------------------------------------------------------------------------------------------------- */

static PyObject *pool_repr(PyObject *self) {
  struct kvs_pool_layout layout;
  char size[KVS_SIZE_TEXT];
  kvs_pool_get_layout(kvs_py_pool_core(self), &layout);
  kvs_size_text(layout.block_nbytes, size);
  return PyUnicode_FromFormat("<kvswap.Pool '%s' %llu block%s of %s on %s>", layout.name,
                              (unsigned long long)layout.num_blocks, layout.num_blocks == 1 ? "" : "s", size,
                              kvs_engine_name(kvs_pool_engine(kvs_py_pool_core(self))));
}

static PyObject *pool_device(PyObject *self, void *unused) {
  (void)unused;
  return kvs_py_device_like(kvs_py_state_of(self), kvs_pool_engine(kvs_py_pool_core(self)));
}

static PyObject *pool_number(PyObject *self, void *field) {
  struct kvs_pool_layout layout;
  kvs_pool_get_layout(kvs_py_pool_core(self), &layout);
  const uint64_t numbers[] = {[PTR] = layout.ptr,       [NUM_BLOCKS] = layout.num_blocks,
                              [STRIDE] = layout.stride, [BLOCK_NBYTES] = layout.block_nbytes,
                              [ROWS] = layout.rows,     [PITCH] = layout.pitch};
  return PyLong_FromUnsignedLongLong(numbers[(uintptr_t)field]);
}

static PyObject *pool_group(PyObject *self, void *unused) {
  (void)unused;
  PyObject *group = as_pool(self)->group;
  return Py_NewRef(group ? group : Py_None);
}

static PyObject *pool_coding(PyObject *self, void *unused) {
  (void)unused;
  PyObject *coding = as_pool(self)->coding;
  return Py_NewRef(coding ? coding : Py_None);
}

static PyObject *pool_name(PyObject *self, void *unused) {
  struct kvs_pool_layout layout;
  (void)unused;
  kvs_pool_get_layout(kvs_py_pool_core(self), &layout);
  return PyUnicode_FromString(layout.name);
}

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(
    pool_doc,
    "Pool(device, ptr, num_blocks=None, block_nbytes=None, *, stride=None, rows=1, pitch=0, group=None, "
    "name=None, coding=None)\n--\n\n"
    "Blocks in memory. kvswap records the accesses to each slot, so that move_blocks() orders transfers between "
    "pools.\n\n"
    "device: Device, its name, or None: as Device(None). ptr: an address, or a tensor, which the pool holds; the\n"
    "  caller keeps the memory of a plain address valid. Device or host memory.\n"
    "num_blocks, block_nbytes: number of blocks (up to 2**32 - 1), and bytes of a block, all its rows together. Both\n"
    "  None: a tensor's first dimension counts the blocks, and all others are one block, which lies in one piece.\n"
    "stride: bytes from block to block, None: block_nbytes / rows. Block i begins at ptr + i * stride. A tensor that\n"
    "  is larger than its blocks needs a stride, since its blocks may be larger than block_nbytes says.\n"
    "rows, pitch: a block is `rows` equal rows, `pitch` bytes apart (required if rows > 1): the layers of "
    "a "
    "layer-first cache,\n"
    "  or K and V in separate halves.\n"
    "group: another Pool of as many blocks: slot i of both is one block, ordered as one. name: for messages, 1 to 31\n"
    "  bytes; None: 'pool N'.\n"
    "coding: kvswap.codecs.Coding: the pool holds coded blocks, and block_nbytes is\n"
    "  coding.coded_nbytes; ptr, stride and pitch are multiples of 16. A transfer from memory of the device to it "
    "codes\n"
    "  on the way, one back decodes; its parts are named in bytes that are not coded, whole pages each.\n\n"
    "Pools of one device must not share bytes. ValueError: a layout that does not fit, or unknown memory.\n"
    "Any thread may use it.");

static PyGetSetDef getset[] = {
    {"device", pool_device, NULL, "Device: where its transfers run.", NULL},
    {"ptr", pool_number, NULL, "int: address of block 0.", (void *)(uintptr_t)PTR},
    {"num_blocks", pool_number, NULL, "int: slots 0 to num_blocks - 1.", (void *)(uintptr_t)NUM_BLOCKS},
    {"block_nbytes", pool_number, NULL, "int: bytes of a block, of all its rows.", (void *)(uintptr_t)BLOCK_NBYTES},
    {"stride", pool_number, NULL, "int: bytes from block to block.", (void *)(uintptr_t)STRIDE},
    {"rows", pool_number, NULL, "int: rows of a block.", (void *)(uintptr_t)ROWS},
    {"pitch", pool_number, NULL, "int: bytes from row to row.", (void *)(uintptr_t)PITCH},
    {"group", pool_group, NULL, "Pool: the one given as group=, or None.", NULL},
    {"name", pool_name, NULL, "str: for messages.", NULL},
    {"coding", pool_coding, NULL, "Coding: the one given as coding=, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct kvs_py_pool, weakrefs), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_members, members},      {Py_tp_doc, (void *)pool_doc}, {Py_tp_new, pool_create},
    {Py_tp_dealloc, pool_dealloc}, {Py_tp_repr, pool_repr},       {Py_tp_traverse, pool_traverse},
    {Py_tp_clear, pool_clear},     {Py_tp_getset, getset},        {0, NULL},
};

PyType_Spec kvs_py_pool_spec = {
    .name = "kvswap.Pool",
    .basicsize = sizeof(struct kvs_py_pool),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
