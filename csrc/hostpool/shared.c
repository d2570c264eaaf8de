/* Shared pools: host pools over a segment, with one word a block that tells other processes the block's state. */
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/owner.h"
#include "base/wait.h"
#include "hostpool/hostpool.h"
#include "hostpool/map.h"
#include "hostpool/segment.h"

/* Values of a word: EMPTY, PUBLISHED, or the name of the process that writes the block. */
enum { EMPTY = 0, PID_BITS = 22 };
static const uint32_t PUBLISHED = UINT32_C(1) << 31;

/* The name of a process: 22 bits of pid and 9 bits of its start time, since pids are reused (a restarted container gets
 * the same one). */
static uint32_t name_of(int64_t pid, uint64_t start) {
  return (uint32_t)pid | (uint32_t)(start * UINT64_C(0x9E3779B97F4A7C15) >> 55) << PID_BITS;
}

static int64_t pid_of(uint32_t word) { return word & ((UINT32_C(1) << PID_BITS) - 1); }

static uint32_t me(void) {
  static atomic_uint_fast64_t known; /* pid and name together: a forked child has another pid */
  uint64_t pid = (uint64_t)getpid(), both = atomic_load(&known);
  if (both >> 32 == pid) return (uint32_t)both;
  uint32_t word = name_of((int64_t)pid, kvs_process_start((int64_t)pid));
  atomic_store(&known, pid << 32 | word);
  return word;
}

int kvs_shared_open(struct kvs_engine *engine, const struct kvs_host_pool_options *options,
                    const struct kvs_shared_options *shared, struct kvs_host_pool **made, struct kvs_error *err) {
  struct kvs_host_pool_options asked = *options;
  struct kvs_host_pool *pool;
  bool replaced = false;
  bool huge = kvs_pages_huge(asked.pages);
  (void)me(); /* compute the name while files can be opened; with the fallback, other processes could not recognise this
                 one */
  int status = KVS_CHECK_RESERVED(shared, "kvs_shared_options", err);
  if (status) return status;
  if (asked.max_blocks) return kvs_fail(err, KVS_UNSUPPORTED, "a shared pool keeps the size that it was made with");
  if (huge) asked.pages = KVS_PAGES_TRANSPARENT;
  status = kvs_host_pool_new(engine, &asked, &pool, err);
  if (status) return status;
  const struct kvs_segment_shape shape = {.num_blocks = pool->num_blocks,
                                          .slot_nbytes = pool->asked.slot_nbytes,
                                          .layers = pool->asked.layers,
                                          .layer_first = pool->asked.layer_first,
                                          .room_nbytes = kvs_host_pool_room(pool),
                                          .index_nbytes = shared->index_nbytes};
  status = kvs_shared_file_open(&shape, shared, pool, &pool->segment, &replaced, err);
  if (status) {
    kvs_host_pool_delete(pool);
    return status;
  }
  pool->map_base = pool->segment->map_base;
  pool->map_nbytes = pool->segment->map_nbytes;
  pool->base = pool->map_base + pool->segment->data_offset;
  if (huge)
    kvs_host_pool_note(pool, "shared memory has no pages of 2 MiB or 1 GiB set aside: transparent ones are asked for");
  if (replaced) kvs_host_pool_note(pool, "what a process left behind when it died was removed");
  status = kvs_pages_commit(pool->map_base, pool->map_nbytes, pool->pages, err);
  if (!status) status = kvs_host_pool_start(pool, err);
  if (!status) {
    *made = pool;
    return status;
  }
  kvs_pages_unmap(pool->map_base, pool->map_nbytes);
  kvs_shared_file_close(pool->segment);
  kvs_host_pool_delete(pool);
  return status;
}

/* -- the segment ----------------------------------------------------------------------------------------------- */

/* Prevents closing until leave(). */
static int enter(struct kvs_host_pool *pool, struct kvs_error *err) {
  int status = kvs_dev_check(pool->engine->device, err);
  if (status == KVS_FORKED) return status;
  pthread_mutex_lock(&pool->lock);
  if (pool->state == KVS_POOL_CLOSED || pool->closing) {
    status = kvs_fail(err, KVS_CLOSED, "the pool is closed");
  } else if (!pool->segment) {
    status = kvs_fail(err, KVS_INVALID, "the pool is not a shared one");
  } else {
    status = KVS_OK;
    pool->readers++;
  }
  pthread_mutex_unlock(&pool->lock);
  return status;
}

