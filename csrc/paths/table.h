/* The rows of the paths, and what is asked of all of them. */
#ifndef KVS_TABLE_H
#define KVS_TABLE_H

#include "paths/path.h"

extern const struct kvs_path_ops *const kvs_paths[KVS_PATHS]; /* NULL for KVS_PATH_AUTO */

#endif
