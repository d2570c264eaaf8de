/* The slots of path burst: sets of device memory allocated before any transfer needs them. A transfer holds one set
 * while it is being queued. The choice of the set keeps bursts from waiting for unrelated work: see struct kvs_slots.
 */
#include "paths/slots.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/wait.h"
#include "lanes/lane.h"
#include "memory/reclaim.h"
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

enum { SETS = 2 * KVS_SLOT_SETS };

static void sets_close(struct kvs_engine *engine, struct kvs_slots *sets) {
  struct kvs_device *device = engine->device;
  struct kvs_error ignored;
  for (struct kvs_slots *slots = sets; slots < sets + SETS; slots++) {
    for (unsigned i = 0; i < KVS_SLOTS_MOST; i++) {
      if (slots->packed[i]) (void)kvs_dev_event_destroy(device, slots->packed[i], &ignored);
      if (slots->free[i]) (void)kvs_dev_event_destroy(device, slots->free[i], &ignored);
    }
    if (slots->begun) (void)kvs_dev_event_destroy(device, slots->begun, &ignored);
  }
  if (sets->address) (void)kvs_dev_free(device, sets->address, &ignored);
}

static int events_open(struct kvs_engine *engine, struct kvs_slots *slots, struct kvs_error *err) {
  struct kvs_device *device = engine->device;
  int status = kvs_dev_event_create(device, false, &slots->begun, err);
  for (unsigned i = 0; !status && i < slots->count; i++) {
    status = kvs_dev_event_create(device, false, &slots->packed[i], err);
    if (!status) status = kvs_dev_event_create(device, false, &slots->free[i], err);
  }
  return status;
}

/* Make all sets, in one allocation: nothing is to be freed, which waits for the device, where there is no room. */
static int sets_open(struct kvs_engine *engine, uint64_t slot_nbytes, unsigned count, struct kvs_slots *sets,
                     struct kvs_error *err) {
  uint64_t own = slot_nbytes * count, spare = slot_nbytes / 2 * SPARE_SLOTS, address = 0;
  memset(sets, 0, SETS * sizeof *sets);
  int status = kvs_dev_alloc(engine->device, 2 * (own + spare), &address, err);
  for (int i = 0; !status && i < SETS; i++) {
    bool is_spare = i % KVS_SLOT_SETS != 0;
    sets[i].address = address;
    sets[i].slot_nbytes = is_spare ? slot_nbytes / 2 : slot_nbytes;
    sets[i].count = is_spare ? SPARE_SLOTS : count;
    sets[i].nbytes = is_spare ? spare : own;
    address += sets[i].nbytes;
    status = events_open(engine, &sets[i], err);
  }
  if (status) sets_close(engine, sets);
  return status;
}

/* Move what a set consists of; the set to which it goes has no transfer before it. */
static void move_locked(struct kvs_slots *to, struct kvs_slots *from) {
  to->address = from->address;
  to->slot_nbytes = from->slot_nbytes;
  to->count = from->count;
  to->begun = from->begun;
  memcpy(to->packed, from->packed, sizeof to->packed);
  memcpy(to->free, from->free, sizeof to->free);
  to->next = to->last = 0;
  to->unsettled[0] = to->unsettled[1] = 0;
  to->lane = NULL;
  to->shared = false;
  to->nbytes = atomic_load(&from->nbytes);
  from->nbytes = 0;
}

static void sets_install(struct kvs_engine *engine, struct kvs_slots *sets) {
  for (int i = 0; i < SETS; i++) {
    pthread_mutex_lock(&engine->slots[i].lock);
    move_locked(&engine->slots[i], &sets[i]);
    pthread_mutex_unlock(&engine->slots[i].lock);
  }
}

void kvs_slots_close(struct kvs_engine *engine) {
  struct kvs_slots sets[SETS];
  memset(sets, 0, sizeof sets);
  for (int i = 0; i < SETS; i++)
    if (engine->slots[i].nbytes) move_locked(&sets[i], &engine->slots[i]);
  sets_close(engine, sets);
}

/* Together: there is always a reason while they are off. */
static void set_note(struct kvs_engine *engine, bool bursts, const char *note) {
  pthread_mutex_lock(&engine->note_lock);
  snprintf(engine->burst_note, sizeof engine->burst_note, "%s", note);
  atomic_store(&engine->bursts, bursts);
  pthread_mutex_unlock(&engine->note_lock);
}

