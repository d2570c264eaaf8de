/* plan.c, overlap.c and region.c against brute force: every plan is carried out on real bytes by the plainest loop. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "plan/overlap.h"
#include "plan/plan.h"

enum { ARENA = 1 << 14 };

static struct kvs_error err;

/* -- the plainest model: bytes that each entry writes ---------------------------------------------------------- */

static bool brute_disjoint(const struct kvs_copies *copies) {
  for (size_t i = 0; i < copies->count; i++)
    for (size_t j = 0; j < copies->count; j++) {
      uint64_t a = copies->dst[i], a_end = a + copies->nbytes[i];
      uint64_t b = copies->dst[j], b_end = b + copies->nbytes[j];
      uint64_t c = copies->src[j], c_end = c + copies->nbytes[j];
      if (i != j && a < b_end && b < a_end) return false;
      if (a < c_end && c < a_end) return false;
    }
  return true;
}

static void carry_out(const struct kvs_copies *copies, unsigned char *arena) {
  unsigned char *before = malloc(ARENA);
  memcpy(before, arena, ARENA);
  for (size_t i = 0; i < copies->count; i++) memcpy(arena + copies->dst[i], before + copies->src[i], copies->nbytes[i]);
  free(before);
}

static uint64_t total(const struct kvs_copies *copies) {
  uint64_t sum = 0;
  for (size_t i = 0; i < copies->count; i++) sum += copies->nbytes[i];
  return sum;
}

/* -- tensors --------------------------------------------------------------------------------------------------- */

struct shape {
  struct kvs_tensor tensors[6];
  size_t ntensors, count;
  int64_t gpu[64], cpu[64];
  int32_t gpu32[64], cpu32[64];
  struct kvs_ids gpu_ids, cpu_ids;
  enum kvs_direction direction;
};

static void shuffle(int64_t *ids, size_t n, uint64_t *seed) {
  for (size_t i = n; i > 1; i--) {
    size_t j = check_below(seed, i);
    int64_t id = ids[i - 1];
    ids[i - 1] = ids[j];
    ids[j] = id;
  }
}

/* Random tensors anywhere in the arena (so that some overlap), some interleaved, some packed. */
static void draw(struct shape *s, uint64_t *seed) {
  uint64_t blocks = 1 + check_below(seed, 16), nbytes = 1 + check_below(seed, 24);
  uint64_t stride = check_below(seed, 2) ? 0 : nbytes * (1 + check_below(seed, 4)) + check_below(seed, 3);
  memset(s, 0, sizeof *s);
  s->ntensors = 1 + check_below(seed, 4);
  s->direction = check_below(seed, 2) ? KVS_H2D : KVS_D2H;
  uint64_t gpu = 16 + check_below(seed, 4096), cpu = 8192 + check_below(seed, 2048);
  if (check_below(seed, 8) == 0) cpu = 16 + check_below(seed, 8192);
  bool interleave = check_below(seed, 2);
  for (size_t t = 0; t < s->ntensors; t++) {
    uint64_t step = interleave ? nbytes + check_below(seed, 2) : blocks * (stride ? stride : nbytes);
    s->tensors[t] = (struct kvs_tensor){.gpu = gpu + t * step,
                                        .cpu = cpu + t * step,
                                        .nbytes = nbytes,
                                        .gpu_blocks = blocks,
                                        .cpu_blocks = blocks,
                                        .gpu_stride = interleave ? nbytes * (s->ntensors + 1) : stride,
                                        .cpu_stride = interleave ? nbytes * (s->ntensors + 2) : stride};
  }
  int64_t all[16];
  s->count = check_below(seed, blocks + 1);
  for (size_t i = 0; i < blocks; i++) all[i] = (int64_t)i;
  if (check_below(seed, 2)) shuffle(all, blocks, seed);
  memcpy(s->gpu, all, sizeof all);
  if (check_below(seed, 2)) shuffle(all, blocks, seed);
  memcpy(s->cpu, all, sizeof all);
  for (size_t i = 0; i < s->count; i++) s->gpu32[i] = (int32_t)s->gpu[i], s->cpu32[i] = (int32_t)s->cpu[i];
  bool narrow = check_below(seed, 2);
  s->gpu_ids = (struct kvs_ids){narrow ? (void *)s->gpu32 : (void *)s->gpu, narrow ? 4 : 8, s->count};
  s->cpu_ids = (struct kvs_ids){s->cpu, 8, s->count};
}

