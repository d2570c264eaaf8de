/* The shape of a transfer: how many copies, pieces and runs it has on each path, before it is planned. */
#include "calls/shape.h"

/* The kernel reads a merged list instead of rows and pairs if the list is this many times shorter. */
enum { LIST_IF_SHORTER = 4 };

/* Consecutive pairs that continue on both sides become one copy for each tensor without gaps. Returns the number of
 * such sequences. */
static uint64_t count_breaks(const int64_t *src, const int64_t *dst, size_t count) {
  uint64_t breaks = count > 0;
  for (size_t i = 1; i < count; i++) breaks += src[i] != src[i - 1] + 1 || dst[i] != dst[i - 1] + 1;
  return breaks;
}

/* Count rows whose host address is not aligned to the lines that the link moves. The last bits of the slots decide. */
static void find_skew(struct kvs_work *work, const int64_t *host_slots) {
  enum { LINE = KVS_COST_LINE };
  struct kvs_shape *shape = &work->shape;
  const struct kvs_rows *rows = &work->scratch->rows;
  uint64_t slots[LINE] = {0}, off = 0, nbytes = 0;
  unsigned used[LINE], nused = 0; /* the residues that occur */
  bool counted = false;
  for (size_t i = 0; i < rows->count; i++) {
    const struct kvs_row *row = &rows->items[i];
    uint64_t base = kvs_row_host(row, work->direction), stride = kvs_row_host_stride(row, work->direction);
    if (((base | stride) & (LINE - 1)) == 0) continue;
    for (size_t s = 0; !counted && s < work->nslots; s++)
      if (slots[host_slots[s] & (LINE - 1)]++ == 0) used[nused++] = (unsigned)(host_slots[s] & (LINE - 1));
    counted = true;
    for (unsigned u = 0; u < nused; u++)
      if ((base + used[u] * stride) & (LINE - 1)) off += slots[used[u]], nbytes += slots[used[u]] * row->nbytes;
  }
  shape->skew_pieces = shape->rows ? (uint64_t)((double)off * (double)shape->pieces / (double)shape->rows) : 0;
  shape->skew_nbytes = shape->skew_pieces ? nbytes : 0;
}

void kvs_find_shape(struct kvs_work *work, uint64_t cpu_slots) {
  struct kvs_scratch *scratch = work->scratch;
  struct kvs_shape *shape = &work->shape;
  /* Ids on the device: nothing is known to be contiguous. */
  uint64_t breaks = work->on_device.ids ? work->nslots : count_breaks(work->src_slots, work->dst_slots, work->nslots);
  const int64_t *host = work->direction == KVS_D2H ? work->dst_slots : work->src_slots;
  shape->copies = 0;
  for (size_t i = 0; i < scratch->rows.count; i++) {
    const struct kvs_row *row = &scratch->rows.items[i];
    bool packed = row->src_stride == row->nbytes && row->dst_stride == row->nbytes;
    shape->copies += packed ? breaks : work->nslots;
  }
  shape->direction = work->direction;
  shape->nbytes = work->nbytes;
  shape->rows = scratch->rows.count * work->nslots;
  shape->pieces = LIST_IF_SHORTER * shape->copies <= shape->rows ? shape->copies : shape->rows;
  shape->runs = work->grid ? 1 : shape->rows; /* the best case; counted exactly where a burst could win */
  work->cpu_slots = cpu_slots;
  find_skew(work, host);
}
