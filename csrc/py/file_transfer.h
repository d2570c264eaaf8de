/* kvswap.files.FileTransfer. */
#ifndef KVS_PY_FILE_TRANSFER_H
#define KVS_PY_FILE_TRANSFER_H

#include "kvswap_file.h"
#include "py/bind.h"

PyObject *kvs_py_file_transfer_new(struct kvs_py_state *state,
                                   struct kvs_file_transfer *transfer); /* steals the reference */

#endif
