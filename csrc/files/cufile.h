/* libcufile, the library of GPUDirect Storage, as one table of entry points that is found at run time: nothing links
 * it. Its structs are declared here; cuda/cufile_check.c compares them with the toolkit's header where there is one.
 *
 * The library is opened by the first user of the process and closed by kvs_cufile_close(), at exit: not in between,
 * since opening starts threads and looks at the whole machine. */
#ifndef KVS_CUFILE_H
#define KVS_CUFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "status.h"

/* Codes of the library that kvswap looks at; results of reads and writes are these, negative. */
enum {
  KVS_CUFILE_CODES = 5000, /* all are beyond */
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

enum { KVS_CUFILE_COMPAT_ALLOWED = 1 }; /* bit of `flags` */
struct kvs_cufile_properties {
  unsigned major, minor; /* of nvidia-fs; 0.0: it is not loaded, or not used */
  size_t poll_nbytes, direct_nbytes;
  unsigned file_systems; /* those it serves, a bit each */
  unsigned flags;
  unsigned features, cache_kib, buffer_kib, pinned_kib;
  unsigned newer[32]; /* later libraries write more */
};

/* X(member, symbol, other symbol, type, arguments): the other one where an older library has not the first. */
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
  void *library; /* from dlopen; never closed: it has threads of its own */
#define X(member, symbol, other, type, arguments) type(*member) arguments;
  KVS_CUFILE_ENTRIES(X)
#undef X
};

/* The library with its driver open; release it afterwards. The thread needs a CUDA context. KVS_UNSUPPORTED says why
 * not. Any thread. */
int kvs_cufile_get(const struct kvs_cufile **, struct kvs_error *);
void kvs_cufile_release(bool lost); /* lost: the device is; the driver then stays open, since closing it might hang */
/* Close the driver, unless somebody still has it: whether it is closed now. For exit, and for tests. */
bool kvs_cufile_close(void);

/* The library that KVSWAP_CUFILE names, NULL: the system's. One that is named is asked what it can do, and not the
 * kernel: it may be a test's. */
const char *kvs_cufile_named(void);
bool kvs_cufile_there(char note[200]); /* loads it, without opening its driver; why not */
bool kvs_cufile_kernel_module(void);   /* whether nvidia-fs is loaded */

/* Whether files such as this one go directly between disk and GPU, by what the driver says; `note`: by what, or why
 * not. Where the library may not fall back (allow_compat_mode is false in its configuration), every file that it takes
 * does. */
bool kvs_cufile_is_real(const struct kvs_cufile *, int fd, char note[160]);

const char *kvs_cufile_text(int code, char text[96]); /* "libcufile's error 5008" */

#endif
