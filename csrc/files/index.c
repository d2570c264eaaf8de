/* Hash table of keys; a list through the entries keeps the LRU order. */
#include "files/index.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_BUCKETS = 256 };

/* Keys are usually hashes, but any bytes are allowed. */
static uint64_t hash_of(const uint8_t *key, size_t nbytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < nbytes; i++) hash = (hash ^ key[i]) * 0x100000001b3u;
  hash ^= hash >> 32;
  hash *= 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

bool kvs_file_index_init(struct kvs_file_index *index) {
  memset(index, 0, sizeof *index);
  index->buckets = calloc(FIRST_BUCKETS, sizeof(struct kvs_file_entry *));
  index->nbuckets = FIRST_BUCKETS;
  return index->buckets != NULL;
}

static void free_entry(struct kvs_file_entry *entry) {
  for (struct kvs_file_stale *more = entry->more, *next; more; more = next) {
    next = more->next;
    free(more);
  }
  free(entry);
}

void kvs_file_index_free(struct kvs_file_index *index) {
  for (size_t i = 0; index->buckets && i < index->nbuckets; i++)
    for (struct kvs_file_entry *entry = index->buckets[i], *next; entry; entry = next) {
      next = entry->next;
      free_entry(entry);
    }
  free(index->buckets);
  memset(index, 0, sizeof *index);
}

static struct kvs_file_entry *find(const struct kvs_file_index *index, uint64_t hash, const uint8_t *key,
                                   size_t nbytes) {
  struct kvs_file_entry *entry = index->buckets[hash & (index->nbuckets - 1)];
  while (entry && (entry->hash != hash || entry->key_nbytes != nbytes || memcmp(entry->key, key, nbytes) != 0))
    entry = entry->next;
  return entry;
}

struct kvs_file_entry *kvs_file_index_find(const struct kvs_file_index *index, const uint8_t *key, size_t nbytes) {
  return find(index, hash_of(key, nbytes), key, nbytes);
}

/* If there is no memory for more buckets, the chains grow longer. */
static void grow(struct kvs_file_index *index) {
  size_t nbuckets = 2 * index->nbuckets;
  struct kvs_file_entry **buckets = calloc(nbuckets, sizeof(struct kvs_file_entry *));
  if (!buckets) return;
  for (size_t i = 0; i < index->nbuckets; i++)
    for (struct kvs_file_entry *entry = index->buckets[i], *next; entry; entry = next) {
      next = entry->next;
      entry->next = buckets[entry->hash & (nbuckets - 1)];
      buckets[entry->hash & (nbuckets - 1)] = entry;
    }
  free(index->buckets);
  index->buckets = buckets;
  index->nbuckets = nbuckets;
}

static void link_entry(struct kvs_file_index *index, struct kvs_file_entry *entry) {
  struct kvs_file_entry **bucket = &index->buckets[entry->hash & (index->nbuckets - 1)];
  entry->next = *bucket;
  *bucket = entry;
  index->count++;
}

struct kvs_file_entry *kvs_file_index_add(struct kvs_file_index *index, const uint8_t *key, size_t nbytes) {
  uint64_t hash = hash_of(key, nbytes);
  struct kvs_file_entry *entry = find(index, hash, key, nbytes);
  if (entry) return entry;
  if (index->count >= index->nbuckets) grow(index);
  entry = calloc(1, sizeof *entry + nbytes);
  if (!entry) return NULL;
  entry->hash = hash;
  entry->slot = entry->stale = entry->other = entry->leaving = KVS_NO_SLOT;
  entry->key_nbytes = (uint16_t)nbytes;
  memcpy(entry->key, key, nbytes);
  link_entry(index, entry);
  return entry;
}

void kvs_file_index_set_slot(struct kvs_file_index *index, struct kvs_file_entry *entry, uint32_t slot) {
  index->blocks -= entry->slot != KVS_NO_SLOT;
  entry->slot = slot;
  index->blocks += slot != KVS_NO_SLOT;
}

void kvs_file_index_pin(struct kvs_file_index *index, struct kvs_file_entry *entry, bool pin) {
  index->pinned -= entry->pins != 0;
  entry->pins += pin ? 1u : -1u;
  index->pinned += entry->pins != 0;
}

