/* Which blocks came and went, for engines that publish what they hold.
 *
 * Single changes are a list of bounded length; if it is not taken in time all of it is dropped and counted, because a
 * list with gaps would be wrong. What changes for many blocks at once is no part of the list, and given in pieces: the
 * blocks that opening found, or the headers of another writer, are entries of the index that are marked `untold`; the
 * blocks that a new epoch removed are entries which left the index, in `gone`. An untold entry that loses its block
 * gives no event. */
#ifndef KVS_FILE_EVENTS_H
#define KVS_FILE_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvs_file_store;
struct kvs_file_entry;

struct kvs_file_events { /* guarded by store->lock */
  uint8_t *data;         /* of each: whether the block is there, bytes of the key (2), the key */
  size_t nbytes, capacity, count;
  uint64_t lost;
  struct kvs_file_entry *gone; /* removed by a new epoch, a list by `next` */
  size_t ngone;
  size_t before, before_nbytes; /* events of the list that come before `gone` */
  bool many;                    /* blocks that come now are marked untold */
  size_t nuntold;               /* at least as many entries as are marked */
  size_t bucket;                /* of the index, from which they are looked for */
};

void kvs_file_event_locked(struct kvs_file_store *, struct kvs_file_entry *, bool there);
/* Mark all blocks of the index: it was just built. */
void kvs_file_events_found(struct kvs_file_store *);
/* The blocks of these entries are removed. Returns those of which there is nothing to tell, to be freed. */
struct kvs_file_entry *kvs_file_events_gone_locked(struct kvs_file_store *, struct kvs_file_entry *);
void kvs_file_events_free(struct kvs_file_events *);

/* The events to be given next, in order: the first `nlisted` of the list, then entries that are gone, then untold
 * ones. */
enum { KVS_FILE_PIECE = 4096 };
struct kvs_file_piece {
  size_t nlisted, listed_nbytes, ngone, nuntold;
  size_t nbytes; /* of all keys */
  struct kvs_file_entry *untold[KVS_FILE_PIECE];
};
void kvs_file_events_find_locked(struct kvs_file_store *, struct kvs_file_piece *);
/* Copy the piece to arrays that have room, and remove it. Returns entries to be freed. */
struct kvs_file_entry *kvs_file_events_take_locked(struct kvs_file_store *, const struct kvs_file_piece *,
                                                   uint8_t *keys, size_t *ends, bool *there);

#endif
