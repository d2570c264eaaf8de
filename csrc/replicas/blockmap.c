/* In memory: the struct, a chain for each bucket (the number of its first slot), and the slots. A slot that is not free
 * is in the chain of its key; READY slots are in a list by their last use, free ones in a queue. All links are numbers
 * of slots, since each process has the memory at another address. */
#include "replicas/blockmap.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64 };

static uint64_t rounded(uint64_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static uint64_t buckets_for(uint64_t num_slots) {
  uint64_t count = 1;
  while (count < num_slots) count *= 2;
  return count;
}

uint64_t kvs_blockmap_nbytes(uint64_t num_slots) {
  return rounded(sizeof(struct kvs_blockmap)) + rounded(buckets_for(num_slots) * sizeof(uint32_t)) +
         num_slots * sizeof(struct kvs_blockmap_slot);
}

static uint32_t *bucket(struct kvs_blockmap *map, uint64_t i) {
  return (uint32_t *)(void *)((char *)map + rounded(sizeof *map)) + i;
}

struct kvs_blockmap_slot *kvs_blockmap_slot(struct kvs_blockmap *map, uint32_t slot) {
  char *slots = (char *)bucket(map, 0) + rounded(map->num_buckets * sizeof(uint32_t));
  return (struct kvs_blockmap_slot *)(void *)slots + slot;
}

/* The one store that changes a slot's state: a killed process has made all stores before it, or not this one. */
static void set_state(struct kvs_blockmap_slot *slot, enum kvs_slot_state state) {
  __atomic_store_n(&slot->state, (uint8_t)state, __ATOMIC_RELEASE);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

/* -- chains -------------------------------------------------------------------------------------------------------- */

/* The seed keeps a client, which chooses prompts and so the keys, from filling one bucket. */
static uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
  return hash ^ hash >> 29;
}

static uint32_t *bucket_of(struct kvs_blockmap *map, const struct kvs_blockmap_key *key, uint32_t epoch) {
  uint64_t hash = mix(mix(map->seed, key->nbytes), epoch), word;
  for (size_t i = 0; i < sizeof key->bytes; i += sizeof word) {
    memcpy(&word, key->bytes + i, sizeof word);
    hash = mix(hash, word);
  }
  return bucket(map, mix(hash, map->seed) & (map->num_buckets - 1));
}

static void chain(struct kvs_blockmap *map, uint32_t slot) {
  struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
  uint32_t *first = bucket_of(map, &entry->key, entry->epoch);
  entry->chain = *first;
  *first = slot;
}

static void unchain(struct kvs_blockmap *map, uint32_t slot) {
  struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
  uint32_t *at = bucket_of(map, &entry->key, entry->epoch);
  while (*at != slot) at = &kvs_blockmap_slot(map, *at)->chain;
  *at = entry->chain;
}

uint32_t kvs_blockmap_find(struct kvs_blockmap *map, const struct kvs_blockmap_key *key, uint32_t epoch) {
  for (uint32_t slot = *bucket_of(map, key, epoch); slot != KVS_BLOCKMAP_NONE;) {
    const struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
    if (entry->epoch == epoch && memcmp(&entry->key, key, sizeof *key) == 0) return slot;
    slot = entry->chain;
  }
  return KVS_BLOCKMAP_NONE;
}

/* -- lists --------------------------------------------------------------------------------------------------------- */

static void append(struct kvs_blockmap *map, uint32_t slot) {
  struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
  entry->newer = KVS_BLOCKMAP_NONE;
  entry->older = map->newest;
  if (map->newest == KVS_BLOCKMAP_NONE)
    map->oldest = slot;
  else
    kvs_blockmap_slot(map, map->newest)->newer = slot;
  map->newest = slot;
}

static void take_out(struct kvs_blockmap *map, uint32_t slot) {
  const struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
  if (entry->older == KVS_BLOCKMAP_NONE)
    map->oldest = entry->newer;
  else
    kvs_blockmap_slot(map, entry->older)->newer = entry->newer;
  if (entry->newer == KVS_BLOCKMAP_NONE)
    map->newest = entry->older;
  else
    kvs_blockmap_slot(map, entry->newer)->older = entry->older;
}

void kvs_blockmap_touch(struct kvs_blockmap *map, uint32_t slot) {
  kvs_blockmap_slot(map, slot)->used = ++map->clock;
  take_out(map, slot);
  append(map, slot);
}

static void push_free(struct kvs_blockmap *map, uint32_t slot) {
  kvs_blockmap_slot(map, slot)->chain = KVS_BLOCKMAP_NONE;
  if (map->first_free == KVS_BLOCKMAP_NONE)
    map->first_free = slot;
  else
    kvs_blockmap_slot(map, map->last_free)->chain = slot;
  map->last_free = slot;
  map->num_free++;
}

/* A slot of any state becomes free. */
static void release(struct kvs_blockmap *map, uint32_t slot) {
  struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
  uint8_t before = entry->state;
  set_state(entry, KVS_SLOT_FREE);
  unchain(map, slot);
  if (before == KVS_SLOT_READY)
    take_out(map, slot);
  else
    map->num_writing--;
  push_free(map, slot);
}

/* -- making and repairing ------------------------------------------------------------------------------------------ */

struct used_slot {
  uint64_t used;
  uint32_t slot;
};

static int by_use(const void *a, const void *b) {
  const struct used_slot *one = a, *other = b;
  return (one->used > other->used) - (one->used < other->used);
}

void kvs_blockmap_rebuild(struct kvs_blockmap *map) {
  struct used_slot *ready = malloc(map->num_slots * sizeof *ready); /* NULL: the order of use is lost, no more */
  size_t count = 0;
  map->first_free = map->last_free = map->oldest = map->newest = KVS_BLOCKMAP_NONE;
  map->num_free = map->num_writing = 0;
  for (uint64_t i = 0; i < map->num_buckets; i++) *bucket(map, i) = KVS_BLOCKMAP_NONE;
  for (uint32_t slot = 0; slot < map->num_slots; slot++) {
    const struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
    if (entry->state == KVS_SLOT_FREE) {
      push_free(map, slot);
      continue;
    }
    if (entry->used > map->clock) map->clock = entry->used;
    chain(map, slot);
    if (entry->state == KVS_SLOT_WRITING)
      map->num_writing++;
    else if (ready)
      ready[count++] = (struct used_slot){entry->used, slot};
    else
      append(map, slot);
  }
  if (count) qsort(ready, count, sizeof *ready, by_use);
  for (size_t i = 0; i < count; i++) append(map, ready[i].slot);
  free(ready);
}

void kvs_blockmap_init(struct kvs_blockmap *map, uint64_t num_slots, uint64_t seed) {
  *map = (struct kvs_blockmap){.num_slots = num_slots, .num_buckets = buckets_for(num_slots), .seed = seed};
  memset(kvs_blockmap_slot(map, 0), 0, num_slots * sizeof(struct kvs_blockmap_slot));
  kvs_blockmap_rebuild(map);
}

/* -- use ----------------------------------------------------------------------------------------------------------- */

static bool has_readers(const struct kvs_blockmap_slot *entry) {
  unsigned all = 0;
  for (size_t i = 0; i < KVS_BLOCKMAP_MEMBERS; i++) all |= entry->readers[i];
  return all != 0;
}

/* Free the `wanted` oldest slots without readers that were last used before `mark`. False: there are fewer, and none
 * was freed. */
static bool evict(struct kvs_blockmap *map, size_t wanted, uint64_t mark) {
  size_t found = 0;
  for (uint32_t slot = map->oldest; slot != KVS_BLOCKMAP_NONE && found < wanted;) {
    const struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
    if (entry->used >= mark) break; /* in the order of use: so are all that follow */
    found += !has_readers(entry);
    slot = entry->newer;
  }
  if (found < wanted) return false;
  for (uint32_t slot = map->oldest; wanted > 0;) {
    const struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
    uint32_t next = entry->newer;
    if (!has_readers(entry)) {
      release(map, slot);
      wanted--;
    }
    slot = next;
  }
  return true;
}

/* Mark the keys that the table has: how many it has not. Those twice in the list count twice. */
static size_t count_missing(struct kvs_blockmap *map, const struct kvs_blockmap_writer *writer,
                            const struct kvs_blockmap_key *keys, size_t count) {
  size_t missing = 0;
  for (size_t i = 0; i < count; i++) {
    uint32_t slot = kvs_blockmap_find(map, &keys[i], writer->epoch);
    if (slot == KVS_BLOCKMAP_NONE)
      missing++;
    else if (kvs_blockmap_slot(map, slot)->state == KVS_SLOT_READY)
      kvs_blockmap_touch(map, slot);
  }
  return missing;
}

static uint32_t write_to_free(struct kvs_blockmap *map, const struct kvs_blockmap_writer *writer,
                              const struct kvs_blockmap_key *key) {
  uint32_t slot = map->first_free;
  struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
  map->first_free = entry->chain;
  map->num_free--;
  entry->key = *key;
  entry->epoch = writer->epoch;
  entry->origin = writer->origin;
  entry->writer = writer->member;
  entry->since_ns = writer->now_ns;
  entry->used = ++map->clock;
  memset(entry->readers, 0, sizeof entry->readers);
  set_state(entry, KVS_SLOT_WRITING);
  map->num_writing++;
  chain(map, slot);
  return slot;
}

bool kvs_blockmap_take(struct kvs_blockmap *map, const struct kvs_blockmap_writer *writer,
                       const struct kvs_blockmap_key *keys, size_t count, uint32_t *slots, size_t *evicted) {
  uint64_t mark = map->clock + 1;
  size_t missing = count_missing(map, writer, keys, count);
  *evicted = missing > map->num_free ? missing - map->num_free : 0;
  if (*evicted && !evict(map, *evicted, mark)) return false;
  for (size_t i = 0; i < count; i++) {
    bool there = kvs_blockmap_find(map, &keys[i], writer->epoch) != KVS_BLOCKMAP_NONE;
    slots[i] = there ? KVS_BLOCKMAP_NONE : write_to_free(map, writer, &keys[i]);
  }
  return true;
}

bool kvs_blockmap_settle(struct kvs_blockmap *map, uint32_t slot, uint8_t member, bool stored) {
  struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
  if (entry->state != KVS_SLOT_WRITING || entry->writer != member) return false;
  if (!stored) {
    release(map, slot);
    return true;
  }
  entry->used = ++map->clock;
  set_state(entry, KVS_SLOT_READY);
  map->num_writing--;
  append(map, slot);
  return true;
}

bool kvs_blockmap_pin(struct kvs_blockmap *map, uint32_t slot, uint8_t member) {
  struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
  if (entry->readers[member] >= KVS_BLOCKMAP_READERS) return false;
  entry->readers[member]++;
  return true;
}

bool kvs_blockmap_unpin(struct kvs_blockmap *map, uint32_t slot, uint8_t member) {
  struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
  if (entry->state != KVS_SLOT_READY || entry->readers[member] == 0) return false;
  entry->readers[member]--;
  return true;
}

size_t kvs_blockmap_pins(struct kvs_blockmap *map, uint8_t member) {
  size_t count = 0;
  for (uint32_t slot = 0; slot < map->num_slots; slot++) {
    const struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
    if (entry->state == KVS_SLOT_READY) count += entry->readers[member];
    if (entry->state == KVS_SLOT_WRITING) count += entry->writer == member;
  }
  return count;
}

void kvs_blockmap_give_back(struct kvs_blockmap *map, uint8_t member) {
  for (uint32_t slot = 0; slot < map->num_slots; slot++) {
    struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
    entry->readers[member] = 0;
    if (entry->state == KVS_SLOT_WRITING && entry->writer == member) release(map, slot);
  }
}

size_t kvs_blockmap_forget(struct kvs_blockmap *map, const uint32_t *epochs, size_t count) {
  size_t freed = 0;
  for (uint32_t slot = 0; slot < map->num_slots; slot++) {
    const struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
    bool wanted = entry->state != KVS_SLOT_READY || has_readers(entry);
    for (size_t i = 0; !wanted && i < count; i++) wanted = epochs[i] == entry->epoch;
    if (wanted) continue;
    release(map, slot);
    freed++;
  }
  return freed;
}

/* -- for tests ----------------------------------------------------------------------------------------------------- */

bool kvs_blockmap_consistent(struct kvs_blockmap *map) {
  uint64_t states[3] = {0}, chained = 0, listed = 0, freed = 0, used = 0;
  for (uint32_t slot = 0; slot < map->num_slots; slot++) states[kvs_blockmap_slot(map, slot)->state % 3]++;
  for (uint64_t i = 0; i < map->num_buckets; i++)
    for (uint32_t slot = *bucket(map, i); slot != KVS_BLOCKMAP_NONE && chained <= map->num_slots; chained++) {
      const struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
      if (entry->state == KVS_SLOT_FREE || kvs_blockmap_find(map, &entry->key, entry->epoch) != slot) return false;
      slot = entry->chain;
    }
  for (uint32_t slot = map->first_free; slot != KVS_BLOCKMAP_NONE && freed <= map->num_slots; freed++)
    slot = kvs_blockmap_slot(map, slot)->chain;
  for (uint32_t slot = map->oldest; slot != KVS_BLOCKMAP_NONE && listed <= map->num_slots; listed++) {
    const struct kvs_blockmap_slot *entry = kvs_blockmap_slot(map, slot);
    if (entry->state != KVS_SLOT_READY || entry->used < used) return false;
    used = entry->used;
    slot = entry->newer;
  }
  return freed == states[KVS_SLOT_FREE] && freed == map->num_free && listed == states[KVS_SLOT_READY] &&
         chained == listed + states[KVS_SLOT_WRITING] && map->num_writing == states[KVS_SLOT_WRITING];
}
