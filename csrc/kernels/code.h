/* The C twins of kernels CODE and VERIFY. */
#ifndef KVS_KERNELS_CODE_H
#define KVS_KERNELS_CODE_H

#include <stdbool.h>

#include "kernels.h"

/* What one CTA codes at a time: a unit, the pages that it is of, and the number of the pair. */
struct kvs_code_item {
  struct kvs_unit unit;
  struct kvs_piece pages;
  uint64_t block;
  bool skipped; /* its destination is bad */
  bool empty;   /* it has no source */
};

struct kvs_code_item kvs_twin_code_item(const struct kvs_code_params *params, uint64_t index);
void kvs_twin_verify(const struct kvs_verify_params *params, unsigned cta, unsigned grid);
void kvs_twin_code(const struct kvs_code_params *params, unsigned cta, unsigned grid);

#endif
