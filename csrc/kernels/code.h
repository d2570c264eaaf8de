/* The C twins of kernels CODE and VERIFY. */
#ifndef KVS_KERNELS_CODE_H
#define KVS_KERNELS_CODE_H

#include "kernels.h"

struct kvs_code_item kvs_twin_code_item(const struct kvs_code_params *params, uint64_t index);
void kvs_twin_verify(const struct kvs_verify_params *params, unsigned cta, unsigned grid);
void kvs_twin_code(const struct kvs_code_params *params, unsigned cta, unsigned grid);

#endif
