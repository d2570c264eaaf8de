/* Codecs by the CPU, for kvswap.codecs, which checks arrays: here are addresses. A coding is a capsule. */
#include "py/codec.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/module.h"

static const char capsule_name[] = "kvswap._C._Coding";
static const char *const kind_names[] = {"raw", "bf16", "fp16", "e4m3", "e5m2", "fp32"};

/* Borrowed; NULL: an exception is set. */
static struct kvs_coding *coding_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, capsule_name); }

struct kvs_coding *kvs_py_coding_from(PyObject *object, const char *name, Py_ssize_t index) {
  PyObject *capsule = PyObject_GetAttrString(object, "_coding");
  struct kvs_coding *coding = capsule ? coding_of(capsule) : NULL;
  Py_XDECREF(capsule); /* `object` holds it */
  if (coding) return coding;
  PyErr_Clear();
  (void)kvs_py_complain(PyExc_TypeError, name, index, "must be a kvswap.codecs.Coding, not %s",
                        Py_TYPE(object)->tp_name);
  return NULL;
}

static void drop(PyObject *capsule) { kvs_coding_close(coding_of(capsule)); }

/* (offset, nbytes, kind, codec or None); the text lives as long as the tuple. */
static int read_field(PyObject *item, Py_ssize_t index, struct kvs_field *field) {
  if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 4)
    return kvs_py_complain(PyExc_TypeError, "fields", index, "must be a tuple of four");
  PyObject *codec = PyTuple_GET_ITEM(item, 3);
  if (kvs_py_uint64(PyTuple_GET_ITEM(item, 0), "offset", -1, &field->offset) < 0) return -1;
  if (kvs_py_uint64(PyTuple_GET_ITEM(item, 1), "nbytes", -1, &field->nbytes) < 0) return -1;
  int kind = kvs_py_choice(PyTuple_GET_ITEM(item, 2), "kind", kind_names, 6);
  if (kind < 0) return -1;
  field->kind = (enum kvs_kind)kind;
  if (codec == Py_None) return 0;
  field->codec = PyUnicode_AsUTF8(codec);
  return field->codec ? 0 : -1;
}

static PyObject *coding_open(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"block_nbytes", "page_nbytes", "pitch", "codec", "fields"};
  static const struct kvs_py_args spec = {"_coding_open", names, 5, 5, 5};
  struct kvs_coding_layout layout = {0};
  struct kvs_coding *coding = NULL;
  struct kvs_error err = {0};
  PyObject *values[5], *capsule = NULL;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  uint64_t *const numbers[] = {&layout.block_nbytes, &layout.page_nbytes, &layout.pitch};
  for (int i = 0; i < 3; i++)
    if (kvs_py_uint64(values[i], names[i], -1, numbers[i]) < 0) return NULL;
  layout.codec = PyUnicode_AsUTF8(values[3]);
  if (!layout.codec) return NULL;
  if (!PyTuple_Check(values[4])) {
    (void)kvs_py_complain(PyExc_TypeError, "fields", -1, "must be a tuple");
    return NULL;
  }
  layout.nfields = (size_t)PyTuple_GET_SIZE(values[4]);
  struct kvs_field *fields = PyMem_Calloc(layout.nfields + 1, sizeof *fields);
  if (!fields) return PyErr_NoMemory();
  layout.fields = fields;
  int rc = 0;
  for (size_t i = 0; rc == 0 && i < layout.nfields; i++)
    rc = read_field(PyTuple_GET_ITEM(values[4], (Py_ssize_t)i), (Py_ssize_t)i, &fields[i]);
  if (rc == 0 && kvs_coding_open(&layout, &coding, &err) != KVS_OK) (void)kvs_py_raise(PyModule_GetState(module), &err);
  PyMem_Free(fields);
  if (coding) capsule = PyCapsule_New(coding, capsule_name, drop);
  if (coding && !capsule) kvs_coding_close(coding);
  return capsule;
}

