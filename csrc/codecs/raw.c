#include <string.h>

#include "codecs/codec.h"

static uint32_t coded_nbytes(uint32_t nbytes, enum kvs_kind kind) {
  (void)kind;
  return KVS_UNIT_HEAD + kvs_round16(nbytes);
}

static bool encode(const struct kvs_unit *unit, const void *values, uint8_t *coded, uint32_t *escapes) {
  (void)escapes;
  memcpy(coded + KVS_UNIT_HEAD, values, kvs_unit_nbytes(unit));
  return true;
}

static bool decode(const struct kvs_unit *unit, const uint8_t *coded, uint32_t escapes, void *values) {
  memcpy(values, coded + KVS_UNIT_HEAD, kvs_unit_nbytes(unit));
  return escapes == 0;
}

const struct kvs_codec_ops kvs_codec_raw = {
    .name = "raw",
    .version = KVS_UNIT_RAW_VERSION,
    .lossless = true,
    .kinds = (1u << KVS_KINDS) - 1u,
    .coded_nbytes = coded_nbytes,
    .encode = encode,
    .decode = decode,
};
