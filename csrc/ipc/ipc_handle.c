/* Bare driver handles, as engines put them in shared memory (FastDeploy's segments contain only the driver's
 * handle). */
#include <inttypes.h>
#include <string.h>

#include "lanes/state.h"

int kvs_export_from_handle(struct kvs_engine *engine, const unsigned char handle[64], uint64_t nbytes,
                           struct kvs_export *made, struct kvs_error *err) {
  if (nbytes == 0) return kvs_fail(err, KVS_INVALID, "0 bytes of a handle cannot be opened");
  *made = (struct kvs_export){.kind = KVS_EXPORT_HANDLE, .allocation_nbytes = nbytes, .nbytes = nbytes};
  memcpy(made->uuid, engine->device->info.uuid, sizeof made->uuid);
  memcpy(made->device, engine->name, sizeof made->device);
  memcpy(made->handle, handle, sizeof made->handle);
  return KVS_OK;
}
