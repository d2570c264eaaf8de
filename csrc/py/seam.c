/* kvswap._C._seam: the members of csrc/device/device.h by name, for the conformance suite. One table row for each
 * member. All take numbers, except copy_batch and copy_direct, which take three lists first. */
#include "../device/share.h"
#include "address.h"
#include "args.h"
#include "errors.h"
#include "module.h"
#include "objects.h"
#include "open.h"

#include <string.h>

enum { SEAM_ARGS = 10 };
enum answer { NOTHING, NUMBER, READY, STREAM_INFO, REGION };

/* Arguments and results of a member. */
struct seam_call {
  struct kvs_device *device;
  uint64_t a[SEAM_ARGS];
  struct kvs_copies copies; /* points into `lists` */
  struct kvs_py_list lists[3];
  uint64_t number;
  struct kvs_stream_info stream;
  struct kvs_region region;
};

struct seam_row {
  const char *name;
  int needed; /* numbers */
  enum answer answer;
  bool copies;
  int (*call)(struct seam_call *, struct kvs_error *);
};

/* These the package itself uses, for `kvswap bench` and engines. */
#define PACKAGE_MEMBERS(X)                                                                                             \
  X(pointer_query, 1, REGION, false, kvs_dev_pointer_query(c->device, c->a[0], &c->region, err))                       \
  X(copy, 4, NOTHING, false, kvs_dev_copy(c->device, c->a[0], c->a[1], c->a[2], c->a[3], err))                         \
  X(fill, 4, NOTHING, false, kvs_dev_fill(c->device, c->a[0], (uint32_t)c->a[1], c->a[2], c->a[3], err))               \
  X(copy_batch, 1, NOTHING, true, kvs_dev_copy_batch(c->device, &c->copies, 0, c->copies.count, c->a[0], err))         \
  X(launch_copy, 5, NOTHING, false, launch_pieces(c, KVS_KERNEL_COPY, err))

/* (npieces, address of the pieces, grid, threads, stream) */
static int launch_pieces(struct seam_call *c, enum kvs_kernel kernel, struct kvs_error *err) {
  struct kvs_copy_params params = {.units = {.pieces = c->a[1]}, .count = c->a[0]};
  struct kvs_launch launch = {.kernel = kernel,
                              .grid = (unsigned)c->a[2],
                              .threads = (unsigned)c->a[3],
                              .params = &params,
                              .params_nbytes = sizeof params};
  return kvs_dev_launch(c->device, &launch, c->a[4], err);
}

#ifdef KVSWAP_NO_TEST_BINDINGS
#define MEMBERS(X) PACKAGE_MEMBERS(X)
#else
#define MEMBERS(X)                                                                                                     \
  PACKAGE_MEMBERS(X)                                                                                                   \
  X(check, 0, NOTHING, false, kvs_dev_check(c->device, err))                                                           \
  X(alloc, 1, NUMBER, false, kvs_dev_alloc(c->device, c->a[0], &c->number, err))                                       \
  X(free, 1, NOTHING, false, kvs_dev_free(c->device, c->a[0], err))                                                    \
  X(host_alloc, 1, NUMBER, false, kvs_dev_host_alloc(c->device, c->a[0], &c->number, err))                             \
  X(host_free, 1, NOTHING, false, kvs_dev_host_free(c->device, c->a[0], err))                                          \
  X(host_register, 2, NOTHING, false, kvs_dev_host_register(c->device, c->a[0], c->a[1], err))                         \
  X(host_unregister, 1, NOTHING, false, kvs_dev_host_unregister(c->device, c->a[0], err))                              \
  X(stream_create, 1, NUMBER, false, kvs_dev_stream_create(c->device, (int)(int64_t)c->a[0], &c->number, err))         \
  X(stream_destroy, 1, NOTHING, false, kvs_dev_stream_destroy(c->device, c->a[0], err))                                \
  X(stream_query, 1, READY, false, kvs_dev_stream_query(c->device, c->a[0], err))                                      \
  X(stream_info, 1, STREAM_INFO, false, kvs_dev_stream_info(c->device, c->a[0], &c->stream, err))                      \
  X(synchronize, 0, NOTHING, false, kvs_dev_synchronize(c->device, err))                                               \
  X(event_create, 1, NUMBER, false, kvs_dev_event_create(c->device, c->a[0] != 0, &c->number, err))                    \
  X(event_destroy, 1, NOTHING, false, kvs_dev_event_destroy(c->device, c->a[0], err))                                  \
  X(event_record, 2, NOTHING, false, kvs_dev_event_record(c->device, c->a[0], c->a[1], err))                           \
  X(event_query, 1, READY, false, kvs_dev_event_query(c->device, c->a[0], err))                                        \
  X(event_elapsed, 2, NUMBER, false, kvs_dev_event_elapsed(c->device, c->a[0], c->a[1], &c->number, err))              \
  X(stream_wait, 2, NOTHING, false, kvs_dev_stream_wait(c->device, c->a[0], c->a[1], err))                             \
  X(copy_direct, 1, NOTHING, true, kvs_dev_copy_direct(c->device, &c->copies, c->a[0], err))                           \
  X(copy_rect, 10, NOTHING, false, copy_rect(c, err))                                                                  \
  X(gap, 1, NOTHING, false, kvs_dev_gap(c->device, c->a[0], err))                                                      \
  X(launch_pack, 5, NOTHING, false, launch_pieces(c, KVS_KERNEL_PACK, err))                                            \
  X(launch_crc, 4, NOTHING, false, launch_crc(c, err))                                                                 \
  X(write32, 3, NOTHING, false, kvs_dev_write32(c->device, c->a[0], (uint32_t)c->a[1], c->a[2], err))                  \
  X(wait32, 3, NOTHING, false, kvs_dev_wait32(c->device, c->a[0], (uint32_t)c->a[1], c->a[2], err))                    \
  X(call, 2, NOTHING, false, call_count(c, err))                                                                       \
  X(chunk_granularity, 0, NUMBER, false, kvs_dev_chunk_granularity(c->device, &c->number, err))