void kvs_slots_open(struct kvs_engine *engine) {
  bool cuda = strcmp(engine->device->ops->kind, "cuda") == 0;
  uint64_t wanted = cuda ? CUDA_SLOT_NBYTES : HOST_SLOT_NBYTES, nbytes = wanted;
  const char *why = engine->disabled.burst ? "KVSWAP_DISABLE names 'burst'" : kvs_kernels_off(engine);
  struct kvs_slots sets[SETS];
  struct kvs_error err = {.status = KVS_OK};
  while (!why && sets_open(engine, nbytes, SLOTS, sets, &err)) {
    nbytes /= 2;
    if (err.status == KVS_LOST || nbytes < LEAST_SLOT_NBYTES) why = err.message;
  }
  if (!why) sets_install(engine, sets);
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
  for (int i = 0; i < SETS; i++) nbytes += engine->slots[i].nbytes;
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

uint64_t kvs_slot_room(const struct kvs_submission *s, uint64_t slot_nbytes) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  uint64_t nbytes = 0, packed = 0;
  for (size_t i = 0; s->work->codings && i < rows->count; i++) {
    nbytes += rows->items[i].nbytes;
    packed += kvs_row_packed_nbytes(&rows->items[i]);
  }
  return packed < nbytes ? (uint64_t)((double)slot_nbytes * (double)packed / (double)nbytes) : slot_nbytes;
}

/* -- giving them back ------------------------------------------------------------------------------------------ */

/* Take the sets out of use, if no transfer uses one. */
static bool sets_take(struct kvs_engine *engine, struct kvs_slots *taken) {
  struct kvs_slots *slots = engine->slots;
  int held = 0;
  while (held < SETS && !pthread_mutex_trylock(&slots[held].lock)) held++;
  bool before = kvs_racecheck_internal(true), over = held == SETS;
  for (int i = 0; over && i < SETS; i++) over = !slots[i].nbytes || is_over(engine, &slots[i]);
  kvs_racecheck_internal(before);
  memset(taken, 0, SETS * sizeof *taken);
  for (int i = 0; over && i < SETS; i++)
    if (slots[i].nbytes) move_locked(&taken[i], &slots[i]);
  while (held-- > 0) pthread_mutex_unlock(&slots[held].lock);
  return over;
}

/* A reclaim task, because freeing waits for the device. Transfers take other paths until the new sets are there. `what`
 * is no pointer but a sum: the bytes of a slot, a multiple of TINY_NBYTES, plus the number of slots. */
static int resize_now(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  uint64_t slot_nbytes = (uint64_t)(uintptr_t)what / TINY_NBYTES * TINY_NBYTES;
  unsigned count = (unsigned)((uint64_t)(uintptr_t)what - slot_nbytes);
  struct kvs_slots sets[SETS];
  kvs_engine_reap(engine);
  if (atomic_exchange(&engine->resizing_slots, true)) return kvs_fail(err, KVS_TIMEOUT, "bursts are under way");
  int status = sets_take(engine, sets) ? KVS_OK : kvs_fail(err, KVS_TIMEOUT, "bursts are under way");
  if (!status) {
    sets_close(engine, sets);
    if (slot_nbytes) status = sets_open(engine, slot_nbytes, count, sets, err);
    bool bursts = slot_nbytes && !status;
    char note[KVS_BURST_NOTE] = "";
    if (bursts) sets_install(engine, sets);
    if (!bursts) snprintf(note, sizeof note, "%.150s", status ? err->message : "its slots were given back");
    set_note(engine, bursts, note);
  }
  atomic_store(&engine->resizing_slots, false);
  return status;
}

int kvs_engine_set_slots(struct kvs_engine *engine, uint64_t slot_nbytes, unsigned count, int64_t timeout_ns,
                         struct kvs_error *err) {
  struct kvs_reclaim *task;
  int status = kvs_dev_check(engine->device, err);
  if (status) return status;
  bool fits = slot_nbytes >= TINY_NBYTES && slot_nbytes <= MOST_NBYTES && slot_nbytes % TINY_NBYTES == 0;
  if (slot_nbytes && (!fits || count < 2 || count > KVS_SLOTS_MOST))
    return kvs_fail(err, KVS_INVALID,
                    "%u slots of %" PRIu64 " bytes: 2 to %d of a multiple of 128 KiB, at most 1 GiB; 0 bytes: none",
                    count, slot_nbytes, KVS_SLOTS_MOST);
  const char *why = slot_nbytes ? kvs_kernels_off(engine) : NULL;
  if (why) return kvs_fail(err, KVS_UNSUPPORTED, "path 'burst' is off: %s", why);
  void *what = (void *)(uintptr_t)(slot_nbytes + (slot_nbytes ? count : 0));
  status = kvs_reclaim_start(engine, resize_now, what, &task, err);
  if (status) return status;
  status = kvs_reclaim_wait(task, timeout_ns, err);
  bool withdrawn = kvs_reclaim_leave(task, KVS_LEAVE_DROP);
  if (status != KVS_TIMEOUT) return status;
  return kvs_fail(err, status, "work of %s had not ended after %.1f s, and %s", engine->name, (double)timeout_ns / 1e9,
                  withdrawn ? "its slots are as before" : "the driver still gives its slots back");
}
