/* The address of a tensor, and lists of them. */
#ifndef KVS_PY_ADDRESS_H
#define KVS_PY_ADDRESS_H

#include "py/dlpack.h"

/* An object that must live until the transfer ends is appended to the list *hold, created on demand. hold NULL: the
 * caller keeps the memory valid. write: the address is a destination. */
int kvs_py_read_address(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index, bool write,
                        PyObject **hold, struct kvs_py_address *address);
int kvs_py_pointers(struct kvs_py_state *state, PyObject *object, const char *name, bool write, PyObject **hold,
                    struct kvs_py_list *list);
int kvs_py_hold(PyObject **hold, PyObject *object);
int kvs_py_check_size(const char *name, Py_ssize_t index, uint64_t limit, uint64_t blocks, uint64_t nbytes);
/* A GPU array of ids by __cuda_array_interface__: 1, or 0 if the object has none. */
int kvs_py_interface_ids(struct kvs_py_state *state, PyObject *object, const char *name, PyObject **keep,
                         struct kvs_py_strided *ids);

#endif