static void leave_order(struct kvs_file_index *index, struct kvs_file_entry *entry) {
  *(entry->older ? &entry->older->newer : &index->oldest) = entry->newer;
  *(entry->newer ? &entry->newer->older : &index->newest) = entry->older;
  entry->older = entry->newer = NULL;
  entry->idle = false;
}

static void join_order(struct kvs_file_index *index, struct kvs_file_entry *entry) {
  entry->older = index->newest;
  *(index->newest ? &index->newest->newer : &index->oldest) = entry;
  index->newest = entry;
  entry->idle = true;
}

void kvs_file_index_touch(struct kvs_file_index *index, struct kvs_file_entry *entry) {
  if (!entry->idle) return; /* joins as most recently used */
  leave_order(index, entry);
  join_order(index, entry);
}

static void unlink_entry(struct kvs_file_index *index, struct kvs_file_entry *entry) {
  struct kvs_file_entry **at = &index->buckets[entry->hash & (index->nbuckets - 1)];
  while (*at != entry) at = &(*at)->next;
  *at = entry->next;
  index->count--;
}

static void drop(struct kvs_file_index *index, struct kvs_file_entry *entry) {
  unlink_entry(index, entry);
  free_entry(entry);
}

static bool in_use(const struct kvs_file_entry *entry) { return entry->readers || entry->writer || entry->first; }

bool kvs_file_index_add_stale(struct kvs_file_entry *entry, uint32_t slot) {
  if (entry->stale == KVS_NO_SLOT) {
    entry->stale = slot;
    return true;
  }
  struct kvs_file_stale *more = malloc(sizeof *more);
  if (!more) return false;
  *more = (struct kvs_file_stale){entry->more, slot};
  entry->more = more;
  return true;
}

void kvs_file_index_drop_stale(struct kvs_file_entry *entry) {
  struct kvs_file_stale *first = entry->more;
  entry->stale = first ? first->slot : KVS_NO_SLOT;
  if (first) entry->more = first->next;
  free(first);
}

void kvs_file_index_settle(struct kvs_file_index *index, struct kvs_file_entry *entry) {
  bool used = in_use(entry), there = entry->slot != KVS_NO_SLOT;
  /* With an unerased older block on disk, eviction would bring that block back at the next open. */
  bool clean = entry->stale == KVS_NO_SLOT;
  bool idle = there && !used && !entry->pins && clean && !entry->foreign;
  if (entry->idle && !idle) leave_order(index, entry);
  if (!entry->idle && idle) join_order(index, entry);
  if (!there && !used && !entry->pins && clean) drop(index, entry);
}

struct kvs_file_entry *kvs_file_index_take_unused(struct kvs_file_index *index) {
  struct kvs_file_entry *taken = NULL;
  for (size_t i = 0; i < index->nbuckets; i++)
    for (struct kvs_file_entry **at = &index->buckets[i], *entry; (entry = *at) != NULL;) {
      entry->older = entry->newer = NULL;
      entry->idle = false;
      if (in_use(entry) || entry->pins || entry->stale != KVS_NO_SLOT) {
        at = &entry->next;
        continue;
      }
      *at = entry->next;
      entry->next = taken;
      taken = entry;
      index->count--;
      index->blocks -= entry->slot != KVS_NO_SLOT;
    }
  index->oldest = index->newest = NULL;
  return taken;
}

/* Move the entry to the new index. The entry replaces the scanned one of the same key, if there is one. */
static void take_place(struct kvs_file_index *found, struct kvs_file_entry *entry) {
  struct kvs_file_entry *twin = find(found, entry->hash, entry->key, entry->key_nbytes);
  entry->slot = twin ? twin->slot : KVS_NO_SLOT;
  entry->sequence = twin ? twin->sequence : 0;
  if (twin) { /* the scanned block is now the entry's */
    if (twin->idle) leave_order(found, twin);
    drop(found, twin);
  }
  link_entry(found, entry);
  found->pinned += entry->pins != 0;
}

void kvs_file_index_replace(struct kvs_file_index *index, struct kvs_file_index *found) {
  for (size_t i = 0; i < index->nbuckets; i++)
    for (struct kvs_file_entry *entry = index->buckets[i], *next; entry; entry = next) {
      next = entry->next;
      if (!in_use(entry) && !entry->pins) continue;
      unlink_entry(index, entry);
      take_place(found, entry);
    }
  struct kvs_file_index old = *index;
  *index = *found;
  *found = old;
}
