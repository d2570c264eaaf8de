/* Dividing a transfer into bursts: see packing.h. Costs per block: a sort key, a pair and, where the host side is not
 * contiguous, a copy. */
#include "plan/packing.h"

#include <stdlib.h>
#include <string.h>

#include "plan/stride.h"

/* Transfers up to this size are one burst: a second burst would cost more than its overlap saves. */
static const uint64_t ONE_BURST_NBYTES = 12 << 20;
/* A transfer above ONE_BURST_NBYTES that fits into one slot is two bursts. D2H the first one, H2D the last one is an
 * eighth of the bytes, because no copy overlaps its kernel. */
enum { SMALL_SHARE = 8 };

/* -- buffers --------------------------------------------------------------------------------------------------- */

/* Keeps the contents. */
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
  free(packing->ends);
  kvs_copies_free(&packing->copies);
  memset(packing, 0, sizeof *packing);
}

int kvs_packing_ends(struct kvs_packing *packing, size_t count, size_t **ends, struct kvs_error *err) {
  int status = grow(&packing->ends, &packing->ends_capacity, count, sizeof *packing->ends, err);
  *ends = packing->ends;
  return status;
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
  for (size_t i = 0; i < count; i++) total += (size_t)((kvs_row_packed_nbytes(&rows->items[i]) - 1) / most) + 1;
  if (total == count) return KVS_OK;
  int status = kvs_rows_reserve(rows, total, err);
  if (status) return status;
  for (size_t i = count, at = total; i-- > 0;) { /* backwards, since the parts overwrite their sources */
    struct kvs_row row = rows->items[i];
    uint64_t parts = (kvs_row_packed_nbytes(&row) - 1) / most + 1;
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

int kvs_pack_rows(struct kvs_rows *rows, enum kvs_direction direction, uint64_t most, const size_t *ends, size_t nends,
                  struct kvs_packing *packing, struct kvs_error *err) {
  int status = KVS_OK;
  if (!ends) sort_rows(rows, direction);
  if (!ends) status = cut_rows(rows, most, err);
  if (!status) status = grow(&packing->groups, &packing->groups_capacity, rows->count, sizeof *packing->groups, err);
  if (status) return status;
  packing->ngroups = 0;
  struct kvs_group *group = NULL;
  uint64_t before = 0;
  for (size_t i = 0, next = 0; i < rows->count; i++) {
    struct kvs_row *row = &rows->items[i];
    uint64_t host = kvs_row_host(row, direction), stride = kvs_row_host_stride(row, direction),
             nbytes = kvs_row_packed_nbytes(row);
    bool apart = false;
    for (; next < nends && ends[next] <= i; next++) apart = true;
    if (!group || apart || host != group->host + group->nbytes || stride != group->host_stride ||
        group->nbytes + nbytes > most) {
      if (group) {
        end_group(rows, group);
        before += group->nbytes;
      }
      group = &packing->groups[packing->ngroups++];
      *group = (struct kvs_group){.first = i, .host = host, .host_stride = stride};
    }
    row->packed = group->nbytes;
    row->before = before;
    group->nbytes += nbytes;
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

/* LSD radix sort by the host slot, over the bits in which slots differ. */
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

/* -- division into bursts -------------------------------------------------------------------------------------- */

bool kvs_is_one_burst(uint64_t nbytes, uint64_t slot_nbytes) {
  return nbytes <= ONE_BURST_NBYTES && nbytes <= slot_nbytes;
}

static uint64_t small_of(uint64_t nbytes, uint64_t slot_nbytes, bool part) {
  return part || nbytes > slot_nbytes || kvs_is_one_burst(nbytes, slot_nbytes) ? 0 : nbytes / SMALL_SHARE;
}

/* Bytes of the next burst. */
static uint64_t room_of(const struct kvs_cutter *cutter) {
  uint64_t slot = cutter->slot_nbytes, small = cutter->small, left = cutter->left;
  if (small == 0) return slot;
  if (cutter->direction == KVS_D2H) return left == cutter->nbytes ? small : slot;
  return left >= 2 * small ? left - small : slot; /* avoid a tiny burst before the small one */
}

static struct kvs_burst taken(struct kvs_cutter *cutter, struct kvs_burst burst) {
  cutter->left -= burst.nbytes;
  return burst;
}

struct kvs_cutter kvs_cut_grid(const struct kvs_packing *packing, size_t first_row, size_t rows_end,
                               enum kvs_direction direction, uint64_t slot_nbytes, bool part) {
  struct kvs_cutter cutter = {.direction = direction, .slot_nbytes = slot_nbytes};
  while (cutter.group < packing->ngroups && packing->groups[cutter.group].first < first_row) cutter.group++;
  for (cutter.end = cutter.group; cutter.end < packing->ngroups && packing->groups[cutter.end].first < rows_end;
       cutter.end++)
    cutter.nbytes += packing->groups[cutter.end].nbytes * packing->npairs;
  cutter.left = cutter.nbytes;
  cutter.small = small_of(cutter.nbytes, slot_nbytes, part);
  return cutter;
}

bool kvs_cut_next(struct kvs_cutter *cutter, const struct kvs_packing *packing, struct kvs_burst *burst) {
  if (cutter->left == 0) return false;
  const struct kvs_group *group = &packing->groups[cutter->group];
  uint64_t room = room_of(cutter), left = group->nbytes * (packing->npairs - cutter->at);
  if (cutter->at > 0 || left > room) { /* only some pairs of this group fit */
    uint64_t rest = packing->npairs - cutter->at, pairs = room / group->nbytes;
    if (pairs == 0) pairs = 1; /* a block can be larger than a small burst, but not than a slot */
    if (room == cutter->slot_nbytes) pairs = (rest - 1) / ((rest - 1) / pairs + 1) + 1; /* equal bursts */
    if (pairs > rest) pairs = rest;
    *burst = taken(cutter, (struct kvs_burst){group->first, group->count, cutter->at, pairs, pairs * group->nbytes});
    cutter->at += pairs;
    if (cutter->at < packing->npairs) return true;
    cutter->at = 0;
    cutter->group++;
    return true;
  }
  struct kvs_burst whole = {.first_row = group->first, .count = packing->npairs};
  for (; cutter->group < cutter->end; cutter->group++) {
    group = &packing->groups[cutter->group];
    uint64_t more = group->nbytes * packing->npairs;
    if (whole.nbytes + more > room) break;
    whole.nrows += group->count;
    whole.nbytes += more;
  }
  *burst = taken(cutter, whole);
  return true;
}

struct kvs_cutter kvs_cut_list(uint64_t nbytes, enum kvs_direction direction, uint64_t slot_nbytes, bool part) {
  return (struct kvs_cutter){.direction = direction,
                             .slot_nbytes = slot_nbytes,
                             .small = small_of(nbytes, slot_nbytes, part),
                             .nbytes = nbytes,
                             .left = nbytes};
}

bool kvs_cut_next_list(struct kvs_cutter *cutter, const struct kvs_piece *pieces, size_t npieces,
                       struct kvs_burst *burst) {
  uint64_t room = room_of(cutter);
  struct kvs_burst next = {.first = cutter->at};
  for (; cutter->at < npieces && (next.count == 0 || next.nbytes + pieces[cutter->at].nbytes <= room); cutter->at++) {
    next.count++;
    next.nbytes += pieces[cutter->at].nbytes;
  }
  if (next.count) *burst = taken(cutter, next);
  return next.count > 0;
}

uint64_t kvs_longest_row(const struct kvs_rows *rows, size_t first, size_t count) {
  uint64_t longest = 0;
  for (size_t i = first; i < first + count; i++)
    if (rows->items[i].nbytes > longest) longest = rows->items[i].nbytes;
  return longest;
}

uint64_t kvs_longest_packed(const struct kvs_rows *rows) {
  uint64_t longest = 0;
  for (size_t i = 0; i < rows->count; i++)
    if (kvs_row_packed_nbytes(&rows->items[i]) > longest) longest = kvs_row_packed_nbytes(&rows->items[i]);
  return longest;
}

size_t kvs_rows_of_a_coding(const struct kvs_rows *rows, size_t first, size_t end) {
  const struct kvs_row *one = &rows->items[first];
  size_t next = first + 1;
  while (next < end && rows->items[next].coding == one->coding) next++;
  return next;
}

/* The kernel numbers its units with 32 bits, including a step beyond the end. One part a row is always few enough,
 * since a unit then has at least one byte in the slot. */
uint64_t kvs_burst_parts(const struct kvs_rows *rows, const struct kvs_burst *burst, uint32_t *piece) {
  const uint64_t most = (uint64_t)1 << 31, lines = burst->nrows * burst->count;
  uint64_t longest = kvs_longest_row(rows, burst->first_row, burst->nrows), parts;
  while ((parts = (longest - 1) / *piece + 1) > 1 && parts >= most / lines) *piece *= 2;
  return parts;
}

/* -- copies of a burst ----------------------------------------------------------------------------------------- */

/* Append the slot's next bytes, at `host`; there is room for one more copy. */
static void add_bytes(struct kvs_copies *copies, enum kvs_direction direction, uint64_t slot, uint64_t host,
                      uint64_t nbytes) {
  size_t last = copies->count - 1;
  uint64_t *hosts = direction == KVS_D2H ? copies->dst : copies->src;
  if (copies->count && hosts[last] + copies->nbytes[last] == host)
    copies->nbytes[last] += nbytes;
  else
    kvs_copies_push(copies, direction == KVS_D2H ? host : slot, direction == KVS_D2H ? slot : host, nbytes, 0);
}

/* Adjacent blocks on the host form one run if there is no gap between them. */
static uint64_t add_group(struct kvs_packing *packing, const struct kvs_group *group, const struct kvs_burst *burst,
                          enum kvs_direction direction, uint64_t slot) {
  const struct kvs_pair *pairs = packing->pairs;
  size_t end = burst->first + burst->count;
  bool together = group->nbytes == group->host_stride;
  for (size_t at = burst->first, n; at < end; at += n) {
    uint32_t host = key_of(&pairs[at], direction);
    for (n = 1; together && at + n < end && key_of(&pairs[at + n], direction) == host + n;) n++;
    add_bytes(&packing->copies, direction, slot, group->host + host * group->host_stride, n * group->nbytes);
    slot += n * group->nbytes;
  }
  return slot;
}

int kvs_burst_copies(struct kvs_packing *packing, const struct kvs_burst *burst, enum kvs_direction direction,
                     uint64_t slot, const struct kvs_regions *regions, struct kvs_error *err) {
  size_t group = 0, groups = 0;
  while (packing->groups[group].first < burst->first_row) group++;
  for (size_t rows = 0; rows < burst->nrows; groups++) rows += packing->groups[group + groups].count;
  packing->copies.count = 0;
  int status = kvs_copies_reserve(&packing->copies, groups * burst->count, err);
  for (size_t i = 0; !status && i < groups; i++)
    slot = add_group(packing, &packing->groups[group + i], burst, direction, slot);
  return status ? status : kvs_plan_split(&packing->copies, 0, regions, err);
}

int kvs_burst_list(struct kvs_packing *packing, struct kvs_piece *pieces, const struct kvs_burst *burst,
                   enum kvs_direction direction, uint64_t slot, const struct kvs_regions *regions,
                   struct kvs_error *err) {
  packing->copies.count = 0;
  int status = kvs_copies_reserve(&packing->copies, burst->count, err);
  if (status) return status;
  for (size_t i = burst->first; i < burst->first + burst->count; i++) {
    uint64_t *host = direction == KVS_D2H ? &pieces[i].dst : &pieces[i].src;
    add_bytes(&packing->copies, direction, slot, *host, pieces[i].nbytes);
    *host = slot;
    slot += pieces[i].nbytes;
  }
  return kvs_plan_split(&packing->copies, 0, regions, err);
}

/* -- rows of a burst ------------------------------------------------------------------------------------------- */

/* Fewer are cheaper one by one. */
enum { LEAST_ROWS = 4 };

size_t kvs_burst_rows(const struct kvs_copies *copies, size_t from, enum kvs_direction direction, uint64_t max_pitch,
                      const struct kvs_regions *regions, struct kvs_rect *rect) {
  const uint64_t *host = direction == KVS_D2H ? copies->dst : copies->src;
  const uint64_t width = copies->nbytes[from];
  size_t end = from + 1;
  rect->width = 0;
  if (end == copies->count || host[end] < host[from] + width) return end;
  uint64_t pitch = host[end] - host[from];
  while (end < copies->count && copies->nbytes[end] == width && host[end] - host[end - 1] == pitch) end++;
  uint64_t rows = end - from, extent = (rows - 1) * pitch + width;
  uint64_t left = kvs_plan_until_seam(regions, host[from], extent);
  if (left < extent) rows = left < width ? 1 : (left - width) / pitch + 1;
  if (rows < LEAST_ROWS) return from + 1;
  uint64_t to = direction == KVS_D2H ? pitch : width, of = direction == KVS_D2H ? width : pitch;
  if (!kvs_rect_make(rect, copies->dst[from], copies->src[from], width, rows, to, of, max_pitch)) rect->width = 0;
  return from + rows;
}
