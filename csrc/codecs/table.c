#include "codecs/table.h"

#include <string.h>

/* Kernels cannot include kvswap_codec.h. */
_Static_assert(KVS_UNIT_BF16 == (int)KVS_KIND_BF16 && KVS_UNIT_E4M3 == (int)KVS_KIND_E4M3, "kinds");
_Static_assert(KVS_UNIT_NOT_STORED == (int)KVS_CODED_NOT_STORED && KVS_UNIT_DAMAGED == (int)KVS_CODED_DAMAGED,
               "verdicts");

const struct kvs_codec_ops *const kvs_codecs[KVS_CODECS] = {
    [KVS_CODEC_RAW] = &kvs_codec_raw,
    [KVS_CODEC_EXACT] = &kvs_codec_exact,
    [KVS_CODEC_MXFP8] = &kvs_codec_mxfp8,
    [KVS_CODEC_FP4] = &kvs_codec_fp4,
};

static const struct {
  const char *name;
  uint32_t nbytes;
} kinds[KVS_KINDS] = {
    [KVS_KIND_RAW] = {"raw", 1},   [KVS_KIND_BF16] = {"bf16", 2}, [KVS_KIND_FP16] = {"fp16", 2},
    [KVS_KIND_E4M3] = {"e4m3", 1}, [KVS_KIND_E5M2] = {"e5m2", 1}, [KVS_KIND_FP32] = {"fp32", 4},
};

int kvs_codec_named(const char *name) {
  for (int i = KVS_CODEC_RAW + 1; i < KVS_CODECS; i++)
    if (strcmp(kvs_codecs[i]->name, name) == 0) return i;
  return -1;
}

const char *kvs_kind_name(enum kvs_kind kind) { return kinds[kind].name; }

uint32_t kvs_kind_nbytes(enum kvs_kind kind) { return kinds[kind].nbytes; }
