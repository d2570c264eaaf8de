/* Settings, reads and writes of whole pages, and what makes a file not the store's. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codecs/coding.h"
#include "files/checks.h"
#include "files/state.h"

enum { MOST_DEPTH = 256 };

int kvs_file_move_page(struct kvs_file_store *store, int fd, bool write, uint64_t offset, void *page, bool dsync) {
  struct kvs_file_span span = {
      .fd = fd, .write = write, .dsync = dsync, .offset = offset, .pieces = {{page, KVS_FILE_PAGE}}, .npieces = 1};
  return kvs_file_move(&store->faults, &span, store->direct);
}

static int check_codings(const struct kvs_file_settings *s, struct kvs_error *err) {
  uint64_t nbytes = 0;
  if (s->ncodings > KVS_FILE_CODINGS)
    return kvs_fail(err, KVS_INVALID, "%zu codings are given: at most %d", s->ncodings, KVS_FILE_CODINGS);
  for (size_t i = 0; i < s->ncodings; i++) {
    const char *text = kvs_coding_text(s->codings[i]);
    nbytes += kvs_coding_nbytes(s->codings[i]);
    if (!strstr(s->layout, text))
      return kvs_fail(err, KVS_INVALID, "the layout does not say how the blocks are coded: it holds no %.150s", text);
  }
  if (nbytes == s->block_nbytes) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "block_nbytes is %llu; a block is coded to %llu bytes",
                  (unsigned long long)s->block_nbytes, (unsigned long long)nbytes);
}

int kvs_file_check_settings(const struct kvs_file_settings *s, struct kvs_error *err) {
  if (!s->directory[0]) return kvs_fail(err, KVS_INVALID, "directory is empty");
  if (s->nmore >= KVS_FILE_DIRECTORIES)
    return kvs_fail(err, KVS_INVALID, "a store has %zu directories: at most %d", s->nmore + 1, KVS_FILE_DIRECTORIES);
  if (s->shared && (s->nmore || s->readonly))
    return kvs_fail(err, KVS_INVALID, "a shared store has one directory, and its readers open it with `shared` too");
  for (size_t i = 0; i < s->nmore; i++)
    if (!s->more[i][0]) return kvs_fail(err, KVS_INVALID, "directory %zu is empty", i + 1);
  if (strlen(s->layout) > KVS_FILE_LAYOUT_NBYTES)
    return kvs_fail(err, KVS_INVALID, "the layout's text has %zu bytes: at most %d", strlen(s->layout),
                    KVS_FILE_LAYOUT_NBYTES);
  if (s->block_nbytes == 0 || s->block_nbytes > KVS_FILE_BLOCK_NBYTES)
    return kvs_fail(err, KVS_INVALID, "block_nbytes is %llu: must be 1 to 2**40", (unsigned long long)s->block_nbytes);
  if (s->ncodings && check_codings(s, err)) return KVS_INVALID;
  if (s->depth > MOST_DEPTH) return kvs_fail(err, KVS_INVALID, "depth is %u: must be 1 to %d", s->depth, MOST_DEPTH);
  return KVS_OK;
}

bool kvs_file_refuses_writes(int status, int code) {
  return status == KVS_FILE &&
         (code == ENOSPC || code == EDQUOT || code == EROFS || code == EACCES || code == EPERM || code == EFBIG);
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

enum { SHOWN = 90 };

/* Where to begin to show two texts, so that what differs is among the SHOWN characters: near the first difference. */
static size_t shown_from(const char *a, const char *b) {
  size_t same = 0;
  if (strlen(a) <= SHOWN && strlen(b) <= SHOWN) return 0;
  while (a[same] && a[same] == b[same]) same++;
  return same < SHOWN / 2 ? 0 : same - SHOWN / 2;
}

int kvs_file_refuse_layout(const struct kvs_file_store *store, const struct kvs_file_root *root,
                           const struct kvs_file_geometry *there, const char *name, struct kvs_error *err) {
  const size_t from = shown_from(there->layout, store->geometry.layout);
  const char *cut = from ? "..." : "";
  return kvs_fail(err, KVS_INVALID,
                  "%s holds blocks of another layout (%s), which are left alone: there '%s%.90s', %llu bytes a block; "
                  "asked for '%s%.90s', %llu bytes",
                  end_of_path(root->path, 80), name, cut, there->layout + from, (unsigned long long)there->block_nbytes,
                  cut, store->geometry.layout + from, (unsigned long long)store->geometry.block_nbytes);
}

void kvs_file_writer_path(const char *directory, uint32_t number, char *path, size_t room) {
  snprintf(path, room, "%s/writer-%04u", directory, number);
}

/* Where nothing was stored the store is refused with the error of the write. */
int kvs_file_refuse_empty(const struct kvs_file_store *store, struct kvs_error *err) {
  bool any = !store->refusal || store->npeers || store->nsegments;
  for (unsigned i = 0; i < store->nroots; i++) any |= !store->roots[i].fresh;
  return any ? KVS_OK : kvs_fail(err, KVS_FILE, "%.200s is no store: it has no files", store->settings.directory);
}

char *kvs_file_absolute_path(const char *path) {
  char *here = path[0] == '/' ? NULL : getcwd(NULL, 0), *whole;
  if (!here) return strdup(path);
  if (asprintf(&whole, "%s/%s", here, path) < 0) whole = NULL;
  free(here);
  return whole;
}

/* About sixteen segments fill the capacity, so at most a tenth is unused; segments are neither tiny nor huge. Stores
 * that share a directory have smaller ones, because they give room to each other in whole segments. */
uint64_t kvs_file_segment_size(const struct kvs_file_settings *s) {
  const bool bound = s->bound || s->shared;
  const uint64_t least = bound ? 1ull << 20 : 16ull << 20, most = 1ull << 30;
  uint64_t nbytes = s->capacity / (bound ? 64 : 16);
  if (s->segment_nbytes)
    nbytes = s->segment_nbytes;
  else
    nbytes = nbytes < least ? least : nbytes > most ? most : nbytes;
  return nbytes < s->capacity || s->readonly ? nbytes : s->capacity;
}

void kvs_file_segment_name(uint32_t number, char name[32]) { snprintf(name, 32, "segment-%08u.kvs", number); }