static void leave(struct kvs_host_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  if (--pool->readers == 0) pthread_cond_broadcast(&pool->changed);
  pthread_mutex_unlock(&pool->lock);
}

int kvs_shared_get_info(struct kvs_host_pool *pool, struct kvs_shared_info *info, struct kvs_error *err) {
  int status = enter(pool, err);
  if (status) return status;
  const struct kvs_shared_file *segment = pool->segment;
  *info = (struct kvs_shared_info){.generation = segment->generation,
                                   .owner_pid = segment->owner_pid,
                                   .owner = segment->owner,
                                   .owner_alive = kvs_shared_file_owner_alive(segment)};
  snprintf(info->path, sizeof info->path, "%s", segment->path);
  leave(pool);
  return KVS_OK;
}

int kvs_shared_unlink(struct kvs_host_pool *pool, struct kvs_error *err) {
  int status = enter(pool, err);
  if (status) return status;
  if (pool->segment->together)
    status = kvs_fail(err, KVS_INVALID,
                      "the segment belongs to all processes that have opened it: the last one takes "
                      "its name away");
  else if (pool->segment->owner)
    kvs_shared_file_unlink(pool->segment);
  else
    status = kvs_fail(err, KVS_INVALID, "process %" PRId64 " owns the segment: it alone takes its name away",
                      pool->segment->owner_pid);
  leave(pool);
  return status;
}

/* -- words ----------------------------------------------------------------------------------------------------- */

static int refuse_block(const struct kvs_shared_file *segment, size_t i, int64_t block, struct kvs_error *err) {
  return kvs_fail(err, KVS_RANGE, "blocks[%zu] is %" PRId64 "; the pool has %" PRIu64 " blocks, 0 to %" PRIu64, i,
                  block, segment->num_blocks, segment->num_blocks - 1);
}

/* A private copy of the caller's list: another thread may modify the original. */
struct block_list {
  struct kvs_host_pool *pool;
  int64_t *items;
  size_t count;
};

static uint32_t *word_of(const struct block_list *list, size_t i) {
  return &list->pool->segment->words[list->items[i]];
}

static void leave_blocks(struct block_list *list) {
  free(list->items);
  leave(list->pool);
}

/* enter(), then check that all blocks are populated. */
static int enter_blocks(struct kvs_host_pool *pool, const struct kvs_ids *blocks, struct block_list *list,
                        struct kvs_error *err) {
  int status = enter(pool, err);
  if (status) return status;
  *list = (struct block_list){.pool = pool, .count = blocks->count};
  list->items = calloc(blocks->count ? blocks->count : 1, sizeof *list->items);
  if (list->items)
    kvs_ids_copy(blocks, list->items);
  else
    status = kvs_fail(err, KVS_NOMEM, "no memory for a list of %zu blocks", blocks->count);
  for (size_t i = 0; !status && i < list->count; i++)
    if ((uint64_t)list->items[i] >= pool->segment->num_blocks)
      status = refuse_block(pool->segment, i, list->items[i], err);
  if (status) leave_blocks(list);
  return status;
}

static bool is_writer(uint32_t word) { return word != EMPTY && word != PUBLISHED; }

/* The process that was writing the block has ended. If its start time cannot be read (too many open files, for
 * example), the process counts as alive. */
static bool writer_ended(uint32_t word) {
  if (!is_writer(word) || word == me()) return false;
  int64_t pid = pid_of(word);
  if (!kvs_process_alive(pid, 0)) return true;
  uint64_t start = kvs_process_start(pid);
  return start && name_of(pid, start) != word;
}

static void wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

