/* io_uring. */
#ifndef KVS_FILE_ENGINE_URING_H
#define KVS_FILE_ENGINE_URING_H

#include "status.h"

int kvs_file_uring_try(struct kvs_error *); /* whether the kernel makes a ring, as kvs_file_uring needs */

#endif
