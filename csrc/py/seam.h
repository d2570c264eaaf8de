/* Members of csrc/device/device.h by name: a row a member, in seam.c and in the extension of the tests. */
#ifndef KVS_PY_SEAM_H
#define KVS_PY_SEAM_H

#include "device/share.h"
#include "py/address.h"

enum { KVS_SEAM_ARGS = 10 };
enum kvs_seam_answer { KVS_SEAM_NOTHING, KVS_SEAM_NUMBER, KVS_SEAM_READY, KVS_SEAM_STREAM_INFO, KVS_SEAM_REGION };

/* Arguments and results of a member. */
struct kvs_seam_call {
  struct kvs_device *device;
  uint64_t a[KVS_SEAM_ARGS];
  struct kvs_copies copies; /* points into `lists` */
  struct kvs_py_list lists[3];
  uint64_t number;
  struct kvs_stream_info stream;
  struct kvs_region region;
};

struct kvs_seam_row {
  const char *name;
  int needed; /* numbers */
  enum kvs_seam_answer answer;
  bool copies; /* three lists come first */
  int (*call)(struct kvs_seam_call *, struct kvs_error *);
};

/* For a list of X(name, needed, answer, copies, expression of c and err). */
#define KVS_SEAM_FUNCTION(name, needed, answer, copies, expression)                                                    \
  static int call_##name(struct kvs_seam_call *c, struct kvs_error *err) { return expression; }
#define KVS_SEAM_ROW(name, needed, answer, copies, expression) {#name, needed, answer, copies, call_##name},

/* (device, name of a member, its arguments...). more: rows besides those of seam.c. */
PyObject *kvs_py_seam(struct kvs_py_state *state, PyObject *const *args, Py_ssize_t nargs,
                      const struct kvs_seam_row *more, size_t nmore);

#endif