static void test_cache_plans(void) {
  static unsigned char want[ARENA], got[ARENA], start[ARENA];
  struct kvs_plan_scratch scratch = {0};
  struct kvs_copies single = {0}, merged = {0};
  uint64_t seed = 0x5EEDull;
  int proved = 0, overlapping = 0;
  for (size_t i = 0; i < ARENA; i++) start[i] = (unsigned char)check_random(&seed);
  for (int round = 0; round < 20000; round++) {
    struct shape s;
    bool disjoint = false;
    draw(&s, &seed);
    single.count = merged.count = 0;
    CHECK(!kvs_plan_check_tensors(s.tensors, s.ntensors, s.direction, &scratch, &disjoint, &err), "%s", err.message);
    CHECK(!kvs_plan_check_ids(s.tensors, s.ntensors, &s.gpu_ids, &s.cpu_ids, s.direction, &scratch, &err), "%s",
          err.message);
    kvs_plan_cache(s.tensors, s.ntensors, &s.gpu_ids, &s.cpu_ids, s.direction, false, &single, &err);
    kvs_plan_cache(s.tensors, s.ntensors, &s.gpu_ids, &s.cpu_ids, s.direction, true, &merged, &err);
    CHECK(single.count == s.count * s.ntensors);
    CHECK(merged.count <= single.count && total(&merged) == total(&single));
    bool apart = brute_disjoint(&single);
    if (disjoint) CHECK(apart, "round %d: proved what is not so", round);
    const struct kvs_plan_bounds bounds = kvs_plan_find_bounds(&merged);
    CHECK((kvs_plan_check_disjoint(&merged, &bounds, &(struct kvs_plan_naming){.entry = "block"}, &scratch, &err) ==
           KVS_OK) == apart,
          "round %d", round);
    proved += disjoint;
    overlapping += !apart;
    if (!apart) continue;
    memcpy(want, start, ARENA);
    memcpy(got, start, ARENA);
    carry_out(&single, want);
    carry_out(&merged, got);
    CHECK(memcmp(want, got, ARENA) == 0, "round %d: merging changed bytes", round);
  }
  CHECK(proved > 5000 && overlapping > 500, "the draw is too tame: %d proved, %d overlap", proved, overlapping);
  kvs_copies_free(&single);
  kvs_copies_free(&merged);
  kvs_plan_scratch_free(&scratch);
}

static void test_merging(void) {
  struct kvs_tensor tensor = {.gpu = 0x1000, .cpu = 0x9000, .nbytes = 16, .gpu_blocks = 64, .cpu_blocks = 64};
  int64_t gpu[] = {3, 4, 5, 9, 10, 20}, cpu[] = {7, 8, 9, 1, 3, 4};
  struct kvs_ids gpu_ids = {gpu, 8, 6}, cpu_ids = {cpu, 8, 6};
  struct kvs_copies copies = {0};
  CHECK(!kvs_plan_cache(&tensor, 1, &gpu_ids, &cpu_ids, KVS_D2H, true, &copies, &err));
  CHECK(copies.count == 4 && copies.nbytes[0] == 48 && copies.nbytes[1] == 16);
  CHECK(copies.src[0] == 0x1000 + 3 * 16 && copies.dst[0] == 0x9000 + 7 * 16);
  CHECK(copies.block[1] == 3 && copies.block[3] == 5);
  copies.count = 0;
  tensor.cpu_stride = 32; /* not packed: nothing may merge */
  CHECK(!kvs_plan_cache(&tensor, 1, &gpu_ids, &cpu_ids, KVS_D2H, true, &copies, &err));
  CHECK(copies.count == 6);
  kvs_copies_free(&copies);
}

static void refused(const struct kvs_tensor *tensor, const int64_t *gpu, const int64_t *cpu, size_t ngpu, size_t ncpu,
                    enum kvs_direction direction, int status, const char *words) {
  struct kvs_plan_scratch scratch = {0};
  struct kvs_ids gpu_ids = {gpu, 8, ngpu}, cpu_ids = {cpu, 8, ncpu};
  int got = kvs_plan_check_ids(tensor, 1, &gpu_ids, &cpu_ids, direction, &scratch, &err);
  CHECK(got == status, "%d", got);
  CHECK(strstr(err.message, words), "'%s' lacks '%s'", err.message, words);
  for (size_t i = 0; i < scratch.bitmap_words; i++) CHECK(scratch.bitmap[i] == 0, "the bitmap was left dirty");
  kvs_plan_scratch_free(&scratch);
}

