/* Client that fetches the chunks of an export from the exporting process. serve.c describes the protocol. */
#include "ipc/fetch.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/owner.h"
#include "base/wait.h"
#include "ipc/exchange.h"

static int refuse(const struct kvs_export *from, const char *what, struct kvs_error *err) {
  const struct kvs_owner owner = {from->pid, from->start};
  if (!kvs_owner_alive(&owner))
    return kvs_fail(err, KVS_CLOSED, "process %" PRId64 ", which exported this memory, has ended", from->pid);
  return kvs_fail(err, KVS_CLOSED,
                  "process %" PRId64 " does not serve this export any more: %s (its Export must be kept)", from->pid,
                  what);
}

/* Moved by kvs_fetch_wait(), one thread at a time: CONNECT -> REQUEST -> ANSWER -> CHUNKS -> DONE. */
enum fetching { FETCH_CONNECT, FETCH_REQUEST, FETCH_ANSWER, FETCH_CHUNKS, FETCH_DONE };

struct kvs_fetch {
  struct kvs_export from;
  int fd;
  enum fetching stage;
  uint64_t deadline;
  uint64_t index; /* of the next chunk */
  struct kvs_range *range;
  struct kvs_piece_moved piece; /* the message in progress: */
  struct kvs_request request;
  struct kvs_answer answer;
  struct kvs_chunk_message message;
};

int kvs_fetch_start(struct kvs_engine *engine, const struct kvs_export *from, struct kvs_fetch **started,
                    struct kvs_error *err) {
  struct kvs_fetch *fetch = calloc(1, sizeof *fetch);
  if (!fetch) return kvs_fail(err, KVS_NOMEM, "no memory to open an export");
  fetch->from = *from;
  fetch->piece.fd = -1;
  fetch->deadline = kvs_exchange_deadline(from->nchunks);
  fetch->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  int status = fetch->fd < 0 ? kvs_fail(err, KVS_UNSUPPORTED, "cannot make a socket: %s", strerror(errno)) : KVS_OK;
  if (!status) status = kvs_range_new(engine, from->allocation_nbytes, &fetch->range, err);
  if (status)
    kvs_fetch_drop(fetch);
  else
    *started = fetch;
  return status;
}

void kvs_fetch_drop(struct kvs_fetch *fetch) {
  kvs_piece_close(&fetch->piece);
  if (fetch->fd >= 0) close(fetch->fd);
  if (fetch->range) kvs_range_drop(fetch->range);
  free(fetch);
}

/* KVS_NOT_READY: the server's backlog is full. */
static int try_connect(struct kvs_fetch *fetch, struct kvs_error *err) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  pid_t pid = 0;
  memcpy(address.sun_path, fetch->from.socket, sizeof address.sun_path);
  if (connect(fetch->fd, (const struct sockaddr *)&address, sizeof address) != 0) {
    if (errno == EAGAIN || errno == EINTR) return KVS_NOT_READY;
    return refuse(&fetch->from, strerror(errno), err);
  }
  if (!kvs_exchange_peer(fetch->fd, &pid) || pid != (pid_t)fetch->from.pid)
    return kvs_fail(err, KVS_INVALID, "the socket of the export belongs to another user or process");
  memcpy(fetch->request.magic, KVS_REQUEST_MAGIC, 8);
  memcpy(fetch->request.token, fetch->from.token, sizeof fetch->request.token);
  kvs_piece_begin(&fetch->piece, &fetch->request, sizeof fetch->request);
  fetch->stage = FETCH_REQUEST;
  return KVS_OK;
}

static void expect_chunk(struct kvs_fetch *fetch) {
  fetch->stage = fetch->index < fetch->from.nchunks ? FETCH_CHUNKS : FETCH_DONE;
  kvs_piece_begin(&fetch->piece, &fetch->message, sizeof fetch->message);
}

static int take_answer(struct kvs_fetch *fetch, struct kvs_error *err) {
  kvs_piece_close(&fetch->piece); /* unexpected descriptor */
  if (memcmp(fetch->answer.magic, KVS_ANSWER_MAGIC, 8) != 0 || fetch->answer.count != fetch->from.nchunks)
    return kvs_fail(err, KVS_INVALID, "what came from the socket of the export is no answer to it");
  expect_chunk(fetch);
  return KVS_OK;
}

static int take_chunk(struct kvs_fetch *fetch, struct kvs_error *err) {
  struct kvs_chunk_message *message = &fetch->message;
  int status;
  message->why[sizeof message->why - 1] = '\0';
  if (message->status)
    status = kvs_fail(err, KVS_CLOSED, "process %" PRId64 " cannot share chunk %" PRIu64 ": %s", fetch->from.pid,
                      fetch->index, message->why);
  else if (fetch->piece.fd < 0 || message->index != fetch->index)
    status = kvs_fail(err, KVS_INVALID, "what came from the socket of the export is no chunk %" PRIu64, fetch->index);
  else
    status = kvs_range_add(fetch->range, message->nbytes, fetch->piece.fd, err);
  kvs_piece_close(&fetch->piece);
  fetch->index++;
  if (!status) expect_chunk(fetch);
  return status;
}

/* One step; KVS_NOT_READY: waiting for the server. */
static int step(struct kvs_fetch *fetch, struct kvs_error *err) {
  if (fetch->stage == FETCH_CONNECT) return try_connect(fetch, err);
  bool sends = fetch->stage == FETCH_REQUEST;
  enum kvs_moved moved = sends ? kvs_piece_send(fetch->fd, &fetch->piece) : kvs_piece_receive(fetch->fd, &fetch->piece);
  if (moved == KVS_MOVED_PART) return KVS_NOT_READY;
  if (moved == KVS_MOVE_FAILED)
    return refuse(&fetch->from, fetch->stage == FETCH_CHUNKS ? "it stopped half-way" : "it does not answer", err);
  if (fetch->stage == FETCH_CHUNKS) return take_chunk(fetch, err);
  if (fetch->stage == FETCH_ANSWER) return take_answer(fetch, err);
  fetch->stage = FETCH_ANSWER;
  kvs_piece_begin(&fetch->piece, &fetch->answer, sizeof fetch->answer);
  return KVS_OK;
}

int kvs_fetch_wait(struct kvs_fetch *fetch, int64_t timeout_ns, struct kvs_range **fetched, struct kvs_error *err) {
  uint64_t slice = kvs_deadline(timeout_ns), until = slice < fetch->deadline ? slice : fetch->deadline;
  while (fetch->stage != FETCH_DONE) {
    int status = step(fetch, err);
    if (status && status != KVS_NOT_READY) return status;
    if (kvs_clock_ns() >= fetch->deadline)
      return refuse(&fetch->from, fetch->stage == FETCH_CONNECT ? "it is busy" : "it takes too long to answer", err);
    if (kvs_clock_ns() >= slice) return kvs_fail(err, KVS_TIMEOUT, "the chunks have not all come");
    struct pollfd waiting = {.fd = fetch->fd, .events = fetch->stage == FETCH_REQUEST ? POLLOUT : POLLIN};
    if (status == KVS_NOT_READY && fetch->stage == FETCH_CONNECT)
      (void)poll(NULL, 0, 10);
    else if (status == KVS_NOT_READY)
      (void)poll(&waiting, 1, kvs_exchange_left_ms(until));
  }
  *fetched = fetch->range;
  fetch->range = NULL;
  return KVS_OK;
}
