/* The pools of a member: whether they fit each other, and what it means for a job that blocks are coded. */
#include "share/pools.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* -- checking ------------------------------------------------------------------------------------------------------ */

static bool is_coded(const struct kvs_share *share) {
  struct kvs_pool_layout layout;
  kvs_pool_get_layout(share->host_pools[0], &layout);
  return layout.coding != NULL;
}

/* The part of the host's blocks in which a pool lies, and where its first byte is in it. */
static uint64_t part_of(const struct kvs_share *share, const struct kvs_pool_layout *layout, uint64_t *within) {
  uint64_t offset = layout->ptr - share->host_base, part = share->parts > 1 ? offset / share->part_stride : 0;
  *within = offset - part * share->part_stride;
  return part;
}

/* Where the pool's first byte is in a slot. */
static uint64_t offset_in_slot(const struct kvs_share *share, const struct kvs_pool_layout *layout) {
  uint64_t within, part = part_of(share, layout, &within);
  return part * share->part_nbytes + within;
}

static bool lies_in(const struct kvs_pool_layout *layout, const struct kvs_share *share) {
  uint64_t within, row = layout->block_nbytes / layout->rows;
  return layout->ptr >= share->host_base && part_of(share, layout, &within) < share->parts &&
         layout->num_blocks == share->num_blocks && layout->stride == share->stride && within < share->part_nbytes &&
         (layout->rows - 1) * layout->pitch + row <= share->part_nbytes - within;
}

/* Bytes of a block of the pool before coding. */
static uint64_t kv_nbytes_of(const struct kvs_pool_layout *host) {
  return host->coding ? host->coding->block_nbytes : host->block_nbytes;
}

static int check_gpu(const struct kvs_share *share, size_t i, const struct kvs_pool_layout *host,
                     struct kvs_error *err) {
  struct kvs_pool_layout gpu;
  kvs_pool_get_layout(share->gpu_pools[i], &gpu);
  if (gpu.coding) return kvs_fail(err, KVS_INVALID, "gpu[%zu] is coded: only the blocks on the host are", i);
  if (gpu.block_nbytes == kv_nbytes_of(host)) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "gpu[%zu] has blocks of %" PRIu64 " bytes; those of host[%zu] have %" PRIu64 "%s",
                  i, gpu.block_nbytes, i, kv_nbytes_of(host), host->coding ? " before coding" : "");
}

static int check_pools(const struct kvs_share *share, struct kvs_error *err) {
  const struct kvs_share_options *asked = &share->asked;
  const bool coded = is_coded(share);
  int status = KVS_OK;
  for (size_t i = 0; !status && i < share->npools; i++) {
    struct kvs_pool *near = share->gpu_pools ? share->gpu_pools[i] : share->host_pools[i];
    struct kvs_pool_layout host;
    kvs_pool_get_layout(share->host_pools[i], &host);
    if (kvs_pool_engine(share->host_pools[i]) != share->engine || kvs_pool_engine(near) != share->engine)
      return kvs_fail(err, KVS_INVALID, "host[%zu] or gpu[%zu] is a pool of another device than gpu[0], %s", i, i,
                      share->engine->name);
    if (!host.coding != !coded)
      return kvs_fail(err, KVS_INVALID, "host[%zu] is %scoded, and host[0] %s: all of them are, or none is", i,
                      host.coding ? "" : "not ", coded ? "is" : "is not");
    if (!lies_in(&host, share))
      return kvs_fail(err, KVS_INVALID,
                      "host[%zu] is no part of each of %" PRIu64 " blocks of %" PRIu64 " bytes, one each %" PRIu64
                      ": the shared pool must be block-first",
                      i, asked->num_blocks, asked->block_nbytes, share->stride);
    if (share->gpu_pools) status = check_gpu(share, i, &host, err);
  }
  return status;
}

static void find_kv_nbytes(struct kvs_share *share) {
  share->kv_nbytes = is_coded(share) ? 0 : share->block_nbytes;
  for (size_t i = 0; is_coded(share) && i < share->npools; i++) {
    struct kvs_pool_layout host;
    kvs_pool_get_layout(share->host_pools[i], &host);
    share->kv_nbytes += kv_nbytes_of(&host);
  }
}

