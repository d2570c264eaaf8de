/* packing.c against brute force. Every packing is read back as the kernel and the copy engine will read it: segments
 * say where in the ring each row of each block lies, copies say where on the host that part of the ring lies, and the
 * two together must be what the rows said. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "plan/packing.h"

enum { MAX_ROWS = 12, MAX_PAIRS = 6000, MAX_PIECES = 3000, MOST_REGIONS = 20, KIB = 1 << 10 };

static const uint64_t MIB = 1 << 20;
static const uint64_t RING = 1ull << 40, SCATTERED = 1ull << 41, HOST = 1ull << 42;

static struct kvs_error err;
static uint64_t seed;

#define OK(call) CHECK((call) == KVS_OK, "%s", err.message)

/* Near seeds give near numbers at first. */
static void begin_round(uint64_t number) {
  seed = (number + 1) * 0x9E3779B97F4A7C15ull;
  for (int i = 0; i < 4; i++) check_random(&seed);
}

static uint64_t below(uint64_t limit) { return check_below(&seed, limit); }

static uint64_t between(uint64_t least, uint64_t most) { return least + below(most - least + 1); }

static uint64_t least_of(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* -- what is packed -------------------------------------------------------------------------------------------- */

enum layout { BLOCK_FIRST, LAYER_FIRST, MIXED, LAYOUTS };

/* Rows as the caller has them, in any order; `host` and `there` are the two sides, whichever is src. */
struct tensor {
  uint64_t there, host, there_stride, host_stride, nbytes;
};

struct work {
  enum kvs_direction direction;
  struct tensor tensors[MAX_ROWS];
  size_t ntensors, npairs;
  uint64_t nslots, host_end;
  int64_t src[MAX_PAIRS], dst[MAX_PAIRS];
};

static void permute(int64_t *ids, size_t count) {
  for (size_t i = count; i > 1; i--) {
    size_t other = (size_t)below(i);
    int64_t id = ids[i - 1];
    ids[i - 1] = ids[other];
    ids[other] = id;
  }
}

/* `count` different slots below `slots`: in runs, permuted, or in runs that are permuted. */
static void draw_slots(int64_t *ids, size_t count, uint64_t slots) {
  uint64_t skip = 0, spare = slots - count, how = below(3);
  for (size_t i = 0; i < count; i++) {
    if (spare && below(6) == 0) skip += below(spare + 1), spare = slots - count - skip;
    ids[i] = (int64_t)(i + skip);
  }
  if (how == 1) permute(ids, count);
  if (how == 2 && count > 4) {
    size_t cut = (size_t)between(1, count - 1);
    int64_t *turned = malloc(count * sizeof *turned);
    for (size_t i = 0; i < count; i++) turned[i] = ids[(i + cut) % count];
    memcpy(ids, turned, count * sizeof *ids);
    free(turned);
  }
}

static void draw_pairs(struct work *w, size_t count) {
  bool store = w->direction == KVS_D2H;
  w->npairs = count;
  w->nslots = count + below(2) * below(20) + 1;
  draw_slots(w->src, count, w->nslots);
  draw_slots(w->dst, count, w->nslots);
  for (size_t i = 0; !store && count > 1 && i < below(4); i++) /* one source, several destinations */
    w->src[below(count)] = w->src[below(count)];
}

/* The host's side of the tensors [from, to): of a block together, or each by itself. */
static void lay_out(struct work *w, size_t from, size_t to, bool together) {
  uint64_t gap = below(3) ? 0 : below(40), sum = 0;
  for (size_t t = from; t < to; t++) {
    w->tensors[t].host = w->host_end + (together ? sum : 0);
    sum += w->tensors[t].nbytes + (together && below(8) == 0 ? 1 + below(9) : 0); /* a hole ends a group */
    if (together) continue;
    w->tensors[t].host_stride = w->tensors[t].nbytes + gap;
    w->host_end += w->nslots * w->tensors[t].host_stride + (below(2) ? 0 : below(30));
  }
  for (size_t t = from; together && t < to; t++) w->tensors[t].host_stride = sum + gap;
  if (together) w->host_end += w->nslots * (sum + gap);
}

static void draw_work(struct work *w, enum layout layout, size_t ntensors, size_t npairs, uint64_t longest) {
  uint64_t there = SCATTERED, nbytes = between(1, longest);
  bool equal = below(2);
  w->direction = below(2) ? KVS_D2H : KVS_H2D;
  w->ntensors = ntensors;
  w->host_end = HOST;
  draw_pairs(w, npairs);
  for (size_t t = 0; t < ntensors; t++) {
    struct tensor *tensor = &w->tensors[t];
    tensor->nbytes = equal ? nbytes : between(1, longest);
    tensor->there = there;
    tensor->there_stride = tensor->nbytes + below(20);
    there += w->nslots * tensor->there_stride + below(50);
  }
  size_t half = layout == MIXED ? ntensors / 2 : ntensors;
  lay_out(w, 0, half, layout == BLOCK_FIRST || (layout == MIXED && below(2)));
  lay_out(w, half, ntensors, below(2));
}

static void make_rows(const struct work *w, struct kvs_rows *rows) {
  bool store = w->direction == KVS_D2H, forward = below(2);
  rows->count = 0;
  OK(kvs_rows_reserve(rows, w->ntensors, &err));
  for (size_t i = 0; i < w->ntensors; i++) {
    const struct tensor *t = &w->tensors[forward ? i : w->ntensors - 1 - i];
    kvs_rows_push(rows, &(struct kvs_row){.src = store ? t->there : t->host,
                                          .dst = store ? t->host : t->there,
                                          .src_stride = store ? t->there_stride : t->host_stride,
                                          .dst_stride = store ? t->host_stride : t->there_stride,
                                          .nbytes = t->nbytes});
  }
}

/* Regions of random sizes over all of [begin, end), most of them with seams: a plan knows all memory that it touches.
 */
static void draw_regions(struct kvs_regions *regions, uint64_t begin, uint64_t end) {
  uint64_t most = (end - begin) / MOST_REGIONS + 2;
  kvs_regions_clear(regions);
  for (uint64_t at = begin - below(3); at < end;) {
    struct kvs_region region = {.base = at, .nbytes = between(most / 3 + 1, most), .seam = below(4) != 0};
    OK(kvs_regions_add(regions, &region, &err));
    at += region.nbytes;
  }
}

/* -- reading it back ------------------------------------------------------------------------------------------- */

/* Bytes [ring, ring + nbytes) of the ring are those at `host`. */
struct span {
  uint64_t ring, host, nbytes;
};

struct spans {
  struct span *items;
  size_t count, capacity;
};

static void add_span(struct spans *spans, uint64_t ring, uint64_t host, uint64_t nbytes) {
  if (spans->count == spans->capacity) {
    spans->capacity = spans->capacity ? 2 * spans->capacity : 256;
    spans->items = realloc(spans->items, spans->capacity * sizeof *spans->items);
  }
  spans->items[spans->count++] = (struct span){ring, host, nbytes};
}

static int by_ring(const void *a, const void *b) {
  uint64_t left = ((const struct span *)a)->ring, right = ((const struct span *)b)->ring;
  return (left > right) - (left < right);
}

/* Sorted, and neighbours that go on on both sides made one: two lists that say the same become equal. False: some
 * overlap. */
static bool normalise(struct spans *spans) {
  size_t n = 0;
  bool apart = true;
  if (spans->count) qsort(spans->items, spans->count, sizeof *spans->items, by_ring);
  for (size_t i = 0; i < spans->count; i++) {
    struct span *last = n ? &spans->items[n - 1] : NULL, span = spans->items[i];
    if (last && last->ring + last->nbytes > span.ring) apart = false;
    if (last && last->ring + last->nbytes == span.ring && last->host + last->nbytes == span.host)
      last->nbytes += span.nbytes;
    else
      spans->items[n++] = span;
  }
  spans->count = n;
  return apart;
}

static bool same(const struct spans *a, const struct spans *b) {
  if (a->count != b->count) return false;
  for (size_t i = 0; i < a->count; i++)
    if (a->items[i].ring != b->items[i].ring || a->items[i].host != b->items[i].host ||
        a->items[i].nbytes != b->items[i].nbytes)
      return false;
  return true;
}

/* Whether one copy may not go on from the byte before `address` to the one there. */
static bool is_seam(const struct kvs_regions *regions, uint64_t address) {
  for (size_t i = 0; i < regions->count; i++) {
    const struct kvs_region *region = &regions->items[i];
    if (region->seam && (region->base == address || region->base + region->nbytes == address)) return true;
  }
  return false;
}

static bool crosses_a_seam(const struct kvs_regions *regions, uint64_t address, uint64_t nbytes) {
  for (size_t i = 0; i < regions->count; i++) {
    const struct kvs_region *region = &regions->items[i];
    uint64_t base = region->base, end = base + region->nbytes;
    bool inside = kvs_region_holds(region, address);
    if (!region->seam) continue;
    if (inside && end - address < nbytes) return true;
    if (!inside && address < base && base - address < nbytes) return true;
  }
  return false;
}

struct reading {
  const struct kvs_packing *packing;
  const struct kvs_regions *regions;
  struct kvs_ring_shape ring;
  bool gather;
  uint64_t total, moved; /* bytes of the transfer; of the fillings before this one */
  uint64_t largest;      /* bytes of a block of a group, or of a piece, that comes whole */
  struct spans spans, copied;
};

static void read_copies(struct reading *r, size_t f) {
  const struct kvs_copies *copies = &r->packing->copies;
  size_t from = f ? r->packing->ends[f - 1] : 0, to = r->packing->ends[f];
  r->copied.count = 0;
  CHECK(from < to && to <= copies->count, "filling %zu", f);
  for (size_t c = from; c < to; c++) {
    uint64_t host = r->gather ? copies->dst[c] : copies->src[c], ring = r->gather ? copies->src[c] : copies->dst[c];
    if (crosses_a_seam(r->regions, host, copies->nbytes[c])) CHECK(false, "filling %zu, copy %zu", f, c);
    if (c > from) {
      const struct span *before = &r->copied.items[r->copied.count - 1];
      bool goes_on = before->ring + before->nbytes == ring && before->host + before->nbytes == host;
      if (goes_on && !is_seam(r->regions, host)) CHECK(false, "filling %zu: copies %zu and the one before", f, c);
    }
    add_span(&r->copied, ring, host, copies->nbytes[c]);
  }
}

/* What packing.h says of the sizes of fillings: as long as they are small, and not smaller than they need be. */
static void check_size(const struct reading *r, size_t f, uint64_t nbytes, uint64_t next) {
  uint64_t left = r->total - r->moved, room = r->ring.slot_nbytes;
  room = least_of(room, r->gather ? MIB << least_of(f, 16) : left / 2 > MIB ? left / 2 : MIB);
  CHECK(nbytes <= r->ring.slot_nbytes, "filling %zu holds %llu", f, (unsigned long long)nbytes);
  CHECK(nbytes <= room || nbytes <= r->largest, "filling %zu holds %llu", f, (unsigned long long)nbytes);
  CHECK(!next || nbytes + next > room, "filling %zu holds %llu", f, (unsigned long long)nbytes);
}

/* r->spans is all of filling f, which begins in its slot; `next`: bytes that were next, 0: none. */
static void check_filling(struct reading *r, size_t f, uint64_t next) {
  uint64_t slot = r->ring.address + f % r->ring.slots * r->ring.slot_nbytes, nbytes = 0;
  bool inside = true;
  for (size_t i = 0; i < r->spans.count; i++) {
    const struct span *span = &r->spans.items[i];
    inside &= span->ring >= slot && span->ring - slot + span->nbytes <= r->ring.slot_nbytes;
    nbytes += span->nbytes;
  }
  CHECK(inside, "filling %zu", f);
  if (f >= r->packing->nfillings) return;
  read_copies(r, f);
  CHECK(normalise(&r->spans), "filling %zu: two lie in one place of the slot", f);
  CHECK(normalise(&r->copied), "filling %zu: a byte is copied twice", f);
  CHECK(same(&r->spans, &r->copied), "filling %zu", f);
  check_size(r, f, nbytes, next);
  r->moved += nbytes;
  r->spans.count = 0;
}

static void check_end(const struct reading *r, size_t fillings) {
  const struct kvs_packing *packing = r->packing;
  CHECK(packing->nfillings == fillings && r->moved == r->total, "%zu fillings", fillings);
  CHECK(!fillings || packing->ends[fillings - 1] == packing->copies.count);
  CHECK(!packing->nsegments || packing->segments[packing->nsegments - 1].last);
}

static void free_reading(struct reading *r) {
  free(r->spans.items);
  free(r->copied.items);
}

static uint64_t segment_nbytes(const struct kvs_rows *rows, const struct kvs_segment *segment) {
  uint64_t nbytes = 0;
  for (uint32_t i = 0; i < segment->nrows; i++) nbytes += rows->items[segment->first_row + i].nbytes;
  return nbytes;
}

/* Every row of every pair once; nothing else. */
static void check_grid(const struct work *w, const struct kvs_rows *rows, const struct kvs_packing *packing,
                       const struct kvs_ring_shape *ring, const struct kvs_regions *regions) {
  struct reading r = {.packing = packing, .regions = regions, .ring = *ring, .gather = w->direction == KVS_D2H};
  unsigned char *seen = calloc(rows->count * packing->npairs + 1, 1);
  size_t f = 0, missing = 0;
  for (size_t i = 0; i < rows->count; i++) r.total += rows->items[i].nbytes * packing->npairs;
  for (size_t s = 0; s < packing->nsegments; s++) {
    const struct kvs_segment *segment = &packing->segments[s];
    uint64_t slot = ring->address + f % ring->slots * ring->slot_nbytes;
    bool known = segment->count && segment->nrows && segment->first + segment->count <= packing->npairs &&
                 segment->first_row + segment->nrows <= rows->count;
    CHECK(known, "segment %zu", s);
    for (uint64_t b = 0; known && b < segment->count; b++)
      for (uint32_t i = 0; i < segment->nrows; i++) {
        const struct kvs_row *row = &rows->items[segment->first_row + i];
        const struct kvs_pair *pair = &packing->pairs[segment->first + b];
        uint64_t host = r.gather ? row->dst + pair->dst * row->dst_stride : row->src + pair->src * row->src_stride;
        add_span(&r.spans, slot + segment->base + b * row->packed_stride + row->packed, host, row->nbytes);
        seen[(segment->first_row + i) * packing->npairs + segment->first + b]++;
      }
    if (!r.spans.count || segment->base == 0) r.largest = segment_nbytes(rows, segment);
    if (segment->last) check_filling(&r, f++, s + 1 < packing->nsegments ? segment_nbytes(rows, segment + 1) : 0);
  }
  for (size_t i = 0; i < rows->count * packing->npairs; i++) missing += seen[i] != 1;
  CHECK(missing == 0, "%zu are not moved once", missing);
  check_end(&r, f);
  free(seen);
  free_reading(&r);
}

/* -- rows and groups ------------------------------------------------------------------------------------------- */

static uint64_t host_of(const struct work *w, const struct kvs_row *row) {
  return w->direction == KVS_D2H ? row->dst : row->src;
}

static uint64_t stride_of(const struct work *w, const struct kvs_row *row) {
  return w->direction == KVS_D2H ? row->dst_stride : row->src_stride;
}

/* Together the rows are the tensors, byte by byte, and none is too long. */
static void check_rows(const struct work *w, const struct kvs_rows *rows, uint64_t most) {
  for (size_t t = 0; t < w->ntensors; t++) {
    const struct tensor *tensor = &w->tensors[t];
    uint64_t next = 0; /* rows are in the host's order, and so are the parts of one */
    for (size_t i = 0; i < rows->count; i++) {
      const struct kvs_row *row = &rows->items[i];
      uint64_t at = host_of(w, row) - tensor->host, there = w->direction == KVS_D2H ? row->src : row->dst;
      if (at != next || next == tensor->nbytes || there != tensor->there + at) continue;
      CHECK(stride_of(w, row) == tensor->host_stride && row->nbytes <= tensor->nbytes - at, "row %zu", i);
      CHECK((w->direction == KVS_D2H ? row->src_stride : row->dst_stride) == tensor->there_stride, "row %zu", i);
      CHECK(row->nbytes == least_of(most, tensor->nbytes - at), "row %zu", i);
      next += row->nbytes;
    }
    CHECK(next == tensor->nbytes, "tensor %zu", t);
  }
}

static void check_groups(const struct work *w, const struct kvs_rows *rows, const struct kvs_packing *packing,
                         uint64_t most) {
  size_t i = 0;
  for (size_t g = 0; g < packing->ngroups; g++) {
    const struct kvs_group *group = &packing->groups[g];
    uint64_t nbytes = 0;
    CHECK(group->first == i && group->count > 0 && i + group->count <= rows->count, "group %zu", g);
    if (group->count > rows->count - i) return;
    CHECK(group->host == host_of(w, &rows->items[i]), "group %zu", g);
    for (size_t end = i + group->count; i < end; i++) {
      const struct kvs_row *row = &rows->items[i];
      CHECK(host_of(w, row) == group->host + nbytes && stride_of(w, row) == group->host_stride, "row %zu", i);
      CHECK(row->packed == nbytes && row->packed_stride == group->nbytes, "row %zu", i);
      nbytes += row->nbytes;
    }
    CHECK(nbytes == group->nbytes && nbytes <= most, "group %zu", g);
    const struct kvs_row *next = i < rows->count ? &rows->items[i] : NULL;
    CHECK(!next || host_of(w, next) != group->host + nbytes || stride_of(w, next) != group->host_stride ||
              nbytes + next->nbytes > most,
          "groups %zu and %zu are one", g, g + 1);
  }
  CHECK(i == rows->count);
}

/* -- runs and pairs -------------------------------------------------------------------------------------------- */

static int by_address(const void *a, const void *b) {
  uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
  return (left > right) - (left < right);
}

/* The runs of each group, block by block, from where the blocks lie. */
static uint64_t brute_runs(const struct kvs_packing *packing, const int64_t *slots, size_t count) {
  uint64_t *begins = malloc((count + 1) * sizeof *begins), runs = 0;
  for (size_t g = 0; g < packing->ngroups; g++) {
    for (size_t i = 0; i < count; i++)
      begins[i] = packing->groups[g].host + (uint64_t)slots[i] * packing->groups[g].host_stride;
    qsort(begins, count, sizeof *begins, by_address);
    for (size_t i = 0; i < count; i++) runs += i == 0 || begins[i] != begins[i - 1] + packing->groups[g].nbytes;
  }
  free(begins);
  return runs;
}

static void check_runs(const struct work *w, const struct kvs_packing *packing, struct kvs_plan_scratch *scratch) {
  const int64_t *host = w->direction == KVS_D2H ? w->dst : w->src;
  uint64_t runs = 12345, different = 1;
  bool *named = calloc(w->nslots, sizeof *named);
  for (size_t i = 0; i < w->npairs; i++) different &= !named[host[i]], named[host[i]] = true;
  free(named);
  OK(kvs_pack_count_runs(packing, host, w->npairs, w->nslots, scratch, &runs, &err));
  if (different) CHECK(runs == brute_runs(packing, host, w->npairs), "%llu runs", (unsigned long long)runs);
  for (size_t i = 0; i < scratch->bitmap_words; i++)
    if (scratch->bitmap[i]) CHECK(false, "word %zu of the bitmap is left", i);
}

struct numbered {
  struct kvs_pair pair;
  uint32_t key;
  size_t number;
};

static int by_key(const void *a, const void *b) {
  const struct numbered *left = a, *right = b;
  if (left->key != right->key) return left->key > right->key ? 1 : -1;
  return left->number > right->number ? 1 : -1;
}

/* As qsort has it; of one slot, in the order given. */
static void check_pairs(const int64_t *src, const int64_t *dst, size_t count, enum kvs_direction direction,
                        const struct kvs_packing *packing) {
  struct numbered *sorted = malloc((count + 1) * sizeof *sorted);
  size_t wrong = 0;
  for (size_t i = 0; i < count; i++) {
    sorted[i] = (struct numbered){{(uint32_t)src[i], (uint32_t)dst[i]}, 0, i};
    sorted[i].key = direction == KVS_D2H ? sorted[i].pair.dst : sorted[i].pair.src;
  }
  qsort(sorted, count, sizeof *sorted, by_key);
  for (size_t i = 0; i < count; i++)
    wrong += packing->pairs[i].src != sorted[i].pair.src || packing->pairs[i].dst != sorted[i].pair.dst;
  CHECK(packing->npairs == count && wrong == 0, "%zu of %zu pairs", wrong, count);
  free(sorted);
}

static void test_pairs(void) {
  struct kvs_packing packing = {0};
  static int64_t src[MAX_PAIRS], dst[MAX_PAIRS];
  static const uint64_t masks[] = {0,        1,          0x7FF,      0x800,      0xFFFF,
                                   0x3FF800, 0xFFC00000, 0xFFFFFFFF, 0x80000001, 0x00400400};
  const size_t counts[] = {0, 1, 2, 3, 64, 65, 1000, MAX_PAIRS};
  for (size_t m = 0; m < sizeof masks / sizeof *masks; m++)
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
      for (int order = 0; order < 3; order++) {
        enum kvs_direction direction = below(2) ? KVS_D2H : KVS_H2D;
        uint64_t all = check_random(&seed);
        for (size_t i = 0; i < counts[c]; i++) {
          src[i] = (int64_t)(((check_random(&seed) & masks[m]) ^ all) & UINT32_MAX);
          dst[i] = (int64_t)(((check_random(&seed) & masks[m]) ^ all) & UINT32_MAX);
          if (order) src[i] = dst[i] = (int64_t)(order == 1 ? i : counts[c] - i);
        }
        OK(kvs_pack_pairs(src, dst, counts[c], &packing, &err));
        kvs_pack_sort(&packing, direction);
        check_pairs(src, dst, counts[c], direction, &packing);
      }
  kvs_packing_free(&packing);
}

/* -- all of it, of random shapes ------------------------------------------------------------------------------- */

struct kept {
  struct kvs_rows rows;
  struct kvs_packing packing;
  struct kvs_regions regions;
  struct kvs_plan_scratch scratch;
};

static void free_kept(struct kept *kept) {
  kvs_rows_free(&kept->rows);
  kvs_packing_free(&kept->packing);
  kvs_regions_clear(&kept->regions);
  kvs_plan_scratch_free(&kept->scratch);
}

static uint64_t most_of(const struct kvs_packing *packing) {
  uint64_t most = 1;
  for (size_t g = 0; g < packing->ngroups; g++)
    if (packing->groups[g].nbytes > most) most = packing->groups[g].nbytes;
  return most;
}

static void pack_and_check(const struct work *w, struct kept *kept, uint64_t most, uint64_t slot_nbytes) {
  struct kvs_packing *packing = &kept->packing;
  make_rows(w, &kept->rows);
  OK(kvs_pack_rows(&kept->rows, w->direction, most, packing, &err));
  check_rows(w, &kept->rows, most);
  check_groups(w, &kept->rows, packing, most);
  check_runs(w, packing, &kept->scratch);
  OK(kvs_pack_pairs(w->src, w->dst, w->npairs, packing, &err));
  kvs_pack_sort(packing, w->direction);
  check_pairs(w->src, w->dst, w->npairs, w->direction, packing);
  if (slot_nbytes < most_of(packing)) slot_nbytes = most_of(packing);
  struct kvs_ring_shape ring = {RING, slot_nbytes, (unsigned)between(1, 5)};
  OK(kvs_pack_grid(packing, w->direction, &ring, &kept->regions, &err));
  check_grid(w, &kept->rows, packing, &ring, &kept->regions);
}

static void test_grids(void) {
  static struct work w;
  struct kept kept = {0};
  for (int round = 0; round < 6000; round++) {
    begin_round((uint64_t)round);
    uint64_t longest = below(4) ? between(1, 300) : between(1, 5000);
    uint64_t most = below(3) ? longest * MAX_ROWS : between(longest / 20 + 1, 2 * longest);
    draw_work(&w, (enum layout)below(LAYOUTS), (size_t)between(1, MAX_ROWS), (size_t)below(below(8) ? 60 : 700),
              longest);
    kvs_regions_clear(&kept.regions);
    if (below(3)) draw_regions(&kept.regions, HOST, w.host_end);
    pack_and_check(&w, &kept, most, between(1, 40 * KIB));
  }
  free_kept(&kept);
}

/* Transfers of many MiB: fillings begin small (gather) or end small (scatter), and blocks may be larger than those. */
static void test_large_transfers(void) {
  static struct work w;
  struct kept kept = {0};
  for (int round = 0; round < 400; round++) {
    static const uint64_t slots[] = {1 << 20, 3 << 20, 4 << 20, 16 << 20};
    begin_round((uint64_t)round);
    uint64_t slot = slots[below(4)];
    draw_work(&w, (enum layout)below(LAYOUTS), (size_t)between(1, 4), (size_t)between(1, 60), 3 * MIB / 2);
    kvs_regions_clear(&kept.regions);
    if (below(2)) draw_regions(&kept.regions, HOST, w.host_end);
    pack_and_check(&w, &kept, slot, slot);
  }
  free_kept(&kept);
}

/* One tensor of blocks as large as several small fillings, in a ring that has room for three. */
static void test_blocks_larger_than_a_small_filling(void) {
  static struct work w;
  struct kept kept = {0};
  for (int direction = 0; direction < 2; direction++)
    for (uint64_t nbytes = MIB - 1; nbytes <= 5 * MIB + 1; nbytes += MIB / 2 + 1) {
      w = (struct work){.direction = (enum kvs_direction)direction, .ntensors = 1, .npairs = 20, .nslots = 20};
      w.tensors[0] = (struct tensor){SCATTERED, HOST, nbytes, nbytes, nbytes};
      w.host_end = HOST + 20 * nbytes;
      for (int64_t i = 0; i < 20; i++) w.src[i] = w.dst[i] = i;
      pack_and_check(&w, &kept, 16 * MIB, 16 * MIB);
    }
  free_kept(&kept);
}

/* What packing.h says in words of two transfers of 100 MiB. */
static void test_first_and_last(void) {
  static struct work w;
  struct kept kept = {0};
  const struct kvs_packing *packing = &kept.packing;
  for (int direction = 0; direction < 2; direction++) {
    w = (struct work){.direction = (enum kvs_direction)direction, .ntensors = 1, .npairs = 6000, .nslots = 6000};
    w.tensors[0] = (struct tensor){SCATTERED, HOST, 20000, 20000, 20000};
    for (int64_t i = 0; i < 6000; i++) w.src[i] = w.dst[i] = i;
    pack_and_check(&w, &kept, 16 * MIB, 16 * MIB);
    size_t n = packing->nfillings;
    CHECK(n > 8 && packing->copies.count == n, "%zu copies in %zu fillings", packing->copies.count, n);
    if (n < 2 || packing->copies.count != n) continue;
    uint64_t small = packing->copies.nbytes[direction == KVS_D2H ? 0 : n - 1];
    uint64_t large = packing->copies.nbytes[direction == KVS_D2H ? n - 2 : 0];
    CHECK(small <= MIB && large > 15 * MIB, "%llu and %llu", (unsigned long long)small, (unsigned long long)large);
  }
  free_kept(&kept);
}

/* Tensors of which the shape of the groups is known. */
static void test_groups(void) {
  static struct work w;
  struct kept kept = {0};
  for (int layout = BLOCK_FIRST; layout <= MIXED; layout++)
    for (int direction = 0; direction < 2; direction++) {
      w = (struct work){.direction = (enum kvs_direction)direction, .ntensors = 8, .npairs = 9, .nslots = 10};
      for (size_t t = 0; t < 8; t++) {
        bool together = layout == BLOCK_FIRST || (layout == MIXED && t < 5);
        w.tensors[t] = (struct tensor){SCATTERED + t * 1000, HOST + (together ? t * 64 : (t + 1) * 10000), 64,
                                       together ? (layout == MIXED ? 5 : 8) * 64 : 64, 64};
      }
      w.host_end = HOST + 100000;
      for (int64_t i = 0; i < 9; i++) w.src[i] = i, w.dst[i] = i < 4 ? i : i + 1;
      pack_and_check(&w, &kept, 16 * MIB, 16 * MIB);
      CHECK(kept.packing.ngroups == (layout == BLOCK_FIRST ? 1 : layout == LAYER_FIRST ? 8 : 4), "layout %d", layout);
      uint64_t runs = 0;
      OK(kvs_pack_count_runs(&kept.packing, direction == KVS_D2H ? w.dst : w.src, 9, 10, &kept.scratch, &runs, &err));
      CHECK(runs == kept.packing.ngroups * (direction == KVS_D2H ? 2 : 1), "%llu runs", (unsigned long long)runs);
      CHECK(kept.packing.copies.count == runs, "%zu copies", kept.packing.copies.count);
    }
  free_kept(&kept);
}

/* -- lists ----------------------------------------------------------------------------------------------------- */

/* Pieces that lie anywhere on the device; on the host one after another, here and there with a gap or a step back. */
static size_t draw_pieces(struct kvs_piece *pieces, bool gather, size_t count, uint64_t longest, uint64_t *end) {
  uint64_t host = HOST + count * (longest + 50), there = SCATTERED, low = HOST;
  *end = host;
  for (size_t i = 0; i < count; i++) {
    uint64_t nbytes = between(1, longest), at = host;
    if (below(10) == 0)
      at = low, low += nbytes;
    else
      host += nbytes;
    pieces[i] = (struct kvs_piece){gather ? at : there, gather ? there : at, nbytes};
    there += nbytes + below(30);
    if (below(6) == 0) host += 1 + below(40);
    if (at + nbytes > *end) *end = at + nbytes;
  }
  return count;
}

static void check_list(const struct kvs_piece *pieces, size_t count, const struct kvs_packing *packing,
                       struct reading *r) {
  size_t f = 0, next = 0;
  for (size_t i = 0; i < count; i++) r->total += pieces[i].nbytes;
  for (size_t s = 0; s < packing->nsegments; s++) {
    const struct kvs_segment *segment = &packing->segments[s];
    uint64_t slot = r->ring.address + f % r->ring.slots * r->ring.slot_nbytes;
    bool known = segment->first == next && segment->count && next + segment->count <= count;
    CHECK(known, "segment %zu", s);
    for (uint64_t i = 0; known && i < segment->count; i++, next++)
      add_span(&r->spans, slot + packing->packed[next], r->gather ? pieces[next].dst : pieces[next].src,
               pieces[next].nbytes);
    r->largest = pieces[segment->first].nbytes;
    if (segment->last) check_filling(r, f++, next < count ? pieces[next].nbytes : 0);
  }
  CHECK(next == count, "%zu of %zu pieces", next, count);
  check_end(r, f);
}

static void test_lists(void) {
  static struct kvs_piece pieces[MAX_PIECES];
  struct kvs_packing packing = {0};
  struct kvs_regions regions = {0};
  for (int round = 0; round < 6000; round++) {
    begin_round((uint64_t)round);
    bool large = below(30) == 0;
    enum kvs_direction direction = below(2) ? KVS_D2H : KVS_H2D;
    uint64_t longest = large ? 32 * KIB : between(1, below(2) ? 60 : 5000), end;
    size_t count = draw_pieces(pieces, direction == KVS_D2H, (size_t)below(large ? MAX_PIECES : 150), longest, &end);
    struct kvs_ring_shape ring = {RING, large ? 16 * MIB : between(longest, 40 * KIB), (unsigned)between(1, 5)};
    struct reading r = {.packing = &packing, .regions = &regions, .ring = ring, .gather = direction == KVS_D2H};
    kvs_regions_clear(&regions);
    if (below(3)) draw_regions(&regions, HOST, end);
    OK(kvs_pack_list(&packing, pieces, count, direction, &ring, &regions, &err));
    check_list(pieces, count, &packing, &r);
    free_reading(&r);
  }
  kvs_packing_free(&packing);
  kvs_regions_clear(&regions);
}

int main(void) {
  begin_round(0);
  test_pairs();
  test_groups();
  test_grids();
  test_large_transfers();
  test_blocks_larger_than_a_small_filling();
  test_first_and_last();
  test_lists();
  return check_close();
}
