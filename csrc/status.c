#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int kvs_fail(struct kvs_error *err, int status, const char *format, ...) {
  va_list args;
  err->status = status;
  err->code = 0;
  err->operation = NULL;
  va_start(args, format);
  vsnprintf(err->message, sizeof err->message, format, args);
  va_end(args);
  return status;
}

int kvs_fail_driver(struct kvs_error *err, int status, int code, const char *operation, const char *format, ...) {
  va_list args;
  int n = snprintf(err->message, sizeof err->message, "%s failed with code %d", operation, code);
  err->status = status;
  err->code = code;
  err->operation = operation;
  if (format[0] && n > 0 && (size_t)n + 2 < sizeof err->message) {
    memcpy(err->message + n, ": ", 2);
    va_start(args, format);
    vsnprintf(err->message + n + 2, sizeof err->message - (size_t)n - 2, format, args);
    va_end(args);
  }
  return status;
}

int kvs_check_reserved(const uint64_t *words, size_t count, const char *name, struct kvs_error *err) {
  for (size_t i = 0; i < count; i++)
    if (words[i])
      return kvs_fail(
          err, KVS_INVALID,
          "reserved[%zu] of struct %s is not 0: set the struct to zero before filling it in, or use a kvswap "
          "as new as the program",
          i, name);
  return KVS_OK;
}

const char *kvs_status_name(int status) {
  switch (status) {
#define X(name, value, exception, description)                                                                         \
  case value:                                                                                                          \
    return #name;
    KVS_STATUS_LIST(X)
#undef X
  default:
    return "UNKNOWN";
  }
}

const char *kvs_status_describe(int status) {
  switch (status) {
#define X(name, value, exception, description)                                                                         \
  case value:                                                                                                          \
    return description;
    KVS_STATUS_LIST(X)
#undef X
  default:
    return "unknown status";
  }
}

enum kvs_exception kvs_status_exception(int status) {
  switch (status) {
#define X(name, value, exception, description)                                                                         \
  case value:                                                                                                          \
    return KVS_EXC_##exception;
    KVS_STATUS_LIST(X)
#undef X
  default:
    return KVS_EXC_BASE;
  }
}

const char *kvs_size_text(uint64_t nbytes, char text[KVS_SIZE_TEXT]) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double size = (double)nbytes;
  int unit = 0;
  for (; size >= 1024 && unit < 6; unit++) size /= 1024;
  snprintf(text, KVS_SIZE_TEXT, unit == 0 ? "%.0f %s" : "%.1f %s", size, units[unit]);
  return text;
}
