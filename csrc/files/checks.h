/* Settings, paths, whole pages, and what makes a file not the store's. */
#ifndef KVS_FILE_CHECKS_H
#define KVS_FILE_CHECKS_H

#include "files/state.h"

int kvs_file_check_settings(const struct kvs_file_settings *, struct kvs_error *);
uint64_t kvs_file_segment_size(const struct kvs_file_settings *); /* that is asked for, or a good one */
/* Other writers are looked for by a path: a later chdir() must change nothing. The caller frees it; NULL: no memory. */
char *kvs_file_absolute_path(const char *path);
void kvs_file_writer_path(const char *directory, uint32_t number, char *path, size_t room); /* in a shared one */
void kvs_file_segment_name(uint32_t number, char name[32]);
/* Move a whole page: 0 or an errno. The store's own files are never opened with O_DIRECT. */
int kvs_file_move_page(struct kvs_file_store *, int fd, bool write, uint64_t offset, void *page, bool dsync);
/* Whether a call failed because the disk refuses to be written: what is on it may still be read. */
bool kvs_file_refuses_writes(int status, int code);
int kvs_file_refuse_empty(const struct kvs_file_store *, struct kvs_error *); /* at open, where it cannot be written */
/* Refuse files that other users may write. `name`: in the directory; empty: the directory itself. */
int kvs_file_refuse_writable_by_others(const struct kvs_file_root *, int fd, const char *name, struct kvs_error *);
bool kvs_file_same_layout(const struct kvs_file_geometry *, const struct kvs_file_geometry *);
int kvs_file_refuse_layout(const struct kvs_file_store *, const struct kvs_file_root *,
                           const struct kvs_file_geometry *there, const char *name, struct kvs_error *);

#endif
