/* The rows of the paths. */
#include "paths/table.h"

const struct kvs_path_ops *const kvs_paths[KVS_PATHS] = {
    [KVS_PATH_DMA] = &kvs_path_dma,       [KVS_PATH_STRIDED] = &kvs_path_strided, [KVS_PATH_BURST] = &kvs_path_burst,
    [KVS_PATH_KERNEL] = &kvs_path_kernel, [KVS_PATH_DIRECT] = &kvs_path_direct,
};

const char *kvs_path_name(enum kvs_path path) {
  if ((unsigned)path >= KVS_PATHS) return "unknown";
  return kvs_paths[path] ? kvs_paths[path]->name : "auto";
}
