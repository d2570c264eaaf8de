/* See files/sys.h. */
#include "files/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/wait.h"
#include "files/format.h"

/* -- faults -------------------------------------------------------------------------------------------------------- */

void kvs_file_faults_init(struct kvs_file_faults *faults) {
  pthread_mutex_init(&faults->lock, NULL);
  kvs_cond_init(&faults->changed);
}

void kvs_file_faults_destroy(struct kvs_file_faults *faults) {
  pthread_cond_destroy(&faults->changed);
  pthread_mutex_destroy(&faults->lock);
}

void kvs_file_faults_set(struct kvs_file_faults *faults, enum kvs_file_call call, const struct kvs_file_fault *fault) {
  pthread_mutex_lock(&faults->lock);
  faults->fault[call] = *fault;
  faults->seen[call] = 0;
  faults->changes++;
  pthread_cond_broadcast(&faults->changed);
  pthread_mutex_unlock(&faults->lock);
}

static bool hits(const struct kvs_file_fault *fault, uint64_t seen) {
  return seen == fault->nth || (seen > fault->nth && fault->every && (seen - fault->nth) % fault->every == 0);
}

static void delay_locked(struct kvs_file_faults *faults, uint64_t delay_ns) {
  uint64_t deadline = kvs_deadline((int64_t)delay_ns), changes = faults->changes;
  while (faults->changes == changes && kvs_cond_wait(&faults->changed, &faults->lock, deadline)) continue;
}

struct kvs_file_fault kvs_file_fault_next(struct kvs_file_faults *faults, enum kvs_file_call call) {
  struct kvs_file_fault fault = {.action = KVS_FILE_FAULT_NONE};
  pthread_mutex_lock(&faults->lock);
  if (faults->fault[call].action != KVS_FILE_FAULT_NONE && hits(&faults->fault[call], ++faults->seen[call]))
    fault = faults->fault[call];
  if (fault.action == KVS_FILE_FAULT_DELAY) {
    delay_locked(faults, fault.delay_ns);
    fault.action = KVS_FILE_FAULT_NONE;
  }
  pthread_mutex_unlock(&faults->lock);
  return fault;
}

/* The errno that an injected fault asks for, 0: make the call. */
static int fault_code(struct kvs_file_faults *faults, enum kvs_file_call call) {
  struct kvs_file_fault fault = kvs_file_fault_next(faults, call);
  if (fault.action == KVS_FILE_FAULT_FAIL) return fault.code;
  return fault.action == KVS_FILE_FAULT_INTERRUPT ? EINTR : 0;
}

/* -- reads and writes ---------------------------------------------------------------------------------------------- */

size_t kvs_file_span_nbytes(const struct kvs_file_span *span) {
  size_t nbytes = 0;
  for (unsigned i = 0; i < span->npieces; i++) nbytes += span->pieces[i].iov_len;
  return nbytes;
}

int kvs_file_span_advance(struct kvs_file_span *span, size_t nbytes, bool direct) {
  size_t all = kvs_file_span_nbytes(span);
  if (nbytes >= all) return 0;
  if (direct) nbytes -= nbytes % KVS_FILE_PAGE; /* direct I/O continues at a page boundary: redo the partial page */
  if (nbytes == 0) return span->write ? EIO : KVS_FILE_ENDED;
  span->offset += nbytes;
  while (nbytes) {
    struct iovec *first = &span->pieces[0];
    size_t part = nbytes < first->iov_len ? nbytes : first->iov_len;
    first->iov_base = (char *)first->iov_base + part;
    first->iov_len -= part;
    nbytes -= part;
    if (first->iov_len) break;
    memmove(first, first + 1, --span->npieces * sizeof *first);
  }
  return KVS_FILE_MORE;
}

struct kvs_file_span kvs_file_span_shortened(const struct kvs_file_span *span) {
  struct kvs_file_span part = *span;
  size_t half = kvs_file_span_nbytes(span) / 2;
  half -= half % KVS_FILE_PAGE;
  if (half == 0) return part;
  for (unsigned i = 0; i < part.npieces; i++) {
    if (part.pieces[i].iov_len >= half) {
      part.pieces[i].iov_len = half;
      part.npieces = i + 1;
      break;
    }
    half -= part.pieces[i].iov_len;
  }
  return part;
}

