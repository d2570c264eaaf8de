/* Device memory of one process in another: the part of kvswap.h (which includes it) that is about sharing. */
#ifndef KVSWAP_IPC_H
#define KVSWAP_IPC_H

#include "kvswap.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVS_EXPORT_NBYTES = 512, KVS_EXPORT_DIMS = 8 };

enum kvs_export_kind {
  KVS_EXPORT_HANDLE = 1, /* of a whole allocation: cuIpcMemHandle, or a host device's file */
  KVS_EXPORT_CHUNKS = 2, /* of memory that is mapped in chunks, whose descriptors the owner serves */
  KVS_EXPORT_EVENT = 3,  /* no memory, but an event; of the fields about memory none means anything */
};

/* What one process tells another of its memory. Numbers are bytes unless they say otherwise; a text ends with a 0. */
struct kvs_export {
  enum kvs_export_kind kind;
  unsigned char uuid[16]; /* of the device */
  char device[32];        /* its name in the owner; elsewhere it may have another, or another device that name */
  int64_t pid;            /* of the owner */
  uint64_t start;         /* when that process started, in clock ticks from the machine's start */
  uint64_t generation;    /* the owner's to count: who opens may insist on one */
  uint64_t allocation_nbytes;
  uint64_t offset;    /* of the memory in its allocation */
  uint64_t nbytes;    /* of the memory */
  uint64_t address;   /* in the owner */
  uint64_t buffer_id; /* of the allocation, in the owner */
  char dtype[16];     /* "bfloat16"; empty: bytes. For the two sides to agree on: kvswap only carries it */
  uint32_t ndim;
  uint64_t shape[KVS_EXPORT_DIMS];                        /* elements */
  uint64_t num_blocks, block_nbytes, stride, rows, pitch; /* as kvs_pool_layout; num_blocks 0: no pool */
  char pool[32];
  unsigned char handle[64];
  /* Of chunks. */
  uint64_t nchunks;
  unsigned char token[16]; /* who knows it may have them */
  char socket[108];
};

/* Fill in an export of memory of `engine`: the caller has set address and nbytes, and what it likes of generation,
 * dtype, shape and layout, the rest being 0. The memory must have been allocated on the device, by whoever, and is good
 * for others as long as it is not freed.
 *
 * Memory that is mapped in chunks needs somebody who serves them: *server, which the caller frees when nobody is to
 * open the export any more (what is open stays so). NULL for other memory. Servers end with kvs_shutdown() at the
 * latest. */
struct kvs_server;
KVS_API int kvs_export_make(struct kvs_engine *engine, struct kvs_export *made, struct kvs_server **server,
                            struct kvs_error *err);
KVS_API void kvs_server_free(struct kvs_server *server);
KVS_API void kvs_servers_stop(void); /* of the process */

/* An export of a handle that came without one: at the beginning of an allocation on this device, which has at least
 * nbytes. Its owner is not known, and counts as running. */
KVS_API int kvs_export_from_handle(struct kvs_engine *engine, const unsigned char handle[64], uint64_t nbytes,
                                   struct kvs_export *made, struct kvs_error *err);

/* An event that was made to be shared (of CUDA: CU_EVENT_INTERPROCESS), and opening one in another process: there it is
 * an event of the device like others, which the caller destroys. Its maker keeps it until then. */
KVS_API int kvs_export_event(struct kvs_engine *engine, uint64_t event, struct kvs_export *made, struct kvs_error *err);
KVS_API int kvs_open_event(struct kvs_engine *engine, const struct kvs_export *from, uint64_t *event,
                           struct kvs_error *err);

/* The fixed form that travels (docs/ipc.md has it byte by byte); reading checks length, version and sum, and that the
 * numbers can be true. */
KVS_API void kvs_export_write(const struct kvs_export *from, unsigned char bytes[KVS_EXPORT_NBYTES]);
KVS_API int kvs_export_read(const void *bytes, size_t nbytes, struct kvs_export *made, struct kvs_error *err);

/* The device of this process that the memory lies on, by its UUID: a new reference. */
KVS_API int kvs_export_device(const struct kvs_export *from, struct kvs_engine **engine, struct kvs_error *err);

/* Open it. In the process that exported it that gives the plain address. generation: the one that is expected, NULL:
 * any. KVS_INVALID: of another device, generation or size than asked for, or freed since; KVS_CLOSED: its owner has
 * ended. The caller owns *mapped. */
struct kvs_mapped;
KVS_API int kvs_mapped_open(struct kvs_engine *engine, const struct kvs_export *from, const uint64_t *generation,
                            struct kvs_mapped **mapped, struct kvs_error *err);
/* The same in steps, for callers that must look up between waits: start, wait (KVS_TIMEOUT: again), drop. The exporter
 * has one limit for all that it sends, 15 s and some milliseconds for each chunk. */
struct kvs_opening;
KVS_API int kvs_opening_start(struct kvs_engine *engine, const struct kvs_export *from, const uint64_t *generation,
                              struct kvs_opening **opening, struct kvs_error *err);
KVS_API int kvs_opening_wait(struct kvs_opening *opening, int64_t timeout_ns, struct kvs_mapped **mapped,
                             struct kvs_error *err);
KVS_API void kvs_opening_drop(struct kvs_opening *opening);
KVS_API uint64_t kvs_mapped_ptr(const struct kvs_mapped *mapped);
KVS_API const struct kvs_export *kvs_mapped_export(const struct kvs_mapped *mapped);
KVS_API bool kvs_mapped_local(const struct kvs_mapped *mapped); /* this process's own memory */
KVS_API bool kvs_mapped_closed(const struct kvs_mapped *mapped);
KVS_API bool kvs_mapped_alive(const struct kvs_mapped *mapped); /* its owner runs */
/* Unmap it, once nothing queued on the device can use it: KVS_TIMEOUT if that takes longer. Called again, it goes on
 * waiting for the same work, or for all that is queued by then if the memory was kept in between. Pools of it cannot be
 * used any more. One thread at a time. */
KVS_API int kvs_mapped_close(struct kvs_mapped *mapped, int64_t timeout_ns, struct kvs_error *err);
/* Closing is given up, and the memory used on; but if the driver is at it already, it is closed afterwards. */
KVS_API void kvs_mapped_keep(struct kvs_mapped *mapped);
/* Let the object go. If it is not closed that is done when it can be, without waiting now. */
KVS_API void kvs_mapped_free(struct kvs_mapped *mapped);

#ifdef __cplusplus
}
#endif
#endif
