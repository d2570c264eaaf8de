/* Segments: the files behind shared pools. */
#ifndef KVS_SEGMENT_H
#define KVS_SEGMENT_H

#include "hostpool/state.h"

struct kvs_shared_file {
  struct kvs_shared_file *next; /* list of the segments that this process owns */
  char path[128];
  uint64_t device, inode; /* of the file; another file may have the name by now */
  uint64_t generation;
  int64_t owner_pid;
  uint64_t owner_start;
  bool owner;
  uint64_t owners_page; /* the owner's: the mapping that keeps its lock */
  uint64_t map_base, map_nbytes, data_offset;
  uint32_t *words; /* one a block, in the mapping */
  uint64_t num_blocks;
};
int kvs_shared_file_open(const struct kvs_host_pool *, const struct kvs_shared_options *, struct kvs_shared_file **,
                         bool *replaced, struct kvs_error *);
void kvs_shared_file_unlink(struct kvs_shared_file *);
bool kvs_shared_file_owner_alive(const struct kvs_shared_file *);
void kvs_shared_file_close(struct kvs_shared_file *); /* the user of the mapping unmaps it */

#endif
