/* The segments in a store's directories. */
#ifndef KVS_FILE_SEGMENT_H
#define KVS_FILE_SEGMENT_H

#include "files/state.h"

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
/* Make a segment with the first unused number from *number on; it is not listed. 0 or an errno. One thread, no lock. */
int kvs_file_segment_make(struct kvs_file_store *, unsigned root, uint32_t *number, int *fd);
/* Under lock; 0 or ENOMEM. *at: its position in the list. */
int kvs_file_segment_append(struct kvs_file_store *, unsigned root, uint32_t number, int fd, uint64_t inode, bool cut,
                            uint32_t *at);
/* Of a truncated file: reserve its space and write its first page again. 0 or an errno. Own segments only; no lock. */
int kvs_file_segment_repair(struct kvs_file_store *, uint32_t at);
int kvs_file_erase(struct kvs_file_store *, int fd, uint64_t offset); /* zero a header page: 0 or an errno */

#endif
