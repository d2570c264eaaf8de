/* Shared by the bindings of the file tier: files.c (the store), file_calls.c (its calls) and file_transfer.c. */
#ifndef KVS_PY_FILES_H
#define KVS_PY_FILES_H

#include "bind.h"

#include "../kvswap_file.h"

int kvs_py_say_store(struct kvs_py_state *state, const struct kvs_file_settings *settings,
                     struct kvs_file_store *store);       /* open.c */
struct kvs_file_store *kvs_py_file_core(PyObject *store); /* borrowed; NULL: not open */
PyObject *kvs_py_file_transfer_new(struct kvs_py_state *state,
                                   struct kvs_file_transfer *transfer); /* steals the reference */

struct kvs_file_transfer *kvs_py_file_transfer_core(PyObject *transfer); /* borrowed */

/* Run work(arg) on a new thread. Ctrl-C ends the wait, not the thread. 0: done, the caller owns arg. -1: an exception
 * is set, and arg is discarded now or when the thread ends. `work` and `discard` run without the GIL. */
int kvs_py_apart(struct kvs_py_state *state, int (*work)(void *arg, struct kvs_error *err), void (*discard)(void *arg),
                 void *arg);

/* Keys from a sequence of bytes or of (block id, pool), or from a 2-D array of bytes. */
struct kvs_py_keys {
  struct kvs_file_keys core;
  Py_buffer view; /* obj NULL: no view */
  uint8_t *data;  /* own copies, or NULL */
  size_t *ends;
};
int kvs_py_read_keys(PyObject *object, struct kvs_py_keys *keys);
void kvs_py_keys_clear(struct kvs_py_keys *keys);

/* file_open.c: FileStore(). *store is the caller's to drop, also on failure. */
int kvs_py_file_open(struct kvs_py_state *state, PyObject *args, PyObject *kwargs, struct kvs_file_store **store);

void kvs_py_file_say_note(PyObject *store); /* files.c: log what happened beside the calls */

/* file_calls.c: methods of the store. */
PyObject *kvs_py_file_store(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *kvs_py_file_load(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *kvs_py_file_delete(PyObject *self, PyObject *keys);
extern const char kvs_py_file_store_doc[], kvs_py_file_load_doc[], kvs_py_file_delete_doc[];

#endif
