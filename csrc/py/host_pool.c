/* kvswap.memory.HostPool: blocks of host memory of this process. */
#include "base/wait.h"
#include "py/args.h"
#include "py/host_pool_base.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/wait.h"

enum { NUM_BLOCKS, BLOCK_NBYTES, MAX_BLOCKS, COMMON };

static PyObject *host_pool_create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"num_blocks", "slot_nbytes", "max_blocks", KVS_PY_HOST_NAMES, NULL};
  struct kvs_host_pool_options options = {0};
  struct kvs_error err = {0};
  struct kvs_engine *engine;
  PyObject *values[COMMON + KVS_PY_HOST_ARGUMENTS] = {NULL}, **common = values + COMMON;
  int rc;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOOOOOOOOOO:HostPool", names, &values[NUM_BLOCKS],
                                   &values[BLOCK_NBYTES], &values[MAX_BLOCKS], &common[0], &common[1], &common[2],
                                   &common[3], &common[4], &common[5], &common[6], &common[7], &common[8], &common[9],
                                   &common[10]))
    return NULL;
  if (kvs_py_host_options(values[NUM_BLOCKS], values[BLOCK_NBYTES], common, &options) < 0) return NULL;
  if (kvs_py_given(values[MAX_BLOCKS]) && kvs_py_uint64(values[MAX_BLOCKS], "max_blocks", -1, &options.max_blocks) < 0)
    return NULL;
  if (kvs_py_given(values[MAX_BLOCKS]) && options.max_blocks == 0) {
    kvs_py_complain(PyExc_ValueError, "max_blocks", -1, "is 0: must be num_blocks or more");
    return NULL;
  }
  struct kvs_py_host_pool *self = kvs_py_host_pool_new(type, common, &engine);
  if (!self) return NULL;
  Py_BEGIN_ALLOW_THREADS
  rc = kvs_host_pool_open(engine, &options, &self->pool, &err);
  kvs_engine_unref(engine);
  Py_END_ALLOW_THREADS
  return kvs_py_host_pool_opened(self, common, rc, &err);
}

static int read_size(PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, const char *function,
                     uint64_t *num_blocks, int64_t *timeout_ns) {
  static const char *const names[] = {"num_blocks", "timeout"};
  const struct kvs_py_args spec = {function, names, 1, 2, 2};
  PyObject *values[2];
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return -1;
  if (kvs_py_uint64(values[0], "num_blocks", -1, num_blocks) < 0) return -1;
  *timeout_ns = INT64_C(60000000000);
  return values[1] ? kvs_py_timeout(values[1], "timeout", timeout_ns) : 0;
}

struct resizing {
  struct kvs_host_pool *pool;
  int (*function)(struct kvs_host_pool *pool, uint64_t num_blocks, int64_t timeout_ns, struct kvs_error *err);
  uint64_t num_blocks;
};

static int resize_slice(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  const struct resizing *resizing = arg;
  return resizing->function(resizing->pool, resizing->num_blocks, timeout_ns, err);
}

/* The caller has waited for the transfers and the device. Still the driver, before it unpins memory, waits for all work
 * that was queued since. A resize that timed out continues where it stopped. */
static int resize(PyObject *self, struct resizing *resizing, int64_t timeout_ns, int64_t since_ns) {
  static const int64_t AT_LEAST_NS = 1000000000;
  int64_t left = timeout_ns - ((int64_t)kvs_clock_ns() - since_ns);
  if (timeout_ns >= 0 && left < AT_LEAST_NS) left = AT_LEAST_NS;
  return kvs_py_wait(kvs_py_state_of(self), resize_slice, resizing, timeout_ns < 0 ? -1 : left,
                     "unpinning the pool's memory");
}

