/* The kernels, their parameters, and the address computation shared by the CUDA code and its C twins. Included by C and
 * CUDA C++: plain data and inline functions only. */
#ifndef KVS_KERNELS_H
#define KVS_KERNELS_H

#include <stdint.h>

#include "codecs/unit.h"
#include "crc.h"
#include "pattern.h"

/* X(name, symbol in the fatbin, parameter struct) */
#define KVS_KERNEL_LIST(X)                                                                                             \
  X(COPY, kvs_kernel_copy, kvs_copy_params) /* scattered copies by words, any size and alignment */                    \
  X(RING, kvs_kernel_ring, kvs_copy_params) /* scattered copies by bulk copies through shared memory */                \
  X(PACK, kvs_kernel_pack, kvs_copy_params) /* scattered copies within device memory, on the whole GPU, unpaced */     \
  X(IDS, kvs_kernel_ids, kvs_ids_params)    /* read and check block ids that lie in device memory */                   \
  X(CODE, kvs_kernel_code, kvs_code_params) /* encode or decode pages, a CTA a unit */                                 \
  X(VERIFY, kvs_kernel_verify, kvs_verify_params)    /* compare coded pages with what they were coded from */          \
  X(PATTERN, kvs_kernel_pattern, kvs_pattern_params) /* write or check bytes that are a function of a key */           \
  X(CRC, kvs_kernel_crc, kvs_crc_params)             /* checksum of a memory range */                                  \
  X(DELAY, kvs_kernel_delay, kvs_delay_params)       /* keep a stream busy for a time */

enum kvs_kernel {
#define X(name, symbol, params) KVS_KERNEL_##name,
  KVS_KERNEL_LIST(X)
#undef X
      KVS_KERNELS
};

/* One piece to copy. Addresses are device addresses (the device alias of pinned host memory). */
struct kvs_piece {
  uint64_t dst, src, nbytes;
};

/* One row of every block: for the pair (s, d) of slots, from src + s * src_stride to dst + d * dst_stride. In a burst
 * slot, rows are packed by groups; the blocks of a group are contiguous, packed_stride bytes each. This row is `packed`
 * bytes after a block's start, and the groups before its own take `before` bytes a block. */
struct kvs_row {
  uint64_t src, dst, src_stride, dst_stride, nbytes;
  uint64_t packed, packed_stride, before;
  uint64_t coded_nbytes; /* on the host's side, and in a slot; 0: as nbytes. Not 0: the row is a page that is coded */
  uint64_t coding;       /* its number among the transfer's codings */
};

struct kvs_pair {
  uint32_t src, dst;
};

/* In place of a slot: the block is bad. As the source it reads zeros, as the destination nothing is copied. */
#define KVS_BAD_SLOT 0xFFFFFFFFu

/* Copies in one of two forms. A list of pieces. Or a grid: each of nrows rows of each pair, divided into `parts` pieces
 * of `piece` bytes (empty beyond the end of a shorter row); a grid needs only O(blocks) of upload if the rows are on
 * the device. */
struct kvs_units {
  uint64_t pieces; /* list: address of struct kvs_piece[]; 0: a grid */
  uint64_t rows;   /* grid: address of struct kvs_row[] */
  uint64_t pairs;  /* grid: address of struct kvs_pair[] */
  uint32_t nrows, parts, piece;
  uint32_t npairs; /* grid with a slot: number of pairs */
  uint64_t slot;   /* grid: device address at which the host side is packed; 0: the host side is in host memory */
  uint64_t before; /* grid with a slot: `before` of the first row */
  uint64_t zeros;  /* grid whose pairs may have no source: address of `piece` bytes that are 0 */
};

enum {
  KVS_INLINE_PAIRS = 480, /* pairs passed as kernel parameters */
  /* RING launch shape. Each warp has a ring of stages of `chunk` bytes in dynamic shared memory. Measured on an H200 at
   * equal GB/s: two CTAs of four warps slow a concurrent model half as much as four CTAs of two warps. With little
   * shared memory, half as many warps. */
  KVS_RING_WARPS = 4,
  KVS_RING_STAGES = 8,
  KVS_RING_CHUNK = 4096,
  KVS_RING_LINE = 128, /* size of a link transaction: partial lines cost as much as whole ones */
};

struct kvs_copy_params {
  struct kvs_units units; /* read until the kernel has ended; a grid with pairs 0 uses inline_pairs */
  uint64_t count;         /* pieces of a list; pairs * nrows * parts of a grid */
  uint64_t ns_per_mib;    /* pace of a CTA: minimum nanoseconds for 1 MiB; 0: unpaced */
  uint32_t chunk;         /* RING: bytes of a stage, a multiple of KVS_RING_LINE */
  uint32_t by_src;        /* 1: the source is the host side, 0: the destination; RING aligns pieces to host lines */
  struct kvs_pair inline_pairs[KVS_INLINE_PAIRS];
};

