/* The list of all statuses, and the error that a failing call fills in.
 *
 * Every function of the core that can fail returns a status: KVS_OK (0) or a negative code of this list, and fills the
 * struct kvs_error that its caller passed as the last argument (never NULL). The caller owns the struct; it is written
 * only on failure. The bindings turn it into one Python exception (csrc/py/errors.c); no other code interprets
 * messages. */
#ifndef KVS_STATUS_H
#define KVS_STATUS_H

#include <stdint.h>

/* X(name, value, exception, description) */
#define KVS_STATUS_LIST(X)                                                                                             \
  X(OK, 0, NONE, "success")                                                                                            \
  X(INVALID, -1, VALUE, "invalid argument")                                                                            \
  X(RANGE, -2, INDEX, "index out of range")                                                                            \
  X(TYPE, -3, TYPE, "wrong type")                                                                                      \
  X(NOMEM, -4, MEMORY, "out of memory")                                                                                \
  X(NOT_READY, -5, DEVICE, "not finished yet")                                                                         \
  X(TIMEOUT, -6, TIMEOUT, "the time limit passed")                                                                     \
  X(QUEUE_FULL, -7, QUEUE_FULL, "the lane is full")                                                                    \
  X(REFUSED, -8, DEVICE, "the driver refused the call")                                                                \
  X(LOST, -9, DEVICE, "the device is lost")                                                                            \
  X(UNSUPPORTED, -10, BASE, "not supported here")                                                                      \
  X(CLOSED, -11, BASE, "already closed")                                                                               \
  X(FORKED, -12, BASE, "opened before fork()")                                                                         \
  X(CAPTURING, -13, BASE, "the stream is being captured")                                                              \
  X(CANCELLED, -14, BASE, "cancelled")                                                                                 \
  X(INTERNAL, -15, BASE, "internal error")                                                                             \
  X(FILE, -16, BASE, "a file operation failed")                                                                        \
  X(MISSING, -17, BASE, "not there")                                                                                   \
  X(DAMAGED, -18, BASE, "the bytes are not those that were written")                                                   \
  X(BUSY, -19, BASE, "in use by another process")                                                                      \
  X(NO_ROOM, -20, BASE, "no room")

enum kvs_status {
#define X(name, value, exception, description) KVS_##name = (value),
  KVS_STATUS_LIST(X)
#undef X
};

/* What a status becomes in Python. BASE is kvswap.Error; DEVICE, QUEUE_FULL derive from it. */
enum kvs_exception {
  KVS_EXC_NONE,
  KVS_EXC_BASE,
  KVS_EXC_VALUE,
  KVS_EXC_INDEX,
  KVS_EXC_TYPE,
  KVS_EXC_MEMORY,
  KVS_EXC_TIMEOUT,
  KVS_EXC_QUEUE_FULL,
  KVS_EXC_DEVICE,
};

struct kvs_error {
  int status;            /* KVS_OK, or the status that the failing call returned */
  int code;              /* the driver's code (CUresult numbering on every device), 0 where no driver call failed */
  const char *operation; /* name of the driver call that failed, static storage; NULL where none did */
  char message[400];
};

/* Fill *err and return `status`, so that callers write `return kvs_fail(err, KVS_INVALID, "...")`. */
int kvs_fail(struct kvs_error *err, int status, const char *format, ...) __attribute__((format(printf, 3, 4), cold));

/* The same for a failed driver call; `message` may be empty: then the code and the operation are named. */
int kvs_fail_driver(struct kvs_error *err, int status, int code, const char *operation, const char *format, ...)
    __attribute__((format(printf, 5, 6), cold));

const char *kvs_status_name(int status);
const char *kvs_status_describe(int status);
enum kvs_exception kvs_status_exception(int status);

/* "1.5 MiB", for messages. */
enum { KVS_SIZE_TEXT = 24 };
const char *kvs_size_text(uint64_t nbytes, char text[KVS_SIZE_TEXT]);

#endif
