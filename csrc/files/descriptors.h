/* Descriptors of the segments.
 *
 * A segment is opened when it is used, and stays open until other segments need its descriptor: all stores of a process
 * together keep a quarter of the descriptors that the process may have, and close those that were not used lately. A
 * request holds its segment from before its begin to its end. */
#ifndef KVS_FILE_DESCRIPTORS_H
#define KVS_FILE_DESCRIPTORS_H

#include "files/state.h"

/* Hold a segment, so that its descriptor is not closed. False: `may_wait`, and all that may be open are held; the end
 * of a hold serves store->parked. */
bool kvs_file_segment_hold_locked(struct kvs_file_store *, uint32_t at, bool may_wait);
void kvs_file_segment_release(struct kvs_file_store *, uint32_t at);
int kvs_file_segment_open(struct kvs_file_store *, uint32_t at, int *fd); /* while it is held; 0 or an errno */
/* Descriptors of segments are kept and given up by these alone; take: -1 if it is not open. */
void kvs_file_descriptor_keep_locked(struct kvs_file_store *, uint32_t at, int fd);
int kvs_file_descriptor_take_locked(struct kvs_file_store *, uint32_t at);
bool kvs_file_descriptor_give_up(struct kvs_file_store *);              /* close one that is not held; false: none */
void kvs_file_descriptors_trim(struct kvs_file_store *, unsigned room); /* to the share, with room for so many more */

#endif
