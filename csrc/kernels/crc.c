/* CRC-32C in a kernel: the constants, and the C twin. */
#include "kernels/twins.h"

#include <endian.h>
#include <string.h>

uint32_t kvs_crc_power(uint64_t nbytes) {
  uint32_t result = KVS_CRC_ONE, square = KVS_CRC_ONE >> 8;
  for (; nbytes; nbytes >>= 1) {
    if (nbytes & 1) result = kvs_crc_times(square, result);
    square = kvs_crc_times(square, square);
  }
  return result;
}

void kvs_crc_table(uint32_t table[4][256], uint32_t factor) {
  for (uint32_t byte = 0; byte < 256; byte++)
    for (int k = 0; k < 4; k++) table[k][byte] = kvs_crc_times(factor, byte << (8 * k));
}

void kvs_crc_plan(struct kvs_crc_params *params, uint64_t nbytes) {
  uint64_t rows = nbytes / KVS_CRC_ROW, each = (rows + KVS_CRC_CTAS - 1) / KVS_CRC_CTAS;
  memset(params, 0, sizeof *params);
  params->nbytes = nbytes;
  params->rows = (uint32_t)(each < 8 ? 8 : each); /* fewer rows do not pay for the table */
  params->bodies = (uint32_t)((rows + params->rows - 1) / params->rows);
  params->row = kvs_crc_power(KVS_CRC_ROW);
  params->start = ~kvs_crc_times(kvs_crc_power(nbytes), ~0u);
  for (unsigned k = 0; k < KVS_CRC_POWERS; k++) params->powers[k] = kvs_crc_power(1ull << k);
  for (unsigned t = 0; t < KVS_CRC_THREADS; t++) params->threads[t] = kvs_crc_power(16 * (KVS_CRC_THREADS - 1 - t));
  for (uint32_t c = 0; c < params->bodies; c++) {
    uint64_t end = (uint64_t)(c + 1) * params->rows;
    params->ctas[c] = kvs_crc_power(nbytes - (end < rows ? end : rows) * KVS_CRC_ROW);
  }
}

static uint32_t crc_rows(const struct kvs_crc_params *params, unsigned cta) {
  const uint64_t rows = params->nbytes / KVS_CRC_ROW, first = (uint64_t)cta * params->rows;
  const uint64_t end = first + params->rows < rows ? first + params->rows : rows;
  const char *data = (const char *)(uintptr_t)params->data;
  uint32_t table[4][256], sums[KVS_CRC_THREADS][4] = {{0}}, all = 0;
  kvs_crc_table(table, params->row);
  for (uint64_t row = first; row < end; row++)
    for (unsigned i = 0; i < 4 * KVS_CRC_THREADS; i++) {
      uint32_t word, *sum = &sums[i / 4][i % 4];
      memcpy(&word, data + row * KVS_CRC_ROW + 4 * i, 4);
      *sum = kvs_crc_look_up(table, *sum) ^ le32toh(word);
    }
  for (unsigned t = 0; t < KVS_CRC_THREADS; t++) all ^= kvs_crc_times(params->threads[t], kvs_crc_join(sums[t]));
  return kvs_crc_times(params->ctas[cta], all);
}

static uint32_t crc_rest(const struct kvs_crc_params *params) {
  const uint8_t *data = (const uint8_t *)(uintptr_t)params->data;
  uint32_t all = 0;
  for (unsigned t = 0; t < KVS_CRC_THREADS; t++) {
    uint64_t at;
    uint32_t count = kvs_crc_rest(params, t, &at), sum = 0;
    for (uint32_t i = 0; i < count; i++) sum = kvs_crc_byte(sum, data[at + i]);
    if (count) all ^= kvs_crc_over(params, sum, (uint32_t)(params->nbytes - at - count));
  }
  return all ^ params->start;
}

void kvs_twin_crc(const struct kvs_crc_params *params, unsigned cta) {
  uint32_t sum = cta < params->bodies ? crc_rows(params, cta) : crc_rest(params);
  __atomic_fetch_xor((uint32_t *)(uintptr_t)params->result, sum, __ATOMIC_RELAXED);
}
