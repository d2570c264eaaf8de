/* See files/survey.h. */
#include "files/survey.h"
#include "files/checks.h"
#include "files/segment.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char store_name[] = "store.kvs";
enum {
  DEPTH = 3,            /* LMCache's is the deepest: SIZE/LAYOUT/writer-NNNN */
  MOST_FOREIGN = 1024,  /* names that are none of a store's, after which a folder is left */
  MOST_WRITERS = 65536, /* looked at */
  NAME_ROOM = 256,
  NONE = -1,
};

int64_t kvs_file_byte_of(uint64_t inode) {
  return (int64_t)(((uint64_t)1 << 62) | (inode & (((uint64_t)1 << 62) - 1)));
}

static bool runs(int bound, uint64_t inode) {
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = kvs_file_byte_of(inode), .l_len = 1};
  return fcntl(bound, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* -- looking ------------------------------------------------------------------------------------------------------- */

/* A folder on the way down. */
struct place {
  const char *path; /* below the directory */
  const char *name;
  unsigned depth;
  uint32_t *outer;   /* the identity of the writers in the folder above; UINT32_MAX: none yet */
  uint32_t identity; /* the same of the folders in this one */
  int64_t writer;    /* its place in the list; NONE: no file of a store was found yet */
};

static bool grow(void *array, size_t *capacity, size_t count, size_t size) {
  void **items = array;
  if (count < *capacity) return true;
  size_t bigger = *capacity ? 2 * *capacity : 64;
  void *grown = realloc(*items, bigger * size);
  if (!grown) return false;
  *items = grown;
  *capacity = bigger;
  return true;
}

static bool is_writer_name(const char *name) {
  unsigned number;
  char again[32];
  if (sscanf(name, "writer-%4u", &number) != 1) return false;
  snprintf(again, sizeof again, "writer-%04u", number);
  return strcmp(name, again) == 0;
}

/* The folder's writer, listed at the first file of a store in it; NULL: no memory. */
static struct kvs_file_surveyed_writer *writer_of(struct kvs_file_survey *survey, struct place *place) {
  if (place->writer != NONE) return &survey->writers[place->writer];
  if (!grow(&survey->writers, &survey->writers_capacity, survey->nwriters, sizeof *survey->writers)) return NULL;
  const bool shared = is_writer_name(place->name);
  uint32_t *identity = shared ? place->outer : &place->identity;
  char *path = strdup(place->path);
  if (!path) return NULL;
  if (*identity == UINT32_MAX) *identity = survey->identities++;
  place->writer = (int64_t)survey->nwriters;
  survey->writers[survey->nwriters] = (struct kvs_file_surveyed_writer){
      .path = path, .identity = *identity, .shared = shared, .folder = -1, .state = -1};
  return &survey->writers[survey->nwriters++];
}

static int add_file(struct kvs_file_survey *survey, struct place *place, const struct stat *info, int64_t number) {
  struct kvs_file_surveyed_writer *writer = writer_of(survey, place);
  if (!writer) return ENOMEM;
  if (number == NONE) {
    writer->inode = info->st_ino;
    return 0;
  }
  if (!grow(&survey->segments, &survey->segments_capacity, survey->nsegments, sizeof *survey->segments)) return ENOMEM;
  const uint64_t nbytes = (uint64_t)info->st_size;
  survey->segments[survey->nsegments++] =
      (struct kvs_file_surveyed_segment){.nbytes = nbytes,
                                         .used_ns = info->st_mtim.tv_sec * 1000000000ll + info->st_mtim.tv_nsec,
                                         .writer = (uint32_t)place->writer,
                                         .number = (uint32_t)number};
  writer->nbytes += nbytes;
  survey->nbytes += nbytes;
  if (nbytes > writer->segment_nbytes) writer->segment_nbytes = nbytes;
  return 0;
}

static int look_into(struct kvs_file_survey *survey, int folder, struct place *place);

/* A folder that cannot be opened has nothing that this process could count or remove. */
static int look_below(struct kvs_file_survey *survey, int folder, struct place *above, const char *name) {
  const int fd = openat(folder, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  char path[DEPTH * NAME_ROOM];
  if (fd < 0) return errno == EMFILE || errno == ENFILE || errno == ENOMEM ? errno : 0;
  snprintf(path, sizeof path, "%s%s%s", above->path, *above->path ? "/" : "", name);
  struct place place = {.path = path,
                        .name = name,
                        .depth = above->depth - 1,
                        .outer = &above->identity,
                        .identity = UINT32_MAX,
                        .writer = NONE};
  return look_into(survey, fd, &place);
}

/* *foreign counts the names that are none of a store's. */
static int look_at(struct kvs_file_survey *survey, int folder, struct place *place, const struct dirent *entry,
                   unsigned *foreign) {
  uint32_t number;
  struct stat info;
  const bool segment = kvs_file_segment_number(entry->d_name, &number);
  if (segment || strcmp(entry->d_name, store_name) == 0) {
    if (fstatat(folder, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) || !S_ISREG(info.st_mode)) return 0;
    return add_file(survey, place, &info, segment ? (int64_t)number : NONE);
  }
  if (entry->d_name[0] == '.') return 0;
  if (place->depth && (entry->d_type == DT_DIR || entry->d_type == DT_UNKNOWN))
    return look_below(survey, folder, place, entry->d_name);
  *foreign += place->depth < DEPTH;
  return 0;
}

/* Closes the folder. */
static int look_into(struct kvs_file_survey *survey, int folder, struct place *place) {
  unsigned foreign = 0;
  int code = 0;
  DIR *dir = fdopendir(folder);
  if (!dir) {
    code = errno;
    close(folder);
    return code;
  }
  for (struct dirent *entry; !code && foreign < MOST_FOREIGN && survey->nwriters < MOST_WRITERS;) {
    if ((entry = readdir(dir)) == NULL) break;
    code = look_at(survey, dirfd(dir), place, entry, &foreign);
  }
  closedir(dir);
  return code;
}

int kvs_file_survey_make(struct kvs_file_survey *survey, int folder, int bound, uint64_t own) {
  struct place place = {.path = "", .name = "", .depth = DEPTH, .identity = UINT32_MAX, .writer = NONE};
  *survey = (struct kvs_file_survey){.folder = folder};
  const int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int code = fd < 0 ? errno : look_into(survey, fd, &place);
  survey->writers_of = calloc(survey->identities + 1, sizeof *survey->writers_of);
  if (!survey->writers_of) code = ENOMEM;
  for (size_t i = 0; i < survey->nwriters; i++) {
    struct kvs_file_surveyed_writer *writer = &survey->writers[i];
    writer->own = own && writer->inode == own;
    writer->runs = writer->own || (bound >= 0 && writer->inode && runs(bound, writer->inode));
  }
  return code;
}

/* The locks of an owner's file end with its descriptors. */
void kvs_file_survey_free(struct kvs_file_survey *survey) {
  for (size_t i = 0; i < survey->nwriters; i++) {
    struct kvs_file_surveyed_writer *writer = &survey->writers[i];
    if (writer->state >= 0) (void)flock(writer->state, LOCK_UN); /* a forked child may have a copy */
    if (writer->state >= 0) close(writer->state);
    if (writer->folder >= 0) close(writer->folder);
    free(writer->path);
  }
  free(survey->writers);
  free(survey->segments);
  free(survey->writers_of);
}

struct kvs_file_surveyed_writer *kvs_file_survey_own(const struct kvs_file_survey *survey) {
  for (size_t i = 0; i < survey->nwriters; i++)
    if (survey->writers[i].own) return &survey->writers[i];
  return NULL;
}

/* -- shares -------------------------------------------------------------------------------------------------------- */

static bool takes_part(const struct kvs_file_surveyed_writer *writer) {
  return writer->runs && (writer->nbytes || writer->own);
}

void kvs_file_survey_share(struct kvs_file_survey *survey, uint64_t limit) {
  uint64_t identities = 0;
  memset(survey->writers_of, 0, survey->identities * sizeof *survey->writers_of);
  for (size_t i = 0; i < survey->nwriters; i++) {
    const struct kvs_file_surveyed_writer *writer = &survey->writers[i];
    if (takes_part(writer)) identities += survey->writers_of[writer->identity]++ == 0;
  }
  for (size_t i = 0; i < survey->nwriters; i++) {
    struct kvs_file_surveyed_writer *writer = &survey->writers[i];
    writer->share = takes_part(writer) ? limit / identities / survey->writers_of[writer->identity] : 0;
  }
}

uint64_t kvs_file_survey_half(const struct kvs_file_surveyed_writer *writer) {
  const uint64_t part = writer->segment_nbytes ? writer->segment_nbytes : 1;
  return (writer->share / 2 + part - 1) / part * part;
}

uint64_t kvs_file_survey_kept_free(const struct kvs_file_survey *survey,
                                   const struct kvs_file_surveyed_writer *except) {
  uint64_t nbytes = 0;
  for (size_t i = 0; i < survey->nwriters; i++) {
    const struct kvs_file_surveyed_writer *writer = &survey->writers[i];
    if (!writer->share || writer == except) continue;
    const uint64_t half = kvs_file_survey_half(writer);
    nbytes += half > writer->nbytes ? half - writer->nbytes : 0;
  }
  return nbytes;
}

/* -- reclaiming ---------------------------------------------------------------------------------------------------- */

/* Lock a writer that does not run, as its next process would. False: it is left alone. */
static bool take(struct kvs_file_survey *survey, struct kvs_file_surveyed_writer *writer,
                 struct kvs_file_faults *faults) {
  const struct kvs_file_root root = {.path = writer->path};
  struct kvs_error ignored;
  struct stat info;
  if (writer->state >= 0) return true;
  if (writer->refused || writer->runs || !writer->inode) return false;
  writer->refused = true;
  if (writer->folder < 0)
    writer->folder =
        openat(survey->folder, *writer->path ? writer->path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (writer->folder < 0 || kvs_file_refuse_writable_by_others(&root, writer->folder, "", &ignored)) return false;
  int fd;
  if (kvs_file_openat(faults, writer->folder, store_name, O_RDWR, &fd)) return false;
  if (kvs_file_refuse_writable_by_others(&root, fd, store_name, &ignored) || flock(fd, LOCK_EX | LOCK_NB) ||
      fstat(fd, &info) || info.st_ino != writer->inode) {
    close(fd);
    return false;
  }
  writer->refused = false;
  writer->state = fd;
  return true;
}

/* Only a file that is a segment of this format, whatever its name says. */
static bool remove_segment(const struct kvs_file_surveyed_writer *writer, uint32_t number,
                           struct kvs_file_faults *faults) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  struct kvs_file_geometry there;
  char name[32];
  int fd;
  kvs_file_segment_name(number, name);
  if (kvs_file_openat(faults, writer->folder, name, O_RDONLY, &fd)) return false;
  const bool whole = pread(fd, page, sizeof page, 0) == (ssize_t)sizeof page;
  const bool ours = whole && kvs_file_geometry_read(page, true, &there) == KVS_FILE_GOOD && there.segment == number;
  close(fd);
  return ours && unlinkat(writer->folder, name, 0) == 0;
}

static int by_use(const void *a, const void *b) {
  const struct kvs_file_surveyed_segment *left = a, *right = b;
  if (left->used_ns != right->used_ns) return left->used_ns > right->used_ns ? 1 : -1;
  return (left->number > right->number) - (left->number < right->number);
}

/* The folder around a writer's, if it is empty and not the directory itself. */
static void remove_outer(const struct kvs_file_survey *survey, const char *path) {
  const char *end = strrchr(path, '/');
  char outer[DEPTH * NAME_ROOM];
  if (!end) return;
  snprintf(outer, sizeof outer, "%.*s", (int)(end - path), path);
  (void)unlinkat(survey->folder, outer, AT_REMOVEDIR);
}

/* A shared store that no process has open and that has no segment left: its writers' folders would stay for ever. */
static void remove_folders(struct kvs_file_survey *survey, uint32_t identity, struct kvs_file_faults *faults) {
  static const char *const names[] = {store_name, "notices.kvs", "new.tmp"};
  bool all = true;
  for (size_t i = 0; i < survey->nwriters; i++) {
    struct kvs_file_surveyed_writer *writer = &survey->writers[i];
    if (writer->identity == identity) all = all && writer->shared && !writer->nbytes && take(survey, writer, faults);
  }
  for (size_t i = 0; all && i < survey->nwriters; i++) {
    const struct kvs_file_surveyed_writer *writer = &survey->writers[i];
    if (writer->identity != identity) continue;
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) (void)unlinkat(writer->folder, names[k], 0);
    (void)unlinkat(survey->folder, writer->path, AT_REMOVEDIR);
    remove_outer(survey, writer->path);
  }
}

uint64_t kvs_file_survey_reclaim(struct kvs_file_survey *survey, struct kvs_file_faults *faults, uint64_t nbytes,
                                 uint64_t *removed) {
  uint64_t freed = 0;
  if (survey->nsegments) qsort(survey->segments, survey->nsegments, sizeof *survey->segments, by_use);
  for (size_t i = 0; i < survey->nsegments && freed < nbytes; i++) {
    struct kvs_file_surveyed_segment *segment = &survey->segments[i];
    struct kvs_file_surveyed_writer *writer = &survey->writers[segment->writer];
    if (!segment->nbytes || !take(survey, writer, faults) || !remove_segment(writer, segment->number, faults)) continue;
    freed += segment->nbytes;
    writer->nbytes -= segment->nbytes;
    segment->nbytes = 0;
    ++*removed;
    if (!writer->nbytes) remove_folders(survey, writer->identity, faults);
  }
  survey->nbytes -= freed;
  return freed;
}
