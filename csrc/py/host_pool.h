/* Shared by HostPool and SharedPool: the object, its arguments, and all methods but the constructor. */
#ifndef KVS_PY_HOST_POOL_H
#define KVS_PY_HOST_POOL_H

#include "bind.h"

/* States of a pool's object, in the atomic `uses`. Each move is one atomic operation, so that a close and a new export
 * cannot both succeed.
 *
 *   n >= 0: open, n exported buffers
 *     | kvs_py_host_pool_take(), only from 0          | close(force=True)
 *     v                                               v
 *   SHRINKING or CLOSED                             far below 0: closed, buffers still exported
 *     | the shrink has ended, or the close failed     | the close failed
 *     +---> 0                                         +---> n
 */
enum { KVS_PY_HOST_CLOSED = -1, KVS_PY_HOST_SHRINKING = -2 };
struct kvs_py_host_pool {
  PyObject_HEAD
  struct kvs_host_pool *pool;
  atomic_long uses;
  PyObject *progress; /* called by a thread that waits for the population; NULL: none */
  atomic_size_t told; /* number of characters of the notices that were logged */
};

/* The arguments that both constructors take, in this order. */
enum {
  KVS_PY_HOST_DEVICE,
  KVS_PY_HOST_LAYERS,
  KVS_PY_HOST_LAYOUT,
  KVS_PY_HOST_PAGES,
  KVS_PY_HOST_NUMA,
  KVS_PY_HOST_CHUNK,
  KVS_PY_HOST_THREADS,
  KVS_PY_HOST_REGISTER,
  KVS_PY_HOST_RESERVE,
  KVS_PY_HOST_PROGRESS,
  KVS_PY_HOST_WAIT,
  KVS_PY_HOST_ARGUMENTS
};
#define KVS_PY_HOST_NAMES                                                                                              \
  "device", "layers", "layout", "pages", "numa", "chunk_nbytes", "threads", "register", "reserve", "progress", "wait"

int kvs_py_host_options(PyObject *num_blocks, PyObject *slot_nbytes, PyObject *const *common,
                        struct kvs_host_pool_options *options);
/* A new object without its pool; *engine: the requested engine. */
struct kvs_py_host_pool *kvs_py_host_pool_new(PyTypeObject *type, PyObject *const *common, struct kvs_engine **engine);
/* Finish the constructor after opening the pool gave rc: raise, or wait if asked for. Steals the reference to self;
 * NULL with an exception. */
PyObject *kvs_py_host_pool_opened(struct kvs_py_host_pool *self, PyObject *const *common, int rc,
                                  const struct kvs_error *err);
int kvs_py_host_pool_info(PyObject *self, struct kvs_host_pool_info *info); /* kvswap.Error if closed */

void kvs_py_host_pool_dealloc(PyObject *self);
int kvs_py_host_pool_traverse(PyObject *self, visitproc visit, void *arg);
int kvs_py_host_pool_clear(PyObject *self);
int kvs_py_host_pool_getbuffer(PyObject *self, Py_buffer *view, int flags);
void kvs_py_host_pool_releasebuffer(PyObject *self, Py_buffer *view);

/* Attributes, each with its docstring. */
enum {
  KVS_PY_HOST_NUM_BLOCKS,
  KVS_PY_HOST_SLOT_NBYTES,
  KVS_PY_HOST_NBYTES,
  KVS_PY_HOST_MAPPED,
  KVS_PY_HOST_MAX_BLOCKS,
  KVS_PY_HOST_LAYER_COUNT,
  KVS_PY_HOST_LAYER_NBYTES,
  KVS_PY_HOST_LAYER_STRIDE,
  KVS_PY_HOST_PTR,
  KVS_PY_HOST_CHUNKS
};
PyObject *kvs_py_host_number(PyObject *self, void *field);
PyObject *kvs_py_host_layout(PyObject *self, void *unused);
PyObject *kvs_py_host_pages(PyObject *self, void *unused);
PyObject *kvs_py_host_state(PyObject *self, void *unused);
PyObject *kvs_py_host_pinned(PyObject *self, void *unused);
PyObject *kvs_py_host_numa_node(PyObject *self, void *unused);
PyObject *kvs_py_host_device(PyObject *self, void *unused);
PyObject *kvs_py_host_notices(PyObject *self, void *unused);
#define KVS_PY_HOST_NUMBER(name, field, doc) {name, kvs_py_host_number, NULL, doc, (void *)(field)}
#define KVS_PY_HOST_GETSET                                                                                             \
  KVS_PY_HOST_NUMBER("ptr", KVS_PY_HOST_PTR, "int: address of the first block. kvswap.Error if the pool is closed."),  \
      KVS_PY_HOST_NUMBER("nbytes", KVS_PY_HOST_NBYTES, "int: bytes of all blocks, num_blocks * slot_nbytes."),         \
      KVS_PY_HOST_NUMBER("mapped_nbytes", KVS_PY_HOST_MAPPED,                                                          \
                         "int: bytes of memory used: nbytes, rounded up to pages."),                                   \
      KVS_PY_HOST_NUMBER("num_blocks", KVS_PY_HOST_NUM_BLOCKS, "int: blocks 0 to num_blocks - 1."),                    \
      KVS_PY_HOST_NUMBER("slot_nbytes", KVS_PY_HOST_SLOT_NBYTES, "int: bytes of a slot: one block, of all layers."),   \
      KVS_PY_HOST_NUMBER("layers", KVS_PY_HOST_LAYER_COUNT, "int: layers of a block."),                                \
      KVS_PY_HOST_NUMBER("layer_nbytes", KVS_PY_HOST_LAYER_NBYTES, "int: bytes of a block in one layer."),             \
      KVS_PY_HOST_NUMBER("layer_stride", KVS_PY_HOST_LAYER_STRIDE,                                                     \
                         "int: bytes from block to block within a layer: cpu_stride of the swap calls."),              \
      KVS_PY_HOST_NUMBER("chunks", KVS_PY_HOST_CHUNKS, "int: number of registrations with the driver."),               \
      {"layout", kvs_py_host_layout, NULL, "str: 'block-first' or 'layer-first'.", NULL},                              \
      {"pages", kvs_py_host_pages, NULL, "str: kind of pages: 'default', 'transparent', '2MiB', '1GiB'.", NULL},       \
      {"state", kvs_py_host_state, NULL, "str: 'populating', 'ready', 'failed', 'cancelled' or 'closed'.", NULL},      \
      {"pinned", kvs_py_host_pinned, NULL, "bool: the whole pool is registered with the device.", NULL},               \
      {"numa_node", kvs_py_host_numa_node, NULL, "int, 'interleave' or None: requested NUMA node of the pages.",       \
       NULL},                                                                                                          \
      {"device", kvs_py_host_device, NULL, "Device: the pool is registered with it.", NULL}, {                         \
    "notices", kvs_py_host_notices, NULL, "tuple of str: what differs from the request; logged too.", NULL             \
  }

