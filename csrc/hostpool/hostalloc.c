/* Pinned memory for callers that keep plain addresses. The engine knows its allocations and registrations; this table
 * maps an address to its engine, since freeing names only the address. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "lanes/state.h"

#define PATIENCE_NS (INT64_C(60) * 1000000000)

struct allocation {
  uint64_t ptr;
  struct kvs_engine *engine; /* with a reference */
  enum kvs_origin origin;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *pieces;     /* guarded by lock, unsorted */
static size_t count, taken, capacity; /* taken: entries that may be put back, for which there is room */

/* The entries are the parent's: a child of fork() starts with none. */
static void forked(void) {
  pieces = NULL;
  count = taken = capacity = 0;
}

static int remember(uint64_t ptr, struct kvs_engine *engine, enum kvs_origin origin, struct kvs_error *err) {
  static struct kvs_fork_guard guard = {.lock = &lock, .in_child = forked};
  int status = KVS_OK;
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&lock);
  if (count + taken == capacity) {
    size_t more = capacity ? 2 * capacity : 16;
    struct allocation *grown = realloc(pieces, more * sizeof *grown);
    if (grown) pieces = grown, capacity = more;
  }
  if (count + taken < capacity)
    pieces[count++] = (struct allocation){ptr, engine, origin};
  else
    status = kvs_fail(err, KVS_NOMEM, "no memory to remember an allocation");
  pthread_mutex_unlock(&lock);
  if (!status) kvs_engine_ref(engine);
  return status;
}

/* Remove an entry, so that of two threads that free the same address one gets an error. put_back() or forget(). */
static int take(uint64_t ptr, enum kvs_origin origin, struct allocation *piece, struct kvs_error *err) {
  bool found = false;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; !found && i < count; i++) {
    found = pieces[i].ptr == ptr && pieces[i].origin == origin;
    if (!found) continue;
    *piece = pieces[i];
    pieces[i] = pieces[--count];
    taken++;
  }
  pthread_mutex_unlock(&lock);
  if (found) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "0x%" PRIx64 " does not come from %s in this process, or was given back already",
                  ptr, origin == KVS_ORIGIN_REGISTERED ? "host_register()" : "host_alloc()");
}

/* After a failed free. */
static void put_back(const struct allocation *piece) {
  pthread_mutex_lock(&lock);
  if (taken) pieces[count++] = *piece, taken--; /* taken is 0 in the child of a fork */
  pthread_mutex_unlock(&lock);
}

static void forget(const struct allocation *piece) {
  pthread_mutex_lock(&lock);
  if (taken) taken--;
  pthread_mutex_unlock(&lock);
  kvs_engine_unref(piece->engine);
}

int kvs_host_give_back(uint64_t ptr, bool registered, int64_t timeout_ns, struct kvs_error *err) {
  struct allocation piece;
  bool kept;
  int status = take(ptr, registered ? KVS_ORIGIN_REGISTERED : KVS_ORIGIN_ALLOCATED, &piece, err);
  if (status) return status;
  status = registered ? kvs_engine_unregister_within(piece.engine, ptr, timeout_ns, &kept, err)
                      : kvs_engine_free_within(piece.engine, ptr, timeout_ns, &kept, err);
  if (kept)
    put_back(&piece);
  else
    forget(&piece);
  return status;
}

int kvs_host_adopt(struct kvs_engine *engine, uint64_t ptr, struct kvs_error *err) {
  int status = remember(ptr, engine, KVS_ORIGIN_ALLOCATED, err);
  if (status) kvs_engine_free_later(engine, ptr);
  return status;
}

int kvs_host_alloc(struct kvs_engine *engine, size_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  int status = kvs_engine_alloc(engine, nbytes, true, ptr, err);
  return status ? status : kvs_host_adopt(engine, *ptr, err);
}

int kvs_host_free(uint64_t ptr, struct kvs_error *err) { return kvs_host_give_back(ptr, false, PATIENCE_NS, err); }

int kvs_host_register(struct kvs_engine *engine, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  struct kvs_error ignored;
  int status = kvs_engine_register(engine, ptr, nbytes, err);
  if (status) return status;
  status = remember(ptr, engine, KVS_ORIGIN_REGISTERED, err);
  if (status) (void)kvs_engine_unregister(engine, ptr, &ignored);
  return status;
}

int kvs_host_unregister(uint64_t ptr, struct kvs_error *err) { return kvs_host_give_back(ptr, true, PATIENCE_NS, err); }
