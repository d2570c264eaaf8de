/* Blocks and files of segments that go away while the store runs.
 *
 *   own segment:    kvs_file_retire() unlinks the file and marks the segment `leaving`: it takes no further block.
 *                   kvs_file_retire_step() evicts its blocks, and closes it when no transfer uses it.
 *   a peer's:       kvs_file_note_removed() marks it `removed` after its writer, or a process that reclaimed it, has
 *                   unlinked the file. kvs_file_sweep() then forgets its blocks; kvs_file_close_removed() closes it.
 *
 * An unlinked file keeps its bytes while it is open, and no process writes to it: loads that run get the right bytes.
 */
#ifndef KVS_FILE_RETIRE_H
#define KVS_FILE_RETIRE_H

#include "files/state.h"

/* Evict the idle blocks of leaving segments and forget those of removed ones. Takes the store's lock for a part of the
 * index at a time. */
void kvs_file_sweep(struct kvs_file_store *);
/* Remove own segments, those with the most free slots and least recently used blocks first; none with a pinned block.
 * Returns how many. One thread calls these two. */
uint32_t kvs_file_retire(struct kvs_file_store *, uint32_t count);
uint32_t kvs_file_retire_step(struct kvs_file_store *); /* returns how many segments are still leaving */

#endif
