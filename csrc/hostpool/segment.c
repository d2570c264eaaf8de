/* Segments: files in /dev/shm through which processes share memory.
 *
 * A segment is created without a name, filled, and then linked to its name; linking fails if the name exists. So a
 * segment exists with a complete header or not at all, and of several creators one wins. The header never changes.
 *
 * The owner holds a lock on the file (fcntl, of an open file description) until it ends; a segment that is not locked
 * is stale. Pids do not tell: a container that is started again has a pid namespace of its own, and finds the segments
 * of the one before. The only reference to the locked description is a mapping that children of fork() do not get and
 * that exec() removes, so that the lock ends with the owner, and not with its children; nor does a program that closes
 * all its descriptors lose it. Another process may replace a stale segment at any time, so a process that removes one
 * locks the file (flock, which is independent of the owner's lock) and then checks that the name still refers to it.
 *
 * A segment with an index belongs to all processes that have opened it: each holds a shared lock, and the last one that
 * leaves removes the name. One that joins takes its lock under flock, so that the last one does not leave meanwhile. */
#include "hostpool/segment.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/owner.h"
#include "base/wait.h"
#include "hostpool/budget.h"
#include "hostpool/map.h"

#define FOLDER "/dev/shm"
#define PREFIX "kvswap."

enum {
  VERSION = 3,
  UNLOCKED_VERSION = 1,
  NAME_NBYTES = 100,
  TRIES = 1000,
  LOCK_TRIES = 80,
  PAUSE_NS = 10 * 1000 * 1000
};
static const char MAGIC[8] = {'K', 'V', 'S', 'W', 'S', 'H', 'M', '\n'};

struct header {
  /* The same in every version, so that each version can remove stale segments of all others. In version 1 the owner has
   * no lock, and its pid and start time say whether it lives; later they are for messages. */
  char magic[8];
  uint32_t version, header_nbytes;
  int64_t owner_pid;
  uint64_t owner_start; /* as in /proc/<pid>/stat; 0: unknown */
  uint64_t pid_space;   /* id of the owner's pid namespace */
  uint64_t generation;
  /* Specific to this version. */
  uint64_t num_blocks, slot_nbytes, layers, layer_first;
  uint64_t words_offset, data_offset, file_nbytes;
  uint64_t index_offset, index_nbytes; /* index_nbytes 0: no index */
};

/* -- owners ---------------------------------------------------------------------------------------------------- */

static uint64_t pid_space(void) {
  struct stat stat_of;
  return stat("/proc/self/ns/pid", &stat_of) == 0 ? stat_of.st_ino : 0;
}

static const struct flock OWNERS_LOCK = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};

