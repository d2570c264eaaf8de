/* The kernels, their parameters, and the address computation that the CUDA code and its C twins share. Included by C
 * and by CUDA C++; everything in it is plain data and inline functions. */
#ifndef KVS_KERNELS_H
#define KVS_KERNELS_H

#include <stdint.h>

#if defined(__CUDACC__)
#define KVS_BOTH __host__ __device__ static __forceinline__
#else
#define KVS_BOTH static inline
#endif

#include "crc.h"

/* X(name, symbol in the fatbin, parameter struct) */
#define KVS_KERNEL_LIST(X)                                                                                             \
  X(COPY, kvs_kernel_copy, kvs_copy_params)          /* scattered copies by words, any size, any alignment */          \
  X(RING, kvs_kernel_ring, kvs_copy_params)          /* the same by bulk copies through shared memory */               \
  X(PACK, kvs_kernel_pack, kvs_copy_params)          /* the same within device memory, by all of the GPU, unpaced */   \
  X(PATTERN, kvs_kernel_pattern, kvs_pattern_params) /* write or check bytes that are a function of their key */       \
  X(CRC, kvs_kernel_crc, kvs_crc_params)             /* the checksum of a stretch of memory */                         \
  X(DELAY, kvs_kernel_delay, kvs_delay_params)       /* keep a stream busy for a time */

enum kvs_kernel {
#define X(name, symbol, params) KVS_KERNEL_##name,
  KVS_KERNEL_LIST(X)
#undef X
      KVS_KERNELS
};

/* One piece of copying. All addresses are as the device sees them (pinned host memory by its device alias). */
struct kvs_piece {
  uint64_t dst, src, nbytes;
};

/* One row of every block: for the pair (s, d) of slots it goes from src + s * src_stride to dst + d * dst_stride. In a
 * slot of a burst rows are packed by groups, each of which has its blocks one after the other, packed_stride bytes
 * each; this row lies `packed` bytes after the beginning of a block, and the groups before its own take `before` bytes
 * of each block. */
struct kvs_row {
  uint64_t src, dst, src_stride, dst_stride, nbytes;
  uint64_t packed, packed_stride, before;
};

struct kvs_pair {
  uint32_t src, dst;
};

/* Copies in one of two forms. A list: pieces. A grid: each of nrows rows of each pair, cut into `parts` pieces of
 * `piece` bytes (those beyond the end of a shorter row are empty): O(blocks) to upload, where the rows are there. */
struct kvs_units {
  uint64_t pieces; /* list: address of struct kvs_piece[]; 0: a grid */
  uint64_t rows;   /* grid: address of struct kvs_row[] */
  uint64_t pairs;  /* grid: address of struct kvs_pair[] */
  uint32_t nrows, parts, piece;
  uint32_t npairs; /* grid with a slot: pairs in it */
  uint64_t slot;   /* grid: where the host's side of all this is packed in device memory; 0: it is on the host */
  uint64_t before; /* grid with a slot: `before` of its first row */
};

enum {
  KVS_INLINE_PAIRS = 480, /* that travel as parameters */
  /* RING: how it is launched. Each warp has a ring of stages, chunk bytes each, in dynamic shared memory. Measured on
   * an H200: at the same GB/s, two CTAs of four warps cost a model beside them half of what four CTAs of two do. Half
   * as many warps where shared memory is small. */
  KVS_RING_WARPS = 4,
  KVS_RING_STAGES = 8,
  KVS_RING_CHUNK = 4096,
  KVS_RING_LINE = 128, /* bytes that a link moves at once: parts of lines are as slow as whole ones */
};

struct kvs_copy_params {
  struct kvs_units units; /* read until the kernel ended; a grid with pairs 0: inline_pairs */
  uint64_t count;         /* pieces, or pairs * nrows * parts */
  uint64_t ns_per_mib;    /* pace of one CTA: nanoseconds it spends at least on 1 MiB; 0: unpaced */
  uint32_t chunk;         /* RING: bytes of one stage, a multiple of KVS_RING_LINE */
  uint32_t by_src;        /* the source is the host's side, else the destination; RING cuts pieces at its lines */
  struct kvs_pair inline_pairs[KVS_INLINE_PAIRS];
};

/* Part `part` of a row of the pair that is number `block` of a grid. */
KVS_BOTH struct kvs_piece kvs_grid_piece(const struct kvs_units *units, uint32_t by_src, const struct kvs_row *row,
                                         const struct kvs_pair *pair, uint64_t block, uint64_t part) {
  struct kvs_piece piece;
  uint64_t at = part * units->piece, left = at < row->nbytes ? row->nbytes - at : 0;
  uint64_t packed =
      units->slot + (row->before - units->before) * units->npairs + block * row->packed_stride + row->packed;
  piece.src = (units->slot && by_src ? packed : row->src + pair->src * row->src_stride) + at;
  piece.dst = (units->slot && !by_src ? packed : row->dst + pair->dst * row->dst_stride) + at;
  piece.nbytes = left < units->piece ? left : units->piece;
  return piece;
}

/* How a piece is cut so that the body moves in the widest words that both addresses allow: `head` bytes, then `words`
 * words of `width` bytes at which dst and src are both aligned, then `tail` bytes. head + words * width + tail =
 * nbytes. */
struct kvs_cut {
  uint64_t head, words, tail;
  uint32_t width; /* 16, 8, 4, 2 or 1 */
};

KVS_BOTH struct kvs_cut kvs_cut_piece(uint64_t dst, uint64_t src, uint64_t nbytes) {
  struct kvs_cut cut;
  uint64_t apart = dst ^ src;
  cut.width = (apart & 15u) == 0 ? 16u : (apart & 7u) == 0 ? 8u : (apart & 3u) == 0 ? 4u : (apart & 1u) == 0 ? 2u : 1u;
  cut.head = (0u - dst) & (uint64_t)(cut.width - 1u);
  if (cut.head > nbytes) cut.head = nbytes;
  cut.words = (nbytes - cut.head) / cut.width;
  cut.tail = nbytes - cut.head - cut.words * cut.width;
  return cut;
}

/* The pattern that `kvswap replay` and the tests write into blocks and check where they land. It shares nothing with
 * the copy paths: byte i of an item is byte i % 8 (little-endian) of kvs_pattern_word(key, i / 8), whatever the item's
 * alignment. */
enum kvs_pattern_mode { KVS_PATTERN_WRITE, KVS_PATTERN_CHECK };

struct kvs_pattern_item {
  uint64_t ptr, nbytes, key;
};

struct kvs_pattern_result {
  uint64_t wrong; /* bytes that differ */
  uint64_t first; /* item << 40 | offset of the least differing byte; UINT64_MAX if none */
};

struct kvs_pattern_params {
  uint64_t items; /* address of struct kvs_pattern_item[nitems], device or pinned memory */
  uint64_t nitems;
  uint64_t result; /* address of one struct kvs_pattern_result, {0, UINT64_MAX} before; CHECK only */
  uint64_t mode;
};

KVS_BOTH uint64_t kvs_pattern_word(uint64_t key, uint64_t index) {
  uint64_t z = key + (index + 1u) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

struct kvs_delay_params {
  uint64_t ns; /* at most 10 s; longer is cut to that */
};

#endif
