/* The slots of path burst: sets of device memory allocated before any transfer needs them. A transfer holds one set
 * while it is being queued. The choice of the set keeps bursts from waiting for unrelated work: see struct kvs_slots.
 */
#include "paths/slots.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/wait.h"
#include "lanes/lane.h"
#include "racecheck/racecheck.h"

enum {
  CUDA_SLOT_NBYTES = 64 << 20, /* the link moves this in 1.2 ms, as long as a model's kernels may keep all SMs */
  HOST_SLOT_NBYTES = 1 << 20,  /* host devices gain nothing from bursts: enough to run the same program */
  LEAST_SLOT_NBYTES = 4 << 20, /* on a GPU with little free memory */
  SLOTS = 3,
  SPARE_SLOTS = 2,
  TINY_NBYTES = 128 << 10, /* least bytes of a configured slot */
  MOST_NBYTES = 1 << 30,   /* most bytes of a configured slot */
};

/* -- the slots ------------------------------------------------------------------------------------------------- */

static void slots_close(struct kvs_engine *engine, struct kvs_slots *slots) {
  struct kvs_device *device = engine->device;
  struct kvs_error ignored;
  for (unsigned i = 0; i < KVS_SLOTS_MOST; i++) {
    if (slots->packed[i]) (void)kvs_dev_event_destroy(device, slots->packed[i], &ignored);
    if (slots->free[i]) (void)kvs_dev_event_destroy(device, slots->free[i], &ignored);
    slots->packed[i] = slots->free[i] = 0;
  }
  if (slots->begun) (void)kvs_dev_event_destroy(device, slots->begun, &ignored);
  if (slots->address) (void)kvs_dev_free(device, slots->address, &ignored);
  slots->begun = slots->address = slots->nbytes = 0;
  slots->lane = NULL;
  slots->shared = false;
}

static int slots_open(struct kvs_engine *engine, struct kvs_slots *slots, uint64_t slot_nbytes, unsigned count,
                      struct kvs_error *err) {
  struct kvs_device *device = engine->device;
  int status = kvs_dev_alloc(device, slot_nbytes * count, &slots->address, err);
  if (!status) status = kvs_dev_event_create(device, false, &slots->begun, err);
  for (unsigned i = 0; !status && i < count; i++) {
    status = kvs_dev_event_create(device, false, &slots->packed[i], err);
    if (!status) status = kvs_dev_event_create(device, false, &slots->free[i], err);
  }
  slots->slot_nbytes = slot_nbytes;
  slots->count = count;
  slots->next = slots->last = 0;
  slots->unsettled[0] = slots->unsettled[1] = 0;
  slots->nbytes = slot_nbytes * count;
  if (status) slots_close(engine, slots);
  return status;
}

void kvs_slots_close(struct kvs_engine *engine) {
  for (int i = 0; i < 2 * KVS_SLOT_SETS; i++) slots_close(engine, &engine->slots[i]);
}

static int open_all(struct kvs_engine *engine, uint64_t slot_nbytes, unsigned count, struct kvs_error *err) {
  int status = KVS_OK;
  for (int direction = 0; !status && direction < 2; direction++) {
    struct kvs_slots *sets = &engine->slots[direction * KVS_SLOT_SETS];
    status = slots_open(engine, &sets[0], slot_nbytes, count, err);
    if (!status) status = slots_open(engine, &sets[1], slot_nbytes / 2, SPARE_SLOTS, err);
  }
  if (status) kvs_slots_close(engine);
  return status;
}

/* Together: there is always a reason while they are off. */
static void set_note(struct kvs_engine *engine, bool bursts, const char *note) {
  pthread_mutex_lock(&engine->note_lock);
  snprintf(engine->burst_note, sizeof engine->burst_note, "%s", note);
  atomic_store(&engine->bursts, bursts);
  pthread_mutex_unlock(&engine->note_lock);
}

