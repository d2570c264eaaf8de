/* In the segment: the lock, the members with their processes, and the map of blocks. The file's lock (flock) guards its
 * preparation, before the lock in it exists.
 *
 * A member's place is used again once nothing of it is left; its number (`origin`) is not, so that a replica that was
 * wrongly taken for ended finds out. The end of a process is seen by its pidfd: at that point the driver has closed the
 * process's device, and no copy of it runs. */
#include "replicas/index.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/owner.h"
#include "base/wait.h"
#include "hostpool/segment.h"

enum {
  PROCESSES = 40, /* of a member */
  NAME_NBYTES = 101,
  ALIGNMENT = 64,
  SWEEP_NS = 1000 * 1000 * 1000, /* how often ended members are looked for in any case */
  SOON_NS = 20 * 1000 * 1000,    /* the same while a call needs what they hold */
  STUCK_NS = 1000 * 1000 * 1000, /* how long no call waits after one waited in vain */
  BUSY_NS = 10 * 1000,           /* from one try to have the lock to the next, at first */
};
static const uint64_t MAGIC = UINT64_C(0x3158444e4953564b); /* "KVSINDX1" */

struct process {
  int64_t pid; /* 0: none */
  uint64_t start;
};

struct member {
  uint32_t origin; /* 0: none */
  uint32_t epoch;
  char name[NAME_NBYTES];
  struct process scheduler;
  struct process workers[PROCESSES];
};

/* In the segment, all zeros at first. */
struct area {
  uint64_t magic; /* set last */
  pthread_mutex_t lock;
  /* Guarded by lock. */
  uint64_t swept_ns;
  uint32_t origins; /* number of the newest membership */
  uint32_t epoch;   /* the newest one */
  struct member members[KVS_BLOCKMAP_MEMBERS];
  char identity[KVS_INDEX_TEXT]; /* empty: none yet */
  /* then the table */
};

struct kvs_index {
  struct kvs_shared_file *segment; /* until it is closed; after opening only the closing thread uses it */
  atomic_bool closed;
  char path[128];
  uint64_t base, nbytes; /* of the mapping, which stays until the index is freed */
  struct area *area;
  struct kvs_blockmap *map;
  int64_t pid;
  uint32_t origin;
  uint8_t me;
  bool scheduler;
  uint64_t stuck_ns; /* when a call waited in vain for the lock; 0: never. Any thread may write it */
};

static uint64_t area_nbytes(void) { return (sizeof(struct area) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

uint64_t kvs_index_nbytes(uint64_t num_slots) { return area_nbytes() + kvs_blockmap_nbytes(num_slots); }

/* -- the lock ------------------------------------------------------------------------------------------------------ */

static int lock_within(struct area *area, uint64_t deadline_ns) {
  struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000), .tv_nsec = (long)(deadline_ns % 1000000000)};
  int code = pthread_mutex_trylock(&area->lock);
  if (code == EBUSY && deadline_ns) code = pthread_mutex_clocklock(&area->lock, CLOCK_MONOTONIC, &until);
  return code;
}

static struct kvs_blockmap *map_of(struct area *area) {
  return (struct kvs_blockmap *)(void *)((char *)area + area_nbytes());
}

/* With the lock, and a table that is right. */
static int enter(struct kvs_index *index, struct kvs_error *err) {
  uint64_t now = kvs_clock_ns(), stuck = __atomic_load_n(&index->stuck_ns, __ATOMIC_RELAXED);
  if (index->pid != getpid()) return kvs_fail(err, KVS_FORKED, "the index was opened before fork()");
  if (atomic_load(&index->closed)) return kvs_fail(err, KVS_CLOSED, "the index is closed");
  int code = lock_within(index->area, stuck && now - stuck < STUCK_NS ? 0 : now + KVS_INDEX_LOCK_NS);
  if (code == EOWNERDEAD) {
    kvs_blockmap_rebuild(index->map);
    pthread_mutex_consistent(&index->area->lock);
    code = 0;
  }
  if (code == 0) {
    if (stuck) __atomic_store_n(&index->stuck_ns, 0, __ATOMIC_RELAXED);
    if (index->origin == 0 || index->area->members[index->me].origin == index->origin) return KVS_OK;
    pthread_mutex_unlock(&index->area->lock);
    return kvs_fail(err, KVS_CLOSED, "this replica was taken for ended");
  }
  if (code == EBUSY || code == ETIMEDOUT) {
    if (code == ETIMEDOUT) __atomic_store_n(&index->stuck_ns, kvs_clock_ns(), __ATOMIC_RELAXED);
    return kvs_fail(err, KVS_TIMEOUT, "a process that does not go on holds the lock of %s", index->path);
  }
  return kvs_fail(err, KVS_INTERNAL, "the lock of %s: %s", index->path, strerror(code));
}

