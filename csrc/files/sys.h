/* File system calls of the store: complete reads and writes out of calls that may be short, interrupted or failing, and
 * fault injection for tests. Errors are errno values; kvs_file_error_text() makes the text. */
#ifndef KVS_FILE_SYS_H
#define KVS_FILE_SYS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "kvswap_file.h"

enum {                         /* errno values and these, which share a number space */
       KVS_FILE_CUFILE = 5000, /* codes of libcufile (files/gds.c) are between this and the next */
       KVS_FILE_CUFILE_END = 6000,
       KVS_FILE_ENDED = 10000, /* the file is shorter than it should be */
       KVS_FILE_DEVICE,        /* a copy between host and device failed */
       KVS_FILE_NOT_REGULAR,   /* the name belongs to a link, directory, pipe, socket or device */
       KVS_FILE_IN_THE_WAY,    /* new.tmp cannot be replaced */
       KVS_FILE_NUMBERS_END,   /* no sequence number or generation is left */
       KVS_FILE_CLEARED,       /* the store was cleared after the block was submitted */
       KVS_FILE_NO_EPOCH,      /* the epoch is unknown */
};

enum kvs_file_call { KVS_FILE_READ, KVS_FILE_WRITE, KVS_FILE_ALLOCATE, KVS_FILE_OPEN, KVS_FILE_SYNC, KVS_FILE_CALLS };
enum kvs_file_fault_action {
  KVS_FILE_FAULT_NONE,
  KVS_FILE_FAULT_FAIL,      /* with `code` */
  KVS_FILE_FAULT_SHORT,     /* READ, WRITE: only a part is moved */
  KVS_FILE_FAULT_INTERRUPT, /* EINTR, nothing moved */
  KVS_FILE_FAULT_DELAY,     /* by `delay_ns`, or until a fault is set or removed */
};
struct kvs_file_fault {
  enum kvs_file_fault_action action;
  uint64_t nth, every; /* as in struct kvs_fault */
  int code;
  uint64_t delay_ns;
};

struct kvs_file_faults {
  pthread_mutex_t lock;
  pthread_cond_t changed;                      /* signalled when a fault is set or removed */
  struct kvs_file_fault fault[KVS_FILE_CALLS]; /* guarded by lock */
  uint64_t seen[KVS_FILE_CALLS];               /* guarded by lock */
  uint64_t changes;                            /* guarded by lock */
};
void kvs_file_faults_init(struct kvs_file_faults *); /* of zeros */
void kvs_file_faults_destroy(struct kvs_file_faults *);
void kvs_file_faults_set(struct kvs_file_faults *, enum kvs_file_call, const struct kvs_file_fault *);
/* The fault for the next call of that kind. DELAY has already slept and returns NONE. */
struct kvs_file_fault kvs_file_fault_next(struct kvs_file_faults *, enum kvs_file_call);

/* One range of a file, to or from several pieces of memory. The struct holds what is left to move, so that a partial
 * transfer can continue. */
enum { KVS_FILE_PIECES = 3 };
struct kvs_file_span {
  int fd;
  bool write;
  bool dsync; /* durable on disk when the call returns */
  uint64_t offset;
  struct iovec pieces[KVS_FILE_PIECES];
  unsigned npieces;
};
/* Account for a call that moved `nbytes`; with O_DIRECT (`direct`) only whole pages count. Returns KVS_FILE_MORE, or
 * what kvs_file_move() returns. A call without progress ends the loop: a read with KVS_FILE_ENDED (end of file), a
 * write with EIO. */
enum { KVS_FILE_MORE = -1 };
int kvs_file_span_advance(struct kvs_file_span *, size_t nbytes, bool direct);
struct kvs_file_span kvs_file_span_shortened(const struct kvs_file_span *); /* about half of the span, for tests */
size_t kvs_file_span_nbytes(const struct kvs_file_span *);

/* Move the whole span: 0 or an errno. */
int kvs_file_move(struct kvs_file_faults *, struct kvs_file_span *, bool direct);

/* Reserve space for a file: 0 or an errno. If the file system cannot reserve space, the file is extended. */
int kvs_file_allocate(struct kvs_file_faults *, int fd, uint64_t nbytes);
/* The same, if it is not reserved already: some file systems ask for the space again. */
int kvs_file_reserve(struct kvs_file_faults *, int fd, uint64_t nbytes);
/* Open a regular file, created with mode 0600. Other kinds are refused: opening a pipe could block, and opening a
 * device could have side effects. */
int kvs_file_openat(struct kvs_file_faults *, int folder, const char *name, int flags, int *fd);
int kvs_file_sync(struct kvs_file_faults *, int fd);
int kvs_file_sync_folder(struct kvs_file_faults *, int folder); /* its names */

/* "No space left on device (errno 28)". */
const char *kvs_file_error_text(int code, char text[96]);
/* Fail with KVS_FILE and the error's text. `format` says what was attempted. */
int kvs_file_fail(struct kvs_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4), cold));

#endif
