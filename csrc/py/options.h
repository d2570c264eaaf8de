/* Options common to the submitting functions. Their tables of names contain KVS_PY_COMMON_NAMES, and
 * KVS_PY_LAYER_NAMES if they copy layer by layer. */
#ifndef KVS_PY_OPTIONS_H
#define KVS_PY_OPTIONS_H

#include "paths/names.h"
#include "py/handle.h"

#define KVS_PY_COMMON_NAMES "stream", "after", "path", "priority", "max_ctas", "pace_gbps"
#define KVS_PY_LAYER_NAMES "layer_events", "after_layers"
enum { KVS_PY_COMMON = 6, KVS_PY_LAYERED = 2 };
#define KVS_PY_ROOM_NS (INT64_C(60) * 1000000000)
struct kvs_py_options {
  PyObject *const *common;  /* the values of those names */
  PyObject *const *layered; /* the values of KVS_PY_LAYER_NAMES, or NULL */
  bool patient;             /* a full lane is waited for, KVS_PY_ROOM_NS at most */
  PyObject *hold;           /* list of objects that must live until the transfer ends, or NULL */
  struct kvs_options core;
  struct kvs_py_after after, after_layers;
  char where[160];
  struct kvs_device_ids device_ids;
  struct kvs_after *more_after; /* `after` and the stream of device_ids, or NULL */
};
int kvs_py_direction(PyObject *value, int64_t *direction); /* KVS_D2H or KVS_H2D */
extern const char *const kvs_py_direction_names[3];        /* "d2h", "h2d", "other", as facts and metrics have them */
int kvs_py_path(PyObject *value, const char *name, bool with_auto); /* an enum kvs_path by its name, or -1 */
int kvs_py_options_check(struct kvs_py_options *options);           /* the checks that need no device */
int kvs_py_options_read(struct kvs_py_state *state, struct kvs_engine *engine, size_t layers,
                        struct kvs_py_options *options);
void kvs_py_options_clear(struct kvs_py_options *options);
void kvs_py_release_owner(void *owner); /* a release() callback: acquires the GIL and drops a reference */
/* Call `submit`, which uses options->core, without the GIL. The transfer then owns options->hold. */
int kvs_py_submit(struct kvs_py_state *state, struct kvs_engine *engine, struct kvs_py_options *options,
                  int (*submit)(void *call, struct kvs_error *err), void *call);

/* The hook round the calls that submit, for NVTX ranges and spans (kvswap.tracing). Without a hook a call costs one
 * load of a flag more. */
/* NULL: no hook is set, or it wants no more of this call. */
PyObject *kvs_py_trace_begin(struct kvs_py_state *state, const char *what);
/* Takes the reference that `begin` gave and returns `result`; result NULL: the call raised. */
PyObject *kvs_py_trace_end(PyObject *end, PyObject *result);

/* Docs. */
#define KVS_PY_ORDER_DOC                                                                                               \
  "stream: behave as if enqueued on it: start after all its work so far; its later work waits. An int handle\n"        \
  "  (0, 1 and 2 as in CUDA), or a torch, cupy or kvswap stream. None: start after the device's compute stream,\n"     \
  "  and no stream waits.\n"                                                                                           \
  "after: an Event, Transfer or stream to start after, or an iterable of them. A Transfer that failed raises its\n"    \
  "  error.\n"
#define KVS_PY_ONE_PATH_DOC(upper, lower) ", '" #lower "'"
#define KVS_PY_LIMITS_DOC                                                                                              \
  "priority: 'high', 'normal', 'background'. max_ctas, pace_gbps: bounds of kernels, in CTAs (1 to 1024) and 10^9\n"   \
  "  bytes a second (path 'kernel' only). 'auto' and None: the device's default (Device.set_defaults), else the\n"     \
  "  calibrated value: 'background' has fewer CTAs and a lower pace, so that a model beside it hardly slows down.\n"
#define KVS_PY_PATH_DOC                                                                                                \
  "path: 'auto'" KVS_PATH_ROWS(KVS_PY_ONE_PATH_DOC) ": docs/paths.md says how each copies.\n" KVS_PY_LIMITS_DOC
#define KVS_PY_LAYER_DOC                                                                                               \
  "layer_events: True: each layer can be waited for alone, by Transfer.make_wait_layer() and layer_done().\n"          \
  "after_layers: None, or a sequence with one entry a layer: an Event, a Transfer or a stream that the layer's\n"      \
  "  copies also start after; or None. Layers are copied in order.\n"
#define KVS_PY_CHECKED_DOC                                                                                             \
  "All that the host has is checked before anything is queued. ValueError, IndexError, TypeError: wrong arguments, "   \
  "nothing\n"                                                                                                          \
  "moved; QueueFull: too many unfinished transfers; DeviceError: the driver. Any thread may call."

#endif
