/* Tensors at equal distances become rows of 2-D copies, which move the same bytes as plain copies. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "plan/stride.h"

enum { ARENA = 1 << 15, TENSORS = 12, BLOCKS = 6 };
static struct kvs_error err;

/* Tensors that often lie at equal distances: in one or two slabs, shuffled, with a gap now and then. */
static size_t random_tensors(uint64_t *seed, struct kvs_tensor *tensors, struct kvs_regions *regions) {
  uint64_t nbytes = 1 + check_below(seed, 20), gpu = 64, cpu = ARENA / 2, n = 1 + check_below(seed, TENSORS);
  uint64_t stride = nbytes + check_below(seed, 4) * check_below(seed, 2), span = BLOCKS * stride;
  bool block_first = check_below(seed, 2);
  uint64_t cpu_stride = block_first ? TENSORS * nbytes : stride;
  regions->count = 0;
  for (uint64_t t = 0; t < n; t++) {
    tensors[t] = (struct kvs_tensor){gpu, cpu, nbytes, BLOCKS, BLOCKS, stride, cpu_stride};
    gpu += span + (check_below(seed, 6) == 0 ? check_below(seed, 64) : 0);
    cpu += block_first ? nbytes : span;
  }
  for (uint64_t t = n; t-- > 1;) {
    uint64_t other = check_below(seed, 3) ? t : check_below(seed, t + 1);
    struct kvs_tensor held = tensors[t];
    tensors[t] = tensors[other];
    tensors[other] = held;
  }
  uint64_t seam = check_below(seed, 2) ? 64 + check_below(seed, gpu - 64) : ARENA / 2;
  const struct kvs_region all[] = {{.base = 1, .nbytes = seam - 1},
                                   {.base = seam, .nbytes = ARENA / 2 - seam},
                                   {.base = ARENA / 2, .nbytes = ARENA / 2}};
  for (int i = 0; i < 3; i++)
    if (all[i].nbytes) CHECK(!kvs_regions_add(regions, &all[i], &err));
  return (size_t)n;
}

static void carry_out(const struct kvs_copies *copies, const struct kvs_rects *rects, unsigned char *arena) {
  for (size_t i = 0; i < copies->count; i++) memcpy(arena + copies->dst[i], arena + copies->src[i], copies->nbytes[i]);
  for (size_t i = 0; i < rects->count; i++)
    for (uint64_t row = 0; row < kvs_rect_rows(&rects->items[i]); row++)
      memcpy(arena + kvs_rect_dst(&rects->items[i], row), arena + kvs_rect_src(&rects->items[i], row),
             rects->items[i].width);
}

static bool in_one(const struct kvs_regions *regions, uint64_t first, uint64_t last, uint64_t nbytes) {
  const struct kvs_region *region = kvs_regions_find(regions, first);
  return last + nbytes <= region->base + region->nbytes;
}

static void test_against_plain_copies(void) {
  static unsigned char want[ARENA], got[ARENA];
  struct kvs_stacks stacks = {0};
  struct kvs_rects rects = {0};
  struct kvs_copies copies = {0}, plain = {0};
  struct kvs_regions regions = {0};
  struct kvs_tensor tensors[TENSORS];
  uint64_t seed = 3;
  size_t stacked = 0, alone = 0, sliced = 0;
  for (int round = 0; round < 20000; round++) {
    size_t n = random_tensors(&seed, tensors, &regions);
    uint64_t max_pitch = check_below(&seed, 3) ? 1 << 20 : 1 + check_below(&seed, 200);
    int64_t gpu_ids[BLOCKS], cpu_ids[BLOCKS];
    size_t count = check_below(&seed, BLOCKS + 1);
    for (int i = 0; i < BLOCKS; i++) gpu_ids[i] = (i * 5 + round) % BLOCKS, cpu_ids[i] = (BLOCKS - i + round) % BLOCKS;
    const struct kvs_ids gpu = {gpu_ids, 8, count}, cpu = {cpu_ids, 8, count};
    enum kvs_direction direction = check_below(&seed, 2) ? KVS_D2H : KVS_H2D;
    for (size_t i = 0; i < ARENA; i++) want[i] = got[i] = (unsigned char)check_random(&seed);
    rects.count = copies.count = plain.count = rects.rows = 0;
    CHECK(!kvs_stacks_find(tensors, n, &regions, &stacks, &err));
    CHECK(!kvs_plan_stacks(tensors, &stacks, &gpu, &cpu, direction, max_pitch, &rects, &copies, &err));
    CHECK(!kvs_plan_cache(tensors, n, &gpu, &cpu, direction, false, &plain, &err));
    uint64_t rows = 0;
    for (size_t i = 0; i < rects.count; i++) {
      const struct kvs_rect *rect = &rects.items[i];
      uint64_t last = kvs_rect_rows(rect) - 1;
      CHECK(rect->src_pitch <= max_pitch && rect->dst_pitch <= max_pitch && rect->src_pitch >= rect->width);
      CHECK(in_one(&regions, rect->src, kvs_rect_src(rect, last), rect->width));
      CHECK(in_one(&regions, rect->dst, kvs_rect_dst(rect, last), rect->width));
      rows += kvs_rect_rows(rect);
      sliced += rect->depth > 1;
    }
    CHECK(rows == rects.rows);
    carry_out(&copies, &rects, got);
    carry_out(&plain, &(struct kvs_rects){0}, want);
    CHECK(memcmp(want, got, ARENA) == 0, "round %d", round);
    size_t seen = 0;
    for (size_t s = 0; s < stacks.count; s++) {
      seen += stacks.items[s].count;
      stacks.items[s].count > 1 ? stacked++ : alone++;
    }
    CHECK(seen == n);
  }
  CHECK(stacked > 5000 && alone > 5000 && sliced > 500);
  kvs_stacks_free(&stacks);
  kvs_rects_free(&rects);
  kvs_copies_free(&copies);
  kvs_copies_free(&plain);
  kvs_regions_clear(&regions);
}

