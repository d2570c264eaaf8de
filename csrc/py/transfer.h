/* kvswap.Transfer, and what it has in common with FileTransfer: the object, and what its methods need of the core. */
#ifndef KVS_PY_TRANSFER_H
#define KVS_PY_TRANSFER_H

#include "py/bind.h"

struct kvs_py_transfer_now {
  enum kvs_state state;
  uint64_t nbytes, num_blocks, elapsed_ns;
};

/* One kind of transfer. done, wait, cancel and unref are called without the GIL, the others with it. */
struct kvs_py_transfer_kind {
  bool (*done)(void *transfer);
  int (*wait)(void *transfer, int64_t timeout_ns, struct kvs_error *err);
  bool (*cancel)(void *transfer);
  void (*unref)(void *transfer); /* the object's reference */
  int (*error)(void *transfer, struct kvs_error *err);
  size_t (*failed)(void *transfer, uint32_t *positions, size_t capacity);
  void (*now)(void *transfer, struct kvs_py_transfer_now *now);
  void (*collect)(void *transfer); /* drop the tensors that were held for ended transfers */
};

/* Takes the reference to the transfer, also on failure. */
PyObject *kvs_py_any_transfer_new(PyObject *type, const struct kvs_py_transfer_kind *kind, void *transfer);
bool kvs_py_any_transfer_poll(PyObject *self); /* whether it has ended; if so, drops what was held for it */
/* Positions of the failed blocks; the caller frees them with PyMem_Free. NULL: none, or an exception is set. */
uint32_t *kvs_py_any_transfer_failed(PyObject *self, size_t *count);
const char *kvs_py_state_name(enum kvs_state state); /* "running" */

PyObject *kvs_py_transfer_new(struct kvs_py_state *state, struct kvs_transfer *transfer); /* takes the reference */
int kvs_py_transfer_wait(struct kvs_py_state *state, struct kvs_transfer *transfer, int64_t timeout_ns);

#endif
