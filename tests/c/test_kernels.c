/* COPY and RING on a host device, as lists and as grids, with and without a slot, against plain loops; threaded, and on
 * deterministic devices over many seeds. */
#include "host_device.h"
#include "kernels/twins.h"

/* -- COPY and RING --------------------------------------------------------------------------------------------- */

enum { MAX_ROWS = 6, MAX_POOL = KVS_INLINE_PAIRS + 40 };

/* A grid over two buffers, its list, and what must come of both. Its first row is not empty. */
struct grid {
  struct kvs_device *device;
  size_t nbytes, npieces, npairs;
  unsigned char *src, *dst, *wanted;
  struct kvs_copy_params grid, list;
};

static struct grid make_grid(struct kvs_device *device, uint64_t *random, size_t most_pairs) {
  struct grid g = {.device = device, .npairs = 1 + check_below(random, most_pairs)};
  static struct kvs_pair pairs[MAX_POOL];
  static struct kvs_piece pieces[MAX_POOL * MAX_ROWS];
  struct kvs_row rows[MAX_ROWS] = {{0}};
  uint32_t from[MAX_POOL], to[MAX_POOL];
  size_t nslots = g.npairs + check_below(random, 5), src_at = MARGIN, dst_at = MARGIN;
  uint32_t nrows = 1 + (uint32_t)check_below(random, MAX_ROWS), piece = 1 + (uint32_t)check_below(random, 150),
           parts = 0;
  shuffle(random, from, nslots);
  shuffle(random, to, nslots);
  for (size_t i = 0; i < g.npairs; i++) pairs[i] = (struct kvs_pair){from[i], to[i]};
  for (uint32_t r = 0; r < nrows; r++) { /* offsets, until it is known where memory is */
    rows[r].nbytes = check_below(random, 400) + (r == 0);
    rows[r].src_stride = rows[r].nbytes + check_below(random, 30);
    rows[r].dst_stride = rows[r].nbytes + check_below(random, 30);
    rows[r].src = src_at;
    rows[r].dst = dst_at;
    src_at += nslots * rows[r].src_stride;
    dst_at += nslots * rows[r].dst_stride;
    uint32_t needed = (uint32_t)((rows[r].nbytes + piece - 1) / piece);
    if (needed > parts) parts = needed;
  }
  parts += (uint32_t)check_below(random, 2);
  g.nbytes = (src_at > dst_at ? src_at : dst_at) + MARGIN;
  g.src = make_memory(device, g.nbytes);
  g.dst = make_memory(device, g.nbytes);
  g.wanted = malloc(g.nbytes);
  fill_random(random, g.src, g.nbytes);
  fill_random(random, g.dst, g.nbytes);
  memcpy(g.wanted, g.dst, g.nbytes);
  for (size_t i = 0; i < g.npairs; i++)
    for (uint32_t r = 0; r < nrows; r++) {
      uint64_t src = rows[r].src + from[i] * rows[r].src_stride, dst = rows[r].dst + to[i] * rows[r].dst_stride;
      pieces[g.npieces++] = (struct kvs_piece){address(g.dst) + dst, address(g.src) + src, rows[r].nbytes};
      memcpy(g.wanted + dst, g.src + src, rows[r].nbytes);
    }
  for (uint32_t r = 0; r < nrows; r++) {
    rows[r].src += address(g.src);
    rows[r].dst += address(g.dst);
  }
  g.list.units.pieces = make_table(device, pieces, g.npieces * sizeof *pieces);
  g.list.count = g.npieces;
  g.grid.units.rows = make_table(device, rows, nrows * sizeof *rows);
  g.grid.units.nrows = nrows;
  g.grid.units.parts = parts;
  g.grid.units.piece = piece;
  g.grid.count = (uint64_t)g.npairs * nrows * parts;
  if (g.npairs <= KVS_INLINE_PAIRS && check_below(random, 2))
    memcpy(g.grid.inline_pairs, pairs, g.npairs * sizeof *pairs);
  else
    g.grid.units.pairs = make_table(device, pairs, g.npairs * sizeof *pairs);
  return g;
}

static void test_grids(uint64_t seed) {
  uint64_t random = seed + 77;
  for (int round = 0; round < (seed ? 1 : 60); round++) {
    struct kvs_device *device = open_device(seed);
    struct grid g = make_grid(device, &random, round % 10 == 9 ? MAX_POOL - 5 : 30);
    unsigned char *before = malloc(g.nbytes);
    memcpy(before, g.dst, g.nbytes);
    for (int kernel = KVS_KERNEL_COPY; kernel <= KVS_KERNEL_PACK; kernel++)
      for (int list = 0; list < 2; list++) {
        memcpy(g.dst, before, g.nbytes);
        launch_copy(device, (enum kvs_kernel)kernel, list ? &g.list : &g.grid, 1 + (unsigned)check_below(&random, 40),
                    0);
        OK(kvs_dev_synchronize(device, &err));
        CHECK(memcmp(g.dst, g.wanted, g.nbytes) == 0, "seed %d round %d kernel %d list %d", (int)seed, round, kernel,
              list);
      }
    free(before);
    free(g.wanted);
    kvs_dev_close(device);
  }
}

