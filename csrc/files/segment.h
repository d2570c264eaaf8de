/* The segments in a store's directories.
 *
 * A segment is opened when it is used, and stays open until other segments need its descriptor: all stores of a process
 * together keep a quarter of the descriptors that the process may have, and close those that were not used lately. A
 * request holds its segment from before its begin to its end. */
#ifndef KVS_FILE_SEGMENT_H
#define KVS_FILE_SEGMENT_H

#include "files/store.h"

void kvs_file_segment_name(uint32_t number, char name[32]);
bool kvs_file_segment_number(const char *name, uint32_t *number); /* false: it is no segment's name */
/* Numbers of the segments of a directory that are not open, ascending; the caller frees the list. */
int kvs_file_list_segments(struct kvs_file_store *, unsigned root, uint32_t **numbers, size_t *count,
                           struct kvs_error *);
int kvs_file_most_segments(const struct kvs_file_store *, uint64_t *most, struct kvs_error *); /* within capacity */
int kvs_file_size_segments(struct kvs_file_store *, struct kvs_error *); /* room for the list of segments */
void kvs_file_remove_old_segments(struct kvs_file_store *);              /* at open, if the capacity was reduced */
int kvs_file_adopt_new(struct kvs_file_store *, struct kvs_error *);     /* add new segments, mark unlinked ones */
int kvs_file_adopt_from(struct kvs_file_store *, unsigned root, struct kvs_error *); /* the same, of one directory */
bool kvs_file_note_removed(struct kvs_file_store *, unsigned root); /* whether any segment was unlinked since */
void kvs_file_close_removed(struct kvs_file_store *);               /* close unlinked segments that no transfer uses */
bool kvs_file_in_use_locked(const struct kvs_file_store *, const struct kvs_file_segment *); /* by a transfer */
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
/* Make a segment with the first unused number from *number on; it is not listed. 0 or an errno. One thread, no lock. */
int kvs_file_segment_make(struct kvs_file_store *, unsigned root, uint32_t *number, int *fd);
/* Under lock; 0 or ENOMEM. *at: its position in the list. */
int kvs_file_segment_append(struct kvs_file_store *, unsigned root, uint32_t number, int fd, uint64_t inode, bool cut,
                            uint32_t *at);
/* Of a truncated file: reserve its space and write its first page again. 0 or an errno. Own segments only; no lock. */
int kvs_file_segment_repair(struct kvs_file_store *, uint32_t at);
int kvs_file_erase(struct kvs_file_store *, int fd, uint64_t offset); /* zero a header page: 0 or an errno */

#endif