/* Whether a process holds an owner's lock, shared or not. Takes no lock, so that no two askers see each other. */
static bool is_owned(int fd) {
  struct flock lock = OWNERS_LOCK;
  return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

static bool stale(int fd, const struct header *header) {
  if (is_owned(fd)) return false;
  return header->version != UNLOCKED_VERSION ||
         (header->pid_space == pid_space() && !kvs_process_alive(header->owner_pid, header->owner_start));
}

/* -- existing segments ----------------------------------------------------------------------------------------- */

/* Open the file and read its header. folder: AT_FDCWD, or where the path begins. KVS_RANGE: not found. */
static int look(int folder, const char *path, int *fd, struct stat *stat_of, struct header *header,
                struct kvs_error *err) {
  *fd = openat(folder, path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
  if (*fd < 0 && errno == ENOENT) return kvs_fail(err, KVS_RANGE, "there is no shared pool at %s", path);
  if (*fd < 0 && (errno == EACCES || errno == EPERM))
    return kvs_fail(err, KVS_UNSUPPORTED, "%s belongs to another user, who alone may use it (%s)", path,
                    strerror(errno));
  if (*fd < 0) return kvs_fail(err, KVS_UNSUPPORTED, "%s cannot be opened: %s", path, strerror(errno));
  int status = KVS_OK;
  ssize_t n = pread(*fd, header, sizeof *header, 0);
  if (fstat(*fd, stat_of) != 0 || !S_ISREG(stat_of->st_mode))
    status = kvs_fail(err, KVS_UNSUPPORTED, "%s is no file", path);
  else if (stat_of->st_uid != geteuid())
    status = kvs_fail(err, KVS_UNSUPPORTED, "%s belongs to user %u, and only memory of one's own user is trusted", path,
                      (unsigned)stat_of->st_uid);
  else if (stat_of->st_mode & 077)
    status = kvs_fail(err, KVS_UNSUPPORTED, "%s can be opened by other users (mode %o): it is not one of kvswap's",
                      path, (unsigned)stat_of->st_mode & 0777);
  else if (n != (ssize_t)sizeof *header || memcmp(header->magic, MAGIC, sizeof MAGIC) != 0)
    status = kvs_fail(err, KVS_INVALID, "%s is no shared pool of kvswap; if nobody needs it, remove it", path);
  if (status) close(*fd);
  return status;
}

/* Whether the name still refers to that file. While the file is locked, no other process removes it. */
static bool still_there(int folder, const char *path, const struct stat *file) {
  struct stat named;
  return fstatat(folder, path, &named, AT_SYMLINK_NOFOLLOW) == 0 && named.st_ino == file->st_ino &&
         named.st_dev == file->st_dev;
}

static bool lock_file(int fd, int tries) {
  while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (--tries <= 0) return false;
    nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
  }
  return true;
}

/* Unlink a name and close the file. stale_of: only if it is still stale; NULL: in any case. KVS_NOT_READY: the name
 * refers to another file, or the file is not stale. KVS_TIMEOUT: another process holds the lock. */
static int remove_name(int folder, const char *path, int fd, const struct stat *file, const struct header *stale_of,
                       int tries, struct kvs_error *err) {
  int status = KVS_NOT_READY;
  if (!lock_file(fd, tries))
    status = kvs_fail(err, KVS_TIMEOUT,
                      "%s was left behind by a process that died, and another one that is about to remove it does not "
                      "go on: end that (fuser names it), or take another name",
                      path);
  else if ((!stale_of || stale(fd, stale_of)) && still_there(folder, path, file) && unlinkat(folder, path, 0) == 0)
    status = KVS_OK;
  close(fd);
  return status;
}

int kvs_shared_file_lock(const struct kvs_shared_file *segment, int *fd, struct kvs_error *err) {
  struct stat file = {.st_ino = segment->inode, .st_dev = segment->device};
  *fd = open(segment->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (*fd < 0 || !still_there(AT_FDCWD, segment->path, &file)) {
    if (*fd >= 0) close(*fd);
    return kvs_fail(err, KVS_CLOSED, "%s was removed meanwhile", segment->path);
  }
  if (lock_file(*fd, LOCK_TRIES)) return KVS_OK;
  close(*fd);
  return kvs_fail(err, KVS_TIMEOUT, "%s is locked by another process that does not go on (fuser names it)",
                  segment->path);
}

/* -- cleaning -------------------------------------------------------------------------------------------------- */

/* The length of /proc/<process>/root at the start of a path; 0: the path begins otherwise. */
static size_t other_root(const char *path) {
  int length = 0;
  (void)sscanf(path, "/proc/%*[a-z0-9-]/root%n", &length);
  return path[length] == '/' || path[length] == '\0' ? (size_t)length : 0;
}

/* Open a folder one component after the other: another container's links would lead elsewhere here. The only link that
 * is followed is /proc/<process>/root, which leads to the files that the process sees. -1: errno. */
static int open_folder(const char *path) {
  char part[NAME_MAX + 2]; /* so that a name that is too long stays so */
  size_t length = other_root(path);
  snprintf(part, sizeof part, "%.*s", length ? (int)length : 1, length || path[0] == '/' ? path : ".");
  int folder = path[0] ? open(part, O_PATH | O_DIRECTORY | O_CLOEXEC) : (errno = ENOENT, -1);
  for (bool last = false; folder >= 0 && !last;) {
    path += length;
    path += strspn(path, "/");
    length = strcspn(path, "/");
    last = length == 0;
    snprintf(part, sizeof part, "%.*s", last ? 1 : (int)length, last ? "." : path);
    int next = openat(folder, part, (last ? O_RDONLY : O_PATH) | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int code = errno;
    close(folder);
    errno = code;
    folder = next;
  }
  return folder;
}

/* Remove a segment if it is stale. */
static bool clean_one(int folder, const char *name) {
  struct header header;
  struct stat stat_of;
  struct kvs_error ignored;
  int fd;
  if (look(folder, name, &fd, &stat_of, &header, &ignored)) return false;
  if (stale(fd, &header)) return remove_name(folder, name, fd, &stat_of, &header, 1, &ignored) == KVS_OK;
  close(fd);
  return false;
}

/* Closes the folder. */
static size_t clean_folder(int fd, char *names, size_t capacity) {
  DIR *folder = fdopendir(fd);
  size_t count = 0, used = 0;
  if (!folder) close(fd);
  if (capacity) names[0] = '\0';
  for (struct dirent *entry; folder && (entry = readdir(folder)) != NULL;) {
    size_t n = strlen(entry->d_name);
    if (strncmp(entry->d_name, PREFIX, strlen(PREFIX)) != 0 || n > strlen(PREFIX) + NAME_NBYTES) continue;
    if (capacity && used + n + 2 > capacity) break;
    if (!clean_one(fd, entry->d_name)) continue;
    count++;
    if (capacity) used += (size_t)snprintf(names + used, capacity - used, "%s\n", entry->d_name + strlen(PREFIX));
  }
  if (folder) closedir(folder);
  return count;
}

size_t kvs_shared_clean(char *names, size_t capacity) {
  int folder = open(FOLDER, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (capacity) names[0] = '\0';
  return folder < 0 ? 0 : clean_folder(folder, names, capacity);
}

int kvs_shared_clean_folder(const char *path, char *names, size_t capacity, size_t *count, struct kvs_error *err) {
  int folder = open_folder(path);
  if (folder < 0)
    return kvs_fail(err, KVS_INVALID,
                    "root is '%.150s', which is no folder that can be opened: %s. Symbolic links are "
                    "not followed, other than /proc/<process>/root",
                    path, strerror(errno));
  *count = clean_folder(folder, names, capacity);
  return KVS_OK;
}

/* -- owning ---------------------------------------------------------------------------------------------------- */

/* fork() takes the lock: else a child could be made with a descriptor of own(). */
static pthread_mutex_t owned_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvs_shared_file *owned; /* guarded by owned_lock: segments that are unlinked at exit */

static void forked(void) { owned = NULL; }

/* Lock the file, whose only reference to the locked description is then a mapping of one page. 0 or an errno. */
static int lock_as_owner_locked(struct kvs_shared_file *segment, const char *path) {
  uint64_t nbytes = kvs_page_nbytes(KVS_PAGES_DEFAULT);
  struct flock lock = OWNERS_LOCK;
  int code = 0, fd = open(path, O_RDWR | O_CLOEXEC); /* another description than that of the memory */
  if (fd < 0) return errno;
  if (segment->together) lock.l_type = F_RDLCK;
  void *page = fcntl(fd, F_OFD_SETLK, &lock) == 0 ? mmap(NULL, nbytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
  if (page == MAP_FAILED) {
    code = errno;
  } else if (madvise(page, nbytes, MADV_DONTFORK) != 0) {
    code = errno;
    munmap(page, nbytes);
  } else {
    segment->owners_page = (uint64_t)(uintptr_t)page;
  }
  close(fd);
  return code;
}

static int own(struct kvs_shared_file *segment, const char *path, struct kvs_error *err) {
  static struct kvs_fork_guard guard = {.lock = &owned_lock, .hold = true, .in_child = forked};
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&owned_lock);
  int code = lock_as_owner_locked(segment, path);
  if (!code) {
    segment->owner = true;
    segment->next = owned;
    owned = segment;
  }
  pthread_mutex_unlock(&owned_lock);
  return code ? kvs_fail(err, KVS_UNSUPPORTED, "%s cannot be made: its file cannot be locked: %s", segment->path,
                         strerror(code))
              : KVS_OK;
}

static void disown(struct kvs_shared_file *segment) {
  pthread_mutex_lock(&owned_lock);
  for (struct kvs_shared_file **at = &owned; *at; at = &(*at)->next)
    if (*at == segment) {
      *at = segment->next;
      kvs_pages_unmap(segment->owners_page, kvs_page_nbytes(KVS_PAGES_DEFAULT)); /* the lock ends */
      break;
    }
  pthread_mutex_unlock(&owned_lock);
}

void kvs_shared_file_unlink(struct kvs_shared_file *segment) {
  struct stat file = {.st_ino = segment->inode, .st_dev = segment->device};
  struct kvs_error ignored;
  if (!segment->owner || segment->together || segment->owner_pid != getpid()) return;
  int fd = open(segment->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd >= 0) (void)remove_name(AT_FDCWD, segment->path, fd, &file, NULL, LOCK_TRIES, &ignored);
}

/* One of several owners leaves: the last one removes the name. Where the file cannot be locked, the next process that
 * makes a segment does. */
static void leave(struct kvs_shared_file *segment) {
  struct stat file = {.st_ino = segment->inode, .st_dev = segment->device};
  int fd = open(segment->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  bool locked = fd >= 0 && lock_file(fd, LOCK_TRIES);
  disown(segment);
  if (locked && !is_owned(fd) && still_there(AT_FDCWD, segment->path, &file)) (void)unlink(segment->path);
  if (fd >= 0) close(fd);
}

/* Unlink the segments of pools that were never closed. */
__attribute__((destructor)) static void unlink_owned(void) {
  for (struct kvs_shared_file *segment = owned, *next; segment; segment = next) {
    next = segment->next;
    if (segment->together)
      leave(segment);
    else
      kvs_shared_file_unlink(segment);
  }
}

void kvs_shared_file_close(struct kvs_shared_file *segment) {
  kvs_shared_file_unlink(segment);
  if (segment->together)
    leave(segment);
  else
    disown(segment);
  free(segment);
}

bool kvs_shared_file_owner_alive(const struct kvs_shared_file *segment) {
  struct stat file;
  int fd = segment->owner ? -1 : open(segment->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (segment->owner) return true;
  bool named = fd >= 0 && fstat(fd, &file) == 0 && file.st_ino == segment->inode && file.st_dev == segment->device;
  bool alive = named ? is_owned(fd) : kvs_process_alive(segment->owner_pid, segment->owner_start);
  if (fd >= 0) close(fd);
  return alive;
}

/* -- creating and joining -------------------------------------------------------------------------------------- */

static int check_name(const char *name, struct kvs_error *err) {
  const char *allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  size_t n = strlen(name);
  if (n >= 1 && n <= NAME_NBYTES && strspn(name, allowed) == n) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "name is '%.110s': it has 1 to %d letters, digits, '.', '_' and '-'", name,
                  (int)NAME_NBYTES);
}

static void fill_header(const struct kvs_segment_shape *shape, struct header *header) {
  uint64_t page = kvs_page_nbytes(KVS_PAGES_DEFAULT);
  *header = (struct header){.version = VERSION, .header_nbytes = sizeof *header, .owner_pid = getpid()};
  memcpy(header->magic, MAGIC, sizeof MAGIC);
  header->owner_start = kvs_process_start(header->owner_pid);
  header->pid_space = pid_space();
  header->num_blocks = shape->num_blocks;
  header->slot_nbytes = shape->slot_nbytes;
  header->layers = shape->layers;
  header->layer_first = shape->layer_first;
  header->words_offset = page;
  header->index_offset = kvs_round_up(page + shape->num_blocks * sizeof(uint32_t), page);
  header->index_nbytes = shape->index_nbytes;
  header->data_offset = kvs_round_up(header->index_offset + shape->index_nbytes, page);
  header->file_nbytes = header->data_offset + shape->room_nbytes;
}

/* Map the file, or what is before its blocks, aligned so that its 2 MiB pages can be huge pages in memory. */
static int map_file(struct kvs_shared_file *segment, int fd, const struct header *header, bool blocks,
                    struct kvs_error *err) {
  uint64_t base, nbytes = blocks ? header->file_nbytes : header->data_offset;
  int status = kvs_pages_reserve(nbytes, 0, &base, err);
  if (status) return status;
  if (mmap((void *)(uintptr_t)base, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    status = kvs_fail(err, KVS_NOMEM, "%s cannot be mapped: %s", segment->path, strerror(errno));
    kvs_pages_unmap(base, nbytes);
    return status;
  }
  segment->map_base = base;
  segment->map_nbytes = nbytes;
  segment->index_nbytes = header->index_nbytes;
  segment->index = header->index_nbytes ? (void *)(uintptr_t)(base + header->index_offset) : NULL;
  segment->data_offset = header->data_offset;
  segment->words = (uint32_t *)(uintptr_t)(base + header->words_offset);
  segment->num_blocks = header->num_blocks;
  segment->generation = header->generation;
  segment->owner_pid = header->owner_pid;
  segment->owner_start = header->owner_start;
  return KVS_OK;
}

static int check_room(const struct kvs_host_pool *pool, uint64_t nbytes, struct kvs_error *err) {
  char wanted[KVS_SIZE_TEXT], there[KVS_SIZE_TEXT];
  struct statvfs room;
  int status = pool ? kvs_host_pool_afford(pool, nbytes, err) : KVS_OK;
  if (status || statvfs(FOLDER, &room) != 0) return status;
  uint64_t left = (uint64_t)room.f_bavail * room.f_frsize;
  if (room.f_blocks == 0 || nbytes <= left) return KVS_OK; /* f_blocks 0: unlimited */
  return kvs_fail(
      err, KVS_NOMEM,
      "%s of shared memory do not fit: %s has %s left. Make it larger (mount -o remount,size=..., docker run "
      "--shm-size, an emptyDir of medium Memory in Kubernetes), or ask for less",
      kvs_size_text(nbytes, wanted), FOLDER, kvs_size_text(left, there));
}

/* Make the complete file, without a name. */
static int make_file(const struct kvs_host_pool *pool, struct header *header, int *fd, struct kvs_error *err) {
  int status = check_room(pool, header->file_nbytes, err);
  if (status) return status;
  *fd = open(FOLDER, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (*fd < 0) return kvs_fail(err, KVS_UNSUPPORTED, "no file can be made in %s: %s", FOLDER, strerror(errno));
  do
    if (getrandom(&header->generation, sizeof header->generation, 0) != (ssize_t)sizeof header->generation)
      header->generation = kvs_clock_ns();
  while ((header->generation >>= 1) == 0);
  /* Allocate now what is written before population: a page that is missing later is a SIGBUS. */
  uint64_t now = kvs_pages_can_populate() ? header->data_offset : header->file_nbytes;
  int code = fchmod(*fd, 0600) != 0 || ftruncate(*fd, (off_t)header->file_nbytes) != 0 ? errno : 0;
  if (code == 0) code = posix_fallocate(*fd, 0, (off_t)now);
  if (code == 0 && pwrite(*fd, header, sizeof *header, 0) != (ssize_t)sizeof *header) code = errno ? errno : EIO;
  if (code == 0) return KVS_OK;
  close(*fd);
  return kvs_fail(err, KVS_NOMEM, "no shared memory is to be had in %s: %s", FOLDER, strerror(code));
}

/* KVS_NOT_READY: the name exists already. */
static int create(const struct kvs_segment_shape *shape, const struct kvs_host_pool *pool,
                  struct kvs_shared_file *segment, struct kvs_error *err) {
  struct header header;
  struct stat stat_of;
  char link[64];
  int fd;
  fill_header(shape, &header);
  if (access(segment->path, F_OK) == 0) return KVS_NOT_READY;
  int status = make_file(pool, &header, &fd, err);
  if (status) return status;
  status = map_file(segment, fd, &header, pool != NULL, err);
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (!status) {
    status = own(segment, link, err);
    if (!status &&
        (fstat(fd, &stat_of) != 0 || linkat(AT_FDCWD, link, AT_FDCWD, segment->path, AT_SYMLINK_FOLLOW) != 0)) {
      status = errno == EEXIST
                   ? KVS_NOT_READY
                   : kvs_fail(err, KVS_UNSUPPORTED, "%s cannot be made: %s", segment->path, strerror(errno));
      disown(segment);
    }
    if (status) kvs_pages_unmap(segment->map_base, segment->map_nbytes);
  }
  close(fd);
  segment->owner = !status;
  if (status) return status;
  segment->device = stat_of.st_dev;
  segment->inode = stat_of.st_ino;
  return KVS_OK;
}

static int check_same(const struct kvs_segment_shape *shape, const struct kvs_shared_options *shared, const char *path,
                      const struct header *header, const struct stat *stat_of, struct kvs_error *err) {
  struct header wanted;
  fill_header(shape, &wanted);
  if (header->version != VERSION || header->header_nbytes != sizeof *header)
    return kvs_fail(err, KVS_INVALID, "%s was made by another version of kvswap (format %u, this one has %d)", path,
                    (unsigned)header->version, (int)VERSION);
  const struct {
    const char *name;
    uint64_t there, here;
  } fields[] = {{"num_blocks", header->num_blocks, wanted.num_blocks},
                {"slot_nbytes", header->slot_nbytes, wanted.slot_nbytes},
                {"layers", header->layers, wanted.layers},
                {"layout (1: layer-first)", header->layer_first, wanted.layer_first},
                {"words_offset", header->words_offset, wanted.words_offset},
                {"index_nbytes", header->index_nbytes, wanted.index_nbytes},
                {"data_offset", header->data_offset, wanted.data_offset},
                {"file_nbytes", header->file_nbytes, wanted.file_nbytes},
                {"its length", (uint64_t)stat_of->st_size, wanted.file_nbytes},
                {"generation", header->generation, shared->generation ? shared->generation : header->generation}};
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
    if (fields[i].there != fields[i].here)
      return kvs_fail(err, KVS_INVALID, "%s is another pool: its %s is %" PRIu64 ", and %" PRIu64 " was asked for",
                      path, fields[i].name, fields[i].there, fields[i].here);
  return KVS_OK;
}

/* Whether a segment whose owner may live can be joined. */
static int check_owner(const struct kvs_shared_options *shared, const char *path, const struct header *header,
                       struct kvs_error *err) {
  bool other_space = header->pid_space != pid_space();
  if (other_space && header->version == UNLOCKED_VERSION)
    return kvs_fail(err, KVS_UNSUPPORTED,
                    "%s was made by an older kvswap in another pid namespace (process %" PRId64 " there), so that its "
                    "owner may live: take another name, or remove it if no process needs it",
                    path, header->owner_pid);
  if (other_space)
    return kvs_fail(err, KVS_UNSUPPORTED,
                    "%s belongs to a running process of another pid namespace (number %" PRId64 " there), and "
                    "processes that share a pool must see each other: run both in one namespace (docker run --pid, "
                    "shareProcessNamespace in Kubernetes), or take another name",
                    path, header->owner_pid);
  if (shared->mode == KVS_SHARED_CREATE)
    return kvs_fail(err, KVS_INVALID,
                    "%s exists already, and process %" PRId64 ", which owns it, is alive: join it "
                    "(create=False), or take another name",
                    path, header->owner_pid);
  return KVS_OK;
}

/* Own an open segment with others. KVS_NOT_READY: meanwhile it became stale, or another has its name. */
static int own_too(int fd, struct kvs_shared_file *segment, const struct header *header, const struct stat *file,
                   struct kvs_error *err) {
  char link[64];
  if (!lock_file(fd, LOCK_TRIES))
    return kvs_fail(err, KVS_TIMEOUT, "%s is locked by another process that does not go on (fuser names it)",
                    segment->path);
  if (stale(fd, header) || !still_there(AT_FDCWD, segment->path, file)) return KVS_NOT_READY;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  return own(segment, link, err);
}

/* KVS_RANGE: not found. KVS_NOT_READY: a stale segment was removed, try again. */
static int join(const struct kvs_segment_shape *shape, const struct kvs_shared_options *shared, bool blocks,
                struct kvs_shared_file *segment, bool *replaced, struct kvs_error *err) {
  struct header header;
  struct stat stat_of;
  int fd, status = look(AT_FDCWD, segment->path, &fd, &stat_of, &header, err);
  if (status) return status;
  bool left_behind = stale(fd, &header);
  if (left_behind && shared->mode != KVS_SHARED_JOIN) {
    status = remove_name(AT_FDCWD, segment->path, fd, &stat_of, &header, LOCK_TRIES, err);
    *replaced = !status || *replaced;
    return status == KVS_TIMEOUT ? status : KVS_NOT_READY;
  }
  if (left_behind)
    status = kvs_fail(err, KVS_INVALID, "%s is what process %" PRId64 " left behind when it died: create it anew",
                      segment->path, header.owner_pid);
  else
    status = check_owner(shared, segment->path, &header, err);
  if (!status) status = check_same(shape, shared, segment->path, &header, &stat_of, err);
  segment->device = stat_of.st_dev;
  segment->inode = stat_of.st_ino;
  bool owns = !status && segment->together;
  if (owns) {
    status = own_too(fd, segment, &header, &stat_of, err);
    owns = !status;
  }
  if (!status) status = map_file(segment, fd, &header, blocks, err);
  (void)flock(fd, LOCK_UN); /* the mapping keeps the description, and with it the lock */
  close(fd);
  if (status && owns) leave(segment);
  return status;
}

int kvs_shared_file_open(const struct kvs_segment_shape *shape, const struct kvs_shared_options *shared,
                         const struct kvs_host_pool *pool, struct kvs_shared_file **made, bool *replaced,
                         struct kvs_error *err) {
  int status = check_name(shared->name, err);
  struct kvs_shared_file *segment = status ? NULL : calloc(1, sizeof *segment);
  if (!segment) return status ? status : kvs_fail(err, KVS_NOMEM, "no memory for a shared pool");
  snprintf(segment->path, sizeof segment->path, "%s/%s%s", FOLDER, PREFIX, shared->name);
  segment->together = shape->index_nbytes != 0;
  *replaced = shared->mode != KVS_SHARED_JOIN && kvs_shared_clean(NULL, 0) > 0;
  status = KVS_NOT_READY;
  for (int tries = 0; status == KVS_NOT_READY && tries < TRIES; tries++) {
    if (shared->mode != KVS_SHARED_JOIN) status = create(shape, pool, segment, err);
    if (status != KVS_NOT_READY) break;
    status = join(shape, shared, pool != NULL, segment, replaced, err);
    if (status == KVS_RANGE && shared->mode != KVS_SHARED_JOIN) status = KVS_NOT_READY; /* removed meanwhile */
  }
  if (status == KVS_OK) {
    *made = segment;
    return status;
  }
  free(segment);
  if (status == KVS_NOT_READY)
    return kvs_fail(err, KVS_TIMEOUT, "other processes make and remove the segment all the time");
  if (status == KVS_RANGE) err->status = status = KVS_INVALID;
  return status;
}
