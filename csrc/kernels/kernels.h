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
  X(RELAY, kvs_kernel_relay, kvs_relay_params)       /* between scattered blocks and a ring in device memory */        \
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

/* One row of every block: for the pair (s, d) of slots it goes from src + s * src_stride to dst + d * dst_stride. Where
 * rows are packed, those of one block lie `packed` bytes after its beginning, and blocks packed_stride apart. */
struct kvs_row {
  uint64_t src, dst, src_stride, dst_stride, nbytes;
  uint64_t packed, packed_stride;
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
};

enum {
  KVS_INLINE_PAIRS = 480, /* that travel as parameters */
  /* RING and RELAY: how they are launched. Each warp has a ring of stages, chunk bytes each, in dynamic shared memory.
   * Measured on an H200: benchmarks/tune_copy.cu. */
  KVS_RING_WARPS = 2,
  KVS_RING_STAGES = 8,
  KVS_RING_CHUNK = 4096,
  KVS_RING_LINE = 128, /* bytes that a link moves at once: parts of lines are as slow as whole ones */
};

struct kvs_copy_params {
  struct kvs_units units; /* read until the kernel ended; a grid with pairs 0: inline_pairs */
  uint64_t count;         /* pieces, or pairs * nrows * parts */
  uint64_t ns_per_mib;    /* pace of one CTA: nanoseconds it spends at least on 1 MiB; 0: unpaced */
  uint64_t only_if;       /* address of a 32-bit word: if that is 0, nothing is copied; 0: always */
  uint32_t chunk;         /* RING: bytes of one stage, a multiple of KVS_RING_LINE */
  uint32_t by_src;        /* RING: pieces are cut at lines of the source, else of the destination: the host's side */
  struct kvs_pair inline_pairs[KVS_INLINE_PAIRS];
};

/* The relay: the kernel moves blocks into (gather) or out of (scatter) the slots of a ring in device memory, and the
 * copy engine moves whole slots; they meet through flags. Each filling of a slot is described by segments.
 *
 * flags[] of 32-bit words, all 0 before: filled[KVS_RELAY_SLOTS], emptied[KVS_RELAY_SLOTS], aborted. The kernel adds 1
 * a warp; streams write the number of the filling. Filling f goes to slot f % nslots, as its (f / nslots + 1)th, k:
 *
 * gather: the kernel waits for emptied >= k - 1, fills, adds to filled; the copy waits for filled >= k * warps, copies
 * out, writes emptied = k.
 *
 * scatter: the copy waits for emptied >= (k - 1) * warps, copies in, writes filled = k; the kernel waits for filled >=
 * k, scatters, adds to emptied.
 *
 * Who waits for longer than patience_ns, or sees abort_word, sets `aborted` and abort_word to 1 and the other flags to
 * KVS_RELAY_RELEASED, and the kernel ends: nobody who waits for a flag stays behind. Streams still write theirs, so
 * only `aborted` tells afterwards that the relay was given up; who does it again comes after the kernel and the copies.
 *
 * Several kernels, one after another, may share the fillings of a transfer: each begins with filling `first`. Flags go
 * on from one to the next, so that one after a relay that was given up finds them released. */
enum { KVS_RELAY_SLOTS = 16, KVS_RELAY_FLAGS = 2 * KVS_RELAY_SLOTS + 1, KVS_RELAY_RELEASED = 0x40000000 };

/* A part of a filling. List: pieces [first, first + count), pieces[i] at packed[i] in the slot. Grid: rows [first_row,
 * first_row + nrows) of pairs [first, first + count): row r of the b-th of them at base + r.packed + b *
 * r.packed_stride in the slot; parts * piece covers the longest row. */
struct kvs_segment {
  uint64_t first, count, base;
  uint32_t first_row, nrows;
  uint32_t last, unused; /* last: of its filling */
};

struct kvs_relay_params {
  struct kvs_units units; /* gather: src is read; scatter: dst is written; the other side is the ring */
  uint64_t packed;        /* list: address of uint64_t[], where in its slot a piece lies */
  uint64_t segments;      /* address of struct kvs_segment[nsegments] */
  uint64_t ring, slot_nbytes;
  uint64_t flags;      /* address of uint32_t[KVS_RELAY_FLAGS] in device memory */
  uint64_t abort_word; /* address of a 32-bit word in host memory: not 0: give up */
  uint64_t patience_ns;
  uint64_t first; /* number of this kernel's first filling, which segments[0] begins */
  uint32_t nsegments, nslots, gather, chunk;
};

KVS_BOTH struct kvs_piece kvs_row_part(const struct kvs_row *row, uint64_t src, uint64_t dst, uint64_t part,
                                       uint64_t piece) {
  struct kvs_piece unit;
  uint64_t at = part * piece, left = at < row->nbytes ? row->nbytes - at : 0;
  unit.src = src + at;
  unit.dst = dst + at;
  unit.nbytes = left < piece ? left : piece;
  return unit;
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