static void test_bad_ids(void) {
  struct kvs_tensor t = {.gpu = 0x1000, .cpu = 0x9000, .nbytes = 16, .gpu_blocks = 10, .cpu_blocks = 5000};
  int64_t good[] = {0, 1, 2}, high[] = {0, 1, 10}, low[] = {0, -1, 2}, twice[] = {4, 2, 4}, far[] = {4999, 5000, 1};
  refused(&t, good, good, 3, 2, KVS_D2H, KVS_INVALID, "gpu_block_ids has 3 entries and cpu_block_ids has 2");
  refused(&t, high, good, 3, 3, KVS_D2H, KVS_RANGE, "gpu_block_ids[2] is 10");
  refused(&t, high, good, 3, 3, KVS_D2H, KVS_RANGE, "10 blocks, 0 to 9");
  refused(&t, low, good, 3, 3, KVS_H2D, KVS_RANGE, "gpu_block_ids[1] is -1");
  refused(&t, good, far, 3, 3, KVS_H2D, KVS_RANGE, "cpu_block_ids[1] is 5000");
  refused(&t, good, twice, 3, 3, KVS_D2H, KVS_INVALID, "cpu_block_ids[0] and cpu_block_ids[2] are both 4");
  refused(&t, twice, good, 3, 3, KVS_H2D, KVS_INVALID, "gpu_block_ids[0] and gpu_block_ids[2] are both 4");
  struct kvs_plan_scratch scratch = {0};
  struct kvs_ids twice_ids = {twice, 8, 3}, good_ids = {good, 8, 3};
  CHECK(!kvs_plan_check_ids(&t, 1, &twice_ids, &good_ids, KVS_D2H, &scratch, &err), "a source may be read twice");
  kvs_plan_scratch_free(&scratch);
}

/* In memory that ends with the list, for the sanitizers. */
static void test_narrow_ids(void) {
  struct kvs_tensor t = {.gpu = 0x1000, .cpu = 0x9000, .nbytes = 16, .gpu_blocks = 10, .cpu_blocks = 10};
  struct kvs_plan_scratch scratch = {0};
  int32_t *list = malloc(4 * sizeof *list);
  for (int i = 0; i < 4; i++) list[i] = 2 * i;
  const struct kvs_ids ids = {list, 4, 4};
  CHECK(!kvs_plan_check_ids(&t, 1, &ids, &ids, KVS_D2H, &scratch, &err), "%s", err.message);
  list[3] = 10;
  CHECK(kvs_plan_check_ids(&t, 1, &ids, &ids, KVS_D2H, &scratch, &err) == KVS_RANGE);
  CHECK(strstr(err.message, "gpu_block_ids[3] is 10"), "%s", err.message);
  kvs_plan_scratch_free(&scratch);
  free(list);
}

static void test_bad_tensors(void) {
  struct kvs_plan_scratch scratch = {0};
  bool disjoint;
  struct kvs_tensor t = {.gpu = 0x1000, .cpu = 0x9000, .nbytes = 16, .gpu_blocks = 4, .cpu_blocks = 4};
  struct kvs_tensor null = t, empty = t, narrow = t, far = t;
  null.cpu = 0;
  empty.nbytes = 0;
  narrow.gpu_stride = 15;
  far.gpu_stride = UINT64_MAX / 2;
  CHECK(kvs_plan_check_tensors(&null, 1, KVS_D2H, &scratch, &disjoint, &err) == KVS_INVALID);
  CHECK(strstr(err.message, "cpu_ptr of tensor 0 is 0"), "%s", err.message);
  CHECK(kvs_plan_check_tensors(&empty, 1, KVS_D2H, &scratch, &disjoint, &err) == KVS_INVALID);
  CHECK(kvs_plan_check_tensors(&narrow, 1, KVS_D2H, &scratch, &disjoint, &err) == KVS_INVALID);
  CHECK(strstr(err.message, "gpu_stride of tensor 0 is 15"), "%s", err.message);
  CHECK(kvs_plan_check_tensors(&far, 1, KVS_D2H, &scratch, &disjoint, &err) == KVS_INVALID);
  CHECK(strstr(err.message, "beyond the address space"), "%s", err.message);
  kvs_plan_scratch_free(&scratch);
}

/* -- raw lists ------------------------------------------------------------------------------------------------- */