/* (dst, src, dst_pitch, src_pitch, dst_height, src_height, width, height, depth, stream) */
static int copy_rect(struct seam_call *c, struct kvs_error *err) {
  struct kvs_rect rect = {.dst = c->a[0],
                          .src = c->a[1],
                          .dst_pitch = c->a[2],
                          .src_pitch = c->a[3],
                          .dst_height = c->a[4],
                          .src_height = c->a[5],
                          .width = c->a[6],
                          .height = c->a[7],
                          .depth = c->a[8]};
  return kvs_dev_copy_rect(c->device, &rect, c->a[9], err);
}

/* (address of the data, its bytes, address of a word that is 0, stream) */
static int launch_crc(struct seam_call *c, struct kvs_error *err) {
  struct kvs_crc_params params;
  kvs_crc_plan(&params, c->a[1]);
  params.data = c->a[0];
  params.result = c->a[2];
  struct kvs_launch launch = {.kernel = KVS_KERNEL_CRC,
                              .grid = params.bodies + 1,
                              .threads = KVS_CRC_THREADS,
                              .params = &params,
                              .params_nbytes = sizeof params};
  return kvs_dev_launch(c->device, &launch, c->a[3], err);
}

static void count_up(void *word) { __atomic_add_fetch((uint32_t *)word, 1, __ATOMIC_RELEASE); }

/* (address of a word of the host that is counted up, stream) */
static int call_count(struct seam_call *c, struct kvs_error *err) {
  return kvs_dev_call(c->device, count_up, (void *)(uintptr_t)c->a[0], c->a[1], err);
}
#endif

#define X(name, needed, answer, copies, expression)                                                                    \
  static int call_##name(struct seam_call *c, struct kvs_error *err) { return expression; }
MEMBERS(X)
#undef X

static const struct seam_row rows[] = {
#define X(name, needed, answer, copies, expression) {#name, needed, answer, copies, call_##name},
    MEMBERS(X)
#undef X
};

static const struct seam_row *find_row(PyObject *operation) {
  for (size_t i = 0; PyUnicode_Check(operation) && i < sizeof rows / sizeof *rows; ++i)
    if (PyUnicode_CompareWithASCIIString(operation, rows[i].name) == 0) return &rows[i];
  kvs_py_complain(PyExc_ValueError, "operation", -1, "is %R: no member of the seam", operation);
  return NULL;
}

static int read_copies(struct kvs_py_state *state, PyObject *const *args, struct seam_call *c, PyObject **block) {
  static const char *const names[3] = {"dsts", "srcs", "sizes"};
  uint64_t *words;
  for (int i = 0; i < 3; ++i) {
    int rc = kvs_py_pointers(state, args[i], names[i], false, NULL, &c->lists[i]);
    if (rc < 0) return -1;
    if (c->lists[i].count != c->lists[0].count)
      return kvs_py_complain(PyExc_ValueError, names[i], -1, "is not as long as dsts");
  }
  size_t count = c->lists[0].count;
  *block = kvs_py_uint64_array(count, &words); /* twice the size that the indices need */
  if (*block == NULL) return -1;
  uint32_t *indices = (uint32_t *)(void *)words;
  for (size_t i = 0; i < count; ++i) indices[i] = (uint32_t)i;
  /* the seam's pointers are not const, but it does not write through them */
  c->copies = (struct kvs_copies){.dst = (uint64_t *)(uintptr_t)c->lists[0].data,
                                  .src = (uint64_t *)(uintptr_t)c->lists[1].data,
                                  .nbytes = (uint64_t *)(uintptr_t)c->lists[2].data,
                                  .block = indices,
                                  .count = count,
                                  .capacity = count};
  return 0;
}

