/* kvswap._C._API: the table of kvswap_capi.h in a capsule, for other extensions. kvswap._C._private: private_capi.h. */
#define KVSWAP_CAPI_PROVIDER
#include "py/capi.h"
#include "kvswap_capi.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/file_transfer.h"
#include "py/handle.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/private_capi.h"
#include "py/sources.h"
#include "py/transfer.h"

/* These functions have no object of the module at hand, and the module has no second instance. */
static struct kvs_py_state *state_now(void) {
  PyObject *module = PyImport_ImportModule("kvswap._C"); /* a look-up in sys.modules */
  struct kvs_py_state *state = module ? PyModule_GetState(module) : NULL;
  if (module && !state) PyErr_SetString(PyExc_ImportError, "kvswap._C is not kvswap's extension");
  Py_XDECREF(module);
  return state;
}

static bool is_a(PyObject *object, PyObject *type, const char *name) {
  if ((PyObject *)Py_TYPE(object) == type) return true;
  kvs_py_complain(PyExc_TypeError, name, -1, "must be a %s, not %s", ((PyTypeObject *)type)->tp_name,
                  Py_TYPE(object)->tp_name);
  return false;
}

static struct kvs_engine *engine_of(PyObject *device) {
  struct kvs_py_state *state = state_now();
  return state ? kvs_py_engine_from(state, device) : NULL;
}

static struct kvs_transfer *transfer_of(PyObject *transfer) {
  struct kvs_py_state *state = state_now();
  if (!state || !is_a(transfer, state->transfer_type, "transfer")) return NULL;
  return kvs_py_transfer_core(transfer);
}

static struct kvs_pool *pool_of(PyObject *pool) {
  struct kvs_py_state *state = state_now();
  if (!state || !is_a(pool, state->pool_type, "pool")) return NULL;
  return kvs_py_pool_core(pool);
}

static struct kvs_file_store *file_store_of(PyObject *store) {
  struct kvs_py_state *state = state_now();
  if (!state || !is_a(store, state->file_store_type, "store")) return NULL;
  return kvs_py_file_core(store);
}

static struct kvs_file_transfer *file_transfer_of(PyObject *transfer) {
  struct kvs_py_state *state = state_now();
  if (!state || !is_a(transfer, state->file_transfer_type, "transfer")) return NULL;
  return kvs_py_file_transfer_core(transfer);
}

static int stream_of(PyObject *stream, struct kvs_engine *engine, uint64_t *handle) {
  struct kvs_py_state *state = state_now();
  return state ? kvs_py_stream_handle(state, stream, "stream", engine, handle) : -1;
}

static PyObject *transfer_object(struct kvs_transfer *transfer) {
  struct kvs_py_state *state = state_now();
  if (state) return kvs_py_transfer_new(state, transfer);
  kvs_transfer_unref(transfer);
  return NULL;
}

static PyObject *file_transfer_object(struct kvs_file_transfer *transfer) {
  struct kvs_py_state *state = state_now();
  if (state) return kvs_py_file_transfer_new(state, transfer);
  kvs_file_transfer_unref(transfer);
  return NULL;
}

static PyObject *raise_error(const struct kvs_error *err) {
  struct kvs_py_state *state = state_now();
  return state ? kvs_py_raise(state, err) : NULL;
}

#define MEMBER(name) .name = kvs_##name,
static struct kvswap_capi table = {.abi_version = KVSWAP_ABI_VERSION,
                                   .size = sizeof table,
                                   .engine_of = engine_of,
                                   .transfer_of = transfer_of,
                                   .pool_of = pool_of,
                                   .file_store_of = file_store_of,
                                   .file_transfer_of = file_transfer_of,
                                   .stream_of = stream_of,
                                   .transfer_object = transfer_object,
                                   .file_transfer_object = file_transfer_object,
                                   .raise_error = raise_error,
                                   KVSWAP_CAPI_LIST(MEMBER)};

static PyObject *device_object(struct kvs_engine *engine) { return kvs_py_device_new(state_now(), engine); }

static PyObject *seam(PyObject *const *args, Py_ssize_t nargs, const struct kvs_seam_row *more, size_t nmore) {
  return kvs_py_seam(state_now(), args, nargs, more, nmore);
}

#define X(name) .name = name,
static struct kvs_py_private inner = {
    .sources = KVSWAP_SOURCES, .device_object = device_object, .seam = seam, KVS_PY_PRIVATE(X)};
#undef X

static int add(PyObject *module, const char *attribute, void *pointer, const char *name) {
  PyObject *capsule = PyCapsule_New(pointer, name, NULL);
  int rc = capsule ? PyModule_AddObjectRef(module, attribute, capsule) : -1;
  Py_XDECREF(capsule);
  return rc;
}

int kvs_py_capi_add(PyObject *module) {
  table.version = kvs_version();
  if (add(module, "_API", &table, "kvswap._C._API") < 0) return -1;
  return add(module, "_private", &inner, "kvswap._C._private");
}
