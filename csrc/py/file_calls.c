/* FileStore.store(), load() and delete(): keys, arguments and submission. */
#include "py/file_calls.h"
#include "py/address.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/file_transfer.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/options.h"

#include <stdio.h>
#include <string.h>

void kvs_py_file_say_note(PyObject *self) {
  char note[300];
  if (kvs_file_take_note(kvs_py_file_core(self), note) && kvs_py_say("warning", "%s", note) < 0)
    PyErr_WriteUnraisable(self);
}

/* -- keys ---------------------------------------------------------------------------------------------------------- */

/* The rows of a 2-D byte array are keys of one length. The core reads them in place, once. */
static int from_rows(PyObject *object, struct kvs_py_keys *keys) {
  if (PyObject_GetBuffer(object, &keys->view, PyBUF_ND | PyBUF_C_CONTIGUOUS) < 0) return -1;
  const Py_buffer *view = &keys->view;
  if (view->ndim != 2 || view->itemsize != 1)
    return kvs_py_complain(PyExc_TypeError, "keys", -1,
                           "is an array of %d dimensions with items of %zd bytes: must be 2-D, a row of single bytes a "
                           "key",
                           view->ndim, view->itemsize);
  size_t count = (size_t)view->shape[0], width = (size_t)view->shape[1];
  keys->ends = PyMem_Calloc(count + 1, sizeof *keys->ends);
  if (!keys->ends) {
    PyErr_NoMemory();
    return -1;
  }
  for (size_t i = 0; i < count; i++) keys->ends[i] = (i + 1) * width;
  keys->core = (struct kvs_file_keys){view->buf, keys->ends, count};
  return 0;
}

/* "block_7_pool_0": TensorRT-LLM's name of a block's file (kvCacheTransferManager.cpp). */
static int pair_text(PyObject *pair, Py_ssize_t index, char text[64]) {
  uint64_t id, pool;
  if (kvs_py_uint64(PyTuple_GET_ITEM(pair, 0), "keys", index, &id) < 0) return -1;
  if (kvs_py_uint64(PyTuple_GET_ITEM(pair, 1), "keys", index, &pool) < 0) return -1;
  return snprintf(text, 64, "block_%llu_pool_%llu", (unsigned long long)id, (unsigned long long)pool);
}

/* The bytes of one key; `text` is storage for a pair's key. */
static Py_ssize_t bytes_of(PyObject *key, Py_ssize_t index, char text[64], const char **bytes) {
  if (PyBytes_Check(key)) {
    *bytes = PyBytes_AS_STRING(key);
    return PyBytes_GET_SIZE(key);
  }
  *bytes = text;
  if (PyTuple_Check(key) && PyTuple_GET_SIZE(key) == 2) return pair_text(key, index, text);
  const char *hint = PyUnicode_Check(key) ? ": encode it, key.encode()"
                     : PyIndex_Check(key) ? ": pass key.to_bytes(8, 'little'), or a pair"
                                          : "";
  return kvs_py_complain(PyExc_TypeError, "keys", index, "must be bytes or a pair (block id, pool), not %s%s",
                         Py_TYPE(key)->tp_name, hint);
}

static int from_items(PyObject *items, struct kvs_py_keys *keys) {
  Py_ssize_t count = PyTuple_GET_SIZE(items);
  size_t used = 0, capacity = 64 * (size_t)count + 1;
  char text[64];
  const char *bytes;
  keys->ends = PyMem_Calloc((size_t)count + 1, sizeof *keys->ends);
  keys->data = PyMem_Malloc(capacity);
  if (!keys->ends || !keys->data) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    Py_ssize_t n = bytes_of(PyTuple_GET_ITEM(items, i), i, text, &bytes);
    if (n < 0) return -1;
    if (used + (size_t)n > capacity) {
      size_t bigger = 2 * (used + (size_t)n);
      uint8_t *grown = PyMem_Realloc(keys->data, bigger);
      if (!grown) {
        PyErr_NoMemory();
        return -1;
      }
      keys->data = grown;
      capacity = bigger;
    }
    memcpy(keys->data + used, bytes, (size_t)n);
    used += (size_t)n;
    keys->ends[i] = used;
  }
  keys->core = (struct kvs_file_keys){keys->data, keys->ends, (size_t)count};
  return 0;
}