static void leave(struct kvs_index *index) { pthread_mutex_unlock(&index->area->lock); }

/* -- members ------------------------------------------------------------------------------------------------------- */

/* All threads of the process have ended, and with them its work on a GPU. If that cannot be seen, it counts as running.
 * /proc shows the first thread, which may end before the others; a pidfd does not. */
static bool has_ended(const struct process *process) {
  if (process->pid == 0) return true;
  int fd = (int)syscall(SYS_pidfd_open, (pid_t)process->pid, 0);
  if (fd < 0) return errno == ESRCH;
  uint64_t start = kvs_process_start(process->pid);
  struct pollfd poller = {.fd = fd, .events = POLLIN};
  bool ended = poll(&poller, 1, 0) > 0 || (start && process->start && start != process->start);
  close(fd);
  return ended;
}

static bool is_gone(const struct member *member) {
  bool gone = has_ended(&member->scheduler);
  for (size_t i = 0; gone && i < PROCESSES; i++) gone = has_ended(&member->workers[i]);
  return gone;
}

static void remove_member(struct area *area, size_t i) {
  kvs_blockmap_give_back(map_of(area), (uint8_t)i);
  area->members[i].origin = 0;
}

/* Give back what ended members had. */
static void sweep(struct area *area, uint64_t every_ns, int except) {
  uint64_t now = kvs_clock_ns();
  if (now - area->swept_ns < every_ns) return;
  area->swept_ns = now;
  for (size_t i = 0; i < KVS_BLOCKMAP_MEMBERS; i++)
    if (area->members[i].origin && (int)i != except && is_gone(&area->members[i])) remove_member(area, i);
}

static size_t count_members(const struct area *area) {
  size_t count = 0;
  for (size_t i = 0; i < KVS_BLOCKMAP_MEMBERS; i++) count += area->members[i].origin != 0;
  return count;
}

static struct process this_process(void) {
  struct kvs_owner self = kvs_owner_self();
  return (struct process){.pid = self.pid, .start = self.start};
}

static int find_place(struct area *area, const char *name, size_t *place, struct kvs_error *err) {
  size_t empty = KVS_BLOCKMAP_MEMBERS;
  for (size_t i = 0; i < KVS_BLOCKMAP_MEMBERS; i++) {
    const struct member *member = &area->members[i];
    if (member->origin == 0) {
      if (empty == KVS_BLOCKMAP_MEMBERS) empty = i;
    } else if (strcmp(member->name, name) == 0) {
      *place = i;
      return KVS_OK;
    }
  }
  if (empty == KVS_BLOCKMAP_MEMBERS)
    return kvs_fail(err, KVS_BUSY, "there are %d replicas, and there can be no more", (int)KVS_BLOCKMAP_MEMBERS);
  struct member *made = &area->members[empty];
  *made = (struct member){.epoch = 0};
  snprintf(made->name, sizeof made->name, "%s", name);
  made->origin = ++area->origins;
  *place = empty;
  return KVS_OK;
}

static int add_worker(struct member *member, struct kvs_error *err) {
  for (size_t i = 0; i < PROCESSES; i++)
    if (has_ended(&member->workers[i])) {
      member->workers[i] = this_process();
      return KVS_OK;
    }
  return kvs_fail(err, KVS_BUSY, "a replica has %d workers at most", (int)PROCESSES);
}

/* The JSON member in which two texts differ first begins here. */
static size_t first_difference(const char *there, const char *here) {
  size_t begin = 0;
  for (size_t i = 0; there[i] && there[i] == here[i]; i++)
    if (there[i] == ',' || there[i] == '{') begin = i + 1;
  return begin;
}

