/* Requests in two lists. A push wakes a thread only if one sleeps. */
#include <errno.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "files/engine.h"
#include "status.h"

void kvs_file_queue_destroy(struct kvs_file_queue *queue) {
  if (queue->wake >= 0) close(queue->wake);
  pthread_cond_destroy(&queue->pushed);
  pthread_mutex_destroy(&queue->lock);
}

int kvs_file_queue_init(struct kvs_file_queue *queue, struct kvs_error *err) {
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
  struct kvs_file_request **last = &queue->last[request->urgent];
  *(*last ? &(*last)->next : &queue->first[request->urgent]) = request;
  *last = request;
  bool tell = !queue->idle && queue->watchers;
  if (queue->idle) pthread_cond_signal(&queue->pushed);
  pthread_mutex_unlock(&queue->lock);
  if (tell) (void)eventfd_write(queue->wake, 1);
}

bool kvs_file_queue_watch(struct kvs_file_queue *queue) {
  pthread_mutex_lock(&queue->lock);
  bool there = queue->first[0] || queue->first[1];
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

static struct kvs_file_request *take_locked(struct kvs_file_queue *queue) {
  for (int urgent = 1; urgent >= 0; urgent--) {
    struct kvs_file_request *request = queue->first[urgent];
    if (!request) continue;
    queue->first[urgent] = request->next;
    if (!request->next) queue->last[urgent] = NULL;
    return request;
  }
  return NULL;
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
