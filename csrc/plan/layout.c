/* Layouts: see layout.h. Bytes of a block are numbered along its rows, whatever lies between the rows in memory. Runs
 * are found by walking a part once, row by row, and joining rows at equal distances. */
#include "plan/layout.h"

#include <inttypes.h>
#include <stdlib.h>

#include "status.h"

static uint64_t row_nbytes(const struct kvs_pool_layout *layout) { return layout->block_nbytes / layout->rows; }

/* Bytes from a block's first byte to one past its last. */
static uint64_t span_of(const struct kvs_pool_layout *layout) {
  return (layout->rows - 1) * layout->pitch + row_nbytes(layout);
}

uint64_t kvs_layout_extent(const struct kvs_pool_layout *layout) {
  return (layout->num_blocks - 1) * layout->stride + span_of(layout);
}

/* Rows may be inside blocks (pitch < stride) or blocks inside rows (stride < pitch); in both cases the smaller step
 * must be at least the size of what it steps over. */
static bool apart(const struct kvs_pool_layout *layout) {
  uint64_t row = row_nbytes(layout), n = layout->num_blocks, extent;
  if (layout->rows == 1) return n == 1 || layout->stride >= row;
  if (n == 1) return layout->pitch >= row;
  if (layout->stride <= layout->pitch)
    return layout->stride >= row && !__builtin_mul_overflow(n - 1, layout->stride, &extent) && layout->pitch >= row &&
           extent <= layout->pitch - row;
  return layout->pitch >= row && span_of(layout) <= layout->stride;
}

static bool wraps(const struct kvs_pool_layout *layout) {
  uint64_t rows, blocks;
  return __builtin_mul_overflow(layout->rows - 1, layout->pitch, &rows) ||
         __builtin_add_overflow(rows, row_nbytes(layout), &rows) ||
         __builtin_mul_overflow(layout->num_blocks - 1, layout->stride, &blocks) ||
         __builtin_add_overflow(rows, blocks, &blocks) || __builtin_add_overflow(layout->ptr, blocks, &blocks);
}

int kvs_layout_check(struct kvs_pool_layout *layout, struct kvs_error *err) {
  int status = KVS_CHECK_RESERVED(layout, "kvs_pool_layout", err);
  if (status) return status;
  if (layout->ptr == 0) return kvs_fail(err, KVS_INVALID, "ptr is 0 (a null pointer)");
  if (layout->num_blocks == 0 || layout->num_blocks > UINT32_MAX)
    return kvs_fail(err, KVS_INVALID, "num_blocks is %" PRIu64 "; it is 1 to %u", layout->num_blocks, UINT32_MAX);
  if (layout->block_nbytes == 0) return kvs_fail(err, KVS_INVALID, "block_nbytes is 0: a block has at least one byte");
  if (layout->rows == 0) layout->rows = 1;
  if (layout->block_nbytes % layout->rows != 0)
    return kvs_fail(err, KVS_INVALID, "block_nbytes is %" PRIu64 ", which %" PRIu64 " rows cannot share equally",
                    layout->block_nbytes, layout->rows);
  uint64_t row = row_nbytes(layout);
  if (layout->stride == 0) layout->stride = row;
  if (layout->pitch == 0 || layout->rows == 1) layout->pitch = row;
  if (wraps(layout))
    return kvs_fail(err, KVS_INVALID,
                    "%" PRIu64 " blocks of %" PRIu64 " rows, %" PRIu64 " bytes from block to block and %" PRIu64
                    " from row to row, go beyond the address space",
                    layout->num_blocks, layout->rows, layout->stride, layout->pitch);
  if (layout->num_blocks == 1 && layout->stride < span_of(layout)) layout->stride = span_of(layout); /* nested rows */
  if (!apart(layout))
    return kvs_fail(err, KVS_INVALID,
                    "blocks overlap: rows of %" PRIu64 " bytes, stride %" PRIu64 " from block to block, pitch %" PRIu64
                    " from row to row, %" PRIu64 " blocks of %" PRIu64 " rows: name stride= and pitch=",
                    row, layout->stride, layout->pitch, layout->num_blocks, layout->rows);
  return KVS_OK;
}

/* Whether two sets of windows [base + i * step, + width) with the same step intersect. A window may extend beyond its
 * step. */
static bool windows_meet(uint64_t a, uint64_t a_width, uint64_t b, uint64_t b_width, uint64_t step) {
  uint64_t ahead = (b - a) % step, behind = (step - ahead) % step;
  if (a > b) {
    behind = (a - b) % step;
    ahead = (step - behind) % step;
  }
  return ahead < a_width || behind < b_width;
}

bool kvs_layouts_overlap(const struct kvs_pool_layout *a, const struct kvs_pool_layout *b, bool *sure) {
  uint64_t a_end = a->ptr + kvs_layout_extent(a), b_end = b->ptr + kvs_layout_extent(b);
  *sure = true;
  if (a_end <= b->ptr || b_end <= a->ptr) return false;
  if (a->stride == b->stride && span_of(a) <= a->stride && span_of(b) <= b->stride) {
    if (!windows_meet(a->ptr, span_of(a), b->ptr, span_of(b), a->stride)) return false;
    if (a->rows == 1 && b->rows == 1) return true;
  }
  if (a->rows > 1 && b->rows > 1 && a->pitch == b->pitch && a->stride <= a->pitch && b->stride <= b->pitch) {
    uint64_t a_width = (a->num_blocks - 1) * a->stride + row_nbytes(a);
    uint64_t b_width = (b->num_blocks - 1) * b->stride + row_nbytes(b);
    if (!windows_meet(a->ptr, a_width, b->ptr, b_width, a->pitch)) return false;
  }
  *sure = false;
  return true;
}