/* Whether each byte of a block is in a pool, or padding. */
static int find_whole(struct kvs_share *share, struct kvs_error *err) {
  uint8_t *seen = calloc((size_t)share->block_nbytes, 1);
  if (!seen) return kvs_fail(err, KVS_NOMEM, "no memory to look at a block of %" PRIu64 " bytes", share->block_nbytes);
  for (size_t i = 0; i < share->npools; i++) {
    struct kvs_pool_layout layout;
    kvs_pool_get_layout(share->host_pools[i], &layout);
    uint8_t *rows = seen + offset_in_slot(share, &layout);
    for (uint64_t row = 0; row < layout.rows; row++)
      memset(rows + row * layout.pitch, 1, layout.block_nbytes / layout.rows);
  }
  share->whole = share->asked.padded || !memchr(seen, 0, (size_t)share->block_nbytes);
  free(seen);
  return KVS_OK;
}

int kvs_share_pools_check(struct kvs_share *share, struct kvs_error *err) {
  int status = check_pools(share, err);
  if (status) return status;
  find_kv_nbytes(share);
  return find_whole(share, err);
}

/* -- pools over slots ---------------------------------------------------------------------------------------------- */

int kvs_share_pools_open(const struct kvs_share *share, uint64_t base, uint64_t blocks, struct kvs_pool ***made,
                         struct kvs_error *err) {
  struct kvs_pool **pools = *made = calloc(share->npools, sizeof *pools);
  int status = pools ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory for %zu pools", share->npools);
  for (size_t i = 0; !status && i < share->npools; i++) {
    struct kvs_pool_layout layout;
    kvs_pool_get_layout(share->host_pools[i], &layout);
    layout.ptr = base + offset_in_slot(share, &layout);
    layout.num_blocks = blocks;
    layout.stride = share->block_nbytes;
    layout.group = i ? pools[0] : NULL;
    layout.name = NULL;
    status = kvs_pool_open(share->engine, &layout, &pools[i], err);
  }
  return status;
}

void kvs_share_pools_close(const struct kvs_share *share, struct kvs_pool **pools) {
  for (size_t i = pools ? share->npools : 0; i-- > 0;)
    if (pools[i]) kvs_pool_unref(pools[i]);
  free(pools);
}

/* -- verdicts ------------------------------------------------------------------------------------------------------ */

/* The first error of a transfer is its error, and verdicts come last. */
bool kvs_share_is_verdict(int status) {
  return status == KVS_NOT_STORED || status == KVS_MISCODED || status == KVS_DAMAGED;
}

/* The transfer's own message names its positions and slots, which are not the job's. */
void kvs_share_explain(const struct kvs_share *share, struct kvs_share_job *job, const struct kvs_error *error) {
  struct kvs_pool_layout layout;
  if (job->error.status) return;
  kvs_pool_get_layout(share->host_pools[0], &layout);
  if (!kvs_share_is_verdict(error->status))
    job->error = *error;
  else if (error->status == KVS_MISCODED)
    kvs_fail(&job->error, KVS_MISCODED,
             "the blocks in failed_positions are coded wrong, and are not stored in pool '%s' (KVSWAP_VERIFY_CODEC)",
             layout.name);
  else if (job->direction == KVS_D2H)
    kvs_fail(&job->error, KVS_NOT_STORED,
             "the blocks in failed_positions do not fit the coded size of pool '%s', and are not stored", layout.name);
  else if (error->status == KVS_NOT_STORED)
    kvs_fail(&job->error, KVS_NOT_STORED,
             "slots of pool '%s', for failed_positions, hold blocks that were not stored, since they did not fit",
             layout.name);
  else
    kvs_fail(&job->error, KVS_DAMAGED,
             "slots of pool '%s', for failed_positions, do not hold blocks that this pool's codec has written",
             layout.name);
}

/* -- digests ------------------------------------------------------------------------------------------------------- */

/* FNV-1a: what members of a shared job must agree on. */
uint64_t kvs_share_mix(uint64_t digest, uint64_t word) {
  for (int i = 0; i < 8; i++) digest = (digest ^ (word >> (8 * i) & 0xff)) * UINT64_C(0x100000001b3);
  return digest;
}

/* What is passed on. */
uint64_t kvs_share_mix_pool(const struct kvs_share *share, size_t pool, uint64_t digest) {
  struct kvs_pool_layout layout;
  kvs_pool_get_layout(share->host_pools[pool], &layout);
  digest = kvs_share_mix(kvs_share_mix(digest, layout.ptr - share->host_base), layout.block_nbytes);
  for (const char *text = layout.coding ? kvs_coding_text(layout.coding) : ""; *text; text++)
    digest = kvs_share_mix(digest, (uint64_t)(unsigned char)*text);
  return kvs_share_mix(kvs_share_mix(digest, layout.rows), layout.pitch);
}