void kvs_slots_open(struct kvs_engine *engine) {
  const struct kvs_device_info *info = &engine->device->info;
  bool cuda = strcmp(engine->device->ops->kind, "cuda") == 0;
  uint64_t wanted = cuda ? CUDA_SLOT_NBYTES : HOST_SLOT_NBYTES, nbytes = wanted;
  const char *why = engine->disabled.burst    ? "KVSWAP_DISABLE names it"
                    : engine->disabled.kernel ? "KVSWAP_DISABLE names 'kernel', which it needs"
                    : !info->kernels          ? info->kernels_note
                                              : NULL;
  struct kvs_error err = {.status = KVS_OK};
  while (!why && open_all(engine, nbytes, SLOTS, &err)) {
    nbytes /= 2;
    if (err.status == KVS_LOST || nbytes < LEAST_SLOT_NBYTES) why = err.message;
  }
  char note[KVS_BURST_NOTE] = "";
  if (why)
    snprintf(note, sizeof note, "%.150s", why);
  else if (nbytes < wanted)
    snprintf(note, sizeof note, "slots of %" PRIu64 " MiB instead of %" PRIu64 ": the device has no more memory free",
             nbytes >> 20, wanted >> 20);
  set_note(engine, !why, note);
}

void kvs_engine_burst_note(struct kvs_engine *engine, char note[KVS_BURST_NOTE]) {
  pthread_mutex_lock(&engine->note_lock);
  memcpy(note, engine->burst_note, KVS_BURST_NOTE);
  pthread_mutex_unlock(&engine->note_lock);
}

bool kvs_bursts_off(struct kvs_engine *engine, char why[KVS_BURST_NOTE]) {
  pthread_mutex_lock(&engine->note_lock);
  bool off = !atomic_load(&engine->bursts);
  if (off) memcpy(why, engine->burst_note, KVS_BURST_NOTE);
  pthread_mutex_unlock(&engine->note_lock);
  return off;
}

uint64_t kvs_engine_slots_nbytes(const struct kvs_engine *engine) {
  uint64_t nbytes = 0;
  for (int i = 0; i < 2 * KVS_SLOT_SETS; i++) nbytes += engine->slots[i].nbytes;
  return nbytes;
}

/* Whether no queued work uses the slots. */
static bool is_over(struct kvs_engine *engine, const struct kvs_slots *slots) {
  struct kvs_device *device = engine->device;
  struct kvs_error ignored;
  bool over = true;
  if (slots->unsettled[0])
    over = kvs_dev_stream_query(device, slots->unsettled[0], &ignored) == KVS_OK &&
           kvs_dev_stream_query(device, slots->unsettled[1], &ignored) == KVS_OK;
  else if (slots->lane && atomic_load(&slots->lane->ended) < slots->sequence)
    /* Querying an event advances a stepped device. */
    over = !device->stepped && kvs_dev_event_query(device, slots->free[slots->last], &ignored) == KVS_OK;
  for (unsigned i = 0; over && slots->shared && i < slots->count; i++)
    over = kvs_dev_event_query(device, slots->free[i], &ignored) == KVS_OK;
  return over;
}

static int rank(enum kvs_priority priority) {
  return priority == KVS_PRIORITY_HIGH ? 2 : priority == KVS_PRIORITY_BACKGROUND ? 0 : 1;
}

/* Whether the transfer that uses the slots has started, so that it ends without further dependencies, and has no lower
 * priority than this lane. */
static bool may_wait_for(struct kvs_engine *engine, const struct kvs_slots *slots, const struct kvs_lane *lane) {
  struct kvs_error ignored;
  if (slots->steps || rank(slots->priority) < rank(lane->priority) || engine->device->stepped) return false;
  return kvs_dev_event_query(engine->device, slots->begun, &ignored) == KVS_OK;
}

static bool usable(struct kvs_engine *engine, struct kvs_slots *slots, const struct kvs_lane *lane, bool waiting) {
  if (!slots->nbytes) return false;
  if (is_over(engine, slots)) {
    slots->unsettled[0] = slots->unsettled[1] = 0;
    slots->shared = false;
    return true;
  }
  if (slots->unsettled[0]) return false;
  if (slots->lane == lane) return true;
  if (!waiting || !may_wait_for(engine, slots, lane)) return false;
  slots->shared = true;
  return true;
}

