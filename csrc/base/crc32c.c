/* CRC-32C, by CPU instructions if available.
 *
 * Carry-less multiplication of wide registers is the fastest: 128 bytes at a time are multiplied by a power of x, so
 * that they can be added to the next 128 bytes. The CRC instruction does what is left, and all where the CPU lacks
 * wide multiplication.
 *
 * That instruction has a latency of three cycles and a throughput of one a cycle, so three interleaved streams are
 * three times as fast as one. Each stream takes a third of the data. Joining the results means appending zero bytes to
 * a checksum, which is linear: one look-up for each byte of the checksum, in tables computed once for both stream
 * lengths. */
#include "base/crc32c.h"

#include <pthread.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/kernels.h"

enum { LONG = 8192, SHORT = 256 }; /* bytes of one stream */

static uint32_t byte_table[8][256]; /* [k][b]: checksum of byte b followed by k zero bytes */
static uint32_t over_long[4][256], over_short[4][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* -- tables -------------------------------------------------------------------------------------------------------- */

static void make_tables(void) {
  for (uint32_t byte = 0; byte < 256; byte++) byte_table[0][byte] = kvs_crc_byte(0, byte);
  for (uint32_t byte = 0; byte < 256; byte++)
    for (int k = 1; k < 8; k++) {
      uint32_t before = byte_table[k - 1][byte];
      byte_table[k][byte] = byte_table[0][before & 0xff] ^ (before >> 8);
    }
  kvs_crc_table(over_long, kvs_crc_power(LONG));
  kvs_crc_table(over_short, kvs_crc_power(SHORT));
}

static uint64_t word_at(const uint8_t *at) {
  uint64_t word;
  memcpy(&word, at, sizeof word);
  return word;
}

uint32_t kvs_crc32c_table(uint32_t crc, const void *data, size_t nbytes) {
  const uint8_t *at = data;
  pthread_once(&once, make_tables);
  crc = ~crc;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; nbytes >= 8; at += 8, nbytes -= 8) {
    uint64_t word = word_at(at) ^ crc;
    crc = 0;
    for (int k = 0; k < 8; k++) crc ^= byte_table[7 - k][(word >> (8 * k)) & 0xff];
  }
#endif
  for (; nbytes; at++, nbytes--) crc = byte_table[0][(crc ^ *at) & 0xff] ^ (crc >> 8);
  return ~crc;
}

/* -- CPU instruction ----------------------------------------------------------------------------------------------- */

#if defined __x86_64__
#include <immintrin.h>
#ifdef __clang__ /* to which the instruction is a feature of its own; older gcc do not know the name */
#define TARGET __attribute__((target("sse4.2,crc32")))
#else
#define TARGET __attribute__((target("sse4.2")))
#endif
#define STEP8(crc, word) ((uint32_t)__builtin_ia32_crc32di((crc), (word)))
#define STEP1(crc, byte) __builtin_ia32_crc32qi((crc), (byte))
static const char *const name = "sse4.2";
#elif defined __aarch64__
#include <arm_acle.h>
#define TARGET __attribute__((target("+crc"))) /* optional in ARMv8.0, which is what wheels are built for */
#define STEP8(crc, word) __crc32cd((crc), (word))
#define STEP1(crc, byte) __crc32cb((crc), (byte))
static const char *const name = "armv8";
#else
#define NO_INSTRUCTION
#endif

#ifdef NO_INSTRUCTION

uint32_t kvs_crc32c_narrow(uint32_t crc, const void *data, size_t nbytes) {
  return kvs_crc32c_table(crc, data, nbytes);
}

uint32_t kvs_crc32c(uint32_t crc, const void *data, size_t nbytes) { return kvs_crc32c_table(crc, data, nbytes); }

const char *kvs_crc32c_how(void) { return "table"; }

#else

