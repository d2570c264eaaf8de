/* The list of all statuses, and the error that a failing call fills in. Part of kvswap.h (which includes this file).
 *
 * Every function that can fail returns a status: KVS_OK (0) or a negative code of this list, and fills the struct
 * kvs_error that its caller passed as the last argument (never NULL). The caller owns the struct; it is written only on
 * failure. */
#ifndef KVSWAP_STATUS_H
#define KVSWAP_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#define KVS_API __attribute__((visibility("default")))

/* X(name, value, what Python raises, description) */
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
  X(MISSING, -17, MISSING, "not there")                                                                                \
  X(DAMAGED, -18, BASE, "the bytes are not those that were written")                                                   \
  X(BUSY, -19, BASE, "in use by another process")                                                                      \
  X(NO_ROOM, -20, BASE, "no room")                                                                                     \
  X(BAD_ID, -21, BASE, "a block id that the device read is bad")                                                       \
  X(NOT_STORED, -22, BASE, "a block does not fit its coded size")                                                      \
  X(MISCODED, -23, BASE, "a coded block does not decode to what was coded")

#define KVS_STATUS_VALUE(name, value, exception, description) KVS_##name = (value),
enum kvs_status { KVS_STATUS_LIST(KVS_STATUS_VALUE) };
#undef KVS_STATUS_VALUE

struct kvs_error {
  int status;            /* KVS_OK, or the status that the failing call returned */
  int code;              /* the driver's code (CUresult numbering on every device), 0 where no driver call failed */
  const char *operation; /* name of the driver call that failed, static storage; NULL where none did */
  char message[400];
};

KVS_API const char *kvs_status_name(int status);     /* "INVALID"; static storage, as all names and descriptions */
KVS_API const char *kvs_status_describe(int status); /* "invalid argument" */

#ifdef __cplusplus
}
#endif
#endif
