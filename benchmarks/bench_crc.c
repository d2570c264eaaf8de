/* GB/s of the file tier's checksum on one core, over 256 MiB and over data that the caches hold:
 *
 *   gcc -std=c11 -D_GNU_SOURCE -O2 -Icsrc -o /tmp/bench_crc benchmarks/bench_crc.c csrc/base/crc32c.c \
 *       csrc/kernels/crc.c && /tmp/bench_crc
 */
#include <stdint.h>
#include <stdio.h>

#include "base/crc32c.h"
#include "bench.h"

static uint32_t sum;

static double gbps(uint32_t (*crc)(uint32_t, const void *, size_t), const uint8_t *data, size_t nbytes, size_t block) {
  double times[RUNS];
  for (int run = 0; run < RUNS; run++) {
    double begin = now_ns();
    for (size_t at = 0; at + block <= nbytes; at += block) sum ^= crc(0, data + at, block);
    times[run] = now_ns() - begin;
  }
  return (double)(nbytes / block * block) / median(times);
}

int main(void) {
  const size_t nbytes = 256 << 20, blocks[] = {4096, 64 << 10, 256 << 10, 2 << 20};
  uint8_t *data = malloc(nbytes);
  if (!data) return 1;
  for (size_t i = 0; i < nbytes; i++) data[i] = (uint8_t)(i * 2654435761u >> 13);
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
    printf("%s, blocks of %7zu bytes: %5.1f GB/s from memory, %5.1f from the caches\n", kvs_crc32c_how(), blocks[i],
           gbps(kvs_crc32c, data, nbytes, blocks[i]), gbps(kvs_crc32c, data, 2 << 20, blocks[i]));
  printf("table, blocks of 2097152 bytes: %5.1f GB/s from the caches\n",
         gbps(kvs_crc32c_table, data, 2 << 20, 2 << 20));
  free(data);
  return sum == 1; /* so that the work is not left out */
}