int kvs_py_read_keys(PyObject *object, struct kvs_py_keys *keys) {
  bool text = PyUnicode_Check(object) || PyBytes_Check(object) || PyByteArray_Check(object);
  if (!text && PyObject_CheckBuffer(object)) return from_rows(object, keys);
  PyObject *items = text ? NULL : PySequence_Tuple(object); /* a list could change while it is read */
  if (!items) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
    PyErr_Clear();
    return kvs_py_complain(PyExc_TypeError, "keys", -1, "must be a sequence of keys, not %s: pass [key] for one",
                           Py_TYPE(object)->tp_name);
  }
  int rc = from_items(items, keys);
  Py_DECREF(items);
  return rc;
}

void kvs_py_keys_clear(struct kvs_py_keys *keys) {
  if (keys->view.obj) PyBuffer_Release(&keys->view);
  PyMem_Free(keys->data);
  PyMem_Free(keys->ends);
}

/* -- a call -------------------------------------------------------------------------------------------------------- */

enum { KEYS, BLOCKS, IDS, AFTER, PARTS, REPLACE, ARGUMENTS };
static const char *const names[] = {"keys", "blocks", "ids", "after", "parts", "replace"};

struct file_call {
  struct kvs_py_state *state;
  struct kvs_file_store *store;
  bool load;
  struct kvs_py_keys keys;
  struct kvs_file_blocks blocks;
  struct kvs_py_list pointers;
  struct kvs_py_after after;
  struct kvs_pool **pools;
  uint64_t *addresses; /* computed from a tensor and ids */
  uint64_t *parts;     /* bytes of each part; NULL: a block is one range */
  size_t nparts;       /* 1 without parts */
  PyObject *hold;      /* list of objects that must live until the transfer ends */
  PyObject *keep_ids;
  struct kvs_file_options options;
  struct kvs_file_transfer *transfer;
};

static void clear(struct file_call *call) {
  kvs_py_keys_clear(&call->keys);
  kvs_py_after_clear(&call->after);
  PyMem_Free(call->pools);
  PyMem_Free(call->addresses);
  PyMem_Free(call->parts);
  Py_XDECREF(call->pointers.keep);
  Py_XDECREF(call->keep_ids);
  Py_XDECREF(call->hold);
}

