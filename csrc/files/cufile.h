/* libcufile, the library of GPUDirect Storage, as one table of entry points. The library is loaded at run time; nothing
 * links it. Its structs are declared here; cufile_check.c compares them with the toolkit's header at build time,
 * if that header exists.
 *
 * The first user in the process opens the library, and kvs_cufile_close() closes it at exit. The library stays open in
 * between, because opening starts threads and scans the machine's PCI topology and mounts. */
#ifndef KVS_CUFILE_H
#define KVS_CUFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "status.h"

/* Error codes of libcufile that kvswap handles. Reads and writes return these codes negated. */
enum {
  KVS_CUFILE_CODES = 5000, /* lower bound of all codes */
  KVS_CUFILE_NO_PLATFORM = 5007,
  KVS_CUFILE_NO_IO = 5008,
  KVS_CUFILE_NO_DEVICE = 5009,
  KVS_CUFILE_FILE_TYPE = 5018,
  KVS_CUFILE_OPEN_FLAG = 5019,
  KVS_CUFILE_NO_DIRECT = 5020,
  KVS_CUFILE_ALREADY_OPEN = 5026,
  KVS_CUFILE_NO_HANDLE = 5027,
  KVS_CUFILE_DISABLED = 5034,
  KVS_CUFILE_CODES_END = 6000,
};

struct kvs_cufile_result {
  int code, cuda;
};

enum { KVS_CUFILE_DESCRIPTOR = 1 };
struct kvs_cufile_file {
  int type; /* KVS_CUFILE_DESCRIPTOR */
  union {
    int fd;
    void *other;
  } handle;
  const void *operations;
};

enum { KVS_CUFILE_COMPAT_ALLOWED = 1 }; /* bit number in `flags` */
struct kvs_cufile_properties {
  unsigned major, minor; /* version of nvidia-fs; 0.0: not loaded or not used */
  size_t poll_nbytes, direct_nbytes;
  unsigned file_systems; /* supported file systems, one bit each */
  unsigned flags;
  unsigned features, cache_kib, buffer_kib, pinned_kib;
  unsigned newer[32]; /* room for fields that later libraries write */
};

/* X(member, symbol, fallback symbol, type, arguments). The fallback is the symbol's name in older libraries. */
#define KVS_CUFILE_ENTRIES(X)                                                                                          \
  X(driver_open, "cuFileDriverOpen", NULL, struct kvs_cufile_result, (void))                                           \
  X(driver_close, "cuFileDriverClose_v2", "cuFileDriverClose", struct kvs_cufile_result, (void))                       \
  X(get_properties, "cuFileDriverGetProperties", NULL, struct kvs_cufile_result, (struct kvs_cufile_properties *))     \
  X(handle_register, "cuFileHandleRegister", NULL, struct kvs_cufile_result,                                           \
    (void **handle, struct kvs_cufile_file *))                                                                         \
  X(handle_deregister, "cuFileHandleDeregister", NULL, void, (void *handle))                                           \
  X(buffer_register, "cuFileBufRegister", NULL, struct kvs_cufile_result, (const void *, size_t nbytes, int flags))    \
  X(buffer_deregister, "cuFileBufDeregister", NULL, struct kvs_cufile_result, (const void *))                          \
  X(read, "cuFileRead", NULL, ssize_t, (void *handle, void *buffer, size_t nbytes, off_t at, off_t in_buffer))         \
  X(write, "cuFileWrite", NULL, ssize_t, (void *handle, const void *buffer, size_t nbytes, off_t at, off_t in_buffer))

struct kvs_cufile {
  void *library; /* from dlopen; never closed, because the library runs threads */
#define X(member, symbol, other, type, arguments) type(*member) arguments;
  KVS_CUFILE_ENTRIES(X)
#undef X
};

/* Get the library with its driver open; call kvs_cufile_release() afterwards. The calling thread needs a current CUDA
 * context. KVS_UNSUPPORTED: the error says why the library cannot be used. Any thread may call this function. */
int kvs_cufile_get(const struct kvs_cufile **, struct kvs_error *);
void kvs_cufile_release(bool lost); /* lost: the device is lost; the driver stays open, since closing could hang */
/* Close the driver unless it has users; true: the driver is closed. For exit and for tests. */
bool kvs_cufile_close(void);

/* The path in KVSWAP_CUFILE, or NULL for the system's library. For a library named this way, the library is asked for
 * its capabilities and the kernel is not: tests name a fake library. */
const char *kvs_cufile_named(void);
bool kvs_cufile_present(char note[200]); /* loads libcufile without opening its driver; false: `note` says why */
bool kvs_cufile_kernel_module(void);     /* true: nvidia-fs is loaded */

/* Whether the driver reports direct transfers between disk and GPU for this kind of file. `note`: the driver's version,
 * or the reason for false. If allow_compat_mode is false in the library's configuration, every file that the library
 * accepts is direct. */
bool kvs_cufile_is_direct(const struct kvs_cufile *, int fd, char note[160]);

const char *kvs_cufile_text(int code, char text[96]); /* "libcufile's error 5008" */

#endif