/* As models have them: 80 layers in one slab beside a block-first pool are one stack, however they are named. */
static void test_a_slab(void) {
  enum { LAYERS = 80, N = 512, PAGE = 8192 };
  struct kvs_tensor tensors[LAYERS];
  struct kvs_regions regions = {0};
  struct kvs_stacks stacks = {0};
  const uint64_t slab = 1ull << 30, pool = 1ull << 40;
  for (size_t t = 0; t < LAYERS; t++)
    tensors[(t * 7) % LAYERS] =
        (struct kvs_tensor){slab + t * N * PAGE, pool + t * PAGE, PAGE, N, N, 0, (uint64_t)LAYERS * PAGE};
  const struct kvs_region sides[] = {{.base = slab, .nbytes = (uint64_t)LAYERS * N * PAGE},
                                     {.base = pool, .nbytes = (uint64_t)LAYERS * N * PAGE}};
  for (int i = 0; i < 2; i++) CHECK(!kvs_regions_add(&regions, &sides[i], &err));
  CHECK(!kvs_stacks_find(tensors, LAYERS, &regions, &stacks, &err));
  CHECK(stacks.count == 1 && stacks.items[0].count == LAYERS && stacks.items[0].gpu_pitch == N * PAGE &&
        stacks.items[0].cpu_pitch == PAGE);
  kvs_regions_clear(&regions);
  for (size_t t = 0; t < LAYERS; t++) { /* each layer an allocation of its own */
    struct kvs_region own = {.base = slab + t * N * PAGE, .nbytes = N * PAGE};
    CHECK(!kvs_regions_add(&regions, &own, &err));
  }
  CHECK(!kvs_regions_add(&regions, &sides[1], &err));
  CHECK(!kvs_stacks_find(tensors, LAYERS, &regions, &stacks, &err) && stacks.count == LAYERS);
  kvs_stacks_free(&stacks);
  kvs_regions_clear(&regions);
}

static void test_pitches(void) {
  struct kvs_rect rect;
  const uint64_t most = (1ull << 31) - 1, far = 3400ull << 20;
  CHECK(kvs_rect_make(&rect, 0, 0, 65536, 20, far, 65536, most));
  CHECK(rect.depth == 20 && rect.height == 1 && rect.dst_pitch * rect.dst_height == far && rect.dst_pitch <= most);
  CHECK(rect.src_pitch * rect.src_height == 65536);
  CHECK(kvs_rect_make(&rect, 0, 0, 65536, 20, most, 65536, most) && rect.depth == 1 && rect.height == 20);
  CHECK(!kvs_rect_make(&rect, 0, 0, 10, 2, (1ull << 61) - 1, 10, most)); /* a prime */
  CHECK(!kvs_rect_make(&rect, 0, 0, 1 << 30, 2, far + 1, 1 << 30, 1 << 29));
}

int main(void) {
  test_against_plain_copies();
  test_a_slab();
  test_pitches();
  return check_close();
}
