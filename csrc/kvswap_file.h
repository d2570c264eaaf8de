/* The file tier: blocks that leave memory for files, and come back exactly or are reported lost.
 *
 * A store is a directory of segment files. Each block lies in a slot behind a header with its key, its length, the
 * store's layout and a checksum; a load compares all of them before it says that a block is there. The index in memory
 * is made from the headers when a store is opened.
 *
 * Threads and errors as in kvswap.h. Work is done by the store's own threads. Within one key, calls have their effect
 * in the order in which they were submitted; across keys there is no order, but loads go before stores. */
#ifndef KVSWAP_FILE_H
#define KVSWAP_FILE_H

#include "kvswap.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  KVS_FILE_KEY_NBYTES = 512,     /* at most; at least 1 */
  KVS_FILE_LAYOUT_NBYTES = 3072, /* of a layout's text, at most */
};
#define KVS_FILE_BLOCK_NBYTES ((uint64_t)1 << 40) /* at most */

struct kvs_file_store;    /* an open directory; reference-counted */
struct kvs_file_transfer; /* one submitted list of blocks; reference-counted */

enum kvs_file_durability {
  KVS_FILE_NONE,  /* a block is stored when the kernel has it: it survives the end of this process */
  KVS_FILE_FLUSH, /* ... when it was handed to the disk */
  KVS_FILE_FSYNC, /* ... when the disk says that it would survive a power failure */
};
enum kvs_file_gds_mode {
  KVS_FILE_GDS_AUTO,   /* GPUDirect Storage where the driver says that it is real */
  KVS_FILE_GDS_COMPAT, /* ... or else libcufile's compatibility mode, which goes through host memory by itself */
  KVS_FILE_GDS_OFF,
};
enum kvs_file_engine { KVS_FILE_AUTO, KVS_FILE_THREADS, KVS_FILE_URING };

struct kvs_file_settings {
  const char *directory;
  const char *layout; /* what the blocks are: model, dtype, ranks. Compared byte by byte with what is there */
  uint64_t block_nbytes;
  uint64_t capacity;       /* bytes that the segment files may take in all */
  uint64_t segment_nbytes; /* of a segment file; 0: as suits */
  enum kvs_file_engine engine;
  enum kvs_file_durability durability;
  enum kvs_file_gds_mode gds; /* of pools; where it cannot be used, staging in host memory is: kvs_file_info.gds_note */
  unsigned depth;             /* reads and writes under way at once; 0: as suits */
  unsigned queue;             /* unfinished transfers, of loads and of stores each, before KVS_QUEUE_FULL; 0: 128 */
  bool buffered;              /* through the page cache, also where O_DIRECT would do */
  bool readonly;              /* beside another process that has it open, or on a file system that cannot be written */
  struct kvs_engine *device;  /* of the pools whose blocks are stored and loaded; NULL: addresses of host memory only */
  uint64_t staging_nbytes;    /* pinned, with GDS device, memory between pools and files; 0: as suits */
};

/* Make or open a store. KVS_INVALID: what is there has another layout (the message names both) and is left alone.
 * KVS_BUSY: another process writes it. */
KVS_API int kvs_file_open(const struct kvs_file_settings *settings, struct kvs_file_store **store,
                          struct kvs_error *err);
/* Take no more calls, let those under way end (at most timeout_ns; then the rest is cancelled as far as it has not
 * begun and waited for), and close the files. Done twice is harmless. */
KVS_API int kvs_file_close(struct kvs_file_store *store, int64_t timeout_ns, struct kvs_error *err);
KVS_API void kvs_file_ref(struct kvs_file_store *store);
/* The last one closes it: never waits, what takes time is done by a thread of its own. kvs_file_open() of the directory
 * waits for that thread. */
KVS_API void kvs_file_unref(struct kvs_file_store *store);
KVS_API void kvs_file_shutdown(int64_t timeout_ns); /* close all stores: for exit */

/* Keys: key i is bytes [ends[i - 1], ends[i]) of data, of key 0 from 0 on. */
struct kvs_file_keys {
  const uint8_t *data;
  const size_t *ends;
  size_t count;
};

/* Where the blocks are: at addresses of host memory, or in slots of pools of the store's device, each block the bytes
 * of all its pools, one after the other. */
struct kvs_file_blocks {
  const uint64_t *addresses; /* one a key; NULL: pools */
  struct kvs_pool *const *pools;
  size_t npools;
  struct kvs_ids ids;
};

struct kvs_file_options {
  bool replace; /* stores: write also where the key is there; else such a block is left as it is, and counts as done */
  const struct kvs_after *after; /* starts after these; and with pools after the device's compute stream */
  size_t nafter;
  void *owner; /* as in kvs_options; released by kvs_file_collect() */
  void (*release)(void *);
};

/* Of all arrays each word is read once, while the call runs, and then checked: another thread may write to them.
 * All or nothing is queued, as in kvswap.h; what goes wrong afterwards is said block by block. Memory must stay mapped,
 * and what is stored unchanged, until the transfer ended. What a failed load leaves in memory is undefined. */
KVS_API int kvs_file_put(struct kvs_file_store *, const struct kvs_file_keys *, const struct kvs_file_blocks *,
                         const struct kvs_file_options *, struct kvs_file_transfer **, struct kvs_error *);
KVS_API int kvs_file_get(struct kvs_file_store *, const struct kvs_file_keys *, const struct kvs_file_blocks *,
                         const struct kvs_file_options *, struct kvs_file_transfer **, struct kvs_error *);