int kvs_layout_check_part(const struct kvs_part *part, size_t index, uint64_t block, struct kvs_error *err) {
  uint64_t end;
  if (part->rows == 0 || part->row_nbytes == 0)
    return kvs_fail(err, KVS_INVALID, "parts[%zu] has %" PRIu64 " rows of %" PRIu64 " bytes: at least 1 of each", index,
                    part->rows, part->row_nbytes);
  if (part->rows > 1 && part->row_pitch < part->row_nbytes)
    return kvs_fail(err, KVS_INVALID, "parts[%zu] has rows of %" PRIu64 " bytes only %" PRIu64 " bytes apart", index,
                    part->row_nbytes, part->row_pitch);
  if (__builtin_mul_overflow(part->rows - 1, part->row_pitch, &end) ||
      __builtin_add_overflow(end, part->row_nbytes, &end) || __builtin_add_overflow(end, part->offset, &end) ||
      end > block)
    return kvs_fail(err, KVS_INVALID,
                    "parts[%zu]: %" PRIu64 " rows of %" PRIu64 " bytes, %" PRIu64 " apart from byte %" PRIu64
                    " on, go beyond a block of %" PRIu64 " bytes",
                    index, part->rows, part->row_nbytes, part->row_pitch, part->offset, block);
  return KVS_OK;
}

/* -- runs ------------------------------------------------------------------------------------------------------ */

uint64_t kvs_layout_place(const struct kvs_pool_layout *layout, uint64_t byte) {
  uint64_t row = row_nbytes(layout);
  return byte / row * layout->pitch + byte % row;
}

static uint64_t left_in_row(const struct kvs_pool_layout *layout, uint64_t byte) {
  if (layout->rows == 1 || layout->pitch == row_nbytes(layout)) return UINT64_MAX; /* contiguous rows */
  return row_nbytes(layout) - byte % row_nbytes(layout);
}

bool kvs_layout_has_pages(const struct kvs_pool_layout *layout, uint64_t page_nbytes) {
  return left_in_row(layout, 0) == UINT64_MAX || row_nbytes(layout) % page_nbytes == 0;
}

/* Extend the last run by a row if the row continues it. */
static bool extend(struct kvs_run *run, uint64_t src, uint64_t dst, uint64_t nbytes) {
  uint64_t src_next = run->src + (run->rows - 1) * run->src_pitch,
           dst_next = run->dst + (run->rows - 1) * run->dst_pitch;
  if (run->rows == 1 && src == run->src + run->row_nbytes && dst == run->dst + run->row_nbytes) {
    run->row_nbytes += nbytes;
    return true;
  }
  if (nbytes != run->row_nbytes || src < src_next || dst < dst_next) return false;
  if (run->rows == 1) {
    run->src_pitch = src - run->src;
    run->dst_pitch = dst - run->dst;
  } else if (src - src_next != run->src_pitch || dst - dst_next != run->dst_pitch) {
    return false;
  }
  run->rows++;
  return true;
}

static int append(struct kvs_run_list *runs, size_t from, uint64_t src, uint64_t dst, uint64_t nbytes,
                  struct kvs_error *err) {
  if (runs->count > from && extend(&runs->items[runs->count - 1], src, dst, nbytes)) return KVS_OK;
  if (runs->count == runs->capacity) {
    size_t capacity = runs->capacity ? 2 * runs->capacity : 64;
    struct kvs_run *grown = realloc(runs->items, capacity * sizeof *grown);
    if (!grown) return kvs_fail(err, KVS_NOMEM, "no memory for a plan of %zu runs", capacity);
    runs->items = grown;
    runs->capacity = capacity;
  }
  runs->items[runs->count++] = (struct kvs_run){.src = src, .dst = dst, .rows = 1, .row_nbytes = nbytes};
  return KVS_OK;
}

int kvs_layout_runs(const struct kvs_part *part, const struct kvs_pool_layout *src, const struct kvs_pool_layout *dst,
                    struct kvs_run_list *runs, struct kvs_error *err) {
  size_t from = runs->count;
  for (uint64_t row = 0; row < part->rows; row++) {
    uint64_t byte = part->offset + row * part->row_pitch, left = part->row_nbytes;
    while (left) {
      uint64_t n = left, src_left = left_in_row(src, byte), dst_left = left_in_row(dst, byte);
      if (src_left < n) n = src_left;
      if (dst_left < n) n = dst_left;
      int status = append(runs, from, kvs_layout_place(src, byte), kvs_layout_place(dst, byte), n, err);
      if (status) return status;
      byte += n;
      left -= n;
    }
  }
  return KVS_OK;
}

bool kvs_layout_locate(const struct kvs_pool_layout *layout, uint64_t offset, uint64_t *block, uint64_t *byte,
                       uint64_t *follow) {
  bool together = layout->rows == 1 || layout->stride > layout->pitch; /* one block's rows are adjacent */
  uint64_t outer = together ? layout->stride : layout->pitch, inner = together ? layout->pitch : layout->stride;
  uint64_t nouter = together ? layout->num_blocks : layout->rows, ninner = together ? layout->rows : layout->num_blocks;
  uint64_t row = row_nbytes(layout), rest = offset % outer, i = offset / outer, j = rest / inner;
  uint64_t to_inner = inner - rest % inner, to_outer = outer - rest;
  if (i >= nouter || j >= ninner || rest % inner >= row) {
    *follow = i < nouter && j + 1 < ninner && to_inner < to_outer ? to_inner : to_outer;
    return false;
  }
  *block = together ? i : j;
  *byte = (together ? j : i) * row + rest % inner;
  *follow = row - rest % inner;
  return true;
}
