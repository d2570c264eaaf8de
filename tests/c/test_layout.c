/* Layouts of pools: what is accepted, where bytes lie, which pools overlap, and runs against a byte-by-byte model. */
#include "check.h"
#include "plan/layout.h"

#include <stdlib.h>
#include <string.h>

enum { ARENA = 1 << 14 };
static struct kvs_error err;

/* A random layout that kvs_layout_check() accepts, within the arena. */
static struct kvs_pool_layout random_layout(uint64_t *seed, uint64_t block_nbytes) {
  for (;;) {
    struct kvs_pool_layout layout = {.ptr = 1 + check_below(seed, 64), .num_blocks = 1 + check_below(seed, 6)};
    layout.rows = 1 + check_below(seed, 4);
    layout.block_nbytes = block_nbytes ? block_nbytes : layout.rows * (1 + check_below(seed, 9));
    if (check_below(seed, 3)) layout.stride = 1 + check_below(seed, 80);
    if (check_below(seed, 3)) layout.pitch = 1 + check_below(seed, 120);
    if (kvs_layout_check(&layout, &err) == KVS_OK && layout.ptr + kvs_layout_extent(&layout) < ARENA) return layout;
  }
}

/* The address of a block's byte, by the words of kvswap_pool.h. */
static uint64_t address_of(const struct kvs_pool_layout *layout, uint64_t block, uint64_t byte) {
  uint64_t row = layout->block_nbytes / layout->rows;
  return layout->ptr + block * layout->stride + byte / row * layout->pitch + byte % row;
}

static void mark(const struct kvs_pool_layout *layout, unsigned char *counts) {
  memset(counts, 0, ARENA);
  for (uint64_t block = 0; block < layout->num_blocks; block++)
    for (uint64_t byte = 0; byte < layout->block_nbytes; byte++) counts[address_of(layout, block, byte)]++;
}

static void test_no_byte_is_two(void) {
  static unsigned char counts[ARENA];
  uint64_t seed = 5;
  for (int round = 0; round < 3000; round++) {
    struct kvs_pool_layout layout = random_layout(&seed, 0);
    uint64_t last = 0;
    mark(&layout, counts);
    for (uint64_t at = 0; at < ARENA; at++) {
      CHECK(counts[at] <= 1, "round %d: byte %llu is %u blocks'", round, (unsigned long long)at, counts[at]);
      if (counts[at]) last = at;
    }
    CHECK(last + 1 == layout.ptr + kvs_layout_extent(&layout));
  }
}

/* Every layout whose blocks do not overlap is accepted, if its rows or its blocks lie together. */
static void test_what_is_refused(void) {
  static unsigned char counts[ARENA];
  uint64_t seed = 6;
  int accepted = 0, refused = 0;
  for (int round = 0; round < 20000; round++) {
    struct kvs_pool_layout layout = {
        .ptr = 64, .num_blocks = 1 + check_below(&seed, 4), .rows = 1 + check_below(&seed, 4)};
    layout.block_nbytes = layout.rows * (1 + check_below(&seed, 6));
    layout.stride = 1 + check_below(&seed, 40);
    layout.pitch = 1 + check_below(&seed, 40);
    struct kvs_pool_layout filled = layout;
    int status = kvs_layout_check(&filled, &err);
    bool twice = false;
    mark(&filled, counts);
    for (uint64_t at = 0; at < ARENA; at++) twice |= counts[at] > 1;
    status ? refused++ : accepted++;
    CHECK(status == KVS_OK ? !twice : status == KVS_INVALID);
    bool nested = filled.rows == 1 || filled.num_blocks == 1 ||
                  (filled.rows - 1) * filled.pitch + filled.block_nbytes / filled.rows <= filled.stride ||
                  (filled.num_blocks - 1) * filled.stride + filled.block_nbytes / filled.rows <= filled.pitch;
    if (nested && !twice) CHECK(status == KVS_OK, "round %d: %s", round, err.message);
  }
  CHECK(accepted > 1000 && refused > 1000);
  const struct kvs_pool_layout wrong[] = {
      {.ptr = 0, .num_blocks = 1, .block_nbytes = 8},
      {.ptr = 8, .num_blocks = 0, .block_nbytes = 8},
      {.ptr = 8, .num_blocks = 1ull << 32, .block_nbytes = 8},
      {.ptr = 8, .num_blocks = 1, .block_nbytes = 0},
      {.ptr = 8, .num_blocks = 1, .block_nbytes = 9, .rows = 2},
      {.ptr = UINT64_MAX - 6, .num_blocks = 1, .block_nbytes = 8},
      {.ptr = 8, .num_blocks = 1 << 20, .block_nbytes = 8, .stride = 1ull << 45},
      {.ptr = 8, .num_blocks = 2, .block_nbytes = 8, .rows = 4, .pitch = 1ull << 63},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    struct kvs_pool_layout layout = wrong[i];
    CHECK(kvs_layout_check(&layout, &err) == KVS_INVALID, "%zu", i);
  }
}

