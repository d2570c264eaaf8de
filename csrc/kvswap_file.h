/* The file tier: blocks move from memory to files and come back exactly, or are reported lost.
 *
 * A store is a directory of segment files. Each block lies in a slot behind a header with its key, its length, the
 * store's layout and a checksum; a load compares all of them before it reports the block. Opening a store builds the
 * index in memory from the headers.
 *
 * Threads and errors as in kvswap.h. The store's own threads do the work. Calls on one key take effect in the order in
 * which they were submitted. Across keys there is no order, but loads go before stores and deletes, until the oldest of
 * these has waited 100 ms and for 64 MiB of loads. */
#ifndef KVSWAP_FILE_H
#define KVSWAP_FILE_H

#include "kvswap.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  KVS_FILE_KEY_NBYTES = 512,     /* 1 to this many bytes */
  KVS_FILE_LAYOUT_NBYTES = 3072, /* limit of a layout's text */
  KVS_FILE_CODINGS = 1024,
  KVS_FILE_DIRECTORIES = 64,
};
#define KVS_FILE_BLOCK_NBYTES ((uint64_t)1 << 40) /* limit of a block */

struct kvs_file_store;    /* an open directory; reference-counted */
struct kvs_file_transfer; /* one submitted list of blocks; reference-counted */

enum kvs_file_durability {
  KVS_FILE_NONE,  /* a block is stored once the kernel has it: it survives the end of this process */
  KVS_FILE_FLUSH, /* ... once it is handed to the disk */
  KVS_FILE_FSYNC, /* ... once the disk reports that it survives a power failure */
};
enum kvs_file_gds_mode {
  KVS_FILE_GDS_AUTO,   /* GPUDirect Storage if the driver reports that it is native */
  KVS_FILE_GDS_COMPAT, /* ... or else libcufile's compatibility mode, which copies through host memory */
  KVS_FILE_GDS_OFF,
};
enum kvs_file_engine { KVS_FILE_AUTO, KVS_FILE_THREADS, KVS_FILE_URING };

struct kvs_file_settings {
  const char *directory;
  const char *layout; /* model, dtype, ranks of the blocks; must be equal, byte by byte, to the text in the directory */
  uint64_t block_nbytes;
  uint64_t capacity;       /* limit on the bytes of all segment files */
  uint64_t segment_nbytes; /* of a segment file; 0: chosen by the store */
  enum kvs_file_engine engine;
  enum kvs_file_durability durability;
  enum kvs_file_gds_mode gds; /* for blocks in pools; kvs_file_info.gds_note says why they go through host memory */
  unsigned depth;             /* reads and writes in flight; 0: chosen by the store */
  unsigned queue;             /* unfinished loads, stores and deletes, each, before KVS_QUEUE_FULL; 0: 128 */
  bool buffered;              /* use the page cache even if O_DIRECT works */
  bool readonly;              /* read only: while another process writes the store, or on a read-only file system */
  /* Processes of a machine find each other's blocks in this directory. All store the same bytes under a key. */
  bool shared;
  struct kvs_engine *device; /* device of the pools to store from and load into; NULL: addresses of host memory only */
  uint64_t staging_nbytes; /* pinned memory (with GDS, device memory) between pools and files; 0: chosen by the store */
  /* Further directories, on other disks. The blocks are spread over all, and the capacity is that of all. A store is
   * opened with all its directories or not at all; the layout is then a JSON object. */
  const char *const *more;
  size_t nmore;
  uint64_t events; /* that are kept for kvs_file_take_events(); 0: none */
  /* A directory at most three folders above, whose first store sets the capacity of all segments below it, of every
   * process, model and layout. NULL: `directory` with `shared`, otherwise none. */
  const char *bound;
  /* The blocks are coded, one coding for each pool of a block, and block_nbytes is that of the coded ones together. The
   * layout holds the text of each (kvs_coding_text()). Pools that are not coded are coded on the way to the file, and
   * decoded on the way back. */
  const struct kvs_coding *const *codings;
  size_t ncodings; /* at most KVS_FILE_CODINGS; 0: blocks are stored as they are, and no pool is coded */
  uint64_t reserved[4];
};

/* Make or open a store. KVS_INVALID: the directory has another layout (the message names both) and is unchanged.
 * If the disk refuses writes a store with blocks opens read-only (kvs_file_info.readonly_note). KVS_BUSY: another
 * process writes the store, or one that was killed has writes that did not reach the disk within 10 s. */
KVS_API int kvs_file_open(const struct kvs_file_settings *settings, struct kvs_file_store **store,
                          struct kvs_error *err);
/* Close a store: refuse new calls and wait at most timeout_ns for those in progress; then cancel what has not begun,
 * wait for the rest, and close the files. Closing twice is harmless. */
KVS_API int kvs_file_close(struct kvs_file_store *store, int64_t timeout_ns, struct kvs_error *err);
KVS_API void kvs_file_ref(struct kvs_file_store *store);
/* The last reference closes the store. Never waits: a thread of its own does the work, and kvs_file_open() of the
 * directory waits for that thread. */