KVS_API int kvs_file_delete(struct kvs_file_store *, const struct kvs_file_keys *, const struct kvs_file_options *,
                            struct kvs_file_transfer **, struct kvs_error *); /* done also where there is none */
/* found[i]: whether a block is there now. It may leave before it is loaded, unless it is pinned. */
KVS_API int kvs_file_contains(struct kvs_file_store *, const struct kvs_file_keys *, bool *found, struct kvs_error *);
/* Pinned blocks are not evicted; pins count. Of keys that are not there: KVS_MISSING, and nothing was pinned. Unpin of
 * what is not pinned: KVS_INVALID. */
KVS_API int kvs_file_pin(struct kvs_file_store *, const struct kvs_file_keys *, bool pin, struct kvs_error *);
/* They count as used now; those that are not there are passed over. */
KVS_API int kvs_file_touch(struct kvs_file_store *, const struct kvs_file_keys *, struct kvs_error *);
/* Keys of all blocks that are there, unused longest first: *keys and *ends, as in kvs_file_keys, are to be freed. */
KVS_API int kvs_file_list(struct kvs_file_store *, uint8_t **keys, size_t **ends, size_t *count, struct kvs_error *);
/* What a directory holds, read from its files; `layout` has room for KVS_FILE_LAYOUT_NBYTES + 1. KVS_MISSING. */
KVS_API int kvs_file_peek(const char *directory, char *layout, uint64_t *block_nbytes, struct kvs_error *);
/* Look at the directory again: a reader sees what was stored since, also while transfers run. Of a store that is
 * written by this one: nothing. KVS_UNSUPPORTED: another thread is at it. */
KVS_API int kvs_file_refresh(struct kvs_file_store *, struct kvs_error *);
KVS_API void kvs_file_collect(struct kvs_file_store *); /* release owners of transfers that ended */

KVS_API void kvs_file_transfer_ref(struct kvs_file_transfer *);
KVS_API void kvs_file_transfer_unref(struct kvs_file_transfer *); /* dropping an unfinished one is safe */
KVS_API struct kvs_file_store *kvs_file_transfer_store(const struct kvs_file_transfer *); /* borrowed */
KVS_API bool kvs_file_transfer_done(struct kvs_file_transfer *);                          /* ended, however */
KVS_API int kvs_file_transfer_wait(struct kvs_file_transfer *, int64_t timeout_ns, struct kvs_error *);
/* Blocks that have not begun are left as they are; whether there were any. The transfer then ends CANCELLED, with those
 * among its failed blocks. */
KVS_API bool kvs_file_transfer_cancel(struct kvs_file_transfer *);
KVS_API int kvs_file_transfer_error(struct kvs_file_transfer *, struct kvs_error *); /* as kvs_transfer_error */
KVS_API size_t kvs_file_transfer_failed(struct kvs_file_transfer *, uint32_t *positions, size_t capacity);
/* Why that block failed, KVS_OK where it did not (or has not yet). */
KVS_API int kvs_file_transfer_reason(struct kvs_file_transfer *, size_t position, struct kvs_error *);

struct kvs_file_transfer_info {
  enum kvs_state state;
  const char *what; /* "store", "load" or "delete" */
  uint64_t nbytes, num_blocks;
  uint64_t num_kept;   /* stores: blocks that were there and were left as they are; loads, deletes: 0 */
  uint64_t elapsed_ns; /* from the call to the end; 0 while it runs */
  size_t num_failed;
};
KVS_API void kvs_file_transfer_get_info(struct kvs_file_transfer *, struct kvs_file_transfer_info *);

struct kvs_file_stats {
  uint64_t blocks, pinned, slots; /* now; slots of all segments */
  uint64_t segments, file_nbytes;
  uint64_t stored, kept, loaded, deleted, evicted; /* blocks, since it was opened */
  uint64_t missed, damaged, failed; /* loads of what is not there; blocks whose bytes were wrong; other failures */
  uint64_t found, cut;              /* at open: blocks, and torn ones that were erased */
  uint64_t foreign;                 /* segment files that cannot be read and are left alone */
  uint64_t lost_slots;              /* not erased, or not read at open: not used until the next one */
  uint64_t unfinished_loads, unfinished_stores; /* transfers, now */
  uint64_t refused_full;
  uint64_t gds_read_nbytes, gds_written_nbytes; /* by libcufile, headers included */
  uint64_t gds_by_host;                         /* blocks that libcufile did not take: they went by host memory */
};
KVS_API int kvs_file_get_stats(struct kvs_file_store *, struct kvs_file_stats *, struct kvs_error *);

struct kvs_file_info {
  const char *engine;    /* "threads" or "io_uring" */
  char engine_note[160]; /* why not io_uring; empty where it is */
  bool direct;           /* O_DIRECT */
  char direct_note[160];
  const char *gds; /* "on", "compat" or "off" */
  char gds_note[160];
  const char *checksum;
  bool readonly;
  uint64_t block_nbytes, slot_nbytes, segment_nbytes, capacity;
  unsigned depth;
};
KVS_API void kvs_file_get_info(struct kvs_file_store *, struct kvs_file_info *);

/* Whether a store would use GPUDirect Storage (with `compat`: or the compatibility mode), as far as can be known
 * without opening libcufile's driver; `note` says by what, or why not. */
KVS_API bool kvs_file_gds(bool compat, char note[200]);

#ifdef __cplusplus
}
#endif
#endif