/* -- grids with a slot ----------------------------------------------------------------------------------------- */

/* Some rows of some pairs, by groups: of a group the slot has block after block, each with the group's rows. Returns
 * the bytes of a block in all of its groups. */
static uint64_t pack(uint64_t *random, struct kvs_row *rows, uint32_t nrows) {
  uint64_t first = check_below(random, 5000), before = first; /* as of groups that are not in this slot */
  for (uint32_t r = 0, end; r < nrows; r = end) {
    uint64_t nbytes = 0;
    end = r + 1 + (uint32_t)check_below(random, nrows - r);
    for (uint32_t i = r; i < end; i++) {
      rows[i].packed = nbytes;
      rows[i].before = before;
      nbytes += rows[i].nbytes;
    }
    for (uint32_t i = r; i < end; i++) rows[i].packed_stride = nbytes;
    before += nbytes;
  }
  return before - first;
}

/* Gathered into the slot, or scattered from it, as plain loops do it: what the host's side of rows says must not
 * matter, so it is nowhere. */
static void test_slots(uint64_t seed, bool by_src) {
  enum { PAIRS = 30 };
  uint64_t random = seed * 2 + by_src + 3;
  struct kvs_device *device = open_device(seed);
  struct kvs_row rows[MAX_ROWS] = {{0}};
  struct kvs_pair pairs[PAIRS];
  uint32_t slots[PAIRS + 4];
  uint32_t nrows = 1 + (uint32_t)check_below(&random, MAX_ROWS), npairs = 1 + (uint32_t)check_below(&random, PAIRS);
  uint32_t piece = 1 + (uint32_t)check_below(&random, 150), parts = 0;
  uint64_t scattered_nbytes = MARGIN;
  shuffle(&random, slots, npairs + 4);
  for (uint32_t i = 0; i < npairs; i++)
    pairs[i] = by_src ? (struct kvs_pair){1u << 30, slots[i]} : (struct kvs_pair){slots[i], 1u << 30};
  for (uint32_t r = 0; r < nrows; r++) {
    rows[r].nbytes = 1 + check_below(&random, 400);
    *(by_src ? &rows[r].dst : &rows[r].src) = scattered_nbytes;
    *(by_src ? &rows[r].dst_stride : &rows[r].src_stride) = rows[r].nbytes + check_below(&random, 30);
    scattered_nbytes += (npairs + 4) * (rows[r].nbytes + 30);
    if ((rows[r].nbytes - 1) / piece + 1 > parts) parts = (uint32_t)((rows[r].nbytes - 1) / piece + 1);
  }
  uint64_t slot_nbytes = pack(&random, rows, nrows) * npairs, margin = check_below(&random, 20);
  unsigned char *scattered = make_memory(device, scattered_nbytes), *slot = make_memory(device, slot_nbytes + 2 * 20);
  unsigned char *wanted_scattered = malloc(scattered_nbytes), *wanted_slot = malloc(slot_nbytes + 2 * 20);
  fill_random(&random, scattered, scattered_nbytes);
  fill_random(&random, slot, slot_nbytes + 2 * 20);
  memcpy(wanted_scattered, scattered, scattered_nbytes);
  memcpy(wanted_slot, slot, slot_nbytes + 2 * 20);
  for (uint32_t b = 0; b < npairs; b++)
    for (uint32_t r = 0; r < nrows; r++) {
      uint64_t there =
          by_src ? rows[r].dst + pairs[b].dst * rows[r].dst_stride : rows[r].src + pairs[b].src * rows[r].src_stride;
      uint64_t here = margin + (rows[r].before - rows[0].before) * npairs + b * rows[r].packed_stride + rows[r].packed;
      if (by_src)
        memcpy(wanted_scattered + there, slot + here, rows[r].nbytes);
      else
        memcpy(wanted_slot + here, scattered + there, rows[r].nbytes);
    }
  for (uint32_t r = 0; r < nrows; r++) *(by_src ? &rows[r].dst : &rows[r].src) += address(scattered);
  struct kvs_copy_params params = {.by_src = by_src, .count = (uint64_t)npairs * nrows * parts};
  params.units = (struct kvs_units){.rows = make_table(device, rows, nrows * sizeof *rows),
                                    .nrows = nrows,
                                    .parts = parts,
                                    .piece = piece,
                                    .npairs = npairs,
                                    .slot = address(slot) + margin,
                                    .before = rows[0].before};
  if (check_below(&random, 2))
    memcpy(params.inline_pairs, pairs, npairs * sizeof *pairs);
  else
    params.units.pairs = make_table(device, pairs, npairs * sizeof *pairs);
  unsigned char *before = malloc(scattered_nbytes), *slot_before = malloc(slot_nbytes + 2 * 20);
  memcpy(before, scattered, scattered_nbytes);
  memcpy(slot_before, slot, slot_nbytes + 2 * 20);
  for (int kernel = KVS_KERNEL_COPY; kernel <= KVS_KERNEL_PACK; kernel++) {
    memcpy(scattered, before, scattered_nbytes);
    memcpy(slot, slot_before, slot_nbytes + 2 * 20);
    launch_copy(device, (enum kvs_kernel)kernel, &params, 1 + (unsigned)check_below(&random, 40), 0);
    OK(kvs_dev_synchronize(device, &err));
    CHECK(memcmp(scattered, wanted_scattered, scattered_nbytes) == 0, "seed %d kernel %d by_src %d", (int)seed, kernel,
          by_src);
    CHECK(memcmp(slot, wanted_slot, slot_nbytes + 2 * 20) == 0, "seed %d kernel %d by_src %d", (int)seed, kernel,
          by_src);
  }
  free(before);
  free(slot_before);
  free(wanted_scattered);
  free(wanted_slot);
  kvs_dev_close(device);
}