/* Runs inside kvs_file_collect(), with or without the GIL. */
static void release_owner(void *owner) {
  if (!Py_IsInitialized()) return; /* a store closed after the interpreter's end */
  PyGILState_STATE gil = PyGILState_Ensure();
  Py_DECREF((PyObject *)owner);
  PyGILState_Release(gil);
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */

static uint64_t block_nbytes(const struct file_call *call) {
  struct kvs_file_info info;
  kvs_file_get_info(call->store, &info);
  return info.block_nbytes;
}

static bool is_pool(const struct file_call *call, PyObject *object) {
  return (PyObject *)Py_TYPE(object) == call->state->pool_type;
}

static int add_pool(struct file_call *call, PyObject *pool, Py_ssize_t index) {
  if (!is_pool(call, pool))
    return kvs_py_complain(PyExc_TypeError, "blocks", index, "must be a Pool, not %s", Py_TYPE(pool)->tp_name);
  if (call->load && kvs_py_pool_readonly(pool))
    return kvs_py_complain(PyExc_ValueError, "blocks", index, "is loaded to, and a pool of read-only memory");
  call->pools[call->blocks.npools++] = kvs_py_pool_core(pool);
  return kvs_py_hold(&call->hold, pool);
}

/* A Pool, or a sequence that begins with one: 1, else 0. */
static int read_pools(struct file_call *call, PyObject *object) {
  bool one = is_pool(call, object);
  bool sequence = PyList_Check(object) || PyTuple_Check(object);
  PyObject *items = one ? PyTuple_Pack(1, object) : sequence ? PySequence_Tuple(object) : NULL;
  if (!items) return PyErr_Occurred() ? -1 : 0;
  Py_ssize_t count = PyTuple_GET_SIZE(items);
  int rc = 0;
  if (count > 0 && is_pool(call, PyTuple_GET_ITEM(items, 0))) {
    rc = 1;
    call->pools = PyMem_Calloc((size_t)count, sizeof(struct kvs_pool *));
    if (!call->pools) {
      PyErr_NoMemory();
      rc = -1;
    }
    for (Py_ssize_t i = 0; rc == 1 && i < count; i++)
      if (add_pool(call, PyTuple_GET_ITEM(items, i), one ? -1 : i) < 0) rc = -1;
    call->blocks.pools = call->pools;
  }
  Py_DECREF(items);
  return rc;
}

/* Read once: another thread may change the array after the check. */
static int64_t read_id(const struct kvs_ids *ids, size_t i) {
  return ids->width == 4 ? ((const volatile int32_t *)ids->data)[i] : ((const volatile int64_t *)ids->data)[i];
}

/* Rows of one tensor, or of one tensor a part: row i of a tensor is at its address + i * bytes of the part. */
static int read_row(struct file_call *call, PyObject *tensor, size_t part) {
  struct kvs_py_address address;
  const struct kvs_ids *ids = &call->blocks.ids;
  const uint64_t nbytes = call->parts ? call->parts[part] : block_nbytes(call);
  Py_ssize_t index = call->parts ? (Py_ssize_t)part : -1;
  if (kvs_py_read_address(call->state, tensor, "blocks", index, call->load, &call->hold, &address) < 0) return -1;
  uint64_t most = address.nbytes == UINT64_MAX ? UINT64_MAX / nbytes : address.nbytes / nbytes;
  for (size_t i = 0; i < ids->count; i++) {
    int64_t id = read_id(ids, i);
    if (id < 0 || (uint64_t)id >= most)
      return kvs_py_complain(PyExc_IndexError, "ids", (Py_ssize_t)i, "is %lld; blocks has %llu blocks of %llu bytes",
                             (long long)id, (unsigned long long)most, (unsigned long long)nbytes);
    call->addresses[i * call->nparts + part] = address.ptr + (uint64_t)id * nbytes;
  }
  return 0;
}

static int read_rows(struct file_call *call, PyObject *object) {
  const struct kvs_ids *ids = &call->blocks.ids;
  PyObject *tensors = call->parts ? PySequence_Tuple(object) : PyTuple_Pack(1, object);
  if (!tensors) return -1;
  int rc = 0;
  if ((size_t)PyTuple_GET_SIZE(tensors) != call->nparts)
    rc =
        kvs_py_complain(PyExc_ValueError, "blocks", -1, "has %zd tensors; with ids one is needed for each of %zu parts",
                        PyTuple_GET_SIZE(tensors), call->nparts);
  call->addresses = rc == 0 ? PyMem_Calloc(ids->count + 1, call->nparts * sizeof *call->addresses) : NULL;
  if (rc == 0 && !call->addresses) {
    PyErr_NoMemory();
    rc = -1;
  }
  for (size_t i = 0; rc == 0 && i < call->nparts; i++) rc = read_row(call, PyTuple_GET_ITEM(tensors, (Py_ssize_t)i), i);
  Py_DECREF(tensors);
  call->blocks.addresses = call->addresses;
  return rc < 0 ? -1 : kvs_py_same_length("ids", ids->count, "keys", call->keys.core.count);
}

/* Bytes of each part, as many as there are in the sequence. */
static int read_parts(struct file_call *call, PyObject *object) {
  call->nparts = 1;
  if (!kvs_py_given(object)) return 0;
  PyObject *items = PySequence_Tuple(object);
  if (!items) return -1;
  size_t count = (size_t)PyTuple_GET_SIZE(items);
  int rc = 0;
  if (count < 1 || count > KVS_FILE_PARTS)
    rc = kvs_py_complain(PyExc_ValueError, "parts", -1, "has %zu sizes: must be 1 to %d", count, KVS_FILE_PARTS);
  call->parts = rc == 0 ? PyMem_Calloc(count, sizeof *call->parts) : NULL;
  if (rc == 0 && !call->parts) {
    PyErr_NoMemory();
    rc = -1;
  }
  for (size_t i = 0; rc == 0 && i < count; i++) {
    rc = kvs_py_uint64(PyTuple_GET_ITEM(items, (Py_ssize_t)i), "parts", (Py_ssize_t)i, &call->parts[i]);
    if (rc == 0 && (call->parts[i] < 1 || call->parts[i] > block_nbytes(call)))
      rc = kvs_py_complain(PyExc_ValueError, "parts", (Py_ssize_t)i, "is %llu: must be 1 to %llu, the bytes of a block",
                           (unsigned long long)call->parts[i], (unsigned long long)block_nbytes(call));
  }
  Py_DECREF(items);
  call->nparts = rc == 0 ? count : 1;
  call->options.part_nbytes = call->parts;
  call->options.nparts = call->parts ? call->nparts : 0;
  return rc;
}

/* Whether `object` is one tensor and no array of addresses: then ids say which of its blocks are meant. */
static bool is_one_tensor(struct kvs_py_state *state, PyObject *object) {
  struct kvs_py_list list = {.keep = NULL};
  int is = kvs_py_words(state, object, "blocks", &list);
  Py_XDECREF(list.keep);
  if (is >= 0) return false;
  bool refused = PyErr_ExceptionMatches(PyExc_TypeError);
  if (refused) PyErr_Clear();
  return refused;
}

static int read_pointers(struct file_call *call, PyObject *object) {
  struct kvs_py_list *list = &call->pointers;
  bool tensor = is_one_tensor(call->state, object);
  if (tensor)
    return kvs_py_complain(PyExc_TypeError, "blocks", -1,
                           "is one tensor (%s): name its blocks in ids, block i at its address + i * block_nbytes, or "
                           "pass a list with one tensor a key",
                           Py_TYPE(object)->tp_name);
  if (PyErr_Occurred()) return -1;
  if (kvs_py_pointers(call->state, object, "blocks", call->load, &call->hold, list) < 0) return -1;
  const char *of = call->parts ? "keys times parts" : "keys";
  if (kvs_py_same_length("blocks", list->count, of, call->keys.core.count * call->nparts) < 0) return -1;
  uint64_t whole = block_nbytes(call);
  for (size_t i = 0; i < list->count; i++) {
    if (list->data[i] == 0) return kvs_py_complain(PyExc_ValueError, "blocks", (Py_ssize_t)i, "is a null address");
    if (!list->limits) continue;
    uint64_t nbytes = call->parts ? call->parts[i % call->nparts] : whole;
    if (list->limits[i] < nbytes)
      return kvs_py_complain(PyExc_ValueError, "blocks", (Py_ssize_t)i, "has %llu bytes; %s has %llu",
                             (unsigned long long)list->limits[i], call->parts ? "its part" : "a block of the store",
                             (unsigned long long)nbytes);
  }
  call->blocks.addresses = list->data;
  return list->keep ? kvs_py_hold(&call->hold, list->keep) : 0;
}

static int read_blocks(struct file_call *call, PyObject *const *values) {
  int pools = read_parts(call, values[PARTS]) < 0 ? -1 : read_pools(call, values[BLOCKS]);
  if (pools < 0) return -1;
  if (pools && call->parts)
    return kvs_py_complain(PyExc_ValueError, "parts", -1, "are of host memory; a pool's blocks have their own");
  if (kvs_py_given(values[IDS]) && kvs_py_ids(call->state, values[IDS], "ids", &call->blocks.ids, &call->keep_ids) < 0)
    return -1;
  if (pools && !kvs_py_given(values[IDS]))
    return kvs_py_complain(PyExc_TypeError, "ids", -1, "are needed with pools: which slots");
  if (pools) return kvs_py_same_length("ids", call->blocks.ids.count, "keys", call->keys.core.count);
  return kvs_py_given(values[IDS]) ? read_rows(call, values[BLOCKS]) : read_pointers(call, values[BLOCKS]);
}

/* Memory.free() and Mapped.close() wait for transfers of the device, but know none of a store. So a store's transfer
 * takes a buffer of the memory, and they raise BufferError until it has ended. */
static int keep_buffer(struct file_call *call, PyObject *item) {
  PyObject *view = PyMemoryView_FromObject(item);
  int rc = view ? kvs_py_hold(&call->hold, view) : -1;
  Py_XDECREF(view);
  return rc;
}

static bool is_memory(const struct file_call *call, PyObject *object) {
  PyObject *type = (PyObject *)Py_TYPE(object);
  return type == call->state->memory_type || type == call->state->mapped_type;
}

/* Host memory has an array interface, and the store may read and write it in place. GPU memory has no buffer: its
 * blocks go through staging, by transfers of the device. */
static int keep_pool(struct file_call *call, PyObject *pool) {
  PyObject *hold = kvs_py_pool_hold(pool), *interface;
  Py_ssize_t count = hold && PyList_Check(hold) ? PyList_GET_SIZE(hold) : 0; /* else a HostPool's buffer */
  struct kvs_error err = {0};
  if (kvs_pool_check_open(kvs_py_pool_core(pool), &err) != KVS_OK) { /* its memory was freed, and has no buffer */
    kvs_py_raise(call->state, &err);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *item = PyList_GET_ITEM(hold, i);
    int has = is_memory(call, item) ? kvs_py_attribute(item, call->state->s_array, &interface) : 0;
    if (has == 1) Py_DECREF(interface);
    if (has < 0 || (has == 1 && keep_buffer(call, item) < 0)) return -1;
  }
  return 0;
}

static int keep_buffers(struct file_call *call) {
  Py_ssize_t count = call->hold ? PyList_GET_SIZE(call->hold) : 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *item = PyList_GET_ITEM(call->hold, i);
    int rc = is_pool(call, item) ? keep_pool(call, item) : is_memory(call, item) ? keep_buffer(call, item) : 0;
    if (rc < 0) return -1;
  }
  return 0;
}