static void test_batches(void) {
  struct kvs_plan_bounds bounds;
  static unsigned char want[ARENA], got[ARENA], start[ARENA];
  struct kvs_plan_scratch scratch = {0};
  struct kvs_copies single = {0}, merged = {0};
  uint64_t seed = 77, src[40], dst[40], nbytes[40];
  int overlapping = 0;
  for (size_t i = 0; i < ARENA; i++) start[i] = (unsigned char)check_random(&seed);
  for (int round = 0; round < 20000; round++) {
    size_t count = check_below(&seed, 40);
    bool one_size = check_below(&seed, 2), dense = check_below(&seed, 4) == 0, grid = check_below(&seed, 2);
    uint64_t size = 1 + check_below(&seed, 30);
    for (size_t i = 0; i < count; i++) {
      bool follow = i > 0 && check_below(&seed, 2);
      nbytes[i] = one_size ? size : 1 + check_below(&seed, 30);
      src[i] = follow ? src[i - 1] + nbytes[i - 1] : 1 + check_below(&seed, 7000);
      dst[i] = follow ? dst[i - 1] + nbytes[i - 1] : 8192 + check_below(&seed, dense ? 400 : 6000);
      if (one_size && grid) dst[i] = 8192 + size * check_below(&seed, 6000 / size);
    }
    single.count = merged.count = 0;
    CHECK(!kvs_plan_batch(src, dst, nbytes, one_size, count, false, &single, &bounds, &err));
    CHECK(!kvs_plan_batch(src, dst, nbytes, one_size, count, true, &merged, &bounds, &err));
    const struct kvs_plan_bounds found = kvs_plan_find_bounds(&merged);
    CHECK(memcmp(&bounds, &found, sizeof found) == 0, "%zu copies", merged.count);
    CHECK(single.count == count && merged.count <= count && total(&single) == total(&merged));
    bool apart = brute_disjoint(&single);
    overlapping += !apart;
    CHECK((kvs_plan_check_disjoint(&merged, &bounds, &(struct kvs_plan_naming){.entry = "entry"}, &scratch, &err) ==
           KVS_OK) == apart,
          "round %d", round);
    if (!apart) continue;
    memcpy(want, start, ARENA);
    memcpy(got, start, ARENA);
    carry_out(&single, want);
    carry_out(&merged, got);
    CHECK(memcmp(want, got, ARENA) == 0, "round %d", round);
  }
  CHECK(overlapping > 1000 && overlapping < 19000, "%d", overlapping);
  uint64_t zero = 0, one = 1, top = UINT64_MAX - 3, eight = 8;
  CHECK(kvs_plan_batch(&one, &one, &zero, true, 1, true, &single, &bounds, &err) == KVS_INVALID);
  CHECK(kvs_plan_batch(&zero, &one, &one, true, 1, true, &single, &bounds, &err) == KVS_INVALID);
  CHECK(strstr(err.message, "src_ptrs[0] is 0"), "%s", err.message);
  CHECK(kvs_plan_batch(&one, &top, &eight, true, 1, true, &single, &bounds, &err) == KVS_INVALID);
  CHECK(strstr(err.message, "dst_ptrs[0]"), "%s", err.message);
  kvs_copies_free(&single);
  kvs_copies_free(&merged);
  kvs_plan_scratch_free(&scratch);
}

/* -- regions, seams, pieces ------------------------------------------------------------------------------------ */

static void test_regions(void) {
  struct kvs_regions set = {0};
  uint64_t seed = 5;
  static int owner[4096]; /* the plainest model: who holds each address */
  for (int round = 0; round < 20000; round++) {
    struct kvs_region r = {.base = 1 + check_below(&seed, 4000), .nbytes = 1 + check_below(&seed, 60)};
    if (check_below(&seed, 2)) {
      bool clear = true;
      for (uint64_t a = r.base; a < r.base + r.nbytes; a++) clear &= owner[a] == 0;
      CHECK((kvs_regions_add(&set, &r, &err) == KVS_OK) == clear);
      for (uint64_t a = r.base; clear && a < r.base + r.nbytes; a++) owner[a] = (int)r.base;
    } else {
      struct kvs_region gone;
      bool there = owner[r.base] == (int)r.base;
      CHECK(kvs_regions_remove(&set, r.base, &gone) == there);
      for (uint64_t a = r.base; there && a < gone.base + gone.nbytes; a++) owner[a] = 0;
    }
    uint64_t at = 1 + check_below(&seed, 4000);
    const struct kvs_region *found = kvs_regions_find(&set, at);
    CHECK((found ? (int)found->base : 0) == owner[at]);
  }
  CHECK(kvs_regions_add(&set, &(struct kvs_region){.base = UINT64_MAX - 3, .nbytes = 8}, &err) == KVS_INVALID);
  CHECK(kvs_regions_add(&set, &(struct kvs_region){.base = 5000, .nbytes = 0}, &err) == KVS_INVALID);
  kvs_regions_clear(&set);
}