static int read_numbers(PyObject *const *args, Py_ssize_t nargs, const struct seam_row *row, struct seam_call *c) {
  if (nargs != row->needed) {
    PyErr_Format(PyExc_TypeError, "%s takes %d numbers (%zd given)", row->name, row->needed, nargs);
    return -1;
  }
  for (Py_ssize_t i = 0; i < nargs; ++i) {
    int64_t number;
    if (PyBool_Check(args[i])) {
      c->a[i] = args[i] == Py_True;
    } else if (kvs_py_uint64(args[i], "argument", i, &c->a[i]) < 0) {
      if (!PyErr_ExceptionMatches(PyExc_ValueError)) return -1;
      PyErr_Clear(); /* a priority may be negative */
      if (kvs_py_int64(args[i], "argument", i, &number) < 0) return -1;
      c->a[i] = (uint64_t)number;
    }
  }
  return 0;
}

static PyObject *region_dict(const struct kvs_region *region) {
  return Py_BuildValue("{s:K, s:K, s:K, s:K, s:s, s:i, s:N, s:N}", "base", (unsigned long long)region->base, "nbytes",
                       (unsigned long long)region->nbytes, "alias", (unsigned long long)region->alias, "buffer_id",
                       (unsigned long long)region->buffer_id, "memory", kvs_memory_name(region->memory), "device",
                       region->device, "seam", PyBool_FromLong(region->seam), "writable",
                       PyBool_FromLong(region->writable));
}

static PyObject *answer_of(const struct seam_call *c, enum answer answer, int rc) {
  switch (answer) {
  case NUMBER:
    return PyLong_FromUnsignedLongLong(c->number);
  case READY:
    return PyBool_FromLong(rc == KVS_OK);
  case STREAM_INFO:
    return Py_BuildValue("(KN)", (unsigned long long)c->stream.id, PyBool_FromLong(c->stream.capturing));
  case REGION:
    return region_dict(&c->region);
  case NOTHING:
    break;
  }
  Py_RETURN_NONE;
}

static PyObject *make_call(struct kvs_py_state *state, const struct seam_row *row, struct seam_call *c) {
  struct kvs_error err = {0};
  int rc;
  KVS_PY_NO_GIL(rc = row->call(c, &err));
  if (rc == KVS_OK || (rc == KVS_NOT_READY && row->answer == READY)) return answer_of(c, row->answer, rc);
  return kvs_py_raise(state, &err);
}

static PyObject *seam(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
  struct kvs_py_state *state = PyModule_GetState(module);
  struct seam_call c = {0};
  PyObject *block = NULL, *result = NULL;
  if (nargs < 2) {
    PyErr_SetString(PyExc_TypeError, "_seam() takes a device, the name of a member and its arguments");
    return NULL;
  }
  const struct seam_row *row = find_row(args[1]);
  if (row == NULL) return NULL;
  int lists = row->copies ? 3 : 0;
  if (nargs < 2 + lists) {
    PyErr_Format(PyExc_TypeError, "%s takes three lists and a stream", row->name);
    return NULL;
  }
  struct kvs_engine *engine = kvs_py_engine_from(state, args[0]);
  if (engine == NULL) return NULL;
  c.device = kvs_engine_device(engine);
  if ((lists == 0 || read_copies(state, args + 2, &c, &block) == 0) &&
      read_numbers(args + 2 + lists, nargs - 2 - lists, row, &c) == 0)
    result = make_call(state, row, &c);
  for (int i = 0; i < 3; ++i) Py_XDECREF(c.lists[i].keep);
  Py_XDECREF(block);
  kvs_engine_unref(engine);
  return result;
}

PyDoc_STRVAR(
    seam_doc,
    "_seam($module, device, operation, /, *args)\n--\n\n"
    "Call one member of csrc/device/device.h and return what it returns; queries return whether it is ready.\n\n"
    "copy_batch and copy_direct take (dsts, srcs, sizes, stream), launch_copy and launch_pack (npieces, address of\n"
    "the pieces, grid, threads, stream), launch_crc (address, bytes, address of a word, stream), copy_rect the fields "
    "of struct kvs_rect and the stream, all others as they stand.");

PyMethodDef kvs_py_seam_methods[] = {
    {"_seam", (PyCFunction)(void (*)(void))seam, METH_FASTCALL, seam_doc},
    {NULL, NULL, 0, NULL},
};