static PyObject *coding_info(PyObject *module, PyObject *capsule) {
  (void)module;
  const struct kvs_coding *coding = coding_of(capsule);
  struct kvs_coding_info info;
  if (!coding) return NULL;
  kvs_coding_get_info(coding, &info);
  return Py_BuildValue("(KKKKKOs)", (unsigned long long)info.block_nbytes, (unsigned long long)info.page_nbytes,
                       (unsigned long long)info.coded_nbytes, (unsigned long long)info.coded_page_nbytes,
                       (unsigned long long)info.units, info.lossless ? Py_True : Py_False, kvs_coding_text(coding));
}

/* Arguments of both calls, in the order of C's encoding. */
enum { CODING, BLOCKS, STRIDE, PAGE_STRIDE, CODED, CODED_STRIDE, COUNT, VERDICTS, VALID, ARGUMENTS };
static const char *const names[] = {"coding",       "blocks", "stride",   "page_stride", "coded",
                                    "coded_stride", "count",  "verdicts", "valid_nbytes"};

/* Encode or decode; decoding takes all arguments but the last. */
static PyObject *code(const struct kvs_py_args *spec, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  PyObject *values[ARGUMENTS];
  uint64_t n[ARGUMENTS];
  size_t bad;
  if (kvs_py_args_parse(spec, args, nargs, kwnames, values) < 0) return NULL;
  struct kvs_coding *coding = coding_of(values[CODING]);
  if (!coding) return NULL;
  for (int i = BLOCKS; i < spec->total; i++)
    if (kvs_py_uint64(values[i], names[i], -1, &n[i]) < 0) return NULL;
  const struct kvs_blocks blocks = {(void *)(uintptr_t)n[BLOCKS], n[STRIDE], n[PAGE_STRIDE]};
  void *coded = (void *)(uintptr_t)n[CODED];
  uint8_t *verdicts = (uint8_t *)(uintptr_t)n[VERDICTS];
  Py_BEGIN_ALLOW_THREADS
  if (spec->total == ARGUMENTS)
    bad = kvs_encode_blocks(coding, &blocks, n[VALID], coded, n[CODED_STRIDE], n[COUNT], verdicts);
  else
    bad = kvs_decode_blocks(coding, coded, n[CODED_STRIDE], &blocks, n[COUNT], verdicts);
  Py_END_ALLOW_THREADS
  return PyLong_FromSize_t(bad);
}

static PyObject *encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"_coding_encode", names, ARGUMENTS, ARGUMENTS, ARGUMENTS};
  (void)module;
  return code(&spec, args, nargs, kwnames);
}

static PyObject *decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"_coding_decode", names, VALID, VALID, VALID};
  (void)module;
  return code(&spec, args, nargs, kwnames);
}

PyDoc_STRVAR(open_doc, "_coding_open($module, /, block_nbytes, page_nbytes, pitch, codec, fields)\n--\n\n"
                       "For kvswap.codecs: how blocks are coded, a capsule. fields: (offset, nbytes, kind, codec or "
                       "None), each.");
PyDoc_STRVAR(info_doc,
             "_coding_info($module, coding, /)\n--\n\n"
             "(block_nbytes, page_nbytes, coded_nbytes, coded_page_nbytes, units of a page, lossless, text).");
PyDoc_STRVAR(encode_doc,
             "_coding_encode($module, /, coding, blocks, stride, page_stride, coded, coded_stride, count, verdicts, "
             "valid_nbytes)\n--\n\n"
             "Encode blocks at an address to another; returns how many do not fit. verdicts: address of a byte a "
             "block.");
PyDoc_STRVAR(decode_doc,
             "_coding_decode($module, /, coding, blocks, stride, page_stride, coded, coded_stride, count, verdicts)\n"
             "--\n\nThe inverse; returns how many blocks are not whole.");

PyMethodDef kvs_py_codec_methods[] = {
    {"_coding_open", KVS_PY_FASTCALL(coding_open), METH_FASTCALL | METH_KEYWORDS, open_doc},
    {"_coding_info", coding_info, METH_O, info_doc},
    {"_coding_encode", KVS_PY_FASTCALL(encode), METH_FASTCALL | METH_KEYWORDS, encode_doc},
    {"_coding_decode", KVS_PY_FASTCALL(decode), METH_FASTCALL | METH_KEYWORDS, decode_doc},
    {NULL, NULL, 0, NULL},
};