static PyObject *host_pool_grow(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  struct kvs_host_pool_info info;
  uint64_t num_blocks;
  int64_t timeout_ns;
  if (read_size(args, nargs, kwnames, "grow", &num_blocks, &timeout_ns) < 0) return NULL;
  if (kvs_py_host_pool_info(self, &info) < 0) return NULL;
  struct kvs_host_pool *pool = ((struct kvs_py_host_pool *)self)->pool;
  int64_t since = (int64_t)kvs_clock_ns();
  if (kvs_host_pool_grow_waits(pool) && kvs_py_host_pool_drain(self, timeout_ns) < 0) return NULL;
  if (resize(self, &(struct resizing){pool, kvs_host_pool_grow, num_blocks}, timeout_ns, since) < 0) return NULL;
  return kvs_py_host_pool_wait((struct kvs_py_host_pool *)self, -1) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *host_pool_shrink(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  struct kvs_host_pool_info info;
  uint64_t num_blocks;
  int64_t timeout_ns;
  if (read_size(args, nargs, kwnames, "shrink", &num_blocks, &timeout_ns) < 0) return NULL;
  struct kvs_host_pool *pool = ((struct kvs_py_host_pool *)self)->pool;
  int64_t since = (int64_t)kvs_clock_ns();
  if (kvs_py_host_pool_info(self, &info) < 0 || kvs_py_host_pool_drain(self, timeout_ns) < 0) return NULL;
  if (kvs_py_host_pool_take(self, KVS_PY_HOST_SHRINKING) < 0) return NULL;
  int rc = resize(self, &(struct resizing){pool, kvs_host_pool_shrink, num_blocks}, timeout_ns, since);
  atomic_store(&((struct kvs_py_host_pool *)self)->uses, 0);
  if (rc < 0) return NULL;
  return kvs_py_host_pool_wait((struct kvs_py_host_pool *)self, -1) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *host_pool_max_blocks(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  (void)unused;
  return kvs_py_host_any_info(self, &info) < 0 ? NULL : PyLong_FromUnsignedLongLong(info.max_blocks);
}

static PyObject *host_pool_repr(PyObject *self) {
  struct kvs_host_pool *pool = ((struct kvs_py_host_pool *)self)->pool;
  struct kvs_host_pool_info info;
  struct kvs_error err = {0};
  char size[KVS_SIZE_TEXT];
  if (kvs_host_pool_get_info(pool, &info, &err) != KVS_OK) return PyUnicode_FromString("<kvswap.memory.HostPool>");
  kvs_size_text(info.slot_nbytes, size);
  return PyUnicode_FromFormat("<kvswap.memory.HostPool %llu block%s of %s on %s%s>",
                              (unsigned long long)info.num_blocks, info.num_blocks == 1 ? "" : "s", size,
                              kvs_engine_name(kvs_host_pool_engine(pool)),
                              info.state == KVS_POOL_CLOSED ? ", closed"
                              : info.pinned                 ? ", pinned"
                                                            : "");
}

PyDoc_STRVAR(
    host_pool_doc,
    "HostPool(num_blocks, slot_nbytes, *, max_blocks=None, device=None, layers=1, layout='block-first', "
    "pages='default', numa='auto', chunk_nbytes=1073741824, threads=None, register=True, reserve=None, progress=None, "
    "wait=True)\n--\n\n"
    "Blocks of pinned host memory, populated by several threads and registered with a device. Uses exactly the\n"
    "requested bytes, rounded up to a page.\n\n"
    "num_blocks, slot_nbytes: number of blocks (up to 2**32 - 1), and bytes of a slot: one block, all layers.\n"
    "layers, layout: 'block-first': all layers of a block together, which gives long runs for the copy paths and one\n"
    "  object a block for files. 'layer-first': all blocks of a layer together, as engines hold them.\n"
    "max_blocks: limit of grow(); reserves addresses, no memory. None: num_blocks.\n"
    "device: Device, its name, or None: as Device(None).\n"
    "pages: 'default'; 'transparent': huge pages if the kernel has them; '2MiB', '1GiB': reserved huge pages of the\n"
    "  system. An unavailable kind becomes the next smaller one, with a notice.\n"
    "numa: 'auto': the device's node; a node's number; 'interleave': all nodes; None: the system's default.\n"
    "chunk_nbytes: approximate bytes of a registration, a whole number of blocks: no block crosses from one "
    "registration\n"
    "  to the next. threads: number of populating threads, 1 to 64.\n"
    "register: False: pageable memory. A chunk that the driver refuses makes the pool pageable, with a notice.\n"
    "reserve: bytes of the machine's memory that must stay free, None: a share; negative: assume that so many bytes\n"
    "  more than now will be free, as on virtual machines whose memory grows.\n"
    "progress: called as progress(done_nbytes, total_nbytes) in the thread that waits. An exception of progress is\n"
    "  raised there; in the constructor it also frees the pool.\n"
    "wait: False: return at once; ready() says which blocks can be used.\n\n"
    "The pool has the buffer protocol (all blocks' bytes; one row a layer if layers have room to grow) and is "
    "accepted\n"
    "as a tensor by all of kvswap. The child of a fork() does not have the memory.\n\n"
    "MemoryError: a limit of the machine or of a control group, checked before any allocation. ValueError.\n"
    "Any thread may use it.");
PyDoc_STRVAR(
    grow_doc,
    "grow($self, /, num_blocks, timeout=60)\n--\n\n"
    "Grow to num_blocks blocks, at most max_blocks, and wait until they are ready. Addresses and contents stay.\n\n"
    "timeout: seconds to wait for transfers that use the last block, if the new blocks share a page with it.");
PyDoc_STRVAR(shrink_doc,
             "shrink($self, /, num_blocks, timeout=60)\n--\n\n"
             "Free the last blocks, so that num_blocks remain. Their addresses and contents stay.\n\n"
             "timeout: seconds to wait for transfers that use the pool. BufferError while views of it are alive.");

static PyMethodDef methods[] = {
    {"grow", KVS_PY_FASTCALL(host_pool_grow), METH_FASTCALL | METH_KEYWORDS, grow_doc},
    {"shrink", KVS_PY_FASTCALL(host_pool_shrink), METH_FASTCALL | METH_KEYWORDS, shrink_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"max_blocks", host_pool_max_blocks, NULL, "int: limit of grow().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)host_pool_doc}, {Py_tp_new, host_pool_create}, {Py_tp_repr, host_pool_repr},
    {Py_tp_methods, methods},           {Py_tp_getset, getset},        {0, NULL},
};

PyType_Spec kvs_py_host_pool_spec = {
    .name = "kvswap.memory.HostPool",
    .basicsize = sizeof(struct kvs_py_host_pool),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
