/* The base of HostPool and SharedPool: the object, its arguments, and what their own methods call. */
#ifndef KVS_PY_HOST_POOL_BASE_H
#define KVS_PY_HOST_POOL_BASE_H

#include "py/bind.h"

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
int kvs_py_host_any_info(PyObject *self, struct kvs_host_pool_info *info);  /* of an open or closed pool */
extern const char *const kvs_py_host_state_names[];                         /* by enum kvs_host_pool_state */

/* Wait until the pool is populated, calling progress=. Ctrl-C works. */
int kvs_py_host_pool_wait(struct kvs_py_host_pool *self, int64_t timeout_ns);
/* Wait for the transfers that use the pool, and make ended ones drop their views. */
int kvs_py_host_pool_drain(PyObject *self, int64_t timeout_ns);
/* Set `uses` from 0 to `wanted`, which refuses new exports. BufferError: exports exist. kvswap.Error: closed. */
int kvs_py_host_pool_take(PyObject *self, long wanted);

#endif
