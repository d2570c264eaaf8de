/* Pinned memory for callers who keep plain addresses. An engine knows what it allocated and registered; what is kept
 * here is which engine that was, since freeing names the address alone. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"

struct piece {
  uint64_t ptr;
  struct kvs_engine *engine; /* a reference */
  enum kvs_origin origin;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct piece *pieces; /* guarded by lock, in no order */
static size_t count, capacity;

/* The child of a fork starts without any: they are its parent's. */
static void forked(void) {
  pthread_mutex_init(&lock, NULL);
  pieces = NULL;
  count = capacity = 0;
}

static void watch_fork(void) { pthread_atfork(NULL, NULL, forked); }

static int remember(uint64_t ptr, struct kvs_engine *engine, enum kvs_origin origin, struct kvs_error *err) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  int status = KVS_OK;
  pthread_once(&once, watch_fork);
  pthread_mutex_lock(&lock);
  if (count == capacity) {
    size_t more = capacity ? 2 * capacity : 16;
    struct piece *grown = realloc(pieces, more * sizeof *grown);
    if (grown) pieces = grown, capacity = more;
  }
  if (count < capacity)
    pieces[count++] = (struct piece){ptr, engine, origin};
  else
    status = kvs_fail(err, KVS_NOMEM, "no memory to remember an allocation");
  pthread_mutex_unlock(&lock);
  if (!status) kvs_engine_ref(engine);
  return status;
}

/* Take an entry out, so that of two threads that free it one is told. */
static int take(uint64_t ptr, enum kvs_origin origin, struct piece *piece, struct kvs_error *err) {
  bool found = false;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; !found && i < count; i++) {
    found = pieces[i].ptr == ptr && pieces[i].origin == origin;
    if (!found) continue;
    *piece = pieces[i];
    pieces[i] = pieces[--count];
  }
  pthread_mutex_unlock(&lock);
  if (found) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "0x%" PRIx64 " does not come from %s in this process, or was given back already",
                  ptr, origin == KVS_ORIGIN_REGISTERED ? "host_register()" : "host_alloc()");
}

/* Back where it was, since it could not be freed. There is room: it was there. */
static void put_back(const struct piece *piece) {
  pthread_mutex_lock(&lock);
  if (count < capacity) pieces[count++] = *piece;
  pthread_mutex_unlock(&lock);
}

static int give_back(uint64_t ptr, enum kvs_origin origin, struct kvs_error *err) {
  struct piece piece;
  int status = take(ptr, origin, &piece, err);
  if (status) return status;
  status = origin == KVS_ORIGIN_REGISTERED ? kvs_engine_unregister(piece.engine, ptr, err)
                                           : kvs_engine_free(piece.engine, ptr, err);
  if (status == KVS_TIMEOUT || (status == KVS_REFUSED && origin == KVS_ORIGIN_REGISTERED))
    put_back(&piece);
  else
    kvs_engine_unref(piece.engine);
  return status;
}

int kvs_host_alloc(struct kvs_engine *engine, size_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  struct kvs_error ignored;
  int status = kvs_engine_alloc(engine, nbytes, true, ptr, err);
  if (status) return status;
  status = remember(*ptr, engine, KVS_ORIGIN_ALLOCATED, err);
  if (status) (void)kvs_engine_free(engine, *ptr, &ignored);
  return status;
}

int kvs_host_free(uint64_t ptr, struct kvs_error *err) { return give_back(ptr, KVS_ORIGIN_ALLOCATED, err); }

int kvs_host_register(struct kvs_engine *engine, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  struct kvs_error ignored;
  int status = kvs_engine_register(engine, ptr, nbytes, err);
  if (status) return status;
  status = remember(ptr, engine, KVS_ORIGIN_REGISTERED, err);
  if (status) (void)kvs_engine_unregister(engine, ptr, &ignored);
  return status;
}

int kvs_host_unregister(uint64_t ptr, struct kvs_error *err) { return give_back(ptr, KVS_ORIGIN_REGISTERED, err); }