static void test_the_most_blocks(void) {
  struct kvs_pool_layout layout = {.ptr = 8, .num_blocks = UINT32_MAX, .block_nbytes = 1};
  CHECK(kvs_layout_check(&layout, &err) == KVS_OK && layout.stride == 1, "%s", err.message);
}

static void test_locate(void) {
  uint64_t seed = 7;
  for (int round = 0; round < 2000; round++) {
    struct kvs_pool_layout layout = random_layout(&seed, 0);
    static int64_t owner[ARENA];
    uint64_t extent = kvs_layout_extent(&layout), block, byte, follow;
    for (uint64_t at = 0; at < extent; at++) owner[at] = -1;
    for (uint64_t b = 0; b < layout.num_blocks; b++)
      for (uint64_t i = 0; i < layout.block_nbytes; i++)
        owner[address_of(&layout, b, i) - layout.ptr] = (int64_t)(b * layout.block_nbytes + i);
    for (uint64_t at = 0; at < extent; at++) {
      bool found = kvs_layout_locate(&layout, at, &block, &byte, &follow);
      CHECK(found == (owner[at] >= 0), "round %d", round);
      if (found) CHECK((int64_t)(block * layout.block_nbytes + byte) == owner[at]);
      CHECK(follow > 0);
      for (uint64_t i = 1; i < follow && at + i < extent; i++)
        CHECK(owner[at + i] == (found ? owner[at] + (int64_t)i : -1), "round %d", round);
    }
  }
}

static void test_overlap(void) {
  static unsigned char one[ARENA], two[ARENA];
  uint64_t seed = 8;
  int apart = 0, interleaved = 0;
  for (int round = 0; round < 5000; round++) {
    struct kvs_pool_layout a = random_layout(&seed, 0), b = a;
    if (check_below(&seed, 2)) b = random_layout(&seed, 0);
    b.ptr = 1 + check_below(&seed, 200);
    bool both = false, sure;
    mark(&a, one);
    mark(&b, two);
    for (uint64_t at = 0; at < ARENA; at++) both |= one[at] && two[at];
    bool said = kvs_layouts_overlap(&a, &b, &sure);
    if (both) CHECK(said, "round %d: an overlap is missed", round);
    if (sure) CHECK(said == both, "round %d", round);
    apart += !said;
    interleaved += !said && a.ptr < b.ptr + kvs_layout_extent(&b) && b.ptr < a.ptr + kvs_layout_extent(&a);
  }
  CHECK(apart > 500 && interleaved > 50);
}

/* K and V of one cache: separate halves, and side by side in every block. */
static void test_halves(void) {
  bool sure;
  struct kvs_pool_layout k = {.ptr = 64, .num_blocks = 8, .block_nbytes = 4 * 16, .rows = 4, .pitch = 2 * 8 * 16},
                         v = k;
  v.ptr += 8 * 16;
  CHECK(!kvs_layout_check(&k, &err) && !kvs_layout_check(&v, &err));
  CHECK(!kvs_layouts_overlap(&k, &v, &sure) && sure);
  v.ptr -= 1;
  CHECK(kvs_layouts_overlap(&k, &v, &sure));
  struct kvs_pool_layout left = {.ptr = 64, .num_blocks = 8, .block_nbytes = 16, .stride = 32}, right = left;
  right.ptr += 16;
  CHECK(!kvs_layout_check(&left, &err) && !kvs_layout_check(&right, &err));
  CHECK(!kvs_layouts_overlap(&left, &right, &sure) && sure);
  right.ptr -= 1;
  CHECK(kvs_layouts_overlap(&left, &right, &sure) && sure);
}

static struct kvs_part random_part(uint64_t *seed, uint64_t block_nbytes) {
  struct kvs_part part = {.offset = check_below(seed, block_nbytes)};
  part.row_nbytes = 1 + check_below(seed, block_nbytes - part.offset);
  part.row_pitch = part.row_nbytes + check_below(seed, 5);
  part.rows = 1 + check_below(seed, 1 + (block_nbytes - part.offset - part.row_nbytes) / part.row_pitch);
  return part;
}

