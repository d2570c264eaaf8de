/* The directories of a store, the store's file in each, and checkpoints in it. */
#ifndef KVS_FILE_DIRECTORY_H
#define KVS_FILE_DIRECTORY_H

#include "files/state.h"

int kvs_file_open_directories(struct kvs_file_store *, struct kvs_error *); /* sets roots, geometry, direct */
int kvs_file_open_segments(struct kvs_file_store *, struct kvs_error *);
void kvs_file_close_directories(struct kvs_file_store *);
/* Close what holds the directories' locks. `everywhere`: release the locks even if a forked child or a ring still has
 * the descriptors. Safe in a child of fork(). */
void kvs_file_unlock_directories(struct kvs_file_store *, bool everywhere);

uint64_t kvs_file_whole_below_locked(const struct kvs_file_store *); /* the sequence that a checkpoint may record now */
int kvs_file_save_checkpoint(struct kvs_file_store *, uint64_t sequence, bool clean); /* 0 or an errno */
void kvs_file_checkpoint_if_due(struct kvs_file_store *);                             /* after a write; no lock */

/* Whether the own directories still have their names; twice a second. Otherwise they take no blocks. */
void kvs_file_look_at_directories(struct kvs_file_store *);
/* Open a directory and check who may write it. `make`: create it if missing. */
int kvs_file_open_folder(struct kvs_file_root *, bool make, struct kvs_error *);
/* Geometry of a directory, from the store's file, else from a segment; *found false: neither can be read. */
int kvs_file_find_geometry(struct kvs_file_store *, unsigned root, struct kvs_file_geometry *, bool *found,
                           size_t *nsegments, struct kvs_error *);

#endif
