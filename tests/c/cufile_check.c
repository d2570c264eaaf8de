/* Compares the structs and numbers of files/gds.c with the header of libcufile. Compiled only where that header is:
 * test_files_gds.py. */
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#include <cufile.h>

#include "files/gds.c"

#define SAME(ours, member, theirs, their_member)                                                                       \
  _Static_assert(offsetof(ours, member) == offsetof(theirs, their_member), #theirs "." #their_member);                 \
  _Static_assert(sizeof(((ours *)0)->member) == sizeof(((theirs *)0)->their_member), #theirs "." #their_member);
SAME(struct cufile_result, code, CUfileError_t, err)
SAME(struct cufile_result, cuda, CUfileError_t, cu_err)
SAME(struct cufile_file, type, CUfileDescr_t, type)
SAME(struct cufile_file, fd, CUfileDescr_t, handle.fd)
SAME(struct cufile_file, operations, CUfileDescr_t, fs_ops)
SAME(struct cufile_properties, major, CUfileDrvProps_t, nvfs.major_version)
SAME(struct cufile_properties, minor, CUfileDrvProps_t, nvfs.minor_version)
SAME(struct cufile_properties, file_systems, CUfileDrvProps_t, nvfs.dstatusflags)
SAME(struct cufile_properties, flags, CUfileDrvProps_t, nvfs.dcontrolflags)
_Static_assert(sizeof(struct cufile_result) == sizeof(CUfileError_t), "CUfileError_t");
_Static_assert(sizeof(struct cufile_file) == sizeof(CUfileDescr_t), "CUfileDescr_t");
_Static_assert(sizeof(struct cufile_properties) >= sizeof(CUfileDrvProps_t), "CUfileDrvProps_t");
_Static_assert((int)CU_FILE_DRIVER_ALREADY_OPEN == ALREADY_OPEN && CUFILEOP_BASE_ERR == KVS_FILE_CUFILE,
               "CUfileOpError");
_Static_assert(CU_FILE_PLATFORM_NOT_SUPPORTED == 5007 && CU_FILE_IO_NOT_SUPPORTED == 5008, "CUfileOpError");
_Static_assert(CU_FILE_DEVICE_NOT_SUPPORTED == 5009 && CU_FILE_INVALID_FILE_TYPE == 5018, "CUfileOpError");
_Static_assert(CU_FILE_INVALID_FILE_OPEN_FLAG == 5019 && CU_FILE_DIO_NOT_SET == 5020, "CUfileOpError");