static int read_after(struct file_call *call, PyObject *value) {
  struct kvs_engine *engine = call->blocks.npools ? kvs_pool_engine(call->pools[0]) : NULL;
  if (kvs_py_read_after(call->state, value, engine, &call->after) < 0) return -1;
  call->options.after = call->after.items;
  call->options.nafter = call->after.count;
  return 0;
}

/* -- submitting ---------------------------------------------------------------------------------------------------- */

enum what { STORE, LOAD, DELETE };

static PyObject *submit(struct file_call *call, enum what what) {
  struct kvs_error err = {0};
  int rc;
  call->options.owner = call->hold;
  call->options.release = call->hold ? release_owner : NULL;
  Py_BEGIN_ALLOW_THREADS
  kvs_file_collect(call->store);
  if (what == STORE)
    rc = kvs_file_store_blocks(call->store, &call->keys.core, &call->blocks, &call->options, &call->transfer, &err);
  else if (what == LOAD)
    rc = kvs_file_load_blocks(call->store, &call->keys.core, &call->blocks, &call->options, &call->transfer, &err);
  else
    rc = kvs_file_delete(call->store, &call->keys.core, &call->options, &call->transfer, &err);
  Py_END_ALLOW_THREADS
  if (rc != KVS_OK) return kvs_py_raise(call->state, &err);
  call->hold = NULL; /* the transfer owns it now */
  return kvs_py_file_transfer_new(call->state, call->transfer);
}

