/* Requests in a list a rank. A push wakes a thread only if one sleeps. */
#include "files/queue.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/wait.h"
#include "files/engine.h"
#include "status.h"

static const uint64_t OVERDUE_NS = 100 * 1000 * 1000, OVERDUE_NBYTES = 64 << 20, LONGEST_NS = 500 * 1000 * 1000;
static const uint64_t LOADS_SHARE = 16, LEAST_NBYTES = 64 << 10;

/* -- turns --------------------------------------------------------------------------------------------------------- */

uint64_t kvs_file_request_nbytes(uint64_t nbytes) { return nbytes < LEAST_NBYTES ? LEAST_NBYTES : nbytes; }

void kvs_file_request_wait(struct kvs_file_request *request, const struct kvs_file_turns *turns) {
  request->since_ns = kvs_clock_ns();
  request->since_nbytes = atomic_load(&turns->popped->load_nbytes);
}

bool kvs_file_request_is_due(struct kvs_file_request *request, struct kvs_file_turns *turns) {
  if (request->rank == KVS_FILE_FIRST) return true;
  const uint64_t popped = atomic_load(&turns->popped->load_nbytes);
  if (popped < turns->next) return false;
  const uint64_t waited = kvs_clock_ns() - request->since_ns;
  if (waited < OVERDUE_NS || (waited < LONGEST_NS && popped - request->since_nbytes < OVERDUE_NBYTES)) return false;
  turns->next = popped + LOADS_SHARE * request->nbytes;
  request->rank = KVS_FILE_FIRST;
  return true;
}

/* -- the queue ----------------------------------------------------------------------------------------------------- */

void kvs_file_queue_destroy(struct kvs_file_queue *queue) {
  if (queue->wake >= 0) close(queue->wake);
  pthread_cond_destroy(&queue->pushed);
  pthread_mutex_destroy(&queue->lock);
}

int kvs_file_queue_init(struct kvs_file_queue *queue, struct kvs_file_popped *popped, struct kvs_error *err) {
  queue->turns.popped = popped;
  if (pthread_mutex_init(&queue->lock, NULL)) return kvs_fail(err, KVS_NOMEM, "no memory for a lock");
  if (pthread_cond_init(&queue->pushed, NULL)) {
    pthread_mutex_destroy(&queue->lock);
    return kvs_fail(err, KVS_NOMEM, "no memory for a queue");
  }
  queue->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (queue->wake >= 0) return KVS_OK;
  int code = errno;
  kvs_file_queue_destroy(queue);
  return kvs_file_fail(err, code, "making an eventfd");
}

void kvs_file_queue_push(struct kvs_file_queue *queue, struct kvs_file_request *request) {
  request->next = NULL;
  pthread_mutex_lock(&queue->lock);
  struct kvs_file_request **last = &queue->last[request->rank];
  *(*last ? &(*last)->next : &queue->first[request->rank]) = request;
  *last = request;
  bool tell = !queue->idle && queue->watchers;
  if (queue->idle) pthread_cond_signal(&queue->pushed);
  pthread_mutex_unlock(&queue->lock);
  if (tell) (void)eventfd_write(queue->wake, 1);
}

bool kvs_file_queue_watch(struct kvs_file_queue *queue) {
  pthread_mutex_lock(&queue->lock);
  bool there = false;
  for (int rank = 0; rank < KVS_FILE_RANKS; rank++) there |= queue->first[rank] != NULL;
  queue->watchers += !there;
  pthread_mutex_unlock(&queue->lock);
  return there;
}

void kvs_file_queue_unwatch(struct kvs_file_queue *queue) {
  pthread_mutex_lock(&queue->lock);
  queue->watchers--;
  pthread_mutex_unlock(&queue->lock);
}

void kvs_file_queue_drain_wake(struct kvs_file_queue *queue) {
  eventfd_t count;
  (void)eventfd_read(queue->wake, &count);
}

static bool is_due_locked(struct kvs_file_queue *queue, enum kvs_file_rank rank) {
  struct kvs_file_request *oldest = queue->first[rank];
  return oldest && queue->first[KVS_FILE_LOADS] && kvs_file_request_is_due(oldest, &queue->turns);
}

/* The list to pop from. */
static enum kvs_file_rank choose_locked(struct kvs_file_queue *queue) {
  const enum kvs_file_rank turn = queue->turn, other = turn == KVS_FILE_STORES ? KVS_FILE_DELETES : KVS_FILE_STORES;
  if (queue->first[KVS_FILE_FIRST]) return KVS_FILE_FIRST;
  if (is_due_locked(queue, turn)) return turn;
  if (is_due_locked(queue, other)) return other;
  if (queue->first[KVS_FILE_LOADS]) return KVS_FILE_LOADS;
  return queue->first[turn] ? turn : other;
}

static struct kvs_file_request *take_locked(struct kvs_file_queue *queue) {
  const enum kvs_file_rank rank = choose_locked(queue);
  struct kvs_file_request *request = queue->first[rank];
  if (!request) return NULL;
  queue->first[rank] = request->next;
  if (!request->next) queue->last[rank] = NULL;
  atomic_fetch_add(&queue->turns.popped->requests, 1);
  if (rank == KVS_FILE_LOADS) atomic_fetch_add(&queue->turns.popped->load_nbytes, request->nbytes);
  if (rank == KVS_FILE_STORES) queue->turn = KVS_FILE_DELETES;
  if (rank == KVS_FILE_DELETES) queue->turn = KVS_FILE_STORES;
  return request;
}

struct kvs_file_request *kvs_file_queue_pop(struct kvs_file_queue *queue, bool wait) {
  pthread_mutex_lock(&queue->lock);
  struct kvs_file_request *request = take_locked(queue);
  while (!request && wait && !queue->closed) {
    queue->idle++;
    pthread_cond_wait(&queue->pushed, &queue->lock);
    queue->idle--;
    request = take_locked(queue);
  }
  pthread_mutex_unlock(&queue->lock);
  return request;
}

void kvs_file_queue_close(struct kvs_file_queue *queue) {
  pthread_mutex_lock(&queue->lock);
  queue->closed = true;
  pthread_cond_broadcast(&queue->pushed);
  pthread_mutex_unlock(&queue->lock);
}

uint8_t *kvs_file_pages_map(size_t nbytes) {
  void *pages = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? NULL : pages;
}

void kvs_file_pages_unmap(uint8_t *pages, size_t nbytes) { munmap(pages, nbytes); }
