/* The file system as the store sees it: whole reads and writes out of calls that do part of them, are interrupted, or
 * fail; and the faults that tests inject. Errors are errno values; the text for people is made in one place. */
#ifndef KVS_FILE_SYS_H
#define KVS_FILE_SYS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "kvswap_file.h"

enum {                         /* beyond all of errno, and of libcufile's codes, which are errors here too */
       KVS_FILE_ENDED = 10000, /* the file is shorter than it should be */
       KVS_FILE_DEVICE,        /* a copy between host and device failed */
       KVS_FILE_NOT_REGULAR,   /* a link, directory, pipe, socket or device has the file's name */
       KVS_FILE_IN_THE_WAY,    /* new.tmp cannot be replaced */
       KVS_FILE_NUMBERS_END,   /* no sequence number or generation is left */
};

enum kvs_file_call { KVS_FILE_READ, KVS_FILE_WRITE, KVS_FILE_ALLOCATE, KVS_FILE_OPEN, KVS_FILE_SYNC, KVS_FILE_CALLS };
enum kvs_file_fault_action {
  KVS_FILE_FAULT_NONE,
  KVS_FILE_FAULT_FAIL,      /* with `code` */
  KVS_FILE_FAULT_SHORT,     /* READ, WRITE: only part is done */
  KVS_FILE_FAULT_INTERRUPT, /* EINTR, nothing done */
  KVS_FILE_FAULT_DELAY,
};
struct kvs_file_fault {
  enum kvs_file_fault_action action;
  uint64_t nth, every; /* as in struct kvs_fault */
  int code;
  uint64_t delay_ns;
};

struct kvs_file_faults {
  pthread_mutex_t lock;
  struct kvs_file_fault fault[KVS_FILE_CALLS]; /* guarded by lock */
  uint64_t seen[KVS_FILE_CALLS];               /* guarded by lock */
};
void kvs_file_faults_set(struct kvs_file_faults *, enum kvs_file_call, const struct kvs_file_fault *);
/* What shall happen to the next call of that kind; DELAY has been slept already and is NONE. */
struct kvs_file_fault kvs_file_fault_next(struct kvs_file_faults *, enum kvs_file_call);

/* For tests. NULL: while stores are opened, of those that are from now on. */
void kvs_file_inject(struct kvs_file_store *, enum kvs_file_call, const struct kvs_file_fault *);

/* One stretch of a file, to or from several pieces of memory. What is left to do is in the struct, so that it can go on
 * after a part. */
enum { KVS_FILE_PIECES = 3 };
struct kvs_file_span {
  int fd;
  bool write;
  bool dsync; /* on disk before it returns */
  uint64_t offset;
  struct iovec pieces[KVS_FILE_PIECES];
  unsigned npieces;
};
/* After a call moved `nbytes` of it, of which only whole pages count with O_DIRECT (`direct`): KVS_FILE_MORE, or what
 * kvs_file_move() returns. Each call that is followed by another has moved something that counts, so there is an end:
 * a read that gets nowhere has met the end of the file (KVS_FILE_ENDED), a write EIO. */
enum { KVS_FILE_MORE = -1 };
int kvs_file_span_advance(struct kvs_file_span *, size_t nbytes, bool direct);
struct kvs_file_span kvs_file_span_shortened(const struct kvs_file_span *); /* about half of it, for tests */
size_t kvs_file_span_nbytes(const struct kvs_file_span *);

/* Until all of it is done: 0, or an errno. */
int kvs_file_move(struct kvs_file_faults *, struct kvs_file_span *, bool direct);

/* Room for a file of that size: 0, or an errno. Where the file system cannot reserve it, the file is made that long. */
int kvs_file_allocate(struct kvs_file_faults *, int fd, uint64_t nbytes);
/* A regular file, made with mode 0600: nothing else is opened, for a pipe would wait and a device could act. */
int kvs_file_openat(struct kvs_file_faults *, int folder, const char *name, int flags, int *fd);
int kvs_file_sync(struct kvs_file_faults *, int fd);

/* "No space left on device (errno 28)". */
const char *kvs_file_error_text(int code, char text[96]);
/* KVS_FILE, with the text. `format` says what was tried. */
int kvs_file_fail(struct kvs_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4), cold));

#endif
