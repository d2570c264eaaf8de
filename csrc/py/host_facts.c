/* The attributes of host pools. */
#include "host_pool.h"

#include <string.h>

enum { NUM_BLOCKS, SLOT_NBYTES, NBYTES, MAPPED, LAYER_COUNT, LAYER_NBYTES, LAYER_STRIDE, PTR, CHUNKS };

static PyObject *host_number(PyObject *self, void *field) {
  struct kvs_host_pool_info info;
  uintptr_t which = (uintptr_t)field;
  if ((which == PTR ? kvs_py_host_pool_info(self, &info) : kvs_py_host_any_info(self, &info)) < 0) return NULL;
  const uint64_t numbers[] = {[NUM_BLOCKS] = info.num_blocks,
                              [SLOT_NBYTES] = info.slot_nbytes,
                              [NBYTES] = info.nbytes,
                              [MAPPED] = info.mapped_nbytes,
                              [LAYER_COUNT] = info.layers,
                              [LAYER_STRIDE] = info.stride,
                              [LAYER_NBYTES] = info.layer_nbytes,
                              [PTR] = info.ptr,
                              [CHUNKS] = info.chunks};
  return PyLong_FromUnsignedLongLong(numbers[which]);
}

static PyObject *host_layout(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  (void)unused;
  return kvs_py_host_any_info(self, &info) < 0 ? NULL
                                               : PyUnicode_FromString(info.layer_first ? "layer-first" : "block-first");
}

static PyObject *host_pages(PyObject *self, void *unused) {
  static const char *const names[] = {[KVS_PAGES_DEFAULT] = "default",
                                      [KVS_PAGES_TRANSPARENT] = "transparent",
                                      [KVS_PAGES_2MIB] = "2MiB",
                                      [KVS_PAGES_1GIB] = "1GiB"};
  struct kvs_host_pool_info info;
  (void)unused;
  return kvs_py_host_any_info(self, &info) < 0 ? NULL : PyUnicode_FromString(names[info.pages]);
}

const char *const kvs_py_host_state_names[] = {[KVS_POOL_POPULATING] = "populating",
                                               [KVS_POOL_READY] = "ready",
                                               [KVS_POOL_FAILED] = "failed",
                                               [KVS_POOL_CANCELLED] = "cancelled",
                                               [KVS_POOL_CLOSED] = "closed"};

static PyObject *host_state(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  (void)unused;
  return kvs_py_host_any_info(self, &info) < 0 ? NULL : PyUnicode_FromString(kvs_py_host_state_names[info.state]);
}

static PyObject *host_pinned(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  (void)unused;
  return kvs_py_host_any_info(self, &info) < 0 ? NULL : PyBool_FromLong(info.pinned && info.state != KVS_POOL_CLOSED);
}

static PyObject *host_numa_node(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  (void)unused;
  if (kvs_py_host_any_info(self, &info) < 0) return NULL;
  if (info.node == -2) return PyUnicode_FromString("interleave");
  return info.node < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(info.node);
}

static PyObject *host_device(PyObject *self, void *unused) {
  (void)unused;
  return kvs_py_device_like(kvs_py_state_of(self), kvs_host_pool_engine(((struct kvs_py_host_pool *)self)->pool));
}

static PyObject *host_notices(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  char text[2048];
  (void)unused;
  if (kvs_py_host_any_info(self, &info) < 0) return NULL;
  kvs_host_pool_notices(((struct kvs_py_host_pool *)self)->pool, text, sizeof text);
  PyObject *whole = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
  PyObject *lines = whole == NULL ? NULL : PyUnicode_Splitlines(whole, 0);
  PyObject *tuple = lines == NULL ? NULL : PyList_AsTuple(lines);
  Py_XDECREF(whole);
  Py_XDECREF(lines);
  return tuple;
}

PyGetSetDef kvs_py_host_getset[] = {
    {"ptr", host_number, NULL, "int: address of the first block. kvswap.Error if the pool is closed.", (void *)PTR},
    {"nbytes", host_number, NULL, "int: bytes of all blocks, num_blocks * slot_nbytes.", (void *)NBYTES},
    {"mapped_nbytes", host_number, NULL, "int: bytes of memory used: nbytes, rounded up to pages.", (void *)MAPPED},
    {"num_blocks", host_number, NULL, "int: blocks 0 to num_blocks - 1.", (void *)NUM_BLOCKS},
    {"slot_nbytes", host_number, NULL, "int: bytes of a slot: one block, of all layers.", (void *)SLOT_NBYTES},
    {"layers", host_number, NULL, "int: layers of a block.", (void *)LAYER_COUNT},
    {"layer_nbytes", host_number, NULL, "int: bytes of a block in one layer.", (void *)LAYER_NBYTES},
    {"layer_stride", host_number, NULL, "int: bytes from block to block within a layer: cpu_stride of the swap calls.",
     (void *)LAYER_STRIDE},
    {"chunks", host_number, NULL, "int: number of registrations with the driver.", (void *)CHUNKS},
    {"layout", host_layout, NULL, "str: 'block-first' or 'layer-first'.", NULL},
    {"pages", host_pages, NULL, "str: kind of pages: 'default', 'transparent', '2MiB', '1GiB'.", NULL},
    {"state", host_state, NULL, "str: 'populating', 'ready', 'failed', 'cancelled' or 'closed'.", NULL},
    {"pinned", host_pinned, NULL, "bool: the whole pool is registered with the device.", NULL},
    {"numa_node", host_numa_node, NULL, "int, 'interleave' or None: requested NUMA node of the pages.", NULL},
    {"device", host_device, NULL, "Device: the pool is registered with it.", NULL},
    {"notices", host_notices, NULL, "tuple of str: what differs from the request; logged too.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
