/* The server of chunks; fetch.c is the client.
 *
 * The socket is in a folder of the user (mode 0700, owner checked), under a name that contains the server's pid, so
 * that the next server can remove the socket of a killed process. Both sides ask the kernel for the peer's user, and
 * the client also for the peer's process. A request has a fixed size and names a token of 16 random bytes. The answer
 * is a header, then one message a chunk with one descriptor. Descriptors are created when they are sent, so neither
 * side holds more than one a connection.
 *
 * All I/O is non-blocking, with the progress kept for each client. One thread serves all clients at once, and a slow
 * client delays only itself. A client can poll for other events between steps. Each side has one deadline for the whole
 * exchange; stopping the server wakes its thread. */
#include "ipc/serve.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/owner.h"
#include "base/thread.h"
#include "base/wait.h"
#include "device/share.h"
#include "ipc/exchange.h"
#include "lanes/registry.h"

enum { REQUEST_MS = 1000, BACKLOG = 16, CLIENTS = 32, STALE_MOST = 1000 };

struct kvs_server {
  struct kvs_server *next; /* guarded by servers_lock */
  struct kvs_engine *engine;
  pid_t pid; /* a forked child does not serve */
  int listening, wake;
  uint64_t inode; /* of the listening socket */
  pthread_t thread;
  bool stopped; /* guarded by servers_lock */
  bool joined;  /* guarded by servers_lock */
  struct kvs_chunks chunks;
  unsigned char token[16];
  struct sockaddr_un address;
};

static pthread_mutex_t servers_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvs_server *servers; /* guarded by servers_lock */
static unsigned next_number;       /* guarded by servers_lock */

static void forked(void) { servers = NULL; }

/* -- the socket's folder --------------------------------------------------------------------------------------- */

static int make_folder(char folder[80], struct kvs_error *err) {
  const char *run = getenv("XDG_RUNTIME_DIR");
  struct stat there;
  bool own = run && run[0] == '/' && strlen(run) < 48 && lstat(run, &there) == 0 && S_ISDIR(there.st_mode) &&
             there.st_uid == geteuid();
  snprintf(folder, 80, "%s/kvswap-%u", own ? run : "/tmp", (unsigned)geteuid());
  if (mkdir(folder, 0700) != 0 && errno != EEXIST)
    return kvs_fail(err, KVS_UNSUPPORTED, "cannot make %s for sockets: %s", folder, strerror(errno));
  if (lstat(folder, &there) == 0 && S_ISDIR(there.st_mode) && there.st_uid == geteuid() && !(there.st_mode & 077))
    return KVS_OK;
  return kvs_fail(err, KVS_UNSUPPORTED, "%s is not a folder that only this user can use (mode 0700): remove it",
                  folder);
}

/* True: the server has ended. A process that is not visible may be in another pid namespace, in a container with the
 * same /tmp; its socket is stale only if connecting to it is refused. */
static bool is_deserted(const char *folder, const char *name) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/%s", folder, name);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  bool deserted = fd >= 0 && length > 0 && (size_t)length < sizeof address.sun_path &&
                  connect(fd, (const struct sockaddr *)&address, sizeof address) != 0 && errno == ECONNREFUSED;
  if (fd >= 0) close(fd);
  return deserted;
}

/* Remove the sockets of processes that have ended. */
static void remove_stale(const char *folder) {
  DIR *listing = opendir(folder);
  struct dirent *entry;
  for (int i = 0; listing && i < STALE_MOST && (entry = readdir(listing)) != NULL;) {
    struct kvs_owner owner;
    unsigned number;
    if (sscanf(entry->d_name, "%" SCNd64 "-%" SCNu64 "-%u.sock", &owner.pid, &owner.start, &number) != 3) continue;
    if (!kvs_owner_alive(&owner) && is_deserted(folder, entry->d_name))
      (void)unlinkat(dirfd(listing), entry->d_name, 0);
    i++;
  }
  if (listing) closedir(listing);
}

