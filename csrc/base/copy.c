/* Copies of blocks, with non-temporal stores where they are faster.
 *
 * memcpy uses non-temporal stores only if one call is larger than the cache. A swap is thousands of blocks of a few
 * KiB, together much larger than the cache and not read again soon. Ordinary stores would first read every destination
 * line (50 % more traffic) and evict everything else from the cache. Sanitized builds use memcpy, which sanitizers
 * intercept. */
#include "base/copy.h"

#include <string.h>

#include "base/cpu.h"

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define STREAMING 1
#include <immintrin.h>
#else
#define STREAMING 0
#endif

#if STREAMING
#define LINE 64u
#define LEAST_STREAMED 1024u /* below this size, alignment costs more than non-temporal stores save */

__attribute__((target("avx2"))) static void stream_lines(char *dst, const char *src, size_t nlines) {
  for (size_t i = 0; i < nlines; i++, dst += LINE, src += LINE) {
    _mm_prefetch(src + 8 * LINE, _MM_HINT_NTA);
    __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)src);
    __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(src + 32));
    _mm256_stream_si256((__m256i *)(void *)dst, low);
    _mm256_stream_si256((__m256i *)(void *)(dst + 32), high);
  }
}

static void copy_streaming(char *dst, const char *src, size_t nbytes) {
  size_t head = (0u - (uintptr_t)dst) & (LINE - 1u);
  size_t nlines = (nbytes - head) / LINE, body = nlines * LINE;
  memcpy(dst, src, head);
  stream_lines(dst + head, src + head, nlines);
  memcpy(dst + head + body, src + head + body, nbytes - head - body);
}
#endif

void kvs_copy_bytes(uint64_t dst, uint64_t src, uint64_t nbytes, bool streaming) {
  char *to = (char *)(uintptr_t)dst;
  const char *from = (const char *)(uintptr_t)src;
#if STREAMING
  if (streaming && nbytes >= LEAST_STREAMED && kvs_cpu_has_avx2()) {
    copy_streaming(to, from, (size_t)nbytes);
    return;
  }
#else
  (void)streaming;
#endif
  memcpy(to, from, (size_t)nbytes);
}

void kvs_copy_fence(void) {
#if STREAMING
  _mm_sfence();
#endif
}
