/* packing.c against brute force. Every burst is read back as the kernel and the copy engine will read it: the kernel's
 * pieces say where in the slot each row of each block lies, the copies say where on the host that part of the slot
 * lies, and the two together must be what the rows said. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "plan/packing.h"
#include "plan/stride.h"

enum { MAX_ROWS = 12, MAX_PAIRS = 6000, MAX_PIECES = 3000, MOST_REGIONS = 20, KIB = 1 << 10 };

static const uint64_t ONE_BURST = 12 << 20; /* packing.h: so many bytes or fewer that fit a slot are one burst */

static const uint64_t MIB = 1 << 20;
static const uint64_t SLOT = 1ull << 40, SCATTERED = 1ull << 41, HOST = 1ull << 42;

static struct kvs_error err;
static uint64_t seed, nrects; /* 2-D copies that were checked */

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

/* Bytes [slot, slot + nbytes) of a slot are those at `host`. */
struct span {
  uint64_t slot, host, nbytes;
};

struct spans {
  struct span *items;
  size_t count, capacity;
};

static void add_span(struct spans *spans, uint64_t slot, uint64_t host, uint64_t nbytes) {
  if (spans->count == spans->capacity) {
    spans->capacity = spans->capacity ? 2 * spans->capacity : 256;
    spans->items = realloc(spans->items, spans->capacity * sizeof *spans->items);
  }
  spans->items[spans->count++] = (struct span){slot, host, nbytes};
}

static int by_slot(const void *a, const void *b) {
  uint64_t left = ((const struct span *)a)->slot, right = ((const struct span *)b)->slot;
  return (left > right) - (left < right);
}

/* Sorted, and neighbours that go on on both sides made one: two lists that say the same become equal. False: some
 * overlap. */
