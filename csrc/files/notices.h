/* What a writer of a shared directory tells its readers: a ring in a file beside its segments, with the key and
 * the slot of each block that comes or goes. Nothing is mapped: calls move a few bytes of the page cache. Notices only
 * save readers from reading headers. Loads compare the header, so that a forged, torn or lost notice costs a miss,
 * never wrong bytes.
 *
 * The writer publishes under its store's lock, before a block is acknowledged and before an evicted one is overwritten.
 * A reader that falls behind by a whole ring, or finds another epoch (another process writes the directory now), reads
 * the headers again. */
#ifndef KVS_FILE_NOTICES_H
#define KVS_FILE_NOTICES_H

#include <stdatomic.h>

#include "files/format.h"
#include "files/sys.h"

enum { KVS_FILE_NOTICES = 4096 };

struct kvs_file_notice {
  uint32_t segment, slot; /* the number in the file's name; the slot in it */
  uint16_t key_nbytes;
  bool gone; /* else the block is there */
  uint8_t key[KVS_FILE_KEY_NBYTES];
};

struct kvs_file_notices {
  int fd;               /* -1: none */
  uint64_t epoch, seen; /* of a reader: what the index has; of the writer: what was published */
  uint64_t begun;       /* of the writer: as in the file */
  bool lost;            /* of the writer: a notice could not be written, so that the next one begins a new epoch */
};

/* Make or reuse the file of a writer, under a new epoch: 0 or an errno. Its space is reserved. */
int kvs_file_notices_make(struct kvs_file_faults *, int folder, struct kvs_file_notices *);
bool kvs_file_notices_are_whole(int folder, const struct kvs_file_notices *); /* neither cut nor replaced */
int kvs_file_notices_open(struct kvs_file_faults *, int folder, struct kvs_file_notices *); /* for a reader */
void kvs_file_notices_close(struct kvs_file_notices *);
void kvs_file_notices_publish(struct kvs_file_notices *, const struct kvs_file_notice *);
/* The reader is about to read all headers: later notices will be new. */
void kvs_file_notices_skip(struct kvs_file_notices *);
enum kvs_file_noticed {
  KVS_FILE_NOTHING_NEW,
  KVS_FILE_NOTICE,  /* the next one, which stays the next until kvs_file_notices_advance() */
  KVS_FILE_BEHIND,  /* some are lost */
  KVS_FILE_UNHEARD, /* the file is missing or cut: some may be lost */
};
enum kvs_file_noticed kvs_file_notices_next(const struct kvs_file_notices *, struct kvs_file_notice *);
static inline void kvs_file_notices_advance(struct kvs_file_notices *notices) { notices->seen++; }

#endif