static int add_scheduler(struct area *area, struct member *member, const char *identity, struct kvs_error *err) {
  if (!has_ended(&member->scheduler))
    return kvs_fail(err, KVS_BUSY, "process %" PRId64 " has joined as '%s' already", member->scheduler.pid,
                    member->name);
  if (member->scheduler.pid)
    return kvs_fail(err, KVS_BUSY, "of a replica that had the name '%s' and was killed, workers still run",
                    member->name);
  if (area->identity[0] && strcmp(area->identity, identity) != 0) {
    size_t at = first_difference(area->identity, identity);
    return kvs_fail(err, KVS_INVALID, "the blocks of its replicas mean something else: %.120s there, and %.120s here",
                    area->identity + at, identity + at);
  }
  if (!area->identity[0]) snprintf(area->identity, sizeof area->identity, "%s", identity);
  member->scheduler = this_process();
  return KVS_OK;
}

/* With the lock. Blocks without any replica are of no use: the first one that comes may have others. */
static int join_locked(struct kvs_index *index, const struct kvs_index_options *options, struct kvs_error *err) {
  struct area *area = index->area;
  size_t place = 0;
  sweep(area, 0, -1);
  if (count_members(area) == 0) {
    kvs_blockmap_init(index->map, index->map->num_slots, index->map->seed);
    area->identity[0] = '\0';
    area->epoch = 0;
  }
  int status = find_place(area, options->member, &place, err);
  if (status) return status;
  struct member *member = &area->members[place];
  status = options->identity ? add_scheduler(area, member, options->identity, err) : add_worker(member, err);
  if (status) {
    if (is_gone(member)) remove_member(area, place);
    return status;
  }
  index->me = (uint8_t)place;
  index->origin = member->origin;
  index->scheduler = options->identity != NULL;
  return KVS_OK;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static int make_lock(pthread_mutex_t *lock) {
  pthread_mutexattr_t attributes;
  int code = pthread_mutexattr_init(&attributes);
  if (code) return code;
  code = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  if (!code) code = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  if (!code) code = pthread_mutex_init(lock, &attributes);
  pthread_mutexattr_destroy(&attributes);
  return code;
}

/* Under the lock of the segment's file: a process that is killed in here leaves no MAGIC, and the next one begins. */
static int prepare_locked(struct kvs_index *index, uint64_t num_slots, struct kvs_error *err) {
  struct area *area = index->area;
  uint64_t seed;
  if (__atomic_load_n(&area->magic, __ATOMIC_ACQUIRE) == MAGIC) return KVS_OK;
  memset(area, 0, sizeof *area);
  int code = make_lock(&area->lock);
  if (code) return kvs_fail(err, KVS_UNSUPPORTED, "no lock can be shared by processes here: %s", strerror(code));
  if (getrandom(&seed, sizeof seed, 0) != (ssize_t)sizeof seed) seed = kvs_clock_ns();
  kvs_blockmap_init(index->map, num_slots, seed);
  __atomic_store_n(&area->magic, MAGIC, __ATOMIC_RELEASE);
  return KVS_OK;
}

static int prepare(struct kvs_index *index, uint64_t num_slots, struct kvs_error *err) {
  int fd, status = kvs_shared_file_lock(index->segment, &fd, err);
  if (status) return status;
  status = prepare_locked(index, num_slots, err);
  close(fd);
  return status;
}

static int check_options(const struct kvs_index_options *options, struct kvs_error *err) {
  size_t length = strlen(options->member);
  if (length == 0 || length >= NAME_NBYTES)
    return kvs_fail(err, KVS_INVALID, "member has %zu bytes: 1 to %d", length, NAME_NBYTES - 1);
  if (options->num_slots == 0 || options->num_slots >= KVS_BLOCKMAP_NONE || options->slot_nbytes == 0 ||
      options->slot_nbytes > UINT64_MAX / 2 / options->num_slots)
    return kvs_fail(err, KVS_INVALID, "%" PRIu64 " slots of %" PRIu64 " bytes: no such segment can be made",
                    options->num_slots, options->slot_nbytes);
  if (!options->identity || (options->identity[0] && strlen(options->identity) < KVS_INDEX_TEXT)) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "identity has %zu bytes: 1 to %d", strlen(options->identity), KVS_INDEX_TEXT - 1);
}

static int open_segment(const struct kvs_index_options *options, struct kvs_shared_file **segment,
                        struct kvs_error *err) {
  const struct kvs_segment_shape shape = {
      .num_blocks = options->num_slots,
      .slot_nbytes = options->slot_nbytes,
      .layers = 1,
      .room_nbytes = kvs_round_up(options->num_slots * options->slot_nbytes, kvs_page_nbytes(KVS_PAGES_DEFAULT)),
      .index_nbytes = kvs_index_nbytes(options->num_slots),
  };
  const struct kvs_shared_options shared = {.name = options->name, .mode = KVS_SHARED_EITHER};
  bool replaced;
  return kvs_shared_file_open(&shape, &shared, NULL, segment, &replaced, err);
}

