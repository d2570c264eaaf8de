/* Arguments. index: position in a list, for messages; -1: not in a list. */
#ifndef KVS_PY_ARGS_H
#define KVS_PY_ARGS_H

#include "py/bind.h"

struct kvs_py_args {
  const char *function;
  const char *const *names;
  int required, positional, total;
};
int kvs_py_args_parse(const struct kvs_py_args *spec, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                      PyObject **values); /* borrowed; NULL where not given */
int kvs_py_complain(PyObject *exception, const char *name, Py_ssize_t index, const char *format, ...); /* always -1 */
int kvs_py_int64(PyObject *value, const char *name, Py_ssize_t index, int64_t *number);
int kvs_py_uint64(PyObject *value, const char *name, Py_ssize_t index, uint64_t *number);
int kvs_py_choice(PyObject *value, const char *name, const char *const *choices, int count); /* its index, or -1 */
int kvs_py_timeout(PyObject *value, const char *name, int64_t *ns);       /* seconds; NULL or None: -1, no limit */
int kvs_py_attribute(PyObject *object, PyObject *name, PyObject **value); /* 1, or 0 where it has none */
int kvs_py_same_length(const char *name, size_t count, const char *other, size_t expected);
extern const char *const kvs_py_priority_names[3];
int kvs_py_not_contiguous(PyObject *object, const char *name, Py_ssize_t index); /* complain; always -1 */

#endif