struct kvs_slots *kvs_slots_take(struct kvs_engine *engine, const struct kvs_lane *lane, enum kvs_direction direction) {
  struct kvs_slots *found = NULL;
  bool before = kvs_racecheck_internal(true);
  for (int i = 0; !found && i < 2 * KVS_SLOT_SETS;
       i++) { /* first pass: both sets, without waiting; second pass: wait for a running transfer */
    struct kvs_slots *slots = &engine->slots[(int)direction * KVS_SLOT_SETS + i % KVS_SLOT_SETS];
    if (pthread_mutex_trylock(&slots->lock)) continue;
    if (usable(engine, slots, lane, i >= KVS_SLOT_SETS))
      found = slots;
    else
      pthread_mutex_unlock(&slots->lock);
  }
  kvs_racecheck_internal(before);
  return found;
}

/* -- giving them back ------------------------------------------------------------------------------------------ */

struct resizing {
  struct kvs_engine *engine;
  uint64_t slot_nbytes;
  unsigned count;
};

static int resize_locked(const struct resizing *r, struct kvs_error *err) {
  struct kvs_engine *engine = r->engine;
  bool before = kvs_racecheck_internal(true), over = true;
  for (int i = 0; i < 2 * KVS_SLOT_SETS; i++) over = over && is_over(engine, &engine->slots[i]);
  kvs_racecheck_internal(before);
  if (!over) return kvs_fail(err, KVS_NOT_READY, "bursts are under way");
  kvs_slots_close(engine);
  int status = r->slot_nbytes ? open_all(engine, r->slot_nbytes, r->count, err) : KVS_OK;
  bool bursts = r->slot_nbytes && !status;
  char note[KVS_BURST_NOTE] = "";
  if (!bursts) snprintf(note, sizeof note, "%.150s", status ? err->message : "its slots were given back");
  set_note(engine, bursts, note);
  return status;
}

/* Needs all sets: retried while a transfer is being queued through one. */
static int resize(void *arg, struct kvs_error *err) {
  const struct resizing *r = arg;
  struct kvs_slots *slots = r->engine->slots;
  int status = KVS_NOT_READY, held = 0;
  kvs_engine_reap(r->engine);
  while (held < 2 * KVS_SLOT_SETS && !pthread_mutex_trylock(&slots[held].lock)) held++;
  if (held == 2 * KVS_SLOT_SETS) status = resize_locked(r, err);
  while (held-- > 0) pthread_mutex_unlock(&slots[held].lock);
  return status;
}

int kvs_engine_set_slots(struct kvs_engine *engine, uint64_t slot_nbytes, unsigned count, int64_t timeout_ns,
                         struct kvs_error *err) {
  struct resizing r = {engine, slot_nbytes, count};
  int status = kvs_dev_check(engine->device, err);
  if (status) return status;
  bool fits = slot_nbytes >= TINY_NBYTES && slot_nbytes <= MOST_NBYTES && slot_nbytes % TINY_NBYTES == 0;
  if (slot_nbytes && (!fits || count < 2 || count > KVS_SLOTS_MOST))
    return kvs_fail(err, KVS_INVALID,
                    "%u slots of %" PRIu64 " bytes: 2 to %d of a multiple of 128 KiB, at most 1 GiB; 0 bytes: none",
                    count, slot_nbytes, KVS_SLOTS_MOST);
  if (slot_nbytes && !engine->device->info.kernels)
    return kvs_fail(err, KVS_UNSUPPORTED, "path 'burst' is off: %s", engine->device->info.kernels_note);
  status = kvs_wait_until(resize, &r, engine->device->stepped, timeout_ns, err);
  if (status != KVS_TIMEOUT) return status;
  return kvs_fail(err, status, "transfers of %s still used its slots after %.1f s", engine->name,
                  (double)timeout_ns / 1e9);
}
