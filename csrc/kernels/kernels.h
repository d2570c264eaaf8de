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

/* X(name, symbol in the fatbin, parameter struct) */
#define KVS_KERNEL_LIST(X)                                                                                             \
  X(COPY, kvs_kernel_copy, kvs_copy_params)          /* scattered copies, any size, any alignment */                   \
  X(PATTERN, kvs_kernel_pattern, kvs_pattern_params) /* write or check bytes that are a function of their key */       \
  X(DELAY, kvs_kernel_delay, kvs_delay_params)       /* keep a stream busy for a time */

enum kvs_kernel {
#define X(name, symbol, params) KVS_KERNEL_##name,
  KVS_KERNEL_LIST(X)
#undef X
      KVS_KERNELS
};

/* One piece of copying. Both addresses are as the device sees them (pinned host memory by its device alias). */
struct kvs_piece {
  uint64_t dst, src, nbytes;
};

struct kvs_copy_params {
  uint64_t pieces; /* address of struct kvs_piece[npieces], device or pinned memory; read until the kernel ended */
  uint64_t npieces;
  uint64_t ns_per_mib; /* pace of one CTA: nanoseconds it spends at least on 1 MiB; 0: unpaced */
};

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
