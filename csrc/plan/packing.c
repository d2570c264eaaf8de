/* Packing: see packing.h. What costs per block is a key, a pair and, where the host's side does not go on, a copy. */
#include "plan/packing.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t LEAST_FILLING = 1 << 20; /* a smaller one is all waiting for flags */

/* -- room ------------------------------------------------------------------------------------------------------ */

/* Contents are kept. */
static int grow(void *pointer, size_t *capacity, size_t wanted, size_t size, struct kvs_error *err) {
  void **at = pointer;
  if (wanted <= *capacity) return KVS_OK;
  if (wanted < 2 * *capacity) wanted = 2 * *capacity;
  if (wanted < 64) wanted = 64;
  void *grown = realloc(*at, wanted * size);
  if (!grown) return kvs_fail(err, KVS_NOMEM, "no memory to pack %zu entries of %zu bytes", wanted, size);
  *at = grown;
  *capacity = wanted;
  return KVS_OK;
}

int kvs_rows_reserve(struct kvs_rows *rows, size_t capacity, struct kvs_error *err) {
  return grow(&rows->items, &rows->capacity, capacity, sizeof *rows->items, err);
}

void kvs_rows_free(struct kvs_rows *rows) {
  free(rows->items);
  memset(rows, 0, sizeof *rows);
}

void kvs_packing_free(struct kvs_packing *packing) {
  free(packing->groups);
  free(packing->pairs);
  free(packing->room);
  free(packing->segments);
  free(packing->packed);
  free(packing->ends);
  kvs_copies_free(&packing->copies);
  memset(packing, 0, sizeof *packing);
}

/* -- rows and groups ------------------------------------------------------------------------------------------- */

static int by_dst(const void *a, const void *b) {
  uint64_t left = ((const struct kvs_row *)a)->dst, right = ((const struct kvs_row *)b)->dst;
  return (left > right) - (left < right);
}

static int by_src(const void *a, const void *b) {
  uint64_t left = ((const struct kvs_row *)a)->src, right = ((const struct kvs_row *)b)->src;
  return (left > right) - (left < right);
}

static void sort_rows(struct kvs_rows *rows, enum kvs_direction direction) {
  for (size_t i = 1; i < rows->count; i++)
    if (kvs_row_host(&rows->items[i], direction) < kvs_row_host(&rows->items[i - 1], direction)) {
      qsort(rows->items, rows->count, sizeof *rows->items, direction == KVS_D2H ? by_dst : by_src);
      return;
    }
}

static int cut_rows(struct kvs_rows *rows, uint64_t most, struct kvs_error *err) {
  size_t count = rows->count, total = 0;
  for (size_t i = 0; i < count; i++) total += (size_t)((rows->items[i].nbytes - 1) / most) + 1;
  if (total == count) return KVS_OK;
  int status = kvs_rows_reserve(rows, total, err);
  if (status) return status;
  for (size_t i = count, at = total; i-- > 0;) { /* from the end, so that nothing is overwritten unread */
    struct kvs_row row = rows->items[i];
    uint64_t parts = (row.nbytes - 1) / most + 1;
    for (uint64_t part = parts; part-- > 0;) {
      struct kvs_row *cut = &rows->items[--at];
      *cut = row;
      cut->src += part * most;
      cut->dst += part * most;
      cut->nbytes = part + 1 < parts ? most : row.nbytes - part * most;
    }
  }
  rows->count = total;
  return KVS_OK;
}

static void end_group(struct kvs_rows *rows, const struct kvs_group *group) {
  for (size_t i = 0; i < group->count; i++) rows->items[group->first + i].packed_stride = group->nbytes;
}

int kvs_pack_rows(struct kvs_rows *rows, enum kvs_direction direction, uint64_t most, struct kvs_packing *packing,
                  struct kvs_error *err) {
  sort_rows(rows, direction);
  int status = cut_rows(rows, most, err);
  if (!status) status = grow(&packing->groups, &packing->groups_capacity, rows->count, sizeof *packing->groups, err);
  if (status) return status;
  packing->ngroups = 0;
  struct kvs_group *group = NULL;
  for (size_t i = 0; i < rows->count; i++) {
    struct kvs_row *row = &rows->items[i];
    uint64_t host = kvs_row_host(row, direction), stride = kvs_row_host_stride(row, direction);
    if (!group || host != group->host + group->nbytes || stride != group->host_stride ||
        group->nbytes + row->nbytes > most) {
      if (group) end_group(rows, group);
      group = &packing->groups[packing->ngroups++];
      *group = (struct kvs_group){.first = i, .host = host, .host_stride = stride};
    }
    row->packed = group->nbytes;
    group->nbytes += row->nbytes;
    group->count++;
  }
  if (group) end_group(rows, group);
  return KVS_OK;
}

