/* Device memory of one process in another: the part of kvswap.h (which includes this file) about sharing. */
#ifndef KVSWAP_IPC_H
#define KVSWAP_IPC_H

#include "kvswap.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVS_EXPORT_NBYTES = 512, KVS_EXPORT_DIMS = 8 };

enum kvs_export_kind {
  KVS_EXPORT_HANDLE = 1, /* of a whole allocation: cuIpcMemHandle, or a host device's file */
  KVS_EXPORT_CHUNKS = 2, /* memory mapped in chunks, whose descriptors the owner serves */
  KVS_EXPORT_EVENT = 3,  /* an event; the fields about memory are unused */
};

/* Description of exported memory, for other processes. Numbers are bytes unless noted; texts end with a 0. */
struct kvs_export {
  enum kvs_export_kind kind;
  unsigned char uuid[16]; /* of the device */
  char device[32];        /* the device's name in the owner; another process may number devices differently */
  int64_t pid;            /* of the owner */
  uint64_t start;         /* when that process started, in clock ticks from the machine's start */
  uint64_t generation;    /* counted by the owner; an opener may require one value */
  uint64_t allocation_nbytes;
  uint64_t offset;    /* offset of the memory in its allocation */
  uint64_t nbytes;    /* of the memory */
  uint64_t address;   /* in the owner */
  uint64_t buffer_id; /* of the allocation, in the owner */
  char dtype[16];     /* "bfloat16"; empty: bytes. Not interpreted by kvswap */
  uint32_t ndim;
  uint64_t shape[KVS_EXPORT_DIMS];                        /* elements */
  uint64_t num_blocks, block_nbytes, stride, rows, pitch; /* as kvs_pool_layout; num_blocks 0: no pool */
  char pool[32];
  unsigned char handle[64];
  /* For chunks. */
  uint64_t nchunks;
  unsigned char token[16]; /* proves the right to receive the chunks */
  char socket[108];
};

/* Make an export of memory of `engine`. The caller has set address and nbytes, and optionally generation, dtype, shape
 * and layout; all other members are 0. Any library may have allocated the memory on the device. Other processes can use
 * it until it is freed.
 *
 * Memory in chunks needs a server for its descriptors: *server, which the caller frees when no process is to open the
 * export any more (open mappings stay). NULL for other memory. kvs_shutdown() stops all servers. */
struct kvs_server;
KVS_API int kvs_export_make(struct kvs_engine *engine, struct kvs_export *made, struct kvs_server **server,
                            struct kvs_error *err);
KVS_API void kvs_server_free(struct kvs_server *server);
KVS_API void kvs_servers_stop(void); /* of the process */

/* Make an export from a bare handle: memory at the beginning of an allocation of at least nbytes on this device. The
 * owner is unknown and counts as running. */
KVS_API int kvs_export_from_handle(struct kvs_engine *engine, const unsigned char handle[64], uint64_t nbytes,
                                   struct kvs_export *made, struct kvs_error *err);

/* Export an event made for sharing (CUDA: CU_EVENT_INTERPROCESS), and open one in another process. There it is an event
 * of the device, which the caller destroys. The maker keeps the event until then. */
KVS_API int kvs_export_event(struct kvs_engine *engine, uint64_t event, struct kvs_export *made, struct kvs_error *err);
KVS_API int kvs_open_event(struct kvs_engine *engine, const struct kvs_export *from, uint64_t *event,
                           struct kvs_error *err);

/* The serialized form (docs/ipc.md has it byte by byte). Reading checks length, version and checksum, and that the
 * numbers are consistent. */
KVS_API void kvs_export_write(const struct kvs_export *from, unsigned char bytes[KVS_EXPORT_NBYTES]);
KVS_API int kvs_export_read(const void *bytes, size_t nbytes, struct kvs_export *made, struct kvs_error *err);

/* The device of this process with the export's UUID: a new reference. */
KVS_API int kvs_export_device(const struct kvs_export *from, struct kvs_engine **engine, struct kvs_error *err);

/* Open an export. The exporting process gets the plain address. generation: the required one, NULL: any. KVS_INVALID:
 * another device, generation or size, or the memory was freed. KVS_CLOSED: the owner has ended. The caller owns
 * *mapped. */
struct kvs_mapped;
KVS_API int kvs_mapped_open(struct kvs_engine *engine, const struct kvs_export *from, const uint64_t *generation,
                            struct kvs_mapped **mapped, struct kvs_error *err);
/* The same in steps, for callers with work between waits: start, wait (KVS_TIMEOUT: again), drop. The exporter's own
 * limit for sending is 15 s plus some milliseconds for each chunk. */
struct kvs_opening;
KVS_API int kvs_opening_start(struct kvs_engine *engine, const struct kvs_export *from, const uint64_t *generation,
                              struct kvs_opening **opening, struct kvs_error *err);
KVS_API int kvs_opening_wait(struct kvs_opening *opening, int64_t timeout_ns, struct kvs_mapped **mapped,
                             struct kvs_error *err);
KVS_API void kvs_opening_drop(struct kvs_opening *opening);
KVS_API uint64_t kvs_mapped_ptr(const struct kvs_mapped *mapped);
KVS_API const struct kvs_export *kvs_mapped_export(const struct kvs_mapped *mapped);
KVS_API bool kvs_mapped_local(const struct kvs_mapped *mapped); /* memory of this process */
KVS_API bool kvs_mapped_closed(const struct kvs_mapped *mapped);
KVS_API bool kvs_mapped_alive(const struct kvs_mapped *mapped); /* the owner process runs */
/* Unmap the memory once no queued work can use it; KVS_TIMEOUT: not yet. Another call continues the wait; after
 * kvs_mapped_keep() it waits for all work queued by then. Pools of the memory become unusable. One thread at a time. */
KVS_API int kvs_mapped_close(struct kvs_mapped *mapped, int64_t timeout_ns, struct kvs_error *err);
/* Stop closing and keep using the memory. If the driver's call has begun, the memory is closed afterwards. */
KVS_API void kvs_mapped_keep(struct kvs_mapped *mapped);
/* Free the object. If the memory is still open, it is closed as soon as possible, without waiting now. */
KVS_API void kvs_mapped_free(struct kvs_mapped *mapped);

#ifdef __cplusplus
}
#endif
#endif