static bool normalise(struct spans *spans) {
  size_t n = 0;
  bool apart = true;
  if (spans->count) qsort(spans->items, spans->count, sizeof *spans->items, by_slot);
  for (size_t i = 0; i < spans->count; i++) {
    struct span *last = n ? &spans->items[n - 1] : NULL, span = spans->items[i];
    if (last && last->slot + last->nbytes > span.slot) apart = false;
    if (last && last->slot + last->nbytes == span.slot && last->host + last->nbytes == span.host)
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
    if (a->items[i].slot != b->items[i].slot || a->items[i].host != b->items[i].host ||
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
  enum kvs_direction direction;
  uint64_t slot_nbytes, slot; /* where this burst's slot is */
  uint64_t total, moved;      /* bytes of all; of the bursts before this one */
  size_t bursts;
  struct spans spans, copied;
};

static void free_reading(struct reading *r) {
  free(r->spans.items);
  free(r->copied.items);
}

/* How many of the copies do not go on where the one before ended: the runs of a burst, whatever seams cut them. */
static size_t read_copies(struct reading *r) {
  const struct kvs_copies *copies = &r->packing->copies;
  bool gather = r->direction == KVS_D2H;
  size_t runs = 0;
  r->copied.count = 0;
  for (size_t c = 0; c < copies->count; c++) {
    uint64_t host = gather ? copies->dst[c] : copies->src[c], slot = gather ? copies->src[c] : copies->dst[c];
    const struct span *before = c ? &r->copied.items[c - 1] : NULL;
    bool goes_on = before && before->slot + before->nbytes == slot && before->host + before->nbytes == host;
    if (crosses_a_seam(r->regions, host, copies->nbytes[c])) CHECK(false, "burst %zu, copy %zu", r->bursts, c);
    if (goes_on && !is_seam(r->regions, host)) CHECK(false, "burst %zu: copy %zu and the one before", r->bursts, c);
    runs += !goes_on;
    add_span(&r->copied, slot, host, copies->nbytes[c]);
  }
  return runs;
}

/* r->spans is where the kernel has the bytes of this burst; the copies must take just these. */
static void check_burst(struct reading *r, const struct kvs_burst *burst, size_t runs) {
  uint64_t nbytes = 0;
  bool inside = true;
  for (size_t i = 0; i < r->spans.count; i++) {
    const struct span *span = &r->spans.items[i];
    inside &= span->slot >= r->slot && span->slot - r->slot + span->nbytes <= r->slot_nbytes;
    nbytes += span->nbytes;
  }
  CHECK(inside && nbytes > 0 && nbytes == burst->nbytes && nbytes <= r->slot_nbytes, "burst %zu holds %llu", r->bursts,
        (unsigned long long)nbytes);
  size_t copied = read_copies(r);
  CHECK(copied == runs, "burst %zu: %zu runs on the host, copied in %zu", r->bursts, runs, copied);
  CHECK(normalise(&r->spans), "burst %zu: two lie in one place of the slot", r->bursts);
  CHECK(normalise(&r->copied), "burst %zu: a byte is copied twice", r->bursts);
  CHECK(same(&r->spans, &r->copied), "burst %zu", r->bursts);
  r->spans.count = 0;
  r->moved += nbytes;
  r->bursts++;
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

/* As large as they may be: within `most` bytes, and within the ends of rows where there are any. */
static void check_groups(const struct work *w, const struct kvs_rows *rows, const struct kvs_packing *packing,
                         uint64_t most, const size_t *ends, size_t nends) {
  size_t i = 0;
  uint64_t before = 0;
  for (size_t g = 0; g < packing->ngroups; g++) {
    const struct kvs_group *group = &packing->groups[g];
    uint64_t nbytes = 0;
    CHECK(group->first == i && group->count > 0 && i + group->count <= rows->count, "group %zu", g);
    if (group->count > rows->count - i) return;
    CHECK(group->host == host_of(w, &rows->items[i]), "group %zu", g);
    for (size_t end = i + group->count; i < end; i++) {
      const struct kvs_row *row = &rows->items[i];
      CHECK(host_of(w, row) == group->host + nbytes && stride_of(w, row) == group->host_stride, "row %zu", i);
      CHECK(row->packed == nbytes && row->packed_stride == group->nbytes && row->before == before, "row %zu", i);
      nbytes += row->nbytes;
    }
    CHECK(nbytes == group->nbytes && nbytes <= most, "group %zu", g);
    before += nbytes;
    const struct kvs_row *next = i < rows->count ? &rows->items[i] : NULL;
    bool apart = false;
    for (size_t end = 0; end < nends; end++) {
      apart |= ends[end] == i;
      CHECK(ends[end] <= group->first || ends[end] >= i, "group %zu crosses the end at %zu", g, ends[end]);
    }
    CHECK(!next || apart || host_of(w, next) != group->host + nbytes || stride_of(w, next) != group->host_stride ||
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

/* -- bursts of a grid ------------------------------------------------------------------------------------------ */

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

/* The contiguous runs on the host of these pairs of one group, from where its blocks lie; *first, *end: what lies
 * lowest, and where the highest ends. */
static size_t runs_of_group(const struct work *w, const struct kvs_packing *packing, const struct kvs_group *group,
                            const struct kvs_burst *burst, uint64_t *first, uint64_t *end) {
  uint64_t *begins = malloc(burst->count * sizeof *begins);
  size_t runs = 0;
  for (size_t i = 0; i < burst->count; i++) {
    const struct kvs_pair *pair = &packing->pairs[burst->first + i];
    begins[i] = group->host + (w->direction == KVS_D2H ? pair->dst : pair->src) * group->host_stride;
  }
  qsort(begins, burst->count, sizeof *begins, by_address);
  for (size_t i = 0; i < burst->count; i++) runs += i == 0 || begins[i] != begins[i - 1] + group->nbytes;
  *first = begins[0];
  *end = begins[burst->count - 1] + group->nbytes;
  free(begins);
  return runs;
}

/* Groups come one after the other in a slot: two of them are one run only where one ends and the next begins. */
static size_t runs_of_burst(const struct work *w, const struct kvs_packing *packing, const struct kvs_burst *burst) {
  size_t runs = 0;
  uint64_t before = 0, first, end;
  for (size_t g = 0; g < packing->ngroups; g++) {
    const struct kvs_group *group = &packing->groups[g];
    if (group->first < burst->first_row || group->first >= burst->first_row + burst->nrows) continue;
    runs += runs_of_group(w, packing, group, burst, &first, &end);
    runs -= first == before;
    before = end;
  }
  return runs;
}

/* What the kernel moves between the slot and where blocks are scattered, piece by piece. */
static void read_burst(struct reading *r, const struct work *w, const struct kvs_rows *rows,
                       const struct kvs_burst *burst, unsigned char *seen) {
  bool gather = w->direction == KVS_D2H;
  struct kvs_units units = {.npairs = (uint32_t)burst->count,
                            .slot = r->slot,
                            .piece = (uint32_t)(below(2) ? between(1, 200) : 32 * KIB),
                            .before = rows->items[burst->first_row].before};
  size_t wrong = 0;
  for (size_t block = 0; block < burst->count; block++)
    for (size_t i = burst->first_row; i < burst->first_row + burst->nrows; i++) {
      const struct kvs_row *row = &rows->items[i];
      const struct kvs_pair *pair = &r->packing->pairs[burst->first + block];
      uint64_t there = gather ? row->src + pair->src * row->src_stride : row->dst + pair->dst * row->dst_stride;
      uint64_t host = gather ? row->dst + pair->dst * row->dst_stride : row->src + pair->src * row->src_stride;
      uint64_t parts = (row->nbytes - 1) / units.piece + 1, at = 0;
      if (parts > 40) units.piece = (uint32_t)row->nbytes, parts = 1;
      for (uint64_t part = 0; part <= parts; part++) { /* the last one is beyond the end of the row */
        const struct kvs_piece piece = kvs_grid_piece(&units, !gather, row, pair, block, part);
        wrong += part < parts ? (gather ? piece.src : piece.dst) != there + at : piece.nbytes != 0;
        if (piece.nbytes) add_span(&r->spans, gather ? piece.dst : piece.src, host + at, piece.nbytes);
        at += piece.nbytes;
      }
      wrong += at != row->nbytes;
      seen[i * r->packing->npairs + burst->first + block]++;
    }
  CHECK(wrong == 0, "burst %zu", r->bursts);
}

/* What packing.h says of the sizes of bursts. `bursts` of the rows [first_row, rows_end), all of them. */
static void check_sizes(const struct reading *r, const struct kvs_burst *bursts, size_t count, size_t rows_end,
                        uint64_t nbytes, bool part) {
  const struct kvs_packing *packing = r->packing;
  uint64_t small = part || nbytes > r->slot_nbytes || nbytes <= ONE_BURST ? 0 : nbytes / 8;
  if (nbytes <= r->slot_nbytes && !small) CHECK(count == (nbytes > 0), "%zu bursts", count);
  if (small && count) {
    const struct kvs_burst *end = &bursts[r->direction == KVS_D2H ? 0 : count - 1];
    CHECK(count > 1 || packing->npairs == 1, "one burst of %llu", (unsigned long long)nbytes);
    CHECK(end->nbytes < (r->direction == KVS_D2H ? small + 1 : 2 * small) || end->count == 1, "%llu of %llu",
          (unsigned long long)end->nbytes, (unsigned long long)nbytes);
    if (packing->ngroups == 1 && packing->groups[0].nbytes <= small) CHECK(count == 2, "%zu bursts", count);
    return;
  }
  for (size_t b = 0, same = 1; b < count; b += same) {
    const struct kvs_burst *burst = &bursts[b];
    size_t g = 0, most = burst->count, least = burst->count;
    while (packing->groups[g].first + packing->groups[g].count < burst->first_row + burst->nrows) g++;
    const struct kvs_group *group = &packing->groups[g], *next = g + 1 < packing->ngroups ? group + 1 : NULL;
    same = 1;
    if (burst->count == packing->npairs) { /* whole groups, as many as the slot holds */
      bool full = !next || next->first >= rows_end || burst->nbytes + next->nbytes * packing->npairs > r->slot_nbytes;
      CHECK(full, "burst %zu has room for a group", b);
      continue;
    }
    for (; b + same < count && bursts[b + same].first_row == burst->first_row; same++) {
      if (bursts[b + same].count > most) most = bursts[b + same].count;
      if (bursts[b + same].count < least) least = bursts[b + same].count;
    }
    uint64_t pairs = r->slot_nbytes / group->nbytes;
    CHECK(burst->nrows == group->count && same == (packing->npairs - 1) / pairs + 1, "group %zu in %zu bursts", g,
          same);
    CHECK(most - least <= 1, "group %zu: bursts of %zu to %zu pairs", g, least, most);
  }
}

/* The 2-D copies of a burst: their rows are its copies, in order, and none lies on both sides of a seam. */
static void check_rects(const struct reading *r) {
  const struct kvs_copies *copies = &r->packing->copies;
  const uint64_t max_pitch = below(2) ? UINT64_MAX : between(1, 1 << 20);
  size_t wrong = 0, rects = 0;
  for (size_t from = 0, end; from < copies->count; from = end) {
    struct kvs_rect rect;
    end = kvs_burst_rows(copies, from, r->direction, max_pitch, r->regions, &rect);
    wrong += end <= from || end > copies->count;
    if (wrong) break;
    if (!rect.width) continue;
    uint64_t rows = kvs_rect_rows(&rect), host = r->direction == KVS_D2H ? rect.dst : rect.src;
    uint64_t last = r->direction == KVS_D2H ? kvs_rect_dst(&rect, rows - 1) : kvs_rect_src(&rect, rows - 1);
    uint64_t extent = last + rect.width - host;
    rects++;
    wrong += rows != end - from || rows < 4 || rect.dst_pitch > max_pitch || rect.src_pitch > max_pitch;
    wrong += kvs_plan_until_seam(r->regions, host, extent) != extent;
    for (size_t i = from; i < end; i++)
      wrong += kvs_rect_dst(&rect, i - from) != copies->dst[i] || kvs_rect_src(&rect, i - from) != copies->src[i] ||
               rect.width != copies->nbytes[i];
  }
  CHECK(wrong == 0, "burst %zu", r->bursts);
  nrects += rects;
}

/* The rows [first_row, rows_end): what is cut of them is read back and added to `seen`. */
static void cut_and_check(struct reading *r, const struct work *w, struct kept *kept, size_t first_row, size_t rows_end,
                          bool part, unsigned char *seen) {
  struct kvs_packing *packing = &kept->packing;
  struct kvs_cutter cutter = kvs_cut_grid(packing, first_row, rows_end, w->direction, r->slot_nbytes, part);
  struct kvs_burst burst = {0}, *bursts = NULL;
  size_t count = 0;
  uint64_t before = r->moved;
  while (kvs_cut_next(&cutter, packing, &burst)) {
    bool known = burst.count && burst.nrows && burst.first + burst.count <= packing->npairs &&
                 burst.first_row >= first_row && burst.first_row + burst.nrows <= rows_end;
    CHECK(known, "burst %zu", r->bursts);
    if (!known) break;
    bursts = realloc(bursts, (count + 1) * sizeof *bursts);
    bursts[count++] = burst;
    r->slot = SLOT + below(3) * r->slot_nbytes;
    read_burst(r, w, &kept->rows, &burst, seen);
    OK(kvs_burst_copies(packing, &burst, w->direction, r->slot, r->regions, &err));
    check_burst(r, &burst, runs_of_burst(w, packing, &burst));
    check_rects(r);
  }
  check_sizes(r, bursts, count, rows_end, r->moved - before, part);
  free(bursts);
}

/* Every row of every pair once. */
static void check_all_seen(const struct reading *r, const struct kvs_rows *rows, const unsigned char *seen) {
  size_t missing = 0;
  uint64_t total = 0;
  for (size_t i = 0; i < rows->count; i++) total += rows->items[i].nbytes * r->packing->npairs;
  for (size_t i = 0; i < rows->count * r->packing->npairs; i++) missing += seen[i] != 1;
  CHECK(missing == 0 && r->moved == total, "%zu are not in one burst", missing);
}

static void take_pairs(const struct work *w, struct kept *kept) {
  OK(kvs_pack_pairs(w->src, w->dst, w->npairs, &kept->packing, &err));
  kvs_pack_sort(&kept->packing, w->direction);
  check_pairs(w->src, w->dst, w->npairs, w->direction, &kept->packing);
}

/* Returns how many bursts. */
static size_t pack_and_check(const struct work *w, struct kept *kept, uint64_t most, uint64_t slot_nbytes) {
  struct kvs_packing *packing = &kept->packing;
  make_rows(w, &kept->rows);
  OK(kvs_pack_rows(&kept->rows, w->direction, most, NULL, 0, packing, &err));
  check_rows(w, &kept->rows, most);
  check_groups(w, &kept->rows, packing, most, NULL, 0);
  check_runs(w, packing, &kept->scratch);
  take_pairs(w, kept);
  if (slot_nbytes < most_of(packing)) slot_nbytes = most_of(packing);
  unsigned char *seen = calloc(kept->rows.count * packing->npairs + 1, 1);
  struct reading r = {
      .packing = packing, .regions = &kept->regions, .direction = w->direction, .slot_nbytes = slot_nbytes};
  cut_and_check(&r, w, kept, 0, kept->rows.count, below(4) == 0, seen);
  check_all_seen(&r, &kept->rows, seen);
  free(seen);
  free_reading(&r);
  return r.bursts;
}

/* Rows that stay in their order, in layers: each layer is cut by itself. */
static void pack_layers_and_check(const struct work *w, struct kept *kept, uint64_t slot_nbytes) {
  struct kvs_packing *packing = &kept->packing;
  struct kvs_row before[MAX_ROWS];
  size_t ends[MAX_ROWS + 2], nends = 0, wrong = 0;
  make_rows(w, &kept->rows);
  for (size_t i = kept->rows.count; i > 1; i--) { /* in no order of the host's */
    size_t other = below(2) ? (size_t)below(i) : i - 1;
    struct kvs_row row = kept->rows.items[i - 1];
    kept->rows.items[i - 1] = kept->rows.items[other];
    kept->rows.items[other] = row;
  }
  memcpy(before, kept->rows.items, kept->rows.count * sizeof *before);
  for (size_t end = 0; end < kept->rows.count;) { /* some layers have no rows at all */
    end = least_of(end + below(4), kept->rows.count);
    ends[nends++] = end;
    if (nends == MAX_ROWS) ends[nends++] = end = kept->rows.count;
  }
  OK(kvs_pack_rows(&kept->rows, w->direction, slot_nbytes, ends, nends, packing, &err));
  for (size_t i = 0; i < w->ntensors; i++) {
    const struct kvs_row *row = &kept->rows.items[i];
    wrong += row->src != before[i].src || row->dst != before[i].dst || row->nbytes != before[i].nbytes ||
             row->src_stride != before[i].src_stride || row->dst_stride != before[i].dst_stride;
  }
  CHECK(kept->rows.count == w->ntensors && wrong == 0, "%zu rows are not where they were", wrong);
  check_groups(w, &kept->rows, packing, slot_nbytes, ends, nends);
  take_pairs(w, kept);
  unsigned char *seen = calloc(kept->rows.count * packing->npairs + 1, 1);
  struct reading r = {
      .packing = packing, .regions = &kept->regions, .direction = w->direction, .slot_nbytes = slot_nbytes};
  for (size_t e = 0; e < nends; e++) cut_and_check(&r, w, kept, e ? ends[e - 1] : 0, ends[e], true, seen);
  check_all_seen(&r, &kept->rows, seen);
  free(seen);
  free_reading(&r);
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
    if (round % 3)
      pack_and_check(&w, &kept, most, between(1, 40 * KIB));
    else
      pack_layers_and_check(&w, &kept, between(longest, 40 * KIB));
  }
  free_kept(&kept);
}

/* Transfers of many MiB: of two bursts one is small, and blocks may be larger than it. */
static void test_large_transfers(void) {
  static struct work w;
  struct kept kept = {0};
  for (int round = 0; round < 400; round++) {
    static const uint64_t slots[] = {1 << 20, 3 << 20, 4 << 20, 16 << 20, 64 << 20};
    begin_round((uint64_t)round);
    uint64_t slot = slots[below(5)];
    draw_work(&w, (enum layout)below(LAYOUTS), (size_t)between(1, 4), (size_t)between(1, 60), 3 * MIB / 2);
    kvs_regions_clear(&kept.regions);
    if (below(2)) draw_regions(&kept.regions, HOST, w.host_end);
    pack_and_check(&w, &kept, slot, slot);
  }
  free_kept(&kept);
}

static struct work one_tensor(enum kvs_direction direction, uint64_t nbytes, size_t npairs) {
  static struct work w;
  w = (struct work){.direction = direction, .ntensors = 1, .npairs = npairs, .nslots = npairs};
  w.tensors[0] = (struct tensor){SCATTERED, HOST, nbytes, nbytes, nbytes};
  w.host_end = HOST + npairs * nbytes;
  for (size_t i = 0; i < npairs; i++) w.src[i] = w.dst[i] = (int64_t)i;
  return w;
}

/* One tensor, of which it is known what its bursts are. */
static void test_first_and_last(void) {
  static struct work w;
  struct kept kept = {0};
  const struct {
    size_t npairs;
    bool part;
    size_t bursts, first, last; /* pairs in the first burst, and in the last, of a gather; 16 MiB are 838 pairs */
  } cases[] = {{1, false, 1, 1, 1},        {629, false, 1, 629, 629}, {630, false, 2, 78, 552},
               {838, false, 2, 104, 734},  {839, false, 2, 420, 419}, {6000, false, 8, 750, 750},
               {5999, false, 8, 750, 749}, {630, true, 1, 630, 630},  {838, true, 1, 838, 838}};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int direction = 0; direction < 2; direction++) {
      w = one_tensor((enum kvs_direction)direction, 20000, cases[c].npairs);
      make_rows(&w, &kept.rows);
      OK(kvs_pack_rows(&kept.rows, w.direction, 16 * MIB, NULL, 0, &kept.packing, &err));
      take_pairs(&w, &kept);
      struct kvs_cutter cutter = kvs_cut_grid(&kept.packing, 0, 1, w.direction, 16 * MIB, cases[c].part);
      struct kvs_burst burst;
      size_t bursts = 0, first = 0, last = 0;
      for (; kvs_cut_next(&cutter, &kept.packing, &burst); last = burst.count)
        if (bursts++ == 0) first = burst.count;
      bool small = direction == KVS_H2D && cases[c].last > cases[c].first; /* then the last is the small one */
      CHECK(bursts == cases[c].bursts, "case %zu, direction %d: %zu bursts", c, direction, bursts);
      CHECK(small ? last == cases[c].first + 1 && first == cases[c].last - 1
                  : first == cases[c].first && last == cases[c].last,
            "case %zu, direction %d: %zu pairs to %zu", c, direction, first, last);
      CHECK(kvs_is_one_burst(cases[c].npairs * 20000, 16 * MIB) == (cases[c].npairs < 630), "case %zu", c);
    }
  CHECK(!kvs_is_one_burst(MIB + 1, MIB) && kvs_is_one_burst(MIB, MIB));
  free_kept(&kept);
}

/* Blocks of which a slot holds a few, one, or just one. */
static void test_large_blocks(void) {
  struct kept kept = {0};
  for (int direction = 0; direction < 2; direction++)
    for (uint64_t nbytes = MIB - 1; nbytes <= 16 * MIB; nbytes += 5 * MIB / 2 + 1) {
      const struct work w = one_tensor((enum kvs_direction)direction, nbytes, 20);
      size_t each = (size_t)(16 * MIB / nbytes), bursts = pack_and_check(&w, &kept, 16 * MIB, 16 * MIB);
      CHECK(bursts == (20 + each - 1) / each, "%zu bursts of %zu", bursts, each);
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
      CHECK(pack_and_check(&w, &kept, 16 * MIB, 16 * MIB) == 1);
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

/* How many bytes the next burst of a list may have: packing.h's rule, of two bursts within a slot one is small. */
static uint64_t room_of_list(const struct reading *r, bool part) {
  uint64_t small = part || r->total > r->slot_nbytes || r->total <= ONE_BURST ? 0 : r->total / 8;
  uint64_t left = r->total - r->moved;
  if (!small) return r->slot_nbytes;
  if (r->direction == KVS_D2H) return r->moved ? r->slot_nbytes : small;
  return left >= 2 * small ? left - small : r->slot_nbytes; /* rounding leaves more than the small one is */
}

/* The pieces of a burst: how many runs they are on the host. Their host's side becomes their place in the slot. */
static size_t read_list(struct reading *r, struct kvs_piece *pieces, const struct kvs_burst *burst) {
  bool gather = r->direction == KVS_D2H;
  struct kvs_piece *before = malloc(burst->count * sizeof *before);
  size_t runs = 0, wrong = 0;
  memcpy(before, pieces + burst->first, burst->count * sizeof *before);
  OK(kvs_burst_list((struct kvs_packing *)r->packing, pieces, burst, r->direction, r->slot, r->regions, &err));
  for (size_t i = 0; i < burst->count; i++) {
    const struct kvs_piece *now = &pieces[burst->first + i], *then = &before[i];
    uint64_t host = gather ? then->dst : then->src;
    runs += i == 0 || host != (gather ? then[-1].dst : then[-1].src) + then[-1].nbytes;
    wrong += now->nbytes != then->nbytes || (gather ? now->src != then->src : now->dst != then->dst);
    add_span(&r->spans, gather ? now->dst : now->src, host, now->nbytes);
  }
  CHECK(wrong == 0, "burst %zu", r->bursts);
  free(before);
  return runs;
}

static void check_list(struct reading *r, struct kvs_piece *pieces, size_t count, bool part) {
  struct kvs_burst burst = {0};
  size_t next = 0;
  for (size_t i = 0; i < count; i++) r->total += pieces[i].nbytes;
  struct kvs_cutter cutter = kvs_cut_list(r->total, r->direction, r->slot_nbytes, part);
  while (kvs_cut_next_list(&cutter, pieces, count, &burst)) {
    bool known = burst.first == next && burst.count && next + burst.count <= count;
    uint64_t room = room_of_list(r, part);
    CHECK(known, "burst %zu", r->bursts);
    if (!known) return;
    next += burst.count;
    CHECK(burst.nbytes <= room || burst.count == 1, "burst %zu", r->bursts);
    CHECK(next == count || burst.nbytes + pieces[next].nbytes > room, "burst %zu has room", r->bursts);
    r->slot = SLOT + below(3) * r->slot_nbytes;
    check_burst(r, &burst, read_list(r, pieces, &burst));
    check_rects(r);
  }
  CHECK(next == count && r->moved == r->total, "%zu of %zu pieces", next, count);
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
    struct reading r = {.packing = &packing,
                        .regions = &regions,
                        .direction = direction,
                        .slot_nbytes = large ? (16 << below(3)) * MIB : between(longest, 40 * KIB)};
    kvs_regions_clear(&regions);
    if (below(3)) draw_regions(&regions, HOST, end);
    check_list(&r, pieces, count, below(4) == 0);
    free_reading(&r);
  }
  kvs_packing_free(&packing);
  kvs_regions_clear(&regions);
}

/* Whatever rows there are: what the kernel counts in 32 bits stays far below 2^32, and every byte is in a part. */
static void test_units(void) {
  static const struct {
    uint64_t longest, rest; /* bytes of the first row, and of each other */
    size_t nrows, count;
    uint64_t parts;
    uint32_t piece;
  } cases[] = {
      {1, 1, 1, 1, 1, 4096},
      {4096, 100, 2, 10, 1, 4096},
      {4097, 100, 2, 10, 2, 4096},
      {MIB, 100, 80, 1000, 256, 4096},
      {32 * MIB, 1, 65537, 1, 8192, 4096},
      {32 * MIB, 1, 65537, 10, 2048, 16384},
      {512 * MIB, 8, 1 << 16, 1, 1 << 14, 1 << 15},
      {1, 1, 4096, 1 << 18, 1, 4096}, /* 1 GiB of single bytes */
      {4097, 1, 4096, 1 << 18, 1, 8192},
  };
  struct kvs_rows rows = {.count = 0};
  OK(kvs_rows_reserve(&rows, 1 << 17, &err));
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    rows.count = 0;
    kvs_rows_push(&rows, &(struct kvs_row){.nbytes = (uint64_t)1 << 40}); /* of another burst */
    for (size_t i = 0; i < cases[c].nrows; i++)
      kvs_rows_push(&rows, &(struct kvs_row){.nbytes = i == 0 ? cases[c].longest : cases[c].rest});
    uint32_t piece = 4096;
    const struct kvs_burst burst = {.first_row = 1, .nrows = cases[c].nrows, .count = cases[c].count};
    uint64_t parts = kvs_burst_parts(&rows, &burst, &piece);
    CHECK(parts * piece >= cases[c].longest && parts * cases[c].nrows * cases[c].count <= 1ull << 31, "case %zu", c);
    CHECK(parts == cases[c].parts && piece == cases[c].piece, "case %zu: %llu parts of %u", c,
          (unsigned long long)parts, piece);
  }
  kvs_rows_free(&rows);
}

int main(void) {
  begin_round(0);
  test_pairs();
  test_groups();
  test_grids();
  test_large_transfers();
  test_large_blocks();
  test_first_and_last();
  test_lists();
  test_units();
  CHECK(nrects > 1000, "%llu", (unsigned long long)nrects);
  return check_close();
}
