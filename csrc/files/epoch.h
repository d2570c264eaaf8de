/* The file that holds the epoch of a directory: 128 random bits, which the blocks carry too. A block of another epoch
 * is gone, so that a new epoch removes all blocks of all processes at one point in time.
 *
 * `epoch.kvs` has two pages. The first one is written once, before the file has its name, and holds the epoch. The
 * second one begins with a mark, 4 bytes: not 0 when another file is about to take the name. Readers map the file.
 * While there is no mark the mapped file is the current one; with a mark they look by name.
 *
 * A new epoch, step by step: lock `epoch.tmp`; write it; sync it; mark `epoch.kvs`; rename `epoch.tmp`; sync the
 * directory. The rename is the point at which the old epoch ends. A process that is killed before it leaves the old
 * epoch, and perhaps a mark, which costs readers time only. `epoch.tmp` stays as a spare with its space reserved, so
 * that a full disk can be cleared. Its lock is the lock of all that write here: a process that gets it looks whether
 * the file still has that name.
 *
 * No file: the epoch is zero, as that of all blocks of older versions. A file that is removed while it is mapped stays
 * valid for those that mapped it. A file that cannot be trusted or read means an unknown epoch, to which no block
 * belongs. */
#ifndef KVS_FILE_EPOCH_H
#define KVS_FILE_EPOCH_H

#include <stdatomic.h>

#include "files/format.h"
#include "files/sys.h"

struct kvs_file_epoch_place {
  int folder;                  /* the descriptor is borrowed; constant */
  const atomic_uint *mark;     /* in the mapped file; NULL: no file is mapped */
  uint64_t device, inode;      /* of the mapped file */
  struct kvs_file_epoch epoch; /* zeros where there was never a file */
};

/* Whether the mapped file is the current one, without a system call. */
static inline bool kvs_file_epoch_stands(const struct kvs_file_epoch_place *place) {
  return place->mark && atomic_load(place->mark) == 0;
}
/* Look by name. True: *found has what there is now, and takes the place of *known, which the caller unmaps. */
bool kvs_file_epoch_look(const struct kvs_file_epoch_place *known, struct kvs_file_epoch_place *found);
bool kvs_file_epoch_known(const struct kvs_file_epoch *);
void kvs_file_epoch_unmap(struct kvs_file_epoch_place *);

/* All of these: 0 or an errno; EBUSY: another process had the lock for timeout_ns. */
/* Make the file with this epoch, unless there is one. `safe`: it survives a power failure. */
int kvs_file_epoch_make(int folder, const struct kvs_file_epoch *, bool safe, int64_t timeout_ns);
/* Reserve the space of the next epoch, if the disk had none for it when this one began. */
void kvs_file_epoch_reserve(int folder);
/* Remove the mark that a killed process left, unless another process is at work now. */
int kvs_file_epoch_unmark(int folder);
/* Begin a new epoch. */
int kvs_file_epoch_renew(struct kvs_file_faults *, int folder, int64_t timeout_ns);

/* The epoch of the store: of several directories, that of all by XOR, so that a new one in any of them is a new one. */
struct kvs_file_epochs {
  pthread_mutex_t looking;                                  /* held over a look by name; taken before store->lock */
  struct kvs_file_epoch_place places[KVS_FILE_DIRECTORIES]; /* changed under both locks */
  unsigned nplaces;                                         /* likewise; 0: the store is closed */
  struct kvs_file_epoch now;                                /* guarded by store->lock: of all blocks in the index */
  pthread_t thread;                                         /* looks by name twice a second */
  pthread_cond_t wake;                                      /* for the thread: it is to stop */
  bool watched, stop;                                       /* the thread runs; guarded by store->lock: it is to stop */
};

#endif