static int name_socket(struct sockaddr_un *address, struct kvs_error *err) {
  struct kvs_owner self = kvs_owner_self();
  char folder[80];
  int status = make_folder(folder, err);
  if (status) return status;
  remove_stale(folder);
  pthread_mutex_lock(&servers_lock);
  unsigned number = next_number++;
  pthread_mutex_unlock(&servers_lock);
  address->sun_family = AF_UNIX;
  int length = snprintf(address->sun_path, sizeof address->sun_path, "%s/%" PRId64 "-%" PRIu64 "-%u.sock", folder,
                        self.pid, self.start, number);
  if (length > 0 && (size_t)length < sizeof address->sun_path) return KVS_OK;
  return kvs_fail(err, KVS_UNSUPPORTED, "the name of a socket in %s is too long", folder);
}

/* -- serving --------------------------------------------------------------------------------------------------- */

static bool same_token(const unsigned char *one, const unsigned char *two) {
  unsigned differs = 0;
  for (int i = 0; i < 16; i++) differs |= one[i] ^ two[i];
  return differs == 0;
}

/* REQUEST -> ANSWER -> CHUNKS, moved by the server's thread alone when a message is complete. */
enum stage { STAGE_REQUEST, STAGE_ANSWER, STAGE_CHUNKS };

struct client {
  int fd;
  enum stage stage;
  uint64_t deadline;
  uint64_t index, at;           /* the next chunk, and its offset */
  bool last;                    /* the message in progress is the last one */
  struct kvs_piece_moved piece; /* the message in progress: */
  struct kvs_request request;
  struct kvs_answer answer;
  struct kvs_chunk_message message;
};

static void begin_chunk(const struct kvs_server *server, struct client *client) {
  struct kvs_chunk_message *message = &client->message;
  struct kvs_error err;
  uint64_t base = 0;
  int fd = -1;
  *message = (struct kvs_chunk_message){.index = client->index++};
  int status = kvs_dev_chunk_query(server->engine->device, client->at, &base, &message->nbytes, &err);
  if (!status) status = kvs_dev_chunk_share(server->engine->device, client->at, &fd, &err);
  message->status = status;
  if (status) snprintf(message->why, sizeof message->why, "%.99s", err.message);
  client->at = base + message->nbytes;
  client->last = status || client->index == server->chunks.count;
  kvs_piece_begin(&client->piece, message, sizeof *message);
  client->piece.fd = fd;
}

static bool begin_answer(const struct kvs_server *server, struct client *client) {
  bool good =
      memcmp(client->request.magic, KVS_REQUEST_MAGIC, 8) == 0 && same_token(client->request.token, server->token);
  kvs_piece_close(&client->piece); /* unexpected descriptor */
  if (!good) return false;
  client->answer = (struct kvs_answer){.count = server->chunks.count};
  memcpy(client->answer.magic, KVS_ANSWER_MAGIC, 8);
  client->stage = STAGE_ANSWER;
  client->last = server->chunks.count == 0;
  client->deadline = kvs_exchange_deadline(server->chunks.count);
  kvs_piece_begin(&client->piece, &client->answer, sizeof client->answer);
  return true;
}

/* Serve a client as far as possible without blocking. False: the client is done. */
static bool serve(const struct kvs_server *server, struct client *client) {
  for (;;) {
    bool asks = client->stage == STAGE_REQUEST;
    enum kvs_moved moved =
        asks ? kvs_piece_receive(client->fd, &client->piece) : kvs_piece_send(client->fd, &client->piece);
    if (moved != KVS_MOVED) return moved == KVS_MOVED_PART;
    if (asks) {
      if (!begin_answer(server, client)) return false;
      continue;
    }
    kvs_piece_close(&client->piece);
    if (client->last) return false;
    if (client->stage == STAGE_ANSWER) client->at = server->chunks.base;
    client->stage = STAGE_CHUNKS;
    begin_chunk(server, client);
  }
}