static void test_runs(void) {
  struct kvs_run_list runs = {0};
  uint64_t seed = 9, most = 0;
  for (int round = 0; round < 20000; round++) {
    struct kvs_pool_layout src = random_layout(&seed, 24), dst = random_layout(&seed, 24);
    struct kvs_part part = random_part(&seed, 24);
    static int64_t got[24];
    memset(got, -1, sizeof got);
    runs.count = 0;
    CHECK(!kvs_layout_check_part(&part, 0, 24, &err), "%s", err.message);
    CHECK(!kvs_layout_runs(&part, &src, &dst, &runs, &err));
    uint64_t moved = 0;
    for (size_t r = 0; r < runs.count; r++)
      for (uint64_t row = 0; row < runs.items[r].rows; row++)
        for (uint64_t i = 0; i < runs.items[r].row_nbytes; i++) {
          uint64_t s = src.ptr + runs.items[r].src + row * runs.items[r].src_pitch + i;
          uint64_t d = dst.ptr + runs.items[r].dst + row * runs.items[r].dst_pitch + i;
          for (uint64_t byte = 0; byte < 24; byte++)
            if (address_of(&dst, 0, byte) == d) {
              CHECK(address_of(&src, 0, byte) == s, "round %d", round);
              CHECK(got[byte] == -1, "round %d: twice", round);
              got[byte] = (int64_t)byte;
              moved++;
            }
        }
    CHECK(moved == part.rows * part.row_nbytes);
    for (uint64_t byte = 0; byte < 24; byte++) {
      uint64_t in = byte - part.offset;
      bool wanted = byte >= part.offset && in / part.row_pitch < part.rows && in % part.row_pitch < part.row_nbytes;
      CHECK((got[byte] >= 0) == wanted, "round %d", round);
    }
    if (runs.count > most) most = runs.count;
  }
  free(runs.items);
}

static void test_few_runs(void) {
  struct kvs_run_list runs = {0};
  struct kvs_pool_layout packed = {.ptr = 8, .num_blocks = 4, .block_nbytes = 80 * 32};
  struct kvs_pool_layout layered = {.ptr = 8, .num_blocks = 4, .block_nbytes = 80 * 32, .rows = 80, .pitch = 4 * 32};
  CHECK(!kvs_layout_check(&packed, &err) && !kvs_layout_check(&layered, &err));
  struct kvs_part whole = {.rows = 1, .row_nbytes = 80 * 32}, heads = {.rows = 160, .row_nbytes = 6, .row_pitch = 16};
  CHECK(!kvs_layout_runs(&whole, &packed, &packed, &runs, &err) && runs.count == 1 && runs.items[0].rows == 1);
  runs.count = 0;
  CHECK(!kvs_layout_runs(&whole, &layered, &packed, &runs, &err) && runs.count == 1 && runs.items[0].rows == 80);
  CHECK(runs.items[0].src_pitch == 128 && runs.items[0].dst_pitch == 32 && runs.items[0].row_nbytes == 32);
  runs.count = 0;
  CHECK(!kvs_layout_runs(&heads, &packed, &packed, &runs, &err) && runs.count == 1 && runs.items[0].rows == 160);
  free(runs.items);
}

static void test_wrong_parts(void) {
  struct kvs_pool_layout pool = {.ptr = 8, .num_blocks = 4, .block_nbytes = 100};
  CHECK(!kvs_layout_check(&pool, &err));
  const struct kvs_part wrong[] = {
      {.rows = 0, .row_nbytes = 1},
      {.rows = 1, .row_nbytes = 0},
      {.rows = 1, .row_nbytes = 101},
      {.rows = 1, .row_nbytes = 1, .offset = 100},
      {.rows = 2, .row_nbytes = 10, .row_pitch = 9},
      {.rows = 11, .row_nbytes = 10, .row_pitch = 10},
      {.rows = UINT64_MAX, .row_nbytes = 10, .row_pitch = UINT64_MAX},
      {.rows = 1, .row_nbytes = 1, .offset = UINT64_MAX},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
    CHECK(kvs_layout_check_part(&wrong[i], i, pool.block_nbytes, &err) == KVS_INVALID, "%zu", i);
}

int main(void) {
  test_no_byte_is_two();
  test_what_is_refused();
  test_the_most_blocks();
  test_locate();
  test_overlap();
  test_halves();
  test_runs();
  test_few_runs();
  test_wrong_parts();
  return check_close();
}
