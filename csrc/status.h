/* How the core makes errors of the statuses of kvswap_status.h. The bindings turn an error into one Python exception
 * (csrc/py/errors.c); no other code interprets messages. */
#ifndef KVS_STATUS_H
#define KVS_STATUS_H

#include <stddef.h>
#include <stdint.h>

#include "kvswap_status.h"

/* Number of statuses: -status is below this. */
#define KVS_STATUS_ONE(name, value, exception, description) +1
enum { KVS_STATUSES = 0 KVS_STATUS_LIST(KVS_STATUS_ONE) };
#undef KVS_STATUS_ONE

/* What a status becomes in Python. BASE is kvswap.Error; DEVICE, QUEUE_FULL and MISSING derive from it. */
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
  KVS_EXC_MISSING,
};

/* Fill *err and return `status`, so that callers write `return kvs_fail(err, KVS_INVALID, "...")`. */
int kvs_fail(struct kvs_error *err, int status, const char *format, ...) __attribute__((format(printf, 3, 4), cold));

/* The same for a failed driver call; `message` may be empty: then the code and the operation are named. */
int kvs_fail_driver(struct kvs_error *err, int status, int code, const char *operation, const char *format, ...)
    __attribute__((format(printf, 5, 6), cold));

/* KVS_INVALID if one of the reserved words of a public struct is not 0. */
int kvs_check_reserved(const uint64_t *words, size_t count, const char *name, struct kvs_error *err);
#define KVS_CHECK_RESERVED(object, name, err)                                                                          \
  kvs_check_reserved((object)->reserved, sizeof(object)->reserved / 8, name, err)

enum kvs_exception kvs_status_exception(int status);

/* "1.5 MiB", for messages. */
enum { KVS_SIZE_TEXT = 24 };
const char *kvs_size_text(uint64_t nbytes, char text[KVS_SIZE_TEXT]);

#endif
