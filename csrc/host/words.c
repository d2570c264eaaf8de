/* A page with a counter of recordings and entries for the latest 64. Recording n has completed when entry n % 64 holds
 * n or more. Recordings of several streams and processes complete in any order, and one must not complete another's
 * waiters: an entry is reused only after its recording has completed. Each entry also names its process, so that a dead
 * process does not block others forever. */
#include "host/words.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/owner.h"
#include "host/arena.h"

enum { PLACES = 64, PAGE_NBYTES = 4096 };

struct page {
  atomic_uint_fast64_t latest;
  struct {
    atomic_uint_fast64_t reached;
    atomic_uint_fast64_t recorder; /* low half of the number, and the process */
  } places[PLACES];
};
_Static_assert(sizeof(struct page) <= PAGE_NBYTES && sizeof(uint_fast64_t) == 8, "it fits, the same in all processes");

struct kvs_host_words {
  atomic_uint refs;
  struct page *page;
  bool opened; /* opened from another process */
  uint64_t offset;
  struct kvs_host_arena arena; /* of this event only; freed with the last reference */
};

static struct page *page_of(const struct kvs_host_words *words) { return words->page; }

int kvs_host_words_new(struct kvs_host_words **made, struct kvs_error *err) {
  struct kvs_host_words *words = calloc(1, sizeof *words);
  if (!words) return kvs_fail(err, KVS_NOMEM, "no memory for an event");
  atomic_init(&words->refs, 1);
  int status = kvs_host_arena_init(&words->arena, err);
  if (status) {
    free(words);
    return status;
  }
  words->page = kvs_host_arena_map(&words->arena, PAGE_NBYTES, &words->offset);
  if (!words->page || words->offset == KVS_HOST_PRIVATE) {
    kvs_host_words_unref(words);
    return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_NOT_SUPPORTED, "event_create_shared",
                           "this system has no memory that can be shared (memfd)");
  }
  *made = words;
  return KVS_OK;
}

int kvs_host_words_share(struct kvs_host_words *words, struct kvs_handle *handle, struct kvs_error *err) {
  if (words->opened)
    return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_HANDLE, "event_share",
                           "it is an event of another process, which alone can share it");
  return kvs_host_arena_share(&words->arena, words->offset, PAGE_NBYTES, 0, handle, err);
}

int kvs_host_words_open(const struct kvs_handle *handle, struct kvs_host_words **made, struct kvs_error *err) {
  uint64_t nbytes = 0;
  void *page = NULL;
  struct kvs_host_words *words = calloc(1, sizeof *words);
  if (!words) return kvs_fail(err, KVS_NOMEM, "no memory for an event");
  int status = kvs_host_arena_open(handle, "event_open", &page, &nbytes, err);
  if (!status && nbytes != PAGE_NBYTES) {
    kvs_host_arena_close(page, nbytes);
    status = kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, "event_open", "this is no handle of an event");
  }
  if (status) {
    free(words);
    return status;
  }
  atomic_init(&words->refs, 1);
  words->page = page;
  words->opened = true;
  *made = words;
  return KVS_OK;
}

struct kvs_host_words *kvs_host_words_ref(struct kvs_host_words *words) {
  if (words) atomic_fetch_add(&words->refs, 1);
  return words;
}

void kvs_host_words_unref(struct kvs_host_words *words) {
  if (!words || atomic_fetch_sub(&words->refs, 1) != 1) return;
  if (words->page) kvs_host_arena_close(words->page, PAGE_NBYTES); /* leaves no hole: others may read it */
  if (!words->opened) kvs_host_arena_destroy(&words->arena);
  free(words);
}

bool kvs_host_words_ended(const struct kvs_host_words *words, uint64_t number) {
  return atomic_load(&page_of(words)->places[number % PLACES].reached) >= number;
}

bool kvs_host_words_abandoned(const struct kvs_host_words *words, uint64_t number) {
  uint64_t recorder = atomic_load(&page_of(words)->places[number % PLACES].recorder);
  return recorder >> 32 == (number & UINT32_MAX) && !kvs_process_alive((int64_t)(recorder & UINT32_MAX), 0);
}

uint64_t kvs_host_words_begin(struct kvs_host_words *words) {
  struct page *page = page_of(words);
  uint64_t latest = atomic_load(&page->latest);
  for (;;) {
    uint64_t number = latest + 1, before = number > PLACES ? number - PLACES : 0;
    if (before && !kvs_host_words_ended(words, before) && !kvs_host_words_abandoned(words, before)) return 0;
    if (!atomic_compare_exchange_weak(&page->latest, &latest, number)) continue;
    atomic_store(&page->places[number % PLACES].recorder, number << 32 | (uint32_t)getpid());
    return number;
  }
}

void kvs_host_words_end(struct kvs_host_words *words, uint64_t number) {
  atomic_store(&page_of(words)->places[number % PLACES].reached, number);
}

uint64_t kvs_host_words_latest(const struct kvs_host_words *words) { return atomic_load(&page_of(words)->latest); }