static void client_close(struct client *client) {
  kvs_piece_close(&client->piece);
  close(client->fd);
}

/* A program may close all descriptors and reuse their numbers: foreign descriptors are neither written to nor closed.
 * The wake-up descriptor is treated like the socket. */
static bool still_ours(const struct kvs_server *server) {
  struct stat file;
  return fstat(server->listening, &file) == 0 && S_ISSOCK(file.st_mode) && file.st_ino == server->inode;
}

/* False: no client is waiting, or the process has too many open files for now. */
static bool take_client(const struct kvs_server *server, struct client *client) {
  pid_t pid;
  int fd = accept4(server->listening, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return false;
  *client = (struct client){.fd = fd, .deadline = kvs_clock_ns() + REQUEST_MS * UINT64_C(1000000)};
  kvs_piece_begin(&client->piece, &client->request, sizeof client->request);
  if (kvs_exchange_peer(fd, &pid)) return true;
  client_close(client);
  return false;
}

struct clients {
  struct client *items[CLIENTS];
  size_t count;
};

static void serve_ready(const struct kvs_server *server, struct clients *clients, const struct pollfd *polled) {
  size_t kept = 0, count = clients->count;
  uint64_t now = kvs_clock_ns();
  for (size_t i = 0; i < count; i++) {
    struct client *client = clients->items[i];
    if (now < client->deadline && (!polled[i].revents || serve(server, client))) {
      clients->items[kept++] = client;
      continue;
    }
    client_close(client);
    free(client);
  }
  clients->count = kept;
}

static bool accept_one(const struct kvs_server *server, struct clients *clients) {
  struct client *client = calloc(1, sizeof *client);
  if (client && take_client(server, client)) {
    clients->items[clients->count++] = client;
    return true;
  }
  free(client);
  return false;
}

/* Serves all clients at once; beyond the limit, new clients wait in the backlog. */
static void *serve_clients(void *arg) {
  struct kvs_server *server = arg;
  struct clients clients = {.count = 0};
  struct pollfd polled[CLIENTS + 2];
  for (;;) {
    uint64_t until = UINT64_MAX;
    for (size_t i = 0; i < clients.count; i++) {
      const struct client *client = clients.items[i];
      polled[i] = (struct pollfd){.fd = client->fd, .events = client->stage == STAGE_REQUEST ? POLLIN : POLLOUT};
      if (client->deadline < until) until = client->deadline;
    }
    struct pollfd *listening = &polled[clients.count], *wake = listening + 1;
    *listening = (struct pollfd){.fd = clients.count < CLIENTS ? server->listening : -1, .events = POLLIN};
    *wake = (struct pollfd){.fd = server->wake, .events = POLLIN};
    int count = poll(polled, clients.count + 2, until == UINT64_MAX ? -1 : kvs_exchange_left_ms(until));
    if (count < 0 && errno != EINTR) break;
    if (count < 0) continue;
    bool more = listening->revents & POLLIN;
    if (wake->revents || !still_ours(server)) break;
    serve_ready(server, &clients, polled);
    if (more && !accept_one(server, &clients)) (void)poll(wake, 1, 50); /* accept failed: retry after a pause */
  }
  while (clients.count) {
    client_close(clients.items[--clients.count]);
    free(clients.items[clients.count]);
  }
  return NULL;
}

static int listen_at(struct kvs_server *server, struct kvs_error *err) {
  const struct sockaddr *address = (const struct sockaddr *)&server->address;
  struct stat file;
  server->listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  server->wake = server->listening < 0 ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (server->wake < 0 || fstat(server->listening, &file) != 0) {
    int failed = errno;
    if (server->listening >= 0) close(server->listening);
    if (server->wake >= 0) close(server->wake);
    server->listening = -1;
    return kvs_fail(err, KVS_UNSUPPORTED, "cannot make a socket: %s", strerror(failed));
  }
  server->inode = file.st_ino;
  if (bind(server->listening, address, sizeof server->address) != 0)
    return kvs_fail(err, KVS_UNSUPPORTED, "cannot bind %s: %s", server->address.sun_path, strerror(errno));
  if (chmod(server->address.sun_path, 0600) == 0 && listen(server->listening, BACKLOG) == 0) return KVS_OK;
  int code = errno;
  (void)unlink(server->address.sun_path);
  return kvs_fail(err, KVS_UNSUPPORTED, "cannot listen at %s: %s", server->address.sun_path, strerror(code));
}

static int start_thread(struct kvs_server *server, struct kvs_error *err) {
  int code = kvs_thread_start(&server->thread, "kvswap-export", serve_clients, server);
  return code ? kvs_fail(err, KVS_NOMEM, "cannot start a thread that serves an export") : KVS_OK;
}

static void server_delete(struct kvs_server *server) {
  if (still_ours(server)) {
    close(server->listening);
    close(server->wake);
  }
  kvs_engine_unref(server->engine);
  free(server);
}

int kvs_server_start(struct kvs_engine *engine, const struct kvs_chunks *chunks, struct kvs_export *made,
                     struct kvs_server **out, struct kvs_error *err) {
  static struct kvs_fork_guard guard = {.lock = &servers_lock, .in_child = forked};
  kvs_fork_watch(&guard);
  kvs_before_shutdown(kvs_servers_stop);
  struct kvs_server *server = calloc(1, sizeof *server);
  if (!server) return kvs_fail(err, KVS_NOMEM, "no memory to serve an export");
  kvs_engine_ref(engine);
  server->engine = engine;
  server->listening = server->wake = -1;
  server->pid = getpid();
  server->chunks = *chunks;
  int status = getrandom(server->token, sizeof server->token, 0) == sizeof server->token
                   ? KVS_OK
                   : kvs_fail(err, KVS_UNSUPPORTED, "this system gives no random bytes");
  if (!status) status = name_socket(&server->address, err);
  if (!status) status = listen_at(server, err);
  if (!status) {
    status = start_thread(server, err);
    if (status) (void)unlink(server->address.sun_path);
  }
  if (status) {
    server_delete(server);
    return status;
  }
  made->nchunks = chunks->count;
  memcpy(made->token, server->token, sizeof made->token);
  memcpy(made->socket, server->address.sun_path, sizeof made->socket);
  pthread_mutex_lock(&servers_lock);
  server->next = servers;
  servers = server;
  pthread_mutex_unlock(&servers_lock);
  *out = server;
  return KVS_OK;
}

/* Wakes the thread, unless the program closed the descriptor on which it sleeps: then the thread is not joined. */
static void stop_locked(struct kvs_server *server) {
  const uint64_t one = 1;
  if (server->stopped) return;
  server->stopped = true;
  (void)unlink(server->address.sun_path);
  server->joined = still_ours(server) && write(server->wake, &one, sizeof one) == sizeof one &&
                   pthread_join(server->thread, NULL) == 0;
}

void kvs_server_free(struct kvs_server *server) {
  bool unused = true; /* no thread uses the server */
  if (server->pid == getpid()) {
    pthread_mutex_lock(&servers_lock);
    stop_locked(server);
    struct kvs_server **at = &servers;
    while (*at && *at != server) at = &(*at)->next;
    if (*at) *at = server->next;
    unused = server->joined;
    pthread_mutex_unlock(&servers_lock);
  }
  if (unused) server_delete(server);
}

void kvs_servers_stop(void) {
  pthread_mutex_lock(&servers_lock);
  for (struct kvs_server *server = servers; server; server = server->next)
    if (server->pid == getpid()) stop_locked(server);
  pthread_mutex_unlock(&servers_lock);
}
