/* Segments: the files behind shared pools. */
#ifndef KVS_SEGMENT_H
#define KVS_SEGMENT_H

#include "hostpool/state.h"

/* What a segment has in it. Two openers that ask for different shapes are refused. */
struct kvs_segment_shape {
  uint64_t num_blocks, slot_nbytes, layers, layer_first;
  uint64_t room_nbytes;  /* of all blocks, in whole pages */
  uint64_t index_nbytes; /* of an index, which is zeros at first; not 0: all openers own the segment */
};

struct kvs_shared_file {
  struct kvs_shared_file *next; /* list of the segments that this process owns */
  char path[128];
  uint64_t device, inode; /* of the file; another file may have the name by now */
  uint64_t generation;
  int64_t owner_pid;
  uint64_t owner_start;
  bool owner;
  bool together;        /* it has an index */
  uint64_t owners_page; /* an owner's: the mapping that keeps its lock */
  uint64_t map_base, map_nbytes, data_offset;
  void *index; /* in the mapping; NULL: none */
  uint64_t index_nbytes;
  uint32_t *words; /* one a block, in the mapping */
  uint64_t num_blocks;
};
/* pool: whose budget a new segment must fit into. NULL: only the index is mapped, and no block is populated. */
int kvs_shared_file_open(const struct kvs_segment_shape *, const struct kvs_shared_options *,
                         const struct kvs_host_pool *pool, struct kvs_shared_file **, bool *replaced,
                         struct kvs_error *);
/* Lock the file against other processes that would call this; closing *fd unlocks it, as the end of the process does.
 */
int kvs_shared_file_lock(const struct kvs_shared_file *, int *fd, struct kvs_error *);
void kvs_shared_file_unlink(struct kvs_shared_file *);
bool kvs_shared_file_owner_alive(const struct kvs_shared_file *);
void kvs_shared_file_close(struct kvs_shared_file *); /* the user of the mapping unmaps it */

#endif