KVS_API void kvs_file_unref(struct kvs_file_store *store);
KVS_API void kvs_file_shutdown(int64_t timeout_ns); /* close all stores: for exit */

/* Keys: key i is bytes [ends[i - 1], ends[i]) of data; key 0 begins at 0. */
struct kvs_file_keys {
  const uint8_t *data;
  const size_t *ends;
  size_t count;
};

/* Where the blocks are: at addresses of host memory, or in slots of pools of the store's device. A block in pools is
 * the bytes of all its pools, one after the other. */
struct kvs_file_blocks {
  const uint64_t *addresses; /* one a key, or nparts a key (kvs_file_options); NULL: pools */
  struct kvs_pool *const *pools;
  size_t npools;
  struct kvs_ids ids;
};

struct kvs_file_options {
  bool replace; /* stores: overwrite existing keys; else an existing block is kept and counts as done */
  const struct kvs_after *after; /* start dependencies; with pools, the device's compute stream is one too */
  size_t nafter;
  void *owner; /* as in kvs_options; released by kvs_file_collect() */
  void (*release)(void *);
  /* With addresses: a block is gathered from `nparts` ranges of part_nbytes[] bytes, which make block_nbytes in all: K
   * and V, layers, groups. Key i has addresses [i * nparts, (i + 1) * nparts). 0: one range. The files are the same. */
  const uint64_t *part_nbytes;
  size_t nparts;
  uint64_t reserved[6];
};
enum { KVS_FILE_PARTS = 65536 }; /* limit of a block's parts */

/* Each word of the arrays is read once, during the call, and then checked: another thread may write to them. All blocks
 * are queued or none, as in kvswap.h; later failures are reported block by block. Memory must stay mapped, and stored
 * bytes unchanged, until the transfer has ended. The memory of pools too: host memory is read and written in place, and
 * what frees or unmaps memory (kvs_engine_free(), kvs_host_free(), kvs_mapped_close(), kvs_host_pool_close()) does not
 * wait for transfers of a store. Memory of a failed load is undefined. */
KVS_API int kvs_file_store_blocks(struct kvs_file_store *, const struct kvs_file_keys *, const struct kvs_file_blocks *,
                                  const struct kvs_file_options *, struct kvs_file_transfer **, struct kvs_error *);
KVS_API int kvs_file_load_blocks(struct kvs_file_store *, const struct kvs_file_keys *, const struct kvs_file_blocks *,
                                 const struct kvs_file_options *, struct kvs_file_transfer **, struct kvs_error *);
KVS_API int kvs_file_delete(struct kvs_file_store *, const struct kvs_file_keys *, const struct kvs_file_options *,
                            struct kvs_file_transfer **, struct kvs_error *); /* a missing key counts as done */
/* found[i]: whether the block exists now. It may be evicted before it is loaded, unless it is pinned. */
KVS_API int kvs_file_contains(struct kvs_file_store *, const struct kvs_file_keys *, bool *found, struct kvs_error *);
/* Pinned blocks are not evicted; pins count. KVS_MISSING: a key does not exist, and nothing was pinned. Unpinning a
 * block that is not pinned: KVS_INVALID. */
KVS_API int kvs_file_pin(struct kvs_file_store *, const struct kvs_file_keys *, bool pin, struct kvs_error *);
/* Mark blocks as used now; missing keys are skipped. */
KVS_API int kvs_file_touch(struct kvs_file_store *, const struct kvs_file_keys *, struct kvs_error *);
/* Keys of all blocks, least recently used first. The caller frees *keys and *ends, which are as in kvs_file_keys. */
KVS_API int kvs_file_list(struct kvs_file_store *, uint8_t **keys, size_t **ends, size_t *count, struct kvs_error *);
/* Which blocks came and went since the last call, in order, at most settings.events. there[i]: the block of key i can
 * be loaded since then; else it was evicted, deleted, cleared or found damaged. *lost: events that were not kept, and
 * then none is given: kvs_file_list() has the keys. Blocks found at open or in the files of another writer, and those
 * that a clear removed, are given in pieces of a few thousand a call, until *count is 0; they do not count against
 * settings.events. The caller frees *keys, *ends and *there. */
KVS_API int kvs_file_take_events(struct kvs_file_store *, uint8_t **keys, size_t **ends, bool **there, size_t *count,
                                 uint64_t *lost, struct kvs_error *);
/* Begin a new epoch: when the call returns, all blocks are gone, for all processes, those that have ended included, and
 * for transfers that were submitted before. A block that is submitted later is there. Also for readers, if this process
 * may write the directory. KVS_FILE: it cannot; nothing has changed. KVS_BUSY: another process has been clearing it for
 * ten seconds. */
KVS_API int kvs_file_clear(struct kvs_file_store *, struct kvs_error *);
/* The same of a directory in which `epoch.kvs` is, or will be: a store's, or a shared one. */
KVS_API int kvs_file_clear_directory(const char *directory, struct kvs_error *);
/* Layout and block size of a directory, read from its files; `layout` has room for KVS_FILE_LAYOUT_NBYTES + 1.
 * KVS_FILE: no store. */
