/* Shared by the kernels: the clock, and coherent loads.
 *
 * No load uses the non-coherent path (ld.global.nc, __ldg): a copy engine, another kernel or the CPU may have written
 * the memory just before, and it may be host memory. Loads do not allocate in L1, since each byte is read once. They
 * are volatile assembly, so that a group of loads stays before the following group of stores. */
#ifndef KVS_COMMON_CUH
#define KVS_COMMON_CUH

#include "kernels.h"

#define KVS_WARP 32u
#define KVS_ALL_LANES 0xffffffffu

static __device__ __forceinline__ uint64_t clock_ns(void) {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

static __device__ __forceinline__ void sleep_ns(uint64_t ns) { __nanosleep(ns < 2000u ? (unsigned)ns : 2000u); }

static __device__ __forceinline__ void word_load(uint4 *word, const uint4 *from) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word->x), "=r"(word->y), "=r"(word->z), "=r"(word->w)
               : "l"(from)
               : "memory");
}

static __device__ __forceinline__ void word_store(uint4 *to, const uint4 *word) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(word->x), "r"(word->y), "r"(word->z), "r"(word->w)
               : "memory");
}

/* For bytes that no kernel reads soon: they leave the L2 cache first. */
static __device__ __forceinline__ void word_store_once(uint4 *to, const uint4 *word) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(word->x), "r"(word->y), "r"(word->z), "r"(word->w)
               : "memory");
}

/* Narrower words: a volatile access is a relaxed access that bypasses L1. */
template <typename Word> static __device__ __forceinline__ void word_load(Word *word, const Word *from) {
  *word = *(const volatile Word *)from;
}

template <typename Word> static __device__ __forceinline__ void word_store(Word *to, const Word *word) {
  *(volatile Word *)to = *word;
}

#endif
