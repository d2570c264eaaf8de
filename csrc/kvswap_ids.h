/* Block ids, in host memory and in memory of the device: a part of kvswap.h, which includes this file. */
#ifndef KVSWAP_IDS_H
#define KVSWAP_IDS_H

#include <stddef.h>
#include <stdint.h>

/* Block ids: `count` signed integers of `width` 4 or 8 bytes. */
struct kvs_ids {
  const void *data;
  unsigned width;
  size_t count;
};

/* Block ids in memory of the device, on the GPU's side of a transfer: `count` signed integers of `width` 4 or 8 bytes,
 * each at a multiple of its width. They are not read by the call: a kernel reads each of them once, after the
 * transfer's start dependencies. It checks them before a block is touched: a block whose id is out of range, or whose
 * destination is named twice, fails. From the GPU it leaves zeros on the host; on the GPU it touches nothing. */
struct kvs_device_ids {
  uint64_t ptr;   /* of the first id */
  int64_t stride; /* bytes from one id to the next, also negative */
  size_t count;
  unsigned width;
  /* 0 or 1: an id is a block's number. More: a block is named by its tokens, so many ids from n * tokens on,
   * token_stride bytes apart; count is the number of blocks, and stride leads from one block's first token to the next
   * one's. */
  uint64_t tokens;
  int64_t token_stride;
  uint64_t reserved[2];
};

/* How a transfer between pools whose ids are on the device is ordered on the GPU's side. POOL: as if it touched all
 * slots of its pools. STREAM: the caller orders it, by streams and `after`. */
enum kvs_gpu_order { KVS_GPU_ORDER_POOL, KVS_GPU_ORDER_STREAM };

#endif
