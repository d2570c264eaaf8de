#include "base/cpu.h"

#include <stdatomic.h>

enum { ASKED = 1, CRC32C = 2, AVX2 = 4, VPCLMUL = 8 };

#if defined __x86_64__
#include <cpuid.h>

static int ask(void) {
  unsigned a, b, c, d, low, high;
  int found = ASKED;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  if (c & bit_SSE4_2) found |= CRC32C;
  if (!(c & bit_OSXSAVE)) return found;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  bool registers = (low & 6u) == 6u; /* XMM and YMM */
  if (!registers || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return found;
  found |= AVX2;
  if ((c & bit_VPCLMULQDQ) && (found & CRC32C)) found |= VPCLMUL;
  return found;
}
#elif defined __aarch64__
#include <sys/auxv.h>

static int ask(void) { return ASKED | (getauxval(AT_HWCAP) & HWCAP_CRC32 ? CRC32C : 0); }
#else
static int ask(void) { return ASKED; }
#endif

static int features(void) {
  static _Atomic int known; /* 0: not asked; all threads find the same */
  int found = atomic_load_explicit(&known, memory_order_relaxed);
  if (found == 0) {
    found = ask();
    atomic_store_explicit(&known, found, memory_order_relaxed);
  }
  return found;
}

bool kvs_cpu_has_crc32c(void) { return (features() & CRC32C) != 0; }

bool kvs_cpu_has_avx2(void) { return (features() & AVX2) != 0; }

bool kvs_cpu_has_vpclmul(void) { return (features() & VPCLMUL) != 0; }