/* Methods, each with its docstring. */
#define KVS_PY_HOST_METHOD(name) PyObject *kvs_py_host_##name(PyObject *, PyObject *const *, Py_ssize_t, PyObject *)
KVS_PY_HOST_METHOD(wait);
KVS_PY_HOST_METHOD(layer);
KVS_PY_HOST_METHOD(torch);
KVS_PY_HOST_METHOD(pool);
KVS_PY_HOST_METHOD(close);
PyObject *kvs_py_host_ready(PyObject *self, PyObject *block);
PyObject *kvs_py_host_cancel(PyObject *self, PyObject *unused);
PyObject *kvs_py_host_layer_ptrs(PyObject *self, PyObject *unused);
PyObject *kvs_py_host_enter(PyObject *self, PyObject *unused);
PyObject *kvs_py_host_exit(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
extern const char kvs_py_host_wait_doc[], kvs_py_host_layer_doc[], kvs_py_host_torch_doc[], kvs_py_host_pool_doc[],
    kvs_py_host_close_doc[], kvs_py_host_ready_doc[], kvs_py_host_cancel_doc[], kvs_py_host_layer_ptrs_doc[],
    kvs_py_host_enter_doc[], kvs_py_host_exit_doc[];
#define KVS_PY_HOST_KEYWORDS(name)                                                                                     \
  {#name, KVS_PY_FASTCALL(kvs_py_host_##name), METH_FASTCALL | METH_KEYWORDS, kvs_py_host_##name##_doc}
#define KVS_PY_HOST_METHODS                                                                                            \
  KVS_PY_HOST_KEYWORDS(wait), KVS_PY_HOST_KEYWORDS(layer), KVS_PY_HOST_KEYWORDS(torch), KVS_PY_HOST_KEYWORDS(pool),    \
      KVS_PY_HOST_KEYWORDS(close), {"ready", kvs_py_host_ready, METH_O, kvs_py_host_ready_doc},                        \
      {"cancel", kvs_py_host_cancel, METH_NOARGS, kvs_py_host_cancel_doc},                                             \
      {"layer_ptrs", kvs_py_host_layer_ptrs, METH_NOARGS, kvs_py_host_layer_ptrs_doc},                                 \
      {"__enter__", kvs_py_host_enter, METH_NOARGS, kvs_py_host_enter_doc}, {                                          \
    "__exit__", KVS_PY_FASTCALL(kvs_py_host_exit), METH_FASTCALL, kvs_py_host_exit_doc                                 \
  }

/* Wait until the pool is populated, calling progress=. Ctrl-C works. */
int kvs_py_host_pool_wait(struct kvs_py_host_pool *self, int64_t timeout_ns);
int kvs_py_host_pool_tell(struct kvs_py_host_pool *self); /* log new notices */
/* Wait for the transfers that use the pool, and make ended ones drop their views. */
int kvs_py_host_pool_drain(PyObject *self, int64_t timeout_ns);
/* Set `uses` from 0 to `wanted`, which refuses new exports. BufferError: exports exist. kvswap.Error: closed. */
int kvs_py_host_pool_take(PyObject *self, long wanted);

#endif
