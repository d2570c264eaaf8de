/* CRC-32C in a kernel (base/crc32c.h is the CPU's). Included by kernels.h: plain data and inline functions.
 *
 * A checksum is a polynomial over bits, reflected: bit 31 is x^0. Appending n bytes multiplies by x^(8n) modulo the
 * polynomial. So the contribution of a range is its own checksum (started with 0) times x^(8 * bytes after it), and
 * contributions are xored.
 *
 * The data is divided into rows of KVS_CRC_ROW bytes; thread t of a CTA reads the four words at 16 t of each row. For
 * each row, a thread multiplies its four sums by the factor of one row (four look-ups each) and xors the next words in.
 * So the loads of a warp are coalesced. Every CTA has the same number of whole rows; one more CTA handles the bytes
 * after the last row, the initial value and the final xor. */
#ifndef KVS_CRC_H
#define KVS_CRC_H

#include <stdint.h>

enum {
  KVS_CRC_THREADS = 256,
  KVS_CRC_ROW = KVS_CRC_THREADS * 16,
  KVS_CRC_CTAS = 32,   /* maximum number of CTAs with rows: enough for the bandwidth of files */
  KVS_CRC_POWERS = 12, /* KVS_CRC_ROW is 2^12 */
};
#define KVS_CRC_POLYNOMIAL 0x82f63b78u /* x^32 modulo the polynomial */
#define KVS_CRC_ONE 0x80000000u        /* x^0 */

struct kvs_crc_params {
  uint64_t data; /* 16-byte aligned */
  uint64_t nbytes;
  uint64_t result;                   /* address of a 32-bit word, initially 0: the checksum is xored into it */
  uint32_t bodies;                   /* CTAs with rows; the grid has one more */
  uint32_t rows;                     /* rows a CTA; the last one may have fewer */
  uint32_t row;                      /* x^(8 * KVS_CRC_ROW) */
  uint32_t start;                    /* the initial value's contribution, and the final xor */
  uint32_t powers[KVS_CRC_POWERS];   /* x^(8 * 2^k) */
  uint32_t threads[KVS_CRC_THREADS]; /* x^(8 * bytes from a thread's last word to the end of the row) */
  uint32_t ctas[KVS_CRC_CTAS];       /* x^(8 * bytes from a CTA's last row to the end of the data) */
};

/* For the host only: all of `params` but `data` and `result`; x^(8 nbytes); the table for kvs_crc_look_up() that
 * multiplies by a factor; the C twin, one CTA's part. */
void kvs_crc_plan(struct kvs_crc_params *params, uint64_t nbytes);
uint32_t kvs_crc_power(uint64_t nbytes);
void kvs_crc_table(uint32_t table[4][256], uint32_t factor);
void kvs_twin_crc(const struct kvs_crc_params *params, unsigned cta);

#ifdef KVS_BOTH

/* A sum times the factor of the table, see kvs_crc_table(). */
KVS_BOTH uint32_t kvs_crc_look_up(const uint32_t table[4][256], uint32_t sum) {
  return table[0][sum & 0xffu] ^ table[1][sum >> 8 & 0xffu] ^ table[2][sum >> 16 & 0xffu] ^ table[3][sum >> 24];
}

KVS_BOTH uint32_t kvs_crc_times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int i = 0; i < 32; i++) {
    product ^= b & (0u - (a >> 31));
    a <<= 1;
    b = (b >> 1) ^ (KVS_CRC_POLYNOMIAL & (0u - (b & 1u)));
  }
  return product;
}

/* Joins the sums of four consecutive words, at the end of the fourth. */
KVS_BOTH uint32_t kvs_crc_join(const uint32_t sums[4]) {
  uint32_t sum = kvs_crc_times(KVS_CRC_POLYNOMIAL, sums[0]) ^ sums[1];
  sum = kvs_crc_times(KVS_CRC_POLYNOMIAL, sum) ^ sums[2];
  sum = kvs_crc_times(KVS_CRC_POLYNOMIAL, sum) ^ sums[3];
  return kvs_crc_times(KVS_CRC_POLYNOMIAL, sum);
}

KVS_BOTH uint32_t kvs_crc_byte(uint32_t sum, uint32_t byte) {
  sum ^= byte;
  for (int bit = 0; bit < 8; bit++) sum = (sum >> 1) ^ (KVS_CRC_POLYNOMIAL & (0u - (sum & 1u)));
  return sum;
}

/* Appends `nbytes` zero bytes, fewer than KVS_CRC_ROW. */
KVS_BOTH uint32_t kvs_crc_over(const struct kvs_crc_params *params, uint32_t sum, uint32_t nbytes) {
  for (int k = 0; k < KVS_CRC_POWERS; k++)
    if (nbytes >> k & 1u) sum = kvs_crc_times(params->powers[k], sum);
  return sum;
}

/* Of the bytes after the last row: where thread `thread` begins, and its number of bytes (at most 16). */
KVS_BOTH uint32_t kvs_crc_rest(const struct kvs_crc_params *params, uint32_t thread, uint64_t *at) {
  uint64_t begin = params->nbytes / KVS_CRC_ROW * KVS_CRC_ROW + thread * 16u;
  uint64_t left = begin < params->nbytes ? params->nbytes - begin : 0;
  *at = begin;
  return (uint32_t)(left < 16u ? left : 16u);
}

#endif
#endif
