/* What lies below a directory that several stores share: their segments, who writes them, and how much each may keep.
 *
 * A store lies at most three folders below the directory. What has no name of a store's files is not counted and never
 * touched; links are not followed. A store is known by its store.kvs. Writers of one shared store, whose folders are
 * named writer-NNNN, have one identity.
 *
 * Room is shared like this. The writers that run and have a segment divide the limit: identities get equal parts, the
 * writers of one identity equal parts of that. Half of its part, in whole segments, is kept free for each writer that
 * has less; the rest is taken by who stores first. The segments of writers that do not run are removed first, those
 * that were used least recently before others. "Used" is the time of the file's last change: a block was written, or a
 * running writer has loaded one and set the time (files/bound.c). */
#ifndef KVS_FILE_SURVEY_H
#define KVS_FILE_SURVEY_H

#include "files/state.h"

struct kvs_file_surveyed_writer {
  char *path;        /* below the directory; empty: the directory itself */
  uint32_t identity; /* 0, 1, ... */
  uint64_t inode;    /* of its store.kvs; 0: none, so its files are left alone */
  bool shared;       /* its folder is named writer-NNNN */
  bool runs, own;
  bool refused;      /* it may not be reclaimed: another process has the lock, or another user its files */
  int folder, state; /* locked while its files are removed; -1: not yet */
  uint64_t nbytes, segment_nbytes; /* of all its segments; of the largest */
  uint64_t share;                  /* its part of the limit; 0: it has none */
};

struct kvs_file_surveyed_segment {
  uint64_t nbytes;
  int64_t used_ns;
  uint32_t writer, number;
};

struct kvs_file_survey {
  int folder; /* of the directory; borrowed */
  struct kvs_file_surveyed_writer *writers;
  struct kvs_file_surveyed_segment *segments;
  size_t nwriters, writers_capacity, nsegments, segments_capacity;
  uint32_t identities;
  uint32_t *writers_of; /* of each identity: writers that take part in sharing the limit */
  uint64_t nbytes;      /* of all segments */
};

/* Look at all files below the directory: 0 or an errno. `bound`: descriptor of bound.kvs, in which running writers hold
 * locks; -1: no writer counts as running. `own`: inode of the caller's store.kvs. The caller frees the survey, also
 * after an error. */
int kvs_file_survey_make(struct kvs_file_survey *, int folder, int bound, uint64_t own);
void kvs_file_survey_free(struct kvs_file_survey *);
struct kvs_file_surveyed_writer *kvs_file_survey_own(const struct kvs_file_survey *); /* NULL: its folder is gone */

void kvs_file_survey_share(struct kvs_file_survey *, uint64_t limit);   /* sets `share` of the writers */
uint64_t kvs_file_survey_half(const struct kvs_file_surveyed_writer *); /* of its share, in whole segments */
/* Room that is kept free for writers with less than half of their share; `except`: not counted, or NULL. */
uint64_t kvs_file_survey_kept_free(const struct kvs_file_survey *, const struct kvs_file_surveyed_writer *except);
/* Remove segments of writers that do not run until `nbytes` are freed. Returns the bytes freed. */
uint64_t kvs_file_survey_reclaim(struct kvs_file_survey *, struct kvs_file_faults *, uint64_t nbytes,
                                 uint64_t *removed);

/* In bound.kvs a running writer holds a lock on the byte of its inode: it ends with the process. */
int64_t kvs_file_byte_of(uint64_t inode);

#endif