/* -- what is wrong --------------------------------------------------------------------------------------------- */

/* What is wrong with a copy. */
#define BAD_COPIES(X)                                                                                                  \
  X(rows, params->units.rows = NOWHERE)                                                                                \
  X(no_rows, params->units.nrows = 0)                                                                                  \
  X(no_parts, params->units.parts = 0)                                                                                 \
  X(pairs, params->units.pairs = NOWHERE)                                                                              \
  X(too_many_inline, make_inline(g, params, KVS_INLINE_PAIRS + 1))                                                     \
  X(list, params->units.pieces = NOWHERE)                                                                              \
  X(endless_list, (*params = g->list, params->count = UINT64_MAX / 4))                                                 \
  X(list_too_long, (*params = g->list, params->count++))                                                               \
  X(id, pair->src = 1u << 30)                                                                                          \
  X(other_id, pair->dst = 1u << 30)                                                                                    \
  X(row_src, row->src = NOWHERE)                                                                                       \
  X(row_dst, row->dst = NOWHERE)                                                                                       \
  X(slot, (params->units.slot = NOWHERE, params->units.npairs = (uint32_t)g->npairs))

/* So many pairs, all of them of slots that are there. */
static bool make_inline(const struct grid *g, struct kvs_copy_params *params, uint64_t npairs) {
  params->units.pairs = 0;
  memset(params->inline_pairs, 0, sizeof params->inline_pairs);
  params->count = npairs * (g->grid.count / g->npairs);
  return true;
}

static void spoil_copy(const struct grid *g, struct kvs_copy_params *params, int which) {
  struct kvs_row *row = (struct kvs_row *)(uintptr_t)params->units.rows;
  struct kvs_pair *pair =
      params->units.pairs ? (struct kvs_pair *)(uintptr_t)params->units.pairs : params->inline_pairs;
  int at = 0;
#define X(name, spoil)                                                                                                 \
  if (which == at++) (void)(spoil);
  BAD_COPIES(X)
#undef X
}

static void test_bad_copies(uint64_t seed) {
  static const char *const names[] = {
#define X(name, spoil) #name,
      BAD_COPIES(X)
#undef X
  };
  for (int which = 0; which < (int)(sizeof names / sizeof *names); which++) {
    uint64_t random = seed + (uint64_t)which;
    struct kvs_device *device = open_device(seed);
    struct grid g = make_grid(device, &random, 20);
    unsigned char *before = malloc(g.nbytes);
    struct kvs_copy_params params = g.grid;
    memcpy(before, g.dst, g.nbytes);
    spoil_copy(&g, &params, which);
    launch_copy(device, seed % 2 ? KVS_KERNEL_COPY : KVS_KERNEL_RING, &params, 2, 0);
    expect_lost(device, names[which], seed);
    CHECK(memcmp(g.dst, before, g.nbytes) == 0, "%s", names[which]);
    free(before);
    free(g.wanted);
    kvs_dev_close(device);
  }
}

/* The twins alone: which units a CTA takes. */
static void test_twins(void) {
  uint64_t random = 9;
  struct kvs_device *device = open_device(0);
  struct grid g = make_grid(device, &random, 20);
  const struct kvs_piece *pieces = (const struct kvs_piece *)(uintptr_t)g.list.units.pieces;
  unsigned char *wanted = malloc(g.nbytes);
  memcpy(wanted, g.dst, g.nbytes);
  kvs_twin_run(KVS_KERNEL_COPY, &g.list, 1, 3);
  for (size_t i = 1; i < g.npieces; i += 3)
    memcpy(wanted + (pieces[i].dst - address(g.dst)), (const void *)(uintptr_t)pieces[i].src, pieces[i].nbytes);
  CHECK(memcmp(g.dst, wanted, g.nbytes) == 0, "CTA 1 of 3");
  free(wanted);
  free(g.wanted);
  kvs_dev_close(device);
}

int main(void) {
  for (uint64_t seed = 0; seed <= SEEDS; seed++) test_grids(seed);
  for (uint64_t seed = 0; seed <= SEEDS; seed++) test_slots(seed, false);
  for (uint64_t seed = 0; seed <= SEEDS; seed++) test_slots(seed, true);
  for (uint64_t seed = 0; seed < 5; seed++) test_bad_copies(seed);
  test_twins();
  return check_close();
}