static PyObject *move(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, bool load) {
  const struct kvs_py_args spec = {load ? "load" : "store", names, 2, 3, load ? ARGUMENTS - 1 : ARGUMENTS};
  struct file_call call = {.state = kvs_py_state_of(self), .store = kvs_py_file_core(self), .load = load};
  PyObject *values[ARGUMENTS], *result = NULL;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  PyObject *range = kvs_py_trace_begin(call.state, load ? "FileStore.load" : "FileStore.store");
  call.options.replace = true;
  if (!load && values[REPLACE]) {
    int replace = PyObject_IsTrue(values[REPLACE]);
    if (replace < 0) return kvs_py_trace_end(range, NULL);
    call.options.replace = replace == 1;
  }
  if (kvs_py_read_keys(values[KEYS], &call.keys) == 0 && read_blocks(&call, values) == 0 && keep_buffers(&call) == 0 &&
      read_after(&call, values[AFTER]) == 0)
    result = submit(&call, load ? LOAD : STORE);
  clear(&call);
  if (result) kvs_py_file_say_note(self);
  return kvs_py_trace_end(range, result);
}

PyObject *kvs_py_file_store(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  return move(self, args, nargs, kwnames, false);
}

PyObject *kvs_py_file_load(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  return move(self, args, nargs, kwnames, true);
}

