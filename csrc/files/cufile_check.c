/* Compares cufile.h with the header of the CUDA toolkit, if installed. Generates no code. */
#include "files/cufile.h"

#if defined(__has_include)
#if __has_include(<cufile.h>) && __has_include(<cuda.h>)
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#include <cufile.h>

#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs);
#define SAME_PLACE(ours, member, theirs, their_member)                                                                 \
  _Static_assert(offsetof(ours, member) == offsetof(theirs, their_member), #theirs "." #their_member);                 \
  _Static_assert(sizeof(((ours *)0)->member) == sizeof(((theirs *)0)->their_member), #theirs "." #their_member);
#define SAME_VALUE(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs);

SAME_SIZE(struct kvs_cufile_result, CUfileError_t)
SAME_PLACE(struct kvs_cufile_result, code, CUfileError_t, err)
SAME_PLACE(struct kvs_cufile_result, cuda, CUfileError_t, cu_err)
SAME_SIZE(struct kvs_cufile_file, CUfileDescr_t)
SAME_PLACE(struct kvs_cufile_file, type, CUfileDescr_t, type)
SAME_PLACE(struct kvs_cufile_file, handle.fd, CUfileDescr_t, handle.fd)
SAME_PLACE(struct kvs_cufile_file, operations, CUfileDescr_t, fs_ops)
SAME_PLACE(struct kvs_cufile_properties, major, CUfileDrvProps_t, nvfs.major_version)
SAME_PLACE(struct kvs_cufile_properties, minor, CUfileDrvProps_t, nvfs.minor_version)
SAME_PLACE(struct kvs_cufile_properties, file_systems, CUfileDrvProps_t, nvfs.dstatusflags)
SAME_PLACE(struct kvs_cufile_properties, flags, CUfileDrvProps_t, nvfs.dcontrolflags)
SAME_PLACE(struct kvs_cufile_properties, features, CUfileDrvProps_t, fflags)
SAME_PLACE(struct kvs_cufile_properties, pinned_kib, CUfileDrvProps_t, max_device_pinned_mem_size)
_Static_assert(sizeof(struct kvs_cufile_properties) >= sizeof(CUfileDrvProps_t), "CUfileDrvProps_t");
SAME_VALUE(KVS_CUFILE_CODES, CUFILEOP_BASE_ERR)
SAME_VALUE(KVS_CUFILE_NO_PLATFORM, CU_FILE_PLATFORM_NOT_SUPPORTED)
SAME_VALUE(KVS_CUFILE_NO_IO, CU_FILE_IO_NOT_SUPPORTED)
SAME_VALUE(KVS_CUFILE_NO_DEVICE, CU_FILE_DEVICE_NOT_SUPPORTED)
SAME_VALUE(KVS_CUFILE_FILE_TYPE, CU_FILE_INVALID_FILE_TYPE)
SAME_VALUE(KVS_CUFILE_OPEN_FLAG, CU_FILE_INVALID_FILE_OPEN_FLAG)
SAME_VALUE(KVS_CUFILE_NO_DIRECT, CU_FILE_DIO_NOT_SET)
SAME_VALUE(KVS_CUFILE_ALREADY_OPEN, CU_FILE_DRIVER_ALREADY_OPEN)
SAME_VALUE(KVS_CUFILE_NO_HANDLE, CU_FILE_HANDLE_NOT_REGISTERED)
SAME_VALUE(KVS_CUFILE_DISABLED, CU_FILE_IO_DISABLED)
SAME_VALUE(KVS_CUFILE_DESCRIPTOR, CU_FILE_HANDLE_TYPE_OPAQUE_FD)
SAME_VALUE(KVS_CUFILE_COMPAT_ALLOWED, CU_FILE_ALLOW_COMPAT_MODE)

#endif
#endif