KVS_API int kvs_file_peek(const char *directory, char *layout, uint64_t *block_nbytes, struct kvs_error *);
/* Read the directory again: a reader then sees later stores, also while transfers run. Nothing to do for the writer of
 * the store. KVS_UNSUPPORTED: another thread is refreshing. */
KVS_API int kvs_file_refresh(struct kvs_file_store *, struct kvs_error *);
KVS_API void kvs_file_collect(struct kvs_file_store *); /* release the owners of ended transfers */

KVS_API void kvs_file_transfer_ref(struct kvs_file_transfer *);
KVS_API void kvs_file_transfer_unref(struct kvs_file_transfer *); /* dropping an unfinished one is safe */
KVS_API struct kvs_file_store *kvs_file_transfer_store(const struct kvs_file_transfer *); /* borrowed */
KVS_API bool kvs_file_transfer_done(struct kvs_file_transfer *);                          /* ended in any state */
KVS_API int kvs_file_transfer_wait(struct kvs_file_transfer *, int64_t timeout_ns, struct kvs_error *);
/* Cancel the blocks that have not begun; returns whether there were any. The transfer then ends CANCELLED, with those
 * blocks among its failed ones. */
KVS_API bool kvs_file_transfer_cancel(struct kvs_file_transfer *);
KVS_API int kvs_file_transfer_error(struct kvs_file_transfer *, struct kvs_error *); /* as kvs_transfer_error */
KVS_API size_t kvs_file_transfer_failed(struct kvs_file_transfer *, uint32_t *positions, size_t capacity);
/* Why that block failed; KVS_OK: it has not failed (yet). */
KVS_API int kvs_file_transfer_reason(struct kvs_file_transfer *, size_t position, struct kvs_error *);

struct kvs_file_transfer_info {
  enum kvs_state state;
  const char *what; /* "store", "load" or "delete" */
  uint64_t nbytes, num_blocks;
  uint64_t num_kept;   /* stores: existing blocks that were kept; loads, deletes: 0 */
  uint64_t elapsed_ns; /* from the call to the end; 0 while it runs */
  size_t num_failed;
  uint64_t reserved[8];
};
KVS_API void kvs_file_transfer_get_info(struct kvs_file_transfer *, struct kvs_file_transfer_info *);

struct kvs_file_stats {
  uint64_t blocks, pinned, slots, segments, file_nbytes; /* now; slots of all segments */
  uint64_t stored, kept, loaded, deleted, evicted;       /* blocks, since the store was opened */
  uint64_t missed, damaged, failed; /* loads of missing keys; blocks with wrong bytes; other failures */
  uint64_t found, cut;              /* at open: blocks; torn blocks and damaged headers, erased unless readonly */
  uint64_t foreign;                 /* segment files that cannot be read; they are left alone */
  uint64_t lost_slots;              /* slots that could not be erased, or read: unused until the next open */
  uint64_t unfinished_loads, unfinished_stores, refused_full; /* transfers, now; calls */
  uint64_t gds_read_nbytes, gds_written_nbytes, gds_by_host;  /* by libcufile; blocks that it refused */
  uint64_t directory_nbytes; /* of all segments in the directory that bounds the store, when it last looked */
  uint64_t reclaimed_segments, retired_segments; /* removed: of ended writers, for room; own, for others' room */
  uint64_t requests; /* reads, writes and erasures that the file engine was given: one for a load or a new block */
  uint64_t reserved[12];
};
KVS_API int kvs_file_get_stats(struct kvs_file_store *, struct kvs_file_stats *, struct kvs_error *);

struct kvs_file_info {
  const char *engine;    /* "threads" or "io_uring" */
  char engine_note[160]; /* why not io_uring; empty with io_uring */
  bool direct;           /* O_DIRECT */
  char direct_note[160];
  const char *gds; /* "on", "compat" or "off" */
  char gds_note[160];
  const char *checksum;
  bool readonly;
  uint64_t block_nbytes, slot_nbytes, segment_nbytes, capacity;
  unsigned depth;
  const char *readonly_note;      /* why a store that was opened for writing is read-only; valid as long as the store */
  const char *bound, *bound_note; /* the directory that bounds the store; what is not as asked for; empty: nothing */
  uint64_t reserved[5];
};
KVS_API bool kvs_file_take_note(struct kvs_file_store *, char note[300]); /* once: what happened beside the calls */
KVS_API void kvs_file_get_info(struct kvs_file_store *, struct kvs_file_info *);
/* Of a directory that bounds stores: its limit, bytes and running writers. limit: a new one; 0: unchanged. */
KVS_API int kvs_file_limit(const char *directory, uint64_t limit, uint64_t found[3], struct kvs_error *err);

/* Whether a store would use GPUDirect Storage (`compat`: or its compatibility mode), and why, without opening it. */
KVS_API bool kvs_file_gds(bool compat, char note[200]);

#ifdef __cplusplus
}
#endif
#endif
