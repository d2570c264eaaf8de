#include "host_kernel.h"

#include <string.h>

#define PACE_LIMIT_NS 1e10

size_t kvs_host_kernel_params_nbytes(enum kvs_kernel kernel) {
  switch (kernel) {
#define X(name, symbol, params)                                                                                        \
  case KVS_KERNEL_##name:                                                                                              \
    return sizeof(struct params);
    KVS_KERNEL_LIST(X)
#undef X
  case KVS_KERNELS:
    break;
  }
  return 0;
}

static bool can(struct kvs_host_view *view, enum kvs_host_use use, uint64_t address, uint64_t nbytes) {
  return !kvs_host_view_refuse(view, use, address, nbytes, false);
}

static bool can_read_table(struct kvs_host_view *view, uint64_t address, uint64_t count, size_t entry_nbytes) {
  uint64_t nbytes;
  return !__builtin_mul_overflow(count, (uint64_t)entry_nbytes, &nbytes) && can(view, KVS_HOST_READ, address, nbytes);
}

static bool prepare_copy(struct kvs_host_view *view, struct kvs_host_op *op) {
  const struct kvs_copy_params *params = &op->what.kernel.params.copy;
  const char *table = (const char *)(uintptr_t)params->pieces;
  uint64_t total = 0;
  if (!can_read_table(view, params->pieces, params->npieces, sizeof(struct kvs_piece))) return false;
  for (uint64_t i = 0; i < params->npieces; i++) {
    struct kvs_piece piece;
    memcpy(&piece, table + i * sizeof piece, sizeof piece);
    if (!can(view, KVS_HOST_READ, piece.src, piece.nbytes) || !can(view, KVS_HOST_WRITE, piece.dst, piece.nbytes))
      return false;
    total += piece.nbytes;
  }
  /* A CTA keeps its pace on its share; shares are taken as equal. */
  double mib = (double)total / (double)op->what.kernel.grid / (1 << 20);
  double pace_ns = mib * (double)params->ns_per_mib;
  op->pace_ns = pace_ns < PACE_LIMIT_NS ? (uint64_t)pace_ns : (uint64_t)PACE_LIMIT_NS;
  return true;
}

static bool prepare_pattern(struct kvs_host_view *view, const struct kvs_pattern_params *params) {
  const char *table = (const char *)(uintptr_t)params->items;
  bool check = params->mode != KVS_PATTERN_WRITE;
  if (!can_read_table(view, params->items, params->nitems, sizeof(struct kvs_pattern_item))) return false;
  if (check &&
      (params->result % 8 != 0 || !can(view, KVS_HOST_WRITE, params->result, sizeof(struct kvs_pattern_result))))
    return false;
  for (uint64_t i = 0; i < params->nitems; i++) {
    struct kvs_pattern_item item;
    memcpy(&item, table + i * sizeof item, sizeof item);
    if (!can(view, check ? KVS_HOST_READ : KVS_HOST_WRITE, item.ptr, item.nbytes)) return false;
  }
  return true;
}

bool kvs_host_kernel_prepare(struct kvs_host_memory *memory, struct kvs_host_op *op) {
  struct kvs_host_view view = {.memory = memory};
  bool good = op->what.kernel.id == KVS_KERNEL_COPY ? prepare_copy(&view, op)
                                                    : prepare_pattern(&view, &op->what.kernel.params.pattern);
  kvs_host_view_clear(&view);
  return good;
}