static void test_split(void) {
  struct kvs_plan_bounds bounds;
  uint64_t seed = 99;
  for (int round = 0; round < 5000; round++) {
    struct kvs_regions set = {0};
    struct kvs_copies copies = {0}, whole = {0};
    static int seam_after[ARENA]; /* 1: a copy may not cover both this byte and the next */
    static unsigned char want[ARENA], got[ARENA];
    memset(seam_after, 0, sizeof seam_after);
    for (size_t i = 0; i < ARENA; i++) want[i] = got[i] = (unsigned char)check_random(&seed);
    for (uint64_t base = 64; base < ARENA - 600;) {
      struct kvs_region r = {.base = base, .nbytes = 1 + check_below(&seed, 500), .seam = check_below(&seed, 2)};
      kvs_regions_add(&set, &r, &err);
      if (r.seam) seam_after[base - 1] = seam_after[base + r.nbytes - 1] = 1;
      base += r.nbytes;
    }
    uint64_t src[4], dst[4], nbytes[4];
    for (int i = 0; i < 4; i++) {
      nbytes[i] = 1 + check_below(&seed, 1000);
      src[i] = 64 + check_below(&seed, 5000);
      dst[i] = 8192 + (uint64_t)i * 1500 + check_below(&seed, 400);
    }
    kvs_plan_batch(src, dst, nbytes, false, 4, false, &copies, &bounds, &err);
    kvs_plan_batch(src, dst, nbytes, false, 4, false, &whole, &bounds, &err);
    CHECK(!kvs_plan_split(&copies, 0, &set, &err));
    for (size_t i = 0; i < copies.count; i++)
      for (uint64_t b = 0; b + 1 < copies.nbytes[i]; b++)
        if (seam_after[copies.src[i] + b] || seam_after[copies.dst[i] + b]) CHECK(false, "round %d crosses", round);
    carry_out(&whole, want);
    carry_out(&copies, got);
    CHECK(memcmp(want, got, ARENA) == 0);
    struct kvs_piece *pieces = malloc(kvs_plan_most_pieces(&copies, total(&copies), 100) * sizeof *pieces);
    size_t n = kvs_plan_pieces(&copies, 100, NULL, pieces);
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
      CHECK(pieces[i].nbytes > 0 && pieces[i].nbytes <= 100);
      sum += pieces[i].nbytes;
    }
    CHECK(sum == total(&whole));
    free(pieces);
    kvs_copies_free(&copies);
    kvs_copies_free(&whole);
    kvs_regions_clear(&set);
  }
}

static void test_parts(void) {
  CHECK(kvs_plan_part(42404, 32768) == 21248 && kvs_plan_part(32768, 32768) == 32768);
  CHECK(kvs_plan_part(0, 32768) == 0 && kvs_plan_part(1, 32768) == 128 && kvs_plan_part(99, 64) == 64);
  for (uint64_t nbytes = 1; nbytes < 300000; nbytes += 331) {
    uint64_t part = kvs_plan_part(nbytes, 32768), count = (nbytes - 1) / 32768 + 1;
    CHECK(part <= 32768 && part % 128 == 0 && (nbytes - 1) / part < count, "%llu", (unsigned long long)nbytes);
    CHECK(nbytes <= count * part && count * part < nbytes + count * 128, "%llu", (unsigned long long)nbytes);
  }
}

static void test_aliases(void) {
  struct kvs_plan_bounds bounds;
  struct kvs_regions set = {0};
  struct kvs_copies copies = {0};
  uint64_t src[] = {0x1010, 0x9000}, dst[] = {0x5000, 0x5100}, nbytes = 96;
  struct kvs_piece pieces[4];
  struct kvs_region pinned = {.base = 0x1000, .nbytes = 0x1000, .alias = 0x771000},
                    other = {.base = 0x5000, .nbytes = 0x1000};
  kvs_regions_add(&set, &pinned, &err);
  kvs_regions_add(&set, &other, &err);
  kvs_plan_batch(src, dst, &nbytes, true, 2, true, &copies, &bounds, &err);
  CHECK(kvs_plan_pieces(&copies, 64, &set, pieces) == 4);
  CHECK(pieces[0].src == 0x771010 && pieces[1].src == 0x771050, "by the device's address");
  CHECK(pieces[0].dst == 0x5000 && pieces[2].src == 0x9000, "where there is no alias, as it is");
  kvs_copies_free(&copies);
  kvs_regions_clear(&set);
}

int main(void) {
  test_regions();
  test_parts();
  test_aliases();
  test_merging();
  test_bad_ids();
  test_narrow_ids();
  test_bad_tensors();
  test_cache_plans();
  test_batches();
  test_split();
  return check_close();
}
