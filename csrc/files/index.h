/* Which key is in which slot, who uses it, and which block was used least recently. Pure: no file, no lock; the store's
 * lock guards it.
 *
 * An entry is also its key's lock: loads share it, stores and deletes have it alone, and who cannot have it yet waits
 * in order. So calls on one key take effect as they were submitted, and a slot is never written while it is read. */
#ifndef KVS_FILE_INDEX_H
#define KVS_FILE_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVS_NO_SLOT UINT32_MAX

struct kvs_file_item;

struct kvs_file_entry {
  struct kvs_file_entry *next;          /* of the same bucket */
  struct kvs_file_entry *older, *newer; /* in the order of use, while nobody uses it */
  uint64_t hash;
  uint64_t sequence; /* of the block in `slot` */
  uint32_t slot;     /* KVS_NO_SLOT: the block is not there */
  uint32_t stale;    /* a slot that may still hold an older block of this key, which must be erased before a newer one
                        may go, or it would come back when the store is opened again; KVS_NO_SLOT: none */
  uint32_t readers, pins;
  bool writer;
  bool idle; /* it is in the order of use: nobody has or wants it, it is there, and not pinned */
  struct kvs_file_item *first, *last; /* who waits for it, linked by the owner of items */
  uint16_t key_nbytes;
  uint8_t key[];
};

struct kvs_file_index {
  struct kvs_file_entry **buckets;
  size_t nbuckets; /* a power of two */
  size_t count;    /* entries */
  size_t blocks;   /* entries with a slot */
  size_t pinned;   /* entries with pins */
  struct kvs_file_entry *oldest, *newest;
};

bool kvs_file_index_init(struct kvs_file_index *); /* false: no memory */
void kvs_file_index_free(struct kvs_file_index *);
struct kvs_file_entry *kvs_file_index_find(const struct kvs_file_index *, const uint8_t *key, size_t key_nbytes);
/* The entry, made if need be; NULL: no memory. */
struct kvs_file_entry *kvs_file_index_add(struct kvs_file_index *, const uint8_t *key, size_t key_nbytes);
void kvs_file_index_set_slot(struct kvs_file_index *, struct kvs_file_entry *, uint32_t slot);
void kvs_file_index_pin(struct kvs_file_index *, struct kvs_file_entry *, bool pin);
void kvs_file_index_touch(struct kvs_file_index *, struct kvs_file_entry *); /* it is used now */
/* Call it after anything about an entry has changed: it joins or leaves the order of use (as the most recently used),
 * and one that says nothing any more is freed. */
void kvs_file_index_settle(struct kvs_file_index *, struct kvs_file_entry *);
/* The index becomes what was found in its place, and `found` empty, to be freed. Entries that somebody has, waits for
 * or pinned stay where they are in memory, with the slot that was found. Nothing of `found` is used or pinned. */
void kvs_file_index_replace(struct kvs_file_index *, struct kvs_file_index *found);

#endif