int kvs_index_open(const struct kvs_index_options *options, struct kvs_index **made, struct kvs_error *err) {
  int status = check_options(options, err);
  struct kvs_index *index = status ? NULL : calloc(1, sizeof *index);
  if (!index) return status ? status : kvs_fail(err, KVS_NOMEM, "no memory for a shared pool");
  index->pid = getpid();
  status = open_segment(options, &index->segment, err);
  if (status) {
    free(index);
    return status;
  }
  index->base = index->segment->map_base;
  index->nbytes = index->segment->map_nbytes;
  snprintf(index->path, sizeof index->path, "%s", index->segment->path);
  index->area = index->segment->index;
  index->map = map_of(index->area);
  status = prepare(index, options->num_slots, err);
  if (!status) status = enter(index, err);
  if (!status) {
    status = join_locked(index, options, err);
    leave(index);
  }
  if (!status) {
    *made = index;
    return status;
  }
  atomic_store(&index->closed, true);
  kvs_shared_file_close(index->segment);
  kvs_index_free(index);
  return status;
}

/* With the lock. A scheduler that still reads or writes stays a process of its member until it has ended: it does not
 * know whether the copies have. */
static void part_locked(struct kvs_index *index) {
  struct area *area = index->area;
  struct member *member = &area->members[index->me];
  if (index->scheduler && kvs_blockmap_pins(index->map, index->me)) return;
  if (index->scheduler) {
    member->scheduler = (struct process){0};
  } else {
    for (size_t i = 0; i < PROCESSES; i++)
      if (member->workers[i].pid == index->pid) {
        member->workers[i] = (struct process){0};
        break;
      }
  }
  if (is_gone(member)) remove_member(area, index->me);
  index->origin = UINT32_MAX; /* a second close must not part again */
}

void kvs_index_close(struct kvs_index *index) {
  struct kvs_error ignored;
  if (index->pid != getpid()) return;
  if (enter(index, &ignored) == KVS_OK) {
    part_locked(index);
    leave(index);
  }
  if (!atomic_exchange(&index->closed, true)) kvs_shared_file_close(index->segment);
}