TARGET static const uint8_t *three_streams(uint32_t *crc, const uint8_t *at, size_t length, size_t *nbytes,
                                           uint32_t table[4][256]) {
  while (*nbytes >= 3 * length) {
    uint32_t a = *crc, b = 0, c = 0;
    for (const uint8_t *end = at + length; at < end; at += 8) {
      a = STEP8(a, word_at(at));
      b = STEP8(b, word_at(at + length));
      c = STEP8(c, word_at(at + 2 * length));
    }
    *crc = kvs_crc_look_up(table, kvs_crc_look_up(table, a) ^ b) ^ c;
    at += 2 * length;
    *nbytes -= 3 * length;
  }
  return at;
}

TARGET static uint32_t by_instruction(uint32_t crc, const uint8_t *at, size_t nbytes) {
  crc = ~crc;
  for (; nbytes && ((uintptr_t)at & 7); at++, nbytes--) crc = STEP1(crc, *at);
  at = three_streams(&crc, at, LONG, &nbytes, over_long);
  at = three_streams(&crc, at, SHORT, &nbytes, over_short);
  for (; nbytes >= 8; at += 8, nbytes -= 8) crc = STEP8(crc, word_at(at));
  for (; nbytes; at++, nbytes--) crc = STEP1(crc, *at);
  return ~crc;
}

uint32_t kvs_crc32c_narrow(uint32_t crc, const void *data, size_t nbytes) {
  if (!kvs_cpu_has_crc32c()) return kvs_crc32c_table(crc, data, nbytes);
  pthread_once(&once, make_tables);
  return by_instruction(crc, data, nbytes);
}

#ifdef __x86_64__
#ifdef __clang__
#define WIDE __attribute__((target("avx2,pclmul,vpclmulqdq,sse4.2,crc32")))
#else
#define WIDE __attribute__((target("avx2,pclmul,vpclmulqdq,sse4.2")))
#endif

enum { FOLDED = 128 }; /* bytes that four registers have */

WIDE static __m256i load(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)(const void *)at); }

/* For each half of a register: its polynomial times the power of x that `by` stands for, plus `next`. */
WIDE static __m256i fold(__m256i sum, __m256i by, __m256i next) {
  __m256i low = _mm256_clmulepi64_epi128(sum, by, 0x00), high = _mm256_clmulepi64_epi128(sum, by, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

/* To move by n bits: x^(n - 33) for the high 64 bits, x^(n + 31) for the low ones, modulo the polynomial, reflected. */
WIDE static __m256i power(int64_t high, int64_t low) { return _mm256_set_epi64x(high, low, high, low); }

WIDE static const uint8_t *fold_all(uint32_t *crc, const uint8_t *at, size_t *nbytes) {
  const __m256i by_1024 = power(0xd3b6092, 0x6992cea2), by_256 = power(0xba4fc28e, 0x3da6d0cb),
                by_128 = power(0x493c7d27, 0xf20c0dfe);
  __m256i a = load(at), b = load(at + 32), c = load(at + 64), d = load(at + 96);
  a = _mm256_xor_si256(a, _mm256_set_epi64x(0, 0, 0, *crc));
  for (at += FOLDED, *nbytes -= FOLDED; *nbytes >= FOLDED; at += FOLDED, *nbytes -= FOLDED) {
    a = fold(a, by_1024, load(at));
    b = fold(b, by_1024, load(at + 32));
    c = fold(c, by_1024, load(at + 64));
    d = fold(d, by_1024, load(at + 96));
  }
  a = fold(fold(fold(a, by_256, b), by_256, c), by_256, d);
  a = fold(a, by_128, _mm256_permute2x128_si256(a, a, 0x11)); /* its low half, over the high one */
  *crc = STEP8(STEP8(0, (uint64_t)_mm256_extract_epi64(a, 0)), (uint64_t)_mm256_extract_epi64(a, 1));
  return at;
}
#endif

uint32_t kvs_crc32c(uint32_t crc, const void *data, size_t nbytes) {
  const uint8_t *at = data;
#ifdef __x86_64__
  if (nbytes >= FOLDED && kvs_cpu_has_vpclmul()) {
    crc = ~crc;
    at = fold_all(&crc, at, &nbytes);
    crc = ~crc;
  }
#endif
  return kvs_crc32c_narrow(crc, at, nbytes);
}

const char *kvs_crc32c_how(void) { return kvs_cpu_has_crc32c() ? name : "table"; }

#endif
