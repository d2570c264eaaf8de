/* Reads and writes of whole pages, and what makes a file not the store's. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files/store.h"

int kvs_file_move_page(struct kvs_file_store *store, int fd, bool write, uint64_t offset, void *page, bool dsync) {
  struct kvs_file_span span = {
      .fd = fd, .write = write, .dsync = dsync, .offset = offset, .pieces = {{page, KVS_FILE_PAGE}}, .npieces = 1};
  return kvs_file_move(&store->faults, &span, store->direct);
}

/* A checksum does not protect against deliberate changes. Root always has access. */
int kvs_file_refuse_writable_by_others(const struct kvs_file_root *root, int fd, const char *name,
                                       struct kvs_error *err) {
  const char *slash = *name ? "/" : "";
  struct stat info;
  if (fstat(fd, &info)) return kvs_file_fail(err, errno, "looking at %.200s%s%s", root->path, slash, name);
  const bool folder = S_ISDIR(info.st_mode);
  const unsigned mode = info.st_mode & 07777;
  if (info.st_uid != geteuid() && info.st_uid != 0)
    return kvs_fail(err, KVS_FILE,
                    "%.200s%s%s belongs to user %u, and this process is user %u: what another user may write is not "
                    "trusted; run as that user, or chown it, or use another directory",
                    root->path, slash, name, (unsigned)info.st_uid, (unsigned)geteuid());
  if (mode & (S_IWGRP | S_IWOTH))
    return kvs_fail(err, KVS_FILE, "%.200s%s%s may be written by other users (mode %04o): chmod %s it", root->path,
                    slash, name, mode, folder ? "700" : "600");
  return KVS_OK;
}

bool kvs_file_same_layout(const struct kvs_file_geometry *a, const struct kvs_file_geometry *b) {
  return a->block_nbytes == b->block_nbytes && strcmp(a->layout, b->layout) == 0;
}

// The end of a path, which tells directories apart where there is no room for all of it.
static const char *end_of_path(const char *path, size_t room) {
  size_t length = strlen(path);
  return length > room ? path + length - room : path;
}

int kvs_file_refuse_layout(const struct kvs_file_store *store, const struct kvs_file_root *root,
                           const struct kvs_file_geometry *there, const char *name, struct kvs_error *err) {
  return kvs_fail(err, KVS_INVALID,
                  "%s holds blocks of another layout (%s), which are left alone: there '%.90s', %llu bytes a block; "
                  "asked for '%.90s', %llu bytes",
                  end_of_path(root->path, 80), name, there->layout, (unsigned long long)there->block_nbytes,
                  store->geometry.layout, (unsigned long long)store->geometry.block_nbytes);
}

void kvs_file_writer_path(const char *directory, uint32_t number, char *path, size_t room) {
  snprintf(path, room, "%s/writer-%04u", directory, number);
}
