/* What many small copies cost their caller. */
#ifndef KVS_MANY_H
#define KVS_MANY_H

#include <stdint.h>

/* A copy takes half a microsecond of the driver's time in the caller's thread, and blocks other threads in the driver:
 * 18 ms for 33,000 copies of 32 KiB, which run 20 ms. A kernel runs a quarter longer and is queued in 0.1 ms. Of large
 * copies it is little: 2,048 of 256 KiB, a load layer by layer in a whole vLLM, took 9.9 ms by bursts (H200). */
static inline double kvs_many_handicap(uint64_t copies, uint64_t nbytes) {
  const uint64_t many = 1024, large_nbytes = 128 << 10;
  return copies > many && nbytes / copies < large_nbytes ? 1.25 : 1.0;
}

#endif