int kvs_file_move(struct kvs_file_faults *faults, struct kvs_file_span *span, bool direct) {
  for (;;) {
    struct kvs_file_fault fault = kvs_file_fault_next(faults, span->write ? KVS_FILE_WRITE : KVS_FILE_READ);
    struct kvs_file_span now = fault.action == KVS_FILE_FAULT_SHORT ? kvs_file_span_shortened(span) : *span;
    if (fault.action == KVS_FILE_FAULT_FAIL) return fault.code;
    if (fault.action == KVS_FILE_FAULT_INTERRUPT) continue;
    ssize_t n = now.write ? pwritev2(now.fd, now.pieces, (int)now.npieces, (off_t)now.offset, now.dsync ? RWF_DSYNC : 0)
                          : preadv(now.fd, now.pieces, (int)now.npieces, (off_t)now.offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    int code = kvs_file_span_advance(span, (size_t)n, direct);
    if (code != KVS_FILE_MORE) return code;
  }
}

/* -- files --------------------------------------------------------------------------------------------------------- */

int kvs_file_allocate(struct kvs_file_faults *faults, int fd, uint64_t nbytes) {
  for (;;) {
    int code = fault_code(faults, KVS_FILE_ALLOCATE);
    if (!code) code = fallocate(fd, 0, 0, (off_t)nbytes) ? errno : 0;
    if (code == EINTR) continue;
    if (code != EOPNOTSUPP && code != ENOSYS) return code;
    return ftruncate(fd, (off_t)nbytes) ? errno : 0;
  }
}

int kvs_file_reserve(struct kvs_file_faults *faults, int fd, uint64_t nbytes) {
  struct stat info;
  bool there = fstat(fd, &info) == 0 && (uint64_t)info.st_size >= nbytes && (uint64_t)info.st_blocks * 512 >= nbytes;
  return there ? 0 : kvs_file_allocate(faults, fd, nbytes);
}

/* Checked before open (a pipe would block) and after it (the file may have been replaced in between). */
static int open_regular(int folder, const char *name, int flags, int *fd) {
  struct stat info;
  if (fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISREG(info.st_mode)) return KVS_FILE_NOT_REGULAR;
  int opened = openat(folder, name, flags | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK, 0600);
  if (opened < 0) return errno;
  int code = fstat(opened, &info) ? errno : S_ISREG(info.st_mode) ? 0 : KVS_FILE_NOT_REGULAR;
  int now = code ? -1 : fcntl(opened, F_GETFL); /* O_NONBLOCK would make io_uring fail instead of wait for the disk */
  if (!code && (now < 0 || fcntl(opened, F_SETFL, now & ~O_NONBLOCK))) code = errno;
  if (code)
    close(opened);
  else
    *fd = opened;
  return code;
}

int kvs_file_openat(struct kvs_file_faults *faults, int folder, const char *name, int flags, int *fd) {
  *fd = -1;
  for (;;) {
    int code = fault_code(faults, KVS_FILE_OPEN);
    if (!code) code = open_regular(folder, name, flags, fd);
    if (code != EINTR) return code;
  }
}

int kvs_file_sync(struct kvs_file_faults *faults, int fd) {
  for (;;) {
    int code = fault_code(faults, KVS_FILE_SYNC);
    if (!code) code = fdatasync(fd) ? errno : 0;
    if (code != EINTR) return code;
  }
}

/* fdatasync() may leave new names out. EINVAL: a file system that knows no such call for directories, as some of the
 * network; there is nothing more to ask of it. */
int kvs_file_sync_folder(struct kvs_file_faults *faults, int folder) {
  for (;;) {
    int code = fault_code(faults, KVS_FILE_SYNC);
    if (!code) code = fsync(folder) ? errno : 0;
    if (code != EINTR) return code == EINVAL ? 0 : code;
  }
}

/* -- error text ---------------------------------------------------------------------------------------------------- */

const char *kvs_file_error_text(int code, char text[96]) {
  char words[64];
  if (code == KVS_FILE_ENDED) return "the file is shorter than it should be";
  if (code == KVS_FILE_DEVICE) return "the device did not copy the header";
  if (code == KVS_FILE_NOT_REGULAR) return "it is a link, directory, pipe, socket or device, not a file: remove it";
  if (code == KVS_FILE_IN_THE_WAY) return "new.tmp in the store's directory cannot be replaced: remove it";
  if (code == KVS_FILE_NUMBERS_END) return "no sequence number is left, so a page is forged: use another directory";
  if (code == KVS_FILE_CLEARED) return "the store was cleared after the block was submitted: it is not stored";
  if (code == KVS_FILE_NO_EPOCH) return "epoch.kvs in the store's directory cannot be read: clear the store";
  if (code > KVS_FILE_CUFILE && code < KVS_FILE_CUFILE_END)
    snprintf(text, 96, "libcufile's error %d", code);
  else
    snprintf(text, 96, "%s (errno %d)", strerror_r(code, words, sizeof words), code);
  return text;
}

int kvs_file_fail(struct kvs_error *err, int code, const char *format, ...) {
  char what[280], text[96];
  va_list args;
  va_start(args, format);
  vsnprintf(what, sizeof what, format, args);
  va_end(args);
  kvs_fail(err, KVS_FILE, "%s: %s", what, kvs_file_error_text(code, text));
  err->code = code;
  return KVS_FILE;
}
