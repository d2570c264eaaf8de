/* The rows of the paths. */
#include "paths/table.h"

#include "private.h"

#define IN_TABLE(upper, lower) [KVS_PATH_##upper] = &kvs_path_##lower,
const struct kvs_path_ops *const kvs_paths[KVS_PATHS] = {KVS_PATH_ROWS(IN_TABLE)};
#undef IN_TABLE

const char *kvs_path_name(enum kvs_path path) {
  if ((unsigned)path >= KVS_PATHS) return "unknown";
  return kvs_paths[path] ? kvs_paths[path]->name : "auto";
}

bool kvs_path_needs_kernels(enum kvs_path path) { return kvs_paths[path] && kvs_paths[path]->needs_kernels; }

bool kvs_path_codes(enum kvs_path path) { return kvs_paths[path] && kvs_paths[path]->codes; }

bool kvs_path_needs_lender(enum kvs_path path) { return kvs_paths[path] && kvs_paths[path]->needs_lender; }

bool kvs_path_needs_threads(enum kvs_path path) { return kvs_paths[path] && kvs_paths[path]->needs_threads; }
