/* The engines that are open: numbers, references, defaults, and whether they accept work. The lowest file of the core:
 * it reaches what ends an engine through engine->destroy. */
#include "lanes/registry.h"
#include "base/fork.h"
#include "base/wait.h"
#include "lanes/state.h"

/* -- by number ------------------------------------------------------------------------------------------------- */

static struct kvs_engine *engines[KVS_MAX_ENGINES]; /* each entry is written once */
static atomic_uint open_engines;                    /* raised after the entry is written */

struct kvs_engine *kvs_engine_at(unsigned number) {
  return number < atomic_load(&open_engines) ? engines[number] : NULL;
}

void kvs_engine_add(struct kvs_engine *engine) {
  engine->immortal = true;
  engines[atomic_load(&open_engines)] = engine;
  atomic_fetch_add(&open_engines, 1);
}

void kvs_engine_ref(struct kvs_engine *engine) { atomic_fetch_add(&engine->refs, 1); }

void kvs_engine_unref(struct kvs_engine *engine) {
  if (atomic_fetch_sub(&engine->refs, 1) == 1) engine->destroy(engine);
}

/* -- releasing callers' objects ------------------------------------------------------------------------------------ */

static atomic_uint releasing;            /* threads, of the process; a release may release others */
static _Thread_local unsigned own_depth; /* of these, this thread's */

/* Only this thread goes on in the child. */
static void release_in_child(void) { atomic_store(&releasing, own_depth); }

void kvs_release_begin(void) {
  static struct kvs_fork_guard guard = {.in_child = release_in_child};
  kvs_fork_watch(&guard);
  own_depth++;
  atomic_fetch_add(&releasing, 1);
}

void kvs_release_end(void) {
  atomic_fetch_sub(&releasing, 1);
  own_depth--;
}

static int poll_released(void *unused, struct kvs_error *err) {
  (void)unused;
  if (own_depth || !atomic_load(&releasing)) return KVS_OK;
  return kvs_fail(err, KVS_NOT_READY, "another thread releases objects");
}

int kvs_release_wait(int64_t timeout_ns, struct kvs_error *err) {
  return kvs_wait_until(poll_released, NULL, false, timeout_ns, err);
}

/* -- the end of the process ------------------------------------------------------------------------------------ */

static void (*_Atomic stop_first)(void);

void kvs_before_shutdown(void (*stop)(void)) { atomic_store(&stop_first, stop); }

void kvs_begin_shutdown(void) {
  void (*stop)(void) = atomic_load(&stop_first);
  if (stop) stop();
}

/* -- what they are asked ------------------------------------------------------------------------------------------- */

const char *kvs_engine_name(const struct kvs_engine *engine) { return engine->name; }

struct kvs_device *kvs_engine_device(struct kvs_engine *engine) { return engine->device; }

int kvs_open_for_work(struct kvs_engine *engine, struct kvs_error *err) {
  if (atomic_load(&engine->closed))
    return kvs_fail(err, KVS_CLOSED, "%s was shut down: the process is ending", engine->name);
  return kvs_dev_check(engine->device, err);
}

void kvs_peer_depend(struct kvs_transfer *transfer, const struct kvs_engine *engine) {
  const struct kvs_engine *other;
  for (unsigned i = 0; engine != transfer->engine && i < KVS_MAX_ENGINES && (other = kvs_engine_at(i)) != NULL; i++)
    if (other == engine) transfer->dependencies |= (uint64_t)1 << i;
}

/* Make a call, since no call may have been made after the fault. */
int kvs_engine_look(struct kvs_engine *engine, struct kvs_error *err) {
  struct kvs_error ignored;
  if (atomic_load(&engine->nlanes)) (void)kvs_dev_stream_query(engine->device, engine->numbered[0]->stream, &ignored);
  return kvs_dev_check(engine->device, err);
}

int kvs_peer_check(const struct kvs_transfer *transfer, struct kvs_error *err) {
  struct kvs_error why;
  for (unsigned i = 0; i < KVS_MAX_ENGINES && transfer->dependencies >> i; i++) {
    struct kvs_engine *other = transfer->dependencies >> i & 1 ? kvs_engine_at(i) : NULL;
    int status = other ? kvs_engine_look(other, &why) : KVS_OK;
    if (!status) continue;
    if (status == KVS_LOST)
      return kvs_fail_driver(err, status, why.code, why.operation, "%s, on which this transfer of %s relied, is lost",
                             other->name, transfer->engine->name);
    *err = why;
    return status;
  }
  return KVS_OK;
}

/* -- defaults ------------------------------------------------------------------------------------------------------ */

/* In the child of a fork, a thread of the parent may have left the lock held. */
void kvs_engine_set_defaults(struct kvs_engine *engine, const struct kvs_defaults *defaults) {
  if (kvs_dev_forked(engine->device)) return;
  pthread_mutex_lock(&engine->lock);
  engine->defaults = *defaults;
  pthread_mutex_unlock(&engine->lock);
}

void kvs_engine_get_defaults(struct kvs_engine *engine, struct kvs_defaults *defaults) {
  *defaults = (struct kvs_defaults){0};
  if (kvs_dev_forked(engine->device)) return;
  pthread_mutex_lock(&engine->lock);
  *defaults = engine->defaults;
  pthread_mutex_unlock(&engine->lock);
}
