/* A libcufile for tests on machines without one: reads and writes are pread and pwrite on the pointers, which are plain
 * memory on a host device. What it claims, and what goes wrong, stands in the fake_ variables, which a test sets; it
 * counts what is registered, and complains of arguments that the library would not take. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct result {
  int code, cuda;
};
struct file {
  int type;
  union {
    int fd;
    void *other;
  } handle;
  const void *operations;
};
struct properties {
  unsigned major, minor;
  size_t poll, direct;
  unsigned file_systems, flags, features, cache, buffer, pinned, batch, timeout;
};

enum { NONE, RETURN, ERRNO, FLIP };

int fake_major, fake_file_systems, fake_flags; /* what it claims */
volatile int fake_opening, fake_open_waits;
int fake_open_code, fake_properties_code, fake_register_code, fake_buffer_code; /* what calls return */
int fake_refuse_from;                            /* handles from this one on, counted from 1, are refused; 0: none */
int fake_most;                                   /* bytes of one read or write; 0: all */
int fake_kind, fake_write, fake_nth, fake_every; /* which reads or writes go wrong, and how: counted from 1 */
long fake_value;

int fake_opens, fake_closes, fake_handles, fake_registered, fake_buffers, fake_complaints; /* what happened */
long fake_calls[2], fake_nbytes[2];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  int fd, used;
} handles[64];
static struct {
  const char *base;
  size_t nbytes;
} buffers[16];

void fake_reset(void) {
  fake_major = fake_file_systems = 0;
  fake_flags = 1 << 1;
  fake_open_code = fake_properties_code = fake_register_code = fake_buffer_code = fake_refuse_from = fake_most = 0;
  fake_kind = fake_write = fake_nth = fake_every = 0;
  fake_value = 0;
  fake_opens = fake_closes = fake_handles = fake_registered = fake_buffers = fake_complaints = 0;
  memset(fake_calls, 0, sizeof fake_calls);
  memset(fake_nbytes, 0, sizeof fake_nbytes);
}

struct result cuFileDriverOpen(void) {
  if (!fake_open_code) fake_opens++;
  for (fake_opening = 1; fake_opening && fake_open_waits; usleep(1000))
    continue; /* until a test sets fake_opening to 0 */
  return (struct result){fake_open_code, 0};
}

struct result cuFileDriverClose_v2(void) {
  const char *report = getenv("FAKE_CUFILE_REPORT");
  FILE *file = report ? fopen(report, "w") : NULL;
  fake_closes++;
  if (file) {
    fprintf(file, "%d %d %d", fake_handles, fake_buffers, fake_complaints);
    fclose(file);
  }
  return (struct result){0, 0};
}

struct result cuFileDriverGetProperties(struct properties *properties) {
  *properties = (struct properties){.major = (unsigned)fake_major,
                                    .minor = fake_major ? 7 : 0,
                                    .file_systems = (unsigned)fake_file_systems,
                                    .flags = (unsigned)fake_flags,
                                    .timeout = 5};
  return (struct result){fake_properties_code, 0};
}

struct result cuFileHandleRegister(void **handle, struct file *file) {
  struct result result = {fake_register_code, 0};
  pthread_mutex_lock(&lock);
  if (file->type != 1 || file->operations || file->handle.fd < 0) fake_complaints++;
  int flags = fcntl(file->handle.fd, F_GETFL);
  if (flags & ~(O_RDWR | O_DIRECT | O_LARGEFILE | 0x8000)) result.code = 5019; /* the library refuses O_NOFOLLOW, say */
  fake_registered++;
  if (fake_refuse_from && fake_registered >= fake_refuse_from) result.code = 5008;
  for (int i = 0; !result.code && i < 64; i++) {
    if (handles[i].used) continue;
    handles[i].used = 1;
    handles[i].fd = file->handle.fd;
    *handle = &handles[i];
    fake_handles++;
    break;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

void cuFileHandleDeregister(void *handle) {
  int *used = &handles[((char *)handle - (char *)handles) / (long)sizeof *handles].used;
  pthread_mutex_lock(&lock);
  if (!*used) fake_complaints++;
  *used = 0;
  fake_handles--;
  pthread_mutex_unlock(&lock);
}

struct result cuFileBufRegister(const void *base, size_t nbytes, int flags) {
  pthread_mutex_lock(&lock);
  if (flags) fake_complaints++;
  for (int i = 0; !fake_buffer_code && i < 16; i++) {
    if (buffers[i].base) continue;
    buffers[i].base = base;
    buffers[i].nbytes = nbytes;
    fake_buffers++;
    break;
  }
  pthread_mutex_unlock(&lock);
  return (struct result){fake_buffer_code, 0};
}

struct result cuFileBufDeregister(const void *base) {
  int code = 5024;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 16; i++) {
    if (buffers[i].base != base) continue;
    buffers[i].base = NULL;
    fake_buffers--;
    code = 0;
    break;
  }
  fake_complaints += code != 0;
  pthread_mutex_unlock(&lock);
  return (struct result){code, 0};
}

/* What goes wrong with this call. */
static int begin(void *handle, const char *base, size_t nbytes, off_t at, off_t in_buffer, int write, int *fd) {
  int inside = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 16; i++)
    if (buffers[i].base == base && (size_t)in_buffer + nbytes <= buffers[i].nbytes) inside = 1;
  if (fake_buffer_code) inside = 1;
  int index = (int)(((char *)handle - (char *)handles) / (long)sizeof *handles);
  if (!inside || !handles[index].used || nbytes % 4096 || at % 4096 || in_buffer % 4096) fake_complaints++;
  *fd = handles[index].fd;
  long seen = ++fake_calls[write];
  int hit = write == fake_write &&
            (seen == fake_nth || (seen > fake_nth && fake_every && (seen - fake_nth) % fake_every == 0));
  pthread_mutex_unlock(&lock);
  return hit ? fake_kind : NONE;
}

static ssize_t move(void *handle, char *base, size_t nbytes, off_t at, off_t in_buffer, int write) {
  int fd, kind = begin(handle, base, nbytes, at, in_buffer, write, &fd);
  if (kind == RETURN) return fake_value;
  if (kind == ERRNO) {
    errno = (int)fake_value;
    return -1;
  }
  if (fake_most && nbytes > (size_t)fake_most) nbytes = (size_t)fake_most;
  ssize_t n = write ? pwrite(fd, base + in_buffer, nbytes, at) : pread(fd, base + in_buffer, nbytes, at);
  if (kind == FLIP && n > fake_value) base[in_buffer + fake_value] ^= 16;
  if (n > 0) __atomic_fetch_add(&fake_nbytes[write], n, __ATOMIC_RELAXED);
  return n;
}

ssize_t cuFileRead(void *handle, void *base, size_t nbytes, off_t at, off_t in_buffer) {
  return move(handle, base, nbytes, at, in_buffer, 0);
}

ssize_t cuFileWrite(void *handle, const void *base, size_t nbytes, off_t at, off_t in_buffer) {
  return move(handle, (char *)(uintptr_t)base, nbytes, at, in_buffer, 1);
}