void kvs_index_free(struct kvs_index *index) {
  kvs_index_close(index);
  kvs_pages_unmap(index->base, index->nbytes);
  free(index);
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

int kvs_index_find(struct kvs_index *index, const struct kvs_blockmap_key *key, uint64_t pending_ns,
                   struct kvs_index_hit *hit, struct kvs_error *err) {
  int status = enter(index, err);
  if (status) return status;
  struct area *area = index->area;
  uint32_t slot = kvs_blockmap_find(index->map, key, area->members[index->me].epoch);
  struct kvs_blockmap_slot *entry = slot == KVS_BLOCKMAP_NONE ? NULL : kvs_blockmap_slot(index->map, slot);
  *hit = (struct kvs_index_hit){.found = KVS_INDEX_MISS};
  if (entry && entry->state == KVS_SLOT_WRITING && entry->writer != index->me) {
    sweep(area, SOON_NS, index->me); /* its writer may have ended */
    bool late = entry->state == KVS_SLOT_WRITING && kvs_clock_ns() - entry->since_ns > pending_ns;
    if (late || entry->state == KVS_SLOT_FREE) entry = NULL;
  }
  if (entry && entry->state == KVS_SLOT_WRITING) {
    hit->found = KVS_INDEX_PENDING;
  } else if (entry && kvs_blockmap_pin(index->map, slot, index->me)) {
    *hit = (struct kvs_index_hit){.found = KVS_INDEX_HIT, .slot = slot, .foreign = entry->origin != index->origin};
  }
  leave(index);
  return KVS_OK;
}

static int refuse_slot(size_t i, uint32_t slot, const char *what, struct kvs_error *err) {
  return kvs_fail(err, KVS_INVALID, "slots[%zu] is %" PRIu32 ", which this replica does not %s", i, slot, what);
}

int kvs_index_unpin(struct kvs_index *index, const uint32_t *slots, size_t count, struct kvs_error *err) {
  int status = enter(index, err);
  if (status) return status;
  for (size_t i = 0; !status && i < count; i++)
    if (slots[i] >= index->map->num_slots || !kvs_blockmap_unpin(index->map, slots[i], index->me))
      status = refuse_slot(i, slots[i], "read", err);
  leave(index);
  return status;
}

int kvs_index_touch(struct kvs_index *index, const struct kvs_blockmap_key *keys, size_t count, struct kvs_error *err) {
  int status = enter(index, err);
  if (status) return status;
  uint32_t epoch = index->area->members[index->me].epoch;
  for (size_t i = count; i-- > 0;) { /* the first key is used last: without it, those after it are of no use */
    uint32_t slot = kvs_blockmap_find(index->map, &keys[i], epoch);
    if (slot != KVS_BLOCKMAP_NONE && kvs_blockmap_slot(index->map, slot)->state == KVS_SLOT_READY)
      kvs_blockmap_touch(index->map, slot);
  }
  sweep(index->area, SWEEP_NS, index->me);
  leave(index);
  return KVS_OK;
}

int kvs_index_take(struct kvs_index *index, const struct kvs_blockmap_key *keys, size_t count, uint32_t *slots,
                   size_t *evicted, struct kvs_error *err) {
  int status = enter(index, err);
  if (status) return status;
  const struct kvs_blockmap_writer writer = {index->me, index->origin, index->area->members[index->me].epoch,
                                             kvs_clock_ns()};
  sweep(index->area, SWEEP_NS, index->me);
  bool taken = kvs_blockmap_take(index->map, &writer, keys, count, slots, evicted);
  if (!taken) {
    sweep(index->area, SOON_NS, index->me);
    taken = kvs_blockmap_take(index->map, &writer, keys, count, slots, evicted);
  }
  leave(index);
  if (taken) return KVS_OK;
  return kvs_fail(err, KVS_NO_ROOM, "%zu blocks do not fit beside those that replicas read and write", count);
}

int kvs_index_settle(struct kvs_index *index, const uint32_t *slots, size_t count, bool stored, struct kvs_error *err) {
  int status = enter(index, err);
  if (status) return status;
  for (size_t i = 0; !status && i < count; i++)
    if (slots[i] >= index->map->num_slots || !kvs_blockmap_settle(index->map, slots[i], index->me, stored))
      status = refuse_slot(i, slots[i], "write", err);
  leave(index);
  return status;
}

int kvs_index_reset(struct kvs_index *index, struct kvs_error *err) {
  int status = enter(index, err);
  if (status) return status;
  struct area *area = index->area;
  uint32_t epochs[KVS_BLOCKMAP_MEMBERS];
  size_t count = 0;
  if (area->members[index->me].epoch == area->epoch) area->epoch++;
  area->members[index->me].epoch = area->epoch;
  for (size_t i = 0; i < KVS_BLOCKMAP_MEMBERS; i++)
    if (area->members[i].origin) epochs[count++] = area->members[i].epoch;
  (void)kvs_blockmap_forget(index->map, epochs, count);
  leave(index);
  return KVS_OK;
}

int kvs_index_get_info(struct kvs_index *index, struct kvs_index_info *info, struct kvs_error *err) {
  int status = enter(index, err);
  if (status) return status;
  const struct kvs_blockmap *map = index->map;
  sweep(index->area, SOON_NS, index->me);
  *info = (struct kvs_index_info){
      .num_slots = map->num_slots,
      .free = map->num_free,
      .writing = map->num_writing,
      .ready = map->num_slots - map->num_free - map->num_writing,
      .pinned = kvs_blockmap_pins(index->map, index->me),
      .epoch = index->area->members[index->me].epoch,
      .member = index->me,
      .members = (uint32_t)count_members(index->area),
  };
  leave(index);
  return KVS_OK;
}

/* -- for tests ----------------------------------------------------------------------------------------------------- */

int kvs_index_hold(struct kvs_index *index, struct kvs_error *err) { return enter(index, err); }

void kvs_index_let_go(struct kvs_index *index) { leave(index); }

int kvs_index_check(struct kvs_index *index, struct kvs_error *err) {
  int status = enter(index, err);
  if (status) return status;
  bool right = kvs_blockmap_consistent(index->map);
  leave(index);
  return right ? KVS_OK : kvs_fail(err, KVS_INTERNAL, "the map of %s is wrong", index->path);
}
