/* GPUDirect Storage: whether libcufile is on this machine. Blocks do not go through it: a block's checksum is compared
 * before a byte of it reaches the device, and a read straight into device memory leaves nothing to compare before. */
#include <dlfcn.h>
#include <stdio.h>

#include "kvswap_file.h"

bool kvs_file_gds(char note[200]) {
  void *library = dlopen("libcufile.so.0", RTLD_LAZY | RTLD_LOCAL);
  if (library) (void)dlclose(library);
  snprintf(note, 200, "%s",
           library ? "libcufile.so.0 is there, but kvswap reads and checks blocks in host memory first"
                   : "libcufile.so.0 is not there");
  return false;
}
