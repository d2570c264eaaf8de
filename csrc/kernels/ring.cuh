/* A warp's ring of stages in shared memory, driven by one lane: bulk copies in, bulk copies out.
 *
 * Loads run RING_LEAD stages ahead; the other stages are being stored. Each stage has an mbarrier that counts the bytes
 * of its load. Each bulk operation has a fixed cost, so a piece uses as few operations as the stage size permits.
 *
 * From sm_90 on. Pieces whose addresses or size are not multiples of 16 bytes are copied by words. */
#ifndef KVS_RING_CUH
#define KVS_RING_CUH

#include "units.cuh"

#define RING_STAGES ((unsigned)KVS_RING_STAGES)
#define RING_LEAD 4u
#define RING_WARPS 8u /* maximum a CTA */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define RING_BULK 1
#else
#define RING_BULK 0
#endif

struct ring_stage {
  uint64_t barrier;
  uint64_t dst;
  uint64_t nbytes;
};

struct ring {
  struct ring_stage *stages;
  uint32_t buffer; /* address in the shared window */
  uint32_t chunk;
  uint32_t loaded, stored; /* numbers of operations; may wrap around */
};

#if RING_BULK
static __device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

static __device__ __forceinline__ void ring_begin(struct ring *ring, unsigned lane) {
  if (lane == 0) {
    for (unsigned i = 0; i < RING_STAGES; i++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&ring->stages[i].barrier)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
}

static __device__ __forceinline__ void ring_store_oldest(struct ring *ring) {
  const unsigned stage = ring->stored % RING_STAGES;
  const uint32_t barrier = shared_address(&ring->stages[stage].barrier);
  const uint32_t parity = ring->stored / RING_STAGES & 1u;
  uint32_t done = 0;
  while (!done)
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(ring->stages[stage].dst),
               "r"(ring->buffer + stage * ring->chunk), "r"((uint32_t)ring->stages[stage].nbytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  ring->stored++;
}

static __device__ __forceinline__ void ring_push(struct ring *ring, uint64_t dst, uint64_t src, uint32_t nbytes) {
  if (ring->loaded - ring->stored == RING_LEAD) ring_store_oldest(ring);
  /* The next stage was stored RING_STAGES operations ago: wait until that store has read the stage. */
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(RING_STAGES - RING_LEAD) : "memory");
  const unsigned stage = ring->loaded % RING_STAGES;
  const uint32_t barrier = shared_address(&ring->stages[stage].barrier);
  ring->stages[stage].dst = dst;
  ring->stages[stage].nbytes = nbytes;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(nbytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   ring->buffer + stage * ring->chunk),
               "l"(src), "r"(nbytes), "r"(barrier)
               : "memory");
  ring->loaded++;
}

/* Waits until all stores are complete. */
static __device__ __forceinline__ void ring_drain(struct ring *ring, unsigned lane) {
  if (lane == 0) {
    while (ring->loaded != ring->stored) ring_store_oldest(ring);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncwarp();
}

/* Called by all lanes of the warp. The first operation ends at a line boundary of `line_of`. */
static __device__ __forceinline__ void ring_copy(struct ring *ring, const struct kvs_piece &piece, uint64_t line_of,
                                                 unsigned lane) {
  if ((piece.dst | piece.src | piece.nbytes) & 15u) {
    warp_copy(piece, lane);
    return;
  }
  if (lane == 0) {
    uint64_t most = ring->chunk - (line_of & (KVS_RING_LINE - 1u));
    for (uint64_t at = 0, n; at < piece.nbytes; at += n, most = ring->chunk) {
      const uint64_t left = piece.nbytes - at;
      n = left < most ? left : most;
      ring_push(ring, piece.dst + at, piece.src + at, (uint32_t)n);
    }
  }
  __syncwarp();
}

#else
static __device__ __forceinline__ uint32_t shared_address(const void *) { return 0; }
static __device__ __forceinline__ void ring_begin(struct ring *, unsigned) {}
static __device__ __forceinline__ void ring_drain(struct ring *, unsigned) { __syncwarp(); }
static __device__ __forceinline__ void ring_copy(struct ring *, const struct kvs_piece &piece, uint64_t,
                                                 unsigned lane) {
  warp_copy(piece, lane);
}
#endif

/* The calling warp's ring, in the CTA's dynamic shared memory: warps * RING_STAGES * chunk bytes. */
static __device__ __forceinline__ struct ring ring_of_warp(unsigned char *memory, struct ring_stage *stages,
                                                           uint32_t chunk) {
  const unsigned warp = threadIdx.x / KVS_WARP;
  return {stages + warp * RING_STAGES, shared_address(memory) + warp * RING_STAGES * chunk, chunk, 0, 0};
}

#endif
