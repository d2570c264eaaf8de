/* What the CPU can do, asked once. Not by __builtin_cpu_supports(): that needs a part of libgcc which the libraries of
 * other compilers lack. Any thread may call. */
#ifndef KVS_BASE_CPU_H
#define KVS_BASE_CPU_H

#include <stdbool.h>

bool kvs_cpu_has_crc32c(void);  /* SSE4.2, or the CRC32 extension of ARMv8 */
bool kvs_cpu_has_avx2(void);    /* and the system keeps its registers */
bool kvs_cpu_has_vpclmul(void); /* carry-less multiplication of AVX2's registers, SSE4.2 too */

#endif
