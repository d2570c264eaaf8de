/* CRC-32C (Castagnoli, reflected, initial value and final xor 0xffffffff): the checksum of the file tier. Pure. */
#ifndef KVS_CRC32C_H
#define KVS_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Continue from `crc`, the checksum of the preceding data (0 at the start). Uses the CPU's instructions if available,
 * otherwise tables. */
uint32_t kvs_crc32c(uint32_t crc, const void *data, size_t nbytes);

/* As on a CPU without wide carry-less multiplication. */
uint32_t kvs_crc32c_narrow(uint32_t crc, const void *data, size_t nbytes);

uint32_t kvs_crc32c_table(uint32_t crc, const void *data, size_t nbytes); /* always with tables */

const char *kvs_crc32c_how(void); /* "sse4.2", "armv8" or "table" */

#endif
