/* One bound for a directory that several stores share: its file bound.kvs holds the limit of the bytes of all segments
 * below. files/survey.h says what counts and how it is shared.
 *
 * bound.kvs is one checked page (files/format.h). The first process that opens a store there writes its capacity into
 * it; later ones go by the page. Byte 0 of the file is locked while a process changes the page, makes or removes a
 * segment, or opens or takes over a writer's directory; a running writer holds a lock on a byte of its own. Locks are
 * those of open file descriptions: they end with the process.
 *
 * A thread of each store makes its segments. If there is no room, it removes segments of writers that do not run; else
 * the store evicts its own blocks. Every LOOK_NS the thread reads the page: when the limit or the turn has changed, a
 * writer with more than its share removes segments of its own (files/retire.h), until no writer lacks its half share. A
 * writer's first segment is made in any case, so the limit is exceeded by a segment a writer at most, until the others
 * have looked.
 *
 * Where the file cannot be used, a store bounds its own segments only, and `note` says why. */
#ifndef KVS_FILE_BOUND_H
#define KVS_FILE_BOUND_H

#include "files/state.h"

struct kvs_file_bound {
  char *path;     /* of the directory; absolute */
  int folder, fd; /* of the directory and of bound.kvs; -1: it cannot be used */
  uint64_t inode; /* of the own store.kvs */
  char note[320]; /* what is not as it was asked for; empty: nothing */
  pthread_t thread;
  bool runs;                            /* the thread was started */
  pthread_cond_t wake;                  /* with store->lock: a segment is asked for, or the store stops */
  bool asked, stop;                     /* guarded by store->lock */
  uint64_t turn;                        /* the thread's own, as are the fields below: the last seen */
  bool doubtful;                        /* room may have to be given back */
  uint32_t leaving;                     /* segments that are being removed */
  uint64_t reclaimed;                   /* segments of other writers that were removed */
  uint64_t look_ns, again_ns, touch_ns; /* times of the next look, of the next survey, of the next touch */
};

/* Before the directories are opened: sets store->bound and the capacity, and takes the lock. KVS_INVALID, KVS_NOMEM. */
int kvs_file_bound_open(struct kvs_file_store *, struct kvs_error *);
/* After that, in any case: the store counts as running if `opened`, and the lock is released. */
int kvs_file_bound_opened(struct kvs_file_store *, bool opened, struct kvs_error *);
int kvs_file_bound_start(struct kvs_file_store *, struct kvs_error *);
void kvs_file_bound_stop(struct kvs_file_store *); /* no transfer is unfinished */
void kvs_file_bound_close(struct kvs_file_store *);
void kvs_file_bound_free(struct kvs_file_store *);
void kvs_file_bound_forked(struct kvs_file_store *); /* in the child of a fork: close copies of descriptors */

/* Ask for a segment: store->growing ends when it is there or refused. False: the caller makes it. */
static inline bool kvs_file_bound_ask_locked(struct kvs_file_store *store) {
  struct kvs_file_bound *bound = store->bound;
  if (!bound || !bound->runs) return false;
  bound->asked = true;
  pthread_cond_signal(&bound->wake);
  return true;
}

#endif