PyObject *kvs_py_file_delete(PyObject *self, PyObject *keys) {
  struct file_call call = {.state = kvs_py_state_of(self), .store = kvs_py_file_core(self)};
  PyObject *range = kvs_py_trace_begin(call.state, "FileStore.delete");
  PyObject *result = kvs_py_read_keys(keys, &call.keys) == 0 ? submit(&call, DELETE) : NULL;
  clear(&call);
  return kvs_py_trace_end(range, result);
}

#define BLOCKS_DOC                                                                                                     \
  "keys: a sequence of bytes (1 to 512 each) or of pairs (block id, pool), or a 2-D array of bytes, a row a key.\n"    \
  "blocks, ids: a Pool of the store's device, or several whose slots make one block, in this order, with the slots\n"  \
  "  in ids; or one tensor of host memory, block i at its address + i * block_nbytes, with i in ids; or, without\n"    \
  "  ids, one address or tensor of host memory a key. Tensors and pools are held until the transfer ended; memory\n"   \
  "  behind plain addresses, also of a pool, must stay mapped as long.\n"                                              \
  "parts: bytes of the parts of a block, which make block_nbytes in all, for blocks in several ranges of host memory " \
  "(K\n"                                                                                                               \
  "  and V, layers, groups): blocks then has len(parts) addresses or tensors a key, key by key; or, with ids, one "    \
  "tensor\n"                                                                                                           \
  "  a part, and part p of block i is at address p + i * parts[p]. The parts pass through a buffer.\n"                 \
  "after: an Event, Transfer or stream to start after, or an iterable of them; with pools it starts after the\n"       \
  "  device's compute stream in any case. A Transfer that failed raises its error.\n"
#define ERRORS_DOC                                                                                                     \
  "\nAll or nothing is queued: ValueError, IndexError, TypeError: wrong arguments; QueueFull: too many unfinished\n"   \
  "transfers. Later failures are reported block by block (FileTransfer.failed_positions, reasons). Any thread may "    \
  "call."

const char kvs_py_file_store_doc[] =
    "store($self, /, keys, blocks, ids=None, *, after=(), parts=None, replace=True)\n--\n\n"
    "Store blocks under keys; returns the FileTransfer at once. The bytes must not change until it "
    "ended.\n\n" BLOCKS_DOC
    "replace: False: an existing key is left unchanged and counts as stored, for keys that determine the bytes.\n"
    "\nIf the store is full, the least recently used blocks are evicted; if none can be, the block "
    "fails.\n" ERRORS_DOC;
const char kvs_py_file_load_doc[] =
    "load($self, /, keys, blocks, ids=None, *, after=(), parts=None)\n--\n\n"
    "Load the blocks of these keys; returns the FileTransfer at once. A missing or damaged block is among the failed\n"
    "blocks, and its memory is then undefined.\n\n" BLOCKS_DOC ERRORS_DOC;
const char kvs_py_file_delete_doc[] =
    "delete($self, keys, /)\n--\n\n"
    "Delete blocks, also pinned ones; returns the FileTransfer at once. A missing key counts as deleted.\n"
    "A deleted block does not come back, not even after a crash.\n\n"
    "keys: as in store(). QueueFull: too many unfinished transfers. Any thread may call.";