/* Part `part` of a row, for pair number `block` of a grid. */
KVS_BOTH struct kvs_piece kvs_grid_piece(const struct kvs_units *units, uint32_t by_src, const struct kvs_row *row,
                                         const struct kvs_pair *pair, uint64_t block, uint64_t part) {
  struct kvs_piece piece;
  const uint32_t from = pair->src == KVS_BAD_SLOT ? 0 : pair->src, to = pair->dst == KVS_BAD_SLOT ? 0 : pair->dst;
  uint64_t at = part * units->piece, left = at < row->nbytes && pair->dst != KVS_BAD_SLOT ? row->nbytes - at : 0;
  uint64_t packed =
      units->slot + (row->before - units->before) * units->npairs + block * row->packed_stride + row->packed;
  piece.src = (units->slot && by_src ? packed : row->src + from * row->src_stride) + at;
  piece.dst = (units->slot && !by_src ? packed : row->dst + to * row->dst_stride) + at;
  if (pair->src == KVS_BAD_SLOT) piece.src = units->zeros;
  piece.nbytes = left < units->piece ? left : units->piece;
  return piece;
}

/* Coded pages. A grid whose `parts` are the units of a page: part u of a row is unit u of its page, `piece` is not
 * used. The source is coded when decoding (by_src), else the destination. Coded pages are 16-byte
 * aligned. A pair without a source is coded as zeros. */
struct kvs_code_params {
  struct kvs_units units;
  uint64_t table;    /* address of struct kvs_unit[units.parts] */
  uint64_t verdicts; /* address of a 32-bit word a pair, initially 0: the worst enum kvs_unit_verdict of its units */
  uint64_t count;    /* pairs * nrows * parts */
  uint64_t valid_nbytes; /* of a page, when encoding: bytes behind are read as zeros */
  uint32_t by_src;       /* 1: decode */
  struct kvs_pair inline_pairs[KVS_INLINE_PAIRS];
};

/* What one CTA codes at a time. */
struct kvs_code_item {
  struct kvs_unit unit;
  struct kvs_piece pages;
  uint64_t block;   /* the number of the pair */
  uint32_t skipped; /* 1: its destination is bad */
  uint32_t empty;   /* 1: it has no source */
};

/* After CODE, with its parameters for encoding. Heads of units that are wrong are written. */
struct kvs_verify_params {
  struct kvs_code_params code;
  uint64_t scratch; /* address of KVS_VERIFY_NBYTES a CTA, 16-byte aligned */
};

/* The pages of a row, of any length. */
KVS_BOTH struct kvs_piece kvs_code_pages(const struct kvs_code_params *params, const struct kvs_row *row,
                                         const struct kvs_pair *pair, uint64_t block) {
  struct kvs_units units = params->units;
  units.piece = 1;
  return kvs_grid_piece(&units, params->by_src, row, pair, block, 0);
}

/* Ids in device memory. Step READ takes each pair as the host named it, reads its id once, notes the id with its
 * verdict, and writes the pair with the slot, or KVS_BAD_SLOT for a bad id, in the place of the id's position. With
 * several tokens a block the ids are those of its tokens, and what is noted is the block, or a bad one's first token.
 * Where ids name destinations, step READ also claims each slot in a hash table, and step CLAIM turns down every pair
 * whose slot was claimed twice: none of them is written. What the host names and what it is told lie in its own memory,
 * so no step waits for a copy engine that other transfers keep busy. */
enum kvs_ids_step { KVS_IDS_READ, KVS_IDS_CLAIM };
enum kvs_id_verdict { KVS_ID_GOOD, KVS_ID_RANGE, KVS_ID_TWICE };

struct kvs_id_result {
  int64_t id;
  uint32_t position; /* in the list of ids */
  uint32_t verdict;
};

/* Words are all ones before: no slot, and not claimed twice. */
struct kvs_id_claim {
  uint32_t slot;
  uint32_t twice; /* 0: claimed twice */
};

struct kvs_ids_params {
  uint64_t ids;                 /* address of the id at position 0 */
  int64_t stride, token_stride; /* bytes from one position to the next, and from token to token */
  uint64_t nids, blocks;        /* number of ids; good ids are below `blocks` */
  uint64_t named;               /* address of struct kvs_pair[npairs], on the host: one side holds positions */
  uint64_t pairs;               /* address of struct kvs_pair[npairs]: with slots in their place */
  uint64_t results;             /* address of struct kvs_id_result[npairs], on the host */
  uint64_t claims;              /* address of struct kvs_id_claim[nclaims], 0: ids may repeat */
  uint64_t npairs, nclaims;
  uint32_t width;  /* bytes of an id, 4 or 8 */
  uint32_t by_dst; /* 1: ids name destinations, 0: sources */
  uint32_t step;   /* enum kvs_ids_step */
  uint32_t tokens; /* of a block; 1: an id is a block's number */
};

/* The block of these tokens: its first one, where all others follow (`whole` is 1). UINT64_MAX: they are no block's. */
KVS_BOTH uint64_t kvs_block_of_tokens(int64_t first, uint32_t tokens, uint32_t whole) {
  if (first < 0 || !whole || (uint64_t)first % tokens != 0) return UINT64_MAX;
  return (uint64_t)first / tokens;
}

/* Where the search for a slot among 2^n claims, at least twice as many as pairs, begins. */
KVS_BOTH uint64_t kvs_claim_begin(uint32_t slot, uint64_t nclaims) {
  return (slot * 0x9E3779B97F4A7C15ull >> 20) & (nclaims - 1u);
}

/* Division of a piece so that its body moves in the widest words that both addresses permit: `head` bytes, `words`
 * words of `width` bytes, aligned on both sides, and `tail` bytes. head + words * width + tail = nbytes. */
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

struct kvs_delay_params {
  uint64_t ns; /* limited to 10 s */
};

#endif
