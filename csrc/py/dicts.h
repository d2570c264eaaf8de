/* Structs of the core as dicts: one table of fields a struct. */
#ifndef KVS_PY_DICTS_H
#define KVS_PY_DICTS_H

#include "py/bind.h"

#include <stddef.h>

struct kvs_py_field {
  const char *name;
  size_t offset;
  PyObject *(*make)(const void *member);
};

PyObject *kvs_py_of_count(const void *member);   /* uint64_t */
PyObject *kvs_py_of_seconds(const void *member); /* uint64_t, nanoseconds */
PyObject *kvs_py_of_int(const void *member);
PyObject *kvs_py_of_unsigned(const void *member);
PyObject *kvs_py_of_bool(const void *member);
PyObject *kvs_py_of_text(const void *member);    /* char[] */
PyObject *kvs_py_of_pointer(const void *member); /* const char *; NULL: "" */

/* A field under another name than its member's, and under the member's own. The member's type chooses the function. */
#define KVS_PY_AS(name, type, member)                                                                                  \
  {name, offsetof(type, member),                                                                                       \
   _Generic(((type *)0)->member,                                                                                       \
       uint64_t: kvs_py_of_count,                                                                                      \
       int: kvs_py_of_int,                                                                                             \
       unsigned: kvs_py_of_unsigned,                                                                                   \
       bool: kvs_py_of_bool,                                                                                           \
       char *: kvs_py_of_text,                                                                                         \
       const char *: kvs_py_of_pointer)}
#define KVS_PY_FIELD(type, member) KVS_PY_AS(#member, type, member)

/* dict[name] = value. Takes the reference; value may be NULL with an exception set. */
int kvs_py_put(PyObject *dict, const char *name, PyObject *value);
int kvs_py_append(PyObject *list, PyObject *value); /* the same */
/* Add the fields of a struct to a dict: the dict, or NULL. dict NULL: NULL. */
PyObject *kvs_py_fill(PyObject *dict, const void *from, const struct kvs_py_field *fields, size_t count);
#define KVS_PY_FILL(dict, from, fields) kvs_py_fill(dict, from, fields, sizeof(fields) / sizeof *(fields))
#define KVS_PY_DICT(from, fields) KVS_PY_FILL(PyDict_New(), from, fields)

#endif