int kvs_shared_claim(struct kvs_host_pool *pool, const struct kvs_ids *blocks, bool *won, struct kvs_error *err) {
  struct block_list list;
  int status = enter_blocks(pool, blocks, &list, err);
  if (status) return status;
  for (size_t i = 0; i < list.count; i++) {
    uint32_t *word = word_of(&list, i), seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    bool mine_to_try = seen == EMPTY || writer_ended(seen);
    won[i] = mine_to_try && __atomic_compare_exchange_n(word, &seen, me(), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  }
  leave_blocks(&list);
  return KVS_OK;
}

/* One thread of a process at a time: all threads use the same name, so a rollback would release another thread's
 * word. */
static pthread_mutex_t setting = PTHREAD_MUTEX_INITIALIZER;

/* Claim a word with another value. False: a live process is writing the block. *before: the old value. */
static bool take_word(uint32_t *word, uint32_t value, uint32_t *before) {
  *before = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  do {
    if (*before == value) return true;
    if (is_writer(*before) && *before != me() && !writer_ended(*before)) return false;
  } while (!__atomic_compare_exchange_n(word, before, me(), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return true;
}

/* Set all words to a value, or none if a live process is writing one of the blocks. All words are claimed first. */
static int set_words(struct kvs_host_pool *pool, const struct kvs_ids *blocks, uint32_t value, struct kvs_error *err) {
  struct block_list list;
  int status = enter_blocks(pool, blocks, &list, err);
  if (status) return status;
  size_t taken = 0;
  static struct kvs_fork_guard guard = {.lock = &setting};
  kvs_fork_watch(&guard);
  uint32_t *before = malloc((list.count ? list.count : 1) * sizeof *before);
  if (!before) status = kvs_fail(err, KVS_NOMEM, "no memory for %zu blocks", list.count);
  pthread_mutex_lock(&setting);
  for (; !status && taken < list.count; taken++) {
    if (take_word(word_of(&list, taken), value, &before[taken])) continue;
    status = kvs_fail(err, KVS_INVALID, "blocks[%zu] = %" PRId64 " is being written by process %" PRId64, taken,
                      list.items[taken], pid_of(before[taken]));
    break;
  }
  for (size_t i = taken; i-- > 0;) { /* backwards: for a block named twice, the first claim has the original value */
    uint32_t *word = word_of(&list, i);
    if (before[i] == value) continue;
    __atomic_store_n(word, status ? before[i] : value, __ATOMIC_RELEASE);
    wake(word);
  }
  pthread_mutex_unlock(&setting);
  free(before);
  leave_blocks(&list);
  return status;
}

int kvs_shared_publish(struct kvs_host_pool *pool, const struct kvs_ids *blocks, struct kvs_error *err) {
  return set_words(pool, blocks, PUBLISHED, err);
}

int kvs_shared_retract(struct kvs_host_pool *pool, const struct kvs_ids *blocks, struct kvs_error *err) {
  return set_words(pool, blocks, EMPTY, err);
}

int kvs_shared_published(struct kvs_host_pool *pool, const struct kvs_ids *blocks, bool *published,
                         struct kvs_error *err) {
  struct block_list list;
  int status = enter_blocks(pool, blocks, &list, err);
  if (status) return status;
  for (size_t i = 0; i < list.count; i++)
    published[i] = __atomic_load_n(word_of(&list, i), __ATOMIC_ACQUIRE) == PUBLISHED;
  leave_blocks(&list);
  return KVS_OK;
}

int kvs_shared_wait(struct kvs_host_pool *pool, const struct kvs_ids *blocks, int64_t timeout_ns,
                    struct kvs_error *err) {
  const int64_t slice_ns = 50 * 1000 * 1000; /* a writer that dies wakes no waiters, so look again after each slice */
  uint64_t start = kvs_clock_ns();
  struct block_list list;
  int status = enter_blocks(pool, blocks, &list, err);
  if (status) return status;
  for (size_t i = 0; !status && i < list.count;) {
    uint32_t *word = word_of(&list, i), seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    int64_t left = timeout_ns < 0 ? slice_ns : timeout_ns - (int64_t)(kvs_clock_ns() - start);
    if (seen == PUBLISHED) {
      i++;
    } else if (writer_ended(seen)) {
      status = kvs_fail(err, KVS_CLOSED, "process %" PRId64 " died while it wrote block %" PRId64 ": claim() it anew",
                        pid_of(seen), list.items[i]);
    } else if (left <= 0 && seen == EMPTY) {
      status = kvs_fail(err, KVS_TIMEOUT, "blocks[%zu] = %" PRId64 " was not published in time; nobody claimed it", i,
                        list.items[i]);
    } else if (left <= 0) {
      status = kvs_fail(err, KVS_TIMEOUT,
                        "blocks[%zu] = %" PRId64 " was not published in time; process %" PRId64 " is writing it", i,
                        list.items[i], pid_of(seen));
    } else {
      struct timespec pause = {.tv_nsec = (long)(left < slice_ns ? left : slice_ns)};
      syscall(SYS_futex, word, FUTEX_WAIT, seen, &pause, NULL, 0);
    }
  }
  leave_blocks(&list);
  return status;
}
