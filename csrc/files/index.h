/* Index of the store: the slot of each key, the users of each entry, and the LRU order. No file access and no lock; the
 * store's lock guards the index.
 *
 * An entry is also the lock of its key: loads share it, stores and deletes hold it exclusively, and waiters queue in
 * FIFO order. Calls on one key therefore take effect in submission order, and a slot is never written while a load
 * reads it. */
#ifndef KVS_FILE_INDEX_H
#define KVS_FILE_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVS_NO_SLOT UINT32_MAX

struct kvs_file_item;

struct kvs_file_stale {
  struct kvs_file_stale *next;
  uint32_t slot;
};

struct kvs_file_entry {
  struct kvs_file_entry *next;          /* in the same bucket */
  struct kvs_file_entry *older, *newer; /* LRU list, while the entry is idle */
  uint64_t hash;
  uint64_t sequence; /* sequence of the block in `slot` */
  uint32_t slot;     /* KVS_NO_SLOT: no block */
  uint32_t stale; /* A slot that may still hold an older block of this key, or KVS_NO_SLOT. That header must be erased
                     before the newer block is removed; otherwise the older block would reappear at the next open. */
  struct kvs_file_stale *more; /* further ones */
  uint32_t other;   /* Shared directories: a further block of this key, of another process. It takes the place of `slot`
                       when that block goes. KVS_NO_SLOT: none is known. */
  uint32_t leaving; /* A slot with a block of a former epoch that a load or delete of this key still uses; it is free
                       when they have ended. KVS_NO_SLOT: none. */
  uint32_t readers, pins;
  bool writer;
  bool foreign;                       /* another process writes `slot`: never evicted here */
  bool untold;                        /* no event has said that its block is there */
  bool idle;                          /* in the LRU list: has a block, no users, no waiters and no pins */
  struct kvs_file_item *first, *last; /* items that wait for this key */
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
/* Find the entry or create it; NULL: no memory. */
struct kvs_file_entry *kvs_file_index_add(struct kvs_file_index *, const uint8_t *key, size_t key_nbytes);
void kvs_file_index_set_slot(struct kvs_file_index *, struct kvs_file_entry *, uint32_t slot);
void kvs_file_index_pin(struct kvs_file_index *, struct kvs_file_entry *, bool pin);
void kvs_file_index_touch(struct kvs_file_index *, struct kvs_file_entry *); /* mark as used now */
bool kvs_file_index_add_stale(struct kvs_file_entry *, uint32_t slot);       /* false: no memory */
void kvs_file_index_drop_stale(struct kvs_file_entry *); /* `stale` is erased: the next one takes its place */
/* Call after each change of an entry. Adds the entry to the LRU list (as most recently used) or removes it, and frees
 * an entry without contents. */
void kvs_file_index_settle(struct kvs_file_index *, struct kvs_file_entry *);
/* Take the entries out that are not used, pinned or stale: a list by `next`. The LRU list is empty then. */
struct kvs_file_entry *kvs_file_index_take_unused(struct kvs_file_index *);
/* Replace the contents with those of `found`, which becomes empty and must be freed. Entries in use, waited for or
 * pinned keep their address and get the new slot. No entry of `found` is in use or pinned. */
void kvs_file_index_replace(struct kvs_file_index *, struct kvs_file_index *found);

#endif