int kvs_pack_count_runs(const struct kvs_packing *packing, const int64_t *host_slots, size_t count, uint64_t slots,
                        struct kvs_plan_scratch *scratch, uint64_t *runs, struct kvs_error *err) {
  size_t words = (size_t)(slots / 64) + 1, together = 0, apart = 0;
  for (size_t g = 0; g < packing->ngroups; g++)
    if (packing->groups[g].nbytes == packing->groups[g].host_stride)
      together++;
    else
      apart++;
  *runs = apart * count;
  if (!together || !count) return KVS_OK;
  int status = kvs_plan_grow_bitmap(scratch, words, err);
  if (status) return status;
  uint64_t *bitmap = scratch->bitmap, begins = 0;
  for (size_t i = 0; i < count; i++) bitmap[host_slots[i] >> 6] |= 1ull << (host_slots[i] & 63);
  for (size_t i = 0; i < count; i++) {
    uint64_t before = (uint64_t)host_slots[i] - 1;
    begins += host_slots[i] == 0 || !(bitmap[before >> 6] >> (before & 63) & 1);
  }
  for (size_t i = 0; i < count; i++) bitmap[host_slots[i] >> 6] = 0;
  *runs += together * begins;
  return KVS_OK;
}

/* -- pairs ----------------------------------------------------------------------------------------------------- */

int kvs_pack_pairs(const int64_t *src, const int64_t *dst, size_t count, struct kvs_packing *packing,
                   struct kvs_error *err) {
  size_t capacity = packing->pairs_capacity;
  int status = grow(&packing->room, &capacity, count, sizeof *packing->room, err);
  if (!status) status = grow(&packing->pairs, &packing->pairs_capacity, count, sizeof *packing->pairs, err);
  if (status) return status;
  packing->npairs = count;
  for (size_t i = 0; i < count; i++) packing->pairs[i] = (struct kvs_pair){(uint32_t)src[i], (uint32_t)dst[i]};
  return KVS_OK;
}

static uint32_t key_of(const struct kvs_pair *pair, enum kvs_direction direction) {
  return direction == KVS_D2H ? pair->dst : pair->src;
}

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

/* Least-digit radix sort by the host's slot, over the bits in which slots differ. */
void kvs_pack_sort(struct kvs_packing *packing, enum kvs_direction direction) {
  size_t count = packing->npairs;
  uint32_t differ = 0;
  bool ascending = true;
  for (size_t i = 1; i < count; i++) {
    uint32_t before = key_of(&packing->pairs[i - 1], direction), key = key_of(&packing->pairs[i], direction);
    ascending &= before <= key;
    differ |= before ^ key;
  }
  if (ascending) return;
  for (unsigned shift = 0; shift < 32 && differ >> shift; shift += DIGIT_BITS) {
    size_t start[DIGITS] = {0}, sum = 0;
    for (size_t i = 0; i < count; i++) start[key_of(&packing->pairs[i], direction) >> shift & (DIGITS - 1)]++;
    for (size_t d = 0; d < DIGITS; d++) {
      size_t n = start[d];
      start[d] = sum;
      sum += n;
    }
    for (size_t i = 0; i < count; i++)
      packing->room[start[key_of(&packing->pairs[i], direction) >> shift & (DIGITS - 1)]++] = packing->pairs[i];
    struct kvs_pair *sorted = packing->room;
    packing->room = packing->pairs;
    packing->pairs = sorted;
  }
}

/* -- fillings -------------------------------------------------------------------------------------------------- */

/* The filling that is being planned. */
struct filling {
  struct kvs_packing *packing;
  const struct kvs_ring_shape *ring;
  const struct kvs_regions *regions;
  bool gather;
  uint64_t left;       /* bytes of the transfer that are in no filling yet */
  uint64_t used, room; /* bytes of this one */
  size_t copies;       /* where its copies begin */
};

static uint64_t room_of(const struct filling *filling) {
  uint64_t room = filling->ring->slot_nbytes, small = LEAST_FILLING;
  if (filling->gather)
    small <<= filling->packing->nfillings < 16 ? filling->packing->nfillings : 16;
  else if (filling->left / 2 > small)
    small = filling->left / 2;
  return small < room ? small : room;
}

static void begin(struct filling *filling) {
  filling->used = 0;
  filling->room = room_of(filling);
  filling->copies = filling->packing->copies.count;
}

static int end(struct filling *filling, struct kvs_error *err) {
  struct kvs_packing *packing = filling->packing;
  int status = grow(&packing->ends, &packing->ends_capacity, packing->nfillings + 1, sizeof *packing->ends, err);
  if (!status) status = kvs_plan_split(&packing->copies, filling->copies, filling->regions, err);
  if (status) return status;
  packing->segments[packing->nsegments - 1].last = 1;
  packing->ends[packing->nfillings++] = packing->copies.count;
  begin(filling);
  return KVS_OK;
}

static int add_segment(struct filling *filling, const struct kvs_segment *segment, struct kvs_error *err) {
  struct kvs_packing *packing = filling->packing;
  int status =
      grow(&packing->segments, &packing->segments_capacity, packing->nsegments + 1, sizeof *packing->segments, err);
  if (!status) packing->segments[packing->nsegments++] = *segment;
  return status;
}

/* The next bytes of the slot are those at `host`. */
static int add_bytes(struct filling *filling, uint64_t host, uint64_t nbytes, struct kvs_error *err) {
  struct kvs_copies *copies = &filling->packing->copies;
  uint64_t slot = filling->packing->nfillings % filling->ring->slots;
  uint64_t there = filling->ring->address + slot * filling->ring->slot_nbytes + filling->used;
  size_t last = copies->count - 1;
  filling->used += nbytes;
  filling->left -= nbytes;
  if (copies->count > filling->copies &&
      (filling->gather ? copies->dst : copies->src)[last] + copies->nbytes[last] == host) {
    copies->nbytes[last] += nbytes;
    return KVS_OK;
  }
  int status = kvs_copies_reserve(copies, copies->count + 1, err);
  if (!status) kvs_copies_push(copies, filling->gather ? host : there, filling->gather ? there : host, nbytes, 0);
  return status;
}

static struct filling start(struct kvs_packing *packing, enum kvs_direction direction,
                            const struct kvs_ring_shape *ring, const struct kvs_regions *regions, uint64_t nbytes) {
  struct filling filling = {
      .packing = packing, .ring = ring, .regions = regions, .gather = direction == KVS_D2H, .left = nbytes};
  packing->nsegments = packing->nfillings = packing->copies.count = 0;
  begin(&filling);
  return filling;
}

static int pack_group(struct filling *filling, const struct kvs_group *group, struct kvs_error *err) {
  const struct kvs_packing *packing = filling->packing;
  int status = KVS_OK;
  for (size_t at = 0, n; !status && at < packing->npairs; at += n) {
    n = filling->used < filling->room ? (size_t)((filling->room - filling->used) / group->nbytes) : 0;
    if (n == 0 && filling->used) {
      status = end(filling, err);
      continue;
    }
    if (n == 0) n = 1; /* a block may be larger than a small filling, never than a slot */
    if (n > packing->npairs - at) n = packing->npairs - at;
    struct kvs_segment segment = {.first = at,
                                  .count = n,
                                  .base = filling->used,
                                  .first_row = (uint32_t)group->first,
                                  .nrows = (uint32_t)group->count};
    status = add_segment(filling, &segment, err);
    for (size_t i = 0; !status && i < n; i++) {
      uint32_t slot = filling->gather ? packing->pairs[at + i].dst : packing->pairs[at + i].src;
      status = add_bytes(filling, group->host + slot * group->host_stride, group->nbytes, err);
    }
  }
  return status;
}

int kvs_pack_grid(struct kvs_packing *packing, enum kvs_direction direction, const struct kvs_ring_shape *ring,
                  const struct kvs_regions *regions, struct kvs_error *err) {
  uint64_t nbytes = 0;
  int status = KVS_OK;
  for (size_t g = 0; g < packing->ngroups; g++) nbytes += packing->groups[g].nbytes * packing->npairs;
  struct filling filling = start(packing, direction, ring, regions, nbytes);
  for (size_t g = 0; !status && g < packing->ngroups; g++) status = pack_group(&filling, &packing->groups[g], err);
  return !status && filling.used ? end(&filling, err) : status;
}

int kvs_pack_list(struct kvs_packing *packing, const struct kvs_piece *pieces, size_t npieces,
                  enum kvs_direction direction, const struct kvs_ring_shape *ring, const struct kvs_regions *regions,
                  struct kvs_error *err) {
  uint64_t nbytes = 0;
  int status = grow(&packing->packed, &packing->packed_capacity, npieces, sizeof *packing->packed, err);
  for (size_t i = 0; i < npieces; i++) nbytes += pieces[i].nbytes;
  struct filling filling = start(packing, direction, ring, regions, nbytes);
  for (size_t i = 0; !status && i < npieces; i++) {
    if (filling.used && filling.used + pieces[i].nbytes > filling.room) status = end(&filling, err);
    if (!status && filling.used == 0) status = add_segment(&filling, &(struct kvs_segment){.first = i}, err);
    if (status) break;
    packing->packed[i] = filling.used;
    packing->segments[packing->nsegments - 1].count++;
    status = add_bytes(&filling, filling.gather ? pieces[i].dst : pieces[i].src, pieces[i].nbytes, err);
  }
  return !status && filling.used ? end(&filling, err) : status;
}
