/* Who serves chunks, and who fetches them.
 *
 * The socket lies in a folder of the user's own (mode 0700, and its owner is looked at), under a name that tells whose
 * it is: what a killed process left there is removed by the next one that serves. Both sides ask the kernel for the
 * other's user, and the client for the other's process. A request is of fixed size and names a token of 16 random
 * bytes; the answer is a header and, a chunk, a message with one descriptor, which is made as it is sent: neither side
 * ever holds more than one. Every wait has a limit, and the server's thread wakes for the end of the server as well. */
#include "ipc/serve.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "device/share.h"
#include "memory/owner.h"

/* A client that says nothing holds up the others, who have more patience than the server. */
enum { SERVER_PATIENCE_MS = 1000, PATIENCE_MS = 15000, BACKLOG = 16, STALE_MOST = 1000 };

static const char REQUEST[8] = "kvswapQ1", ANSWER[8] = "kvswapA1";

struct request {
  char magic[8];
  unsigned char token[16];
};

struct answer {
  char magic[8];
  uint64_t count;
};

struct chunk_message {
  uint64_t index, nbytes;
  int32_t status;
  char why[100]; /* where status is not KVS_OK, and then there is no descriptor */
};

struct kvs_server {
  struct kvs_server *next; /* guarded by servers_lock */
  struct kvs_engine *engine;
  pid_t pid; /* a forked child's copy of the server serves nobody */
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

static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void renew_servers_lock(void) {
  pthread_mutex_init(&servers_lock, NULL);
  servers = NULL;
}

static void watch_fork(void) { pthread_atfork(NULL, NULL, renew_servers_lock); }

/* -- the folder ------------------------------------------------------------------------------------------------ */

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

/* A process that is not to be seen from here may live in another pid namespace, of a container with the same /tmp: only
 * a socket at which nobody listens is nobody's. */
static bool is_deserted(const char *folder, const char *name) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/%s", folder, name);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  bool deserted = fd >= 0 && length > 0 && (size_t)length < sizeof address.sun_path &&
                  connect(fd, (const struct sockaddr *)&address, sizeof address) != 0 && errno == ECONNREFUSED;
  if (fd >= 0) close(fd);
  return deserted;
}

/* What processes left that are no more. */
static void remove_stale(const char *folder) {
  DIR *listing = opendir(folder);
  struct dirent *entry;
  for (int i = 0; listing && i < STALE_MOST && (entry = readdir(listing)) != NULL; i++) {
    struct kvs_owner owner;
    unsigned number;
    if (sscanf(entry->d_name, "%" SCNd64 "-%" SCNu64 "-%u.sock", &owner.pid, &owner.start, &number) == 3 &&
        !kvs_owner_alive(&owner) && is_deserted(folder, entry->d_name))
      (void)unlinkat(dirfd(listing), entry->d_name, 0);
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

/* -- both sides ------------------------------------------------------------------------------------------------ */

/* Until `fd` is ready for `events`; false if it takes too long, fails, or `wake` (-1: the client, who has none) is
 * raised. */
static bool ready(int fd, short events, int wake) {
  struct pollfd waiting[2] = {{.fd = fd, .events = events}, {.fd = wake, .events = POLLIN}};
  uint64_t start = kvs_clock_ns();
  for (;;) {
    int left = (wake < 0 ? PATIENCE_MS : SERVER_PATIENCE_MS) - (int)((kvs_clock_ns() - start) / 1000000);
    if (left <= 0) return false;
    int count = poll(waiting, wake < 0 ? 1 : 2, left);
    if (count < 0 && errno == EINTR) continue;
    return count > 0 && !waiting[1].revents && waiting[0].revents;
  }
}

static bool send_all(int fd, const void *data, size_t nbytes, int descriptor, int wake) {
  struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = nbytes};
  char control[CMSG_SPACE(sizeof(int))] = {0};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  while (part.iov_len) {
    if (!ready(fd, POLLOUT, wake)) return false;
    ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (sent <= 0) return false;
    part.iov_base = (char *)part.iov_base + sent;
    part.iov_len -= (size_t)sent;
    message.msg_control = NULL; /* it went with the first byte */
    message.msg_controllen = 0;
  }
  return true;
}

/* The first descriptor that came along, or -1. More fit into the padding, and would stay open if nobody closed them. */
static int descriptor_of(struct msghdr *message) {
  int first = -1, one;
  for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = CMSG_LEN(0); at + sizeof one <= header->cmsg_len; at += sizeof one) {
      memcpy(&one, (const char *)header + at, sizeof one);
      if (first < 0)
        first = one;
      else
        close(one);
    }
  }
  return first;
}

/* All of it; a descriptor that comes along is put into *descriptor (NULL: none is expected, and closed). */
static bool receive_all(int fd, void *data, size_t nbytes, int *descriptor, int wake) {
  char *at = data;
  int found = -1;
  while (nbytes) {
    struct iovec part = {.iov_base = at, .iov_len = nbytes};
    char control[CMSG_SPACE(sizeof(int))];
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    if (!ready(fd, POLLIN, wake)) break;
    ssize_t received = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (received < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (received <= 0) break;
    int one = descriptor_of(&message);
    if (one >= 0 && found >= 0) close(one);
    if (one >= 0 && found < 0) found = one;
    at += received;
    nbytes -= (size_t)received;
  }
  if (nbytes == 0 && descriptor) {
    *descriptor = found;
    return true;
  }
  if (found >= 0) close(found);
  return nbytes == 0;
}

static bool is_ours(int fd, pid_t *pid) {
  struct ucred peer;
  socklen_t nbytes = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) != 0) return false;
  *pid = peer.pid;
  return peer.uid == geteuid();
}

/* -- serving --------------------------------------------------------------------------------------------------- */

static bool same_token(const unsigned char *one, const unsigned char *two) {
  unsigned differs = 0;
  for (int i = 0; i < 16; i++) differs |= one[i] ^ two[i];
  return differs == 0;
}

static bool send_chunk(const struct kvs_server *server, int client, uint64_t index, uint64_t *at) {
  struct chunk_message message = {.index = index};
  struct kvs_error err;
  uint64_t base = 0;
  int fd = -1;
  int status = kvs_dev_chunk_query(server->engine->device, *at, &base, &message.nbytes, &err);
  if (!status) status = kvs_dev_chunk_share(server->engine->device, *at, &fd, &err);
  message.status = status;
  if (status) snprintf(message.why, sizeof message.why, "%.99s", err.message);
  bool sent = send_all(client, &message, sizeof message, fd, server->wake);
  if (fd >= 0) close(fd);
  *at = base + message.nbytes;
  return sent && !status;
}

static void serve(const struct kvs_server *server, int client) {
  struct request request;
  struct answer answer = {.count = server->chunks.count};
  uint64_t at = server->chunks.base;
  pid_t pid;
  if (!is_ours(client, &pid) || !receive_all(client, &request, sizeof request, NULL, server->wake)) return;
  if (memcmp(request.magic, REQUEST, sizeof REQUEST) != 0 || !same_token(request.token, server->token)) return;
  memcpy(answer.magic, ANSWER, sizeof ANSWER);
  if (!send_all(client, &answer, sizeof answer, -1, server->wake)) return;
  for (uint64_t i = 0; i < server->chunks.count; i++)
    if (!send_chunk(server, client, i, &at)) return;
}

/* A program may close all descriptors, and open files of its own under their numbers: those are neither written to nor
 * closed. The other descriptor goes with this one. */
static bool still_ours(const struct kvs_server *server) {
  struct stat file;
  return fstat(server->listening, &file) == 0 && S_ISSOCK(file.st_mode) && file.st_ino == server->inode;
}

static void *serve_clients(void *arg) {
  struct kvs_server *server = arg;
  struct pollfd waiting[2] = {{.fd = server->listening, .events = POLLIN}, {.fd = server->wake, .events = POLLIN}};
  while (poll(waiting, 2, -1) >= 0 || errno == EINTR) {
    if (waiting[1].revents || !still_ours(server)) break;
    if (!(waiting[0].revents & POLLIN)) continue;
    int client = accept4(server->listening, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (client < 0) { /* too many open files, say: they are looked at again, but not at once */
      (void)poll(&waiting[1], 1, 50);
      continue;
    }
    serve(server, client);
    close(client);
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
  sigset_t all, before;
  sigfillset(&all); /* signals are for the threads of the program */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int code = pthread_create(&server->thread, NULL, serve_clients, server);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (code) return kvs_fail(err, KVS_NOMEM, "cannot start a thread that serves an export");
  pthread_setname_np(server->thread, "kvswap-export");
  return KVS_OK;
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
  pthread_once(&fork_once, watch_fork);
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

/* The thread wakes at once, wherever it waits; unless the program closed what it waits for: then it sleeps on. */
static void stop_locked(struct kvs_server *server) {
  const uint64_t one = 1;
  if (server->stopped) return;
  server->stopped = true;
  (void)unlink(server->address.sun_path);
  server->joined = still_ours(server) && write(server->wake, &one, sizeof one) == sizeof one &&
                   pthread_join(server->thread, NULL) == 0;
}

void kvs_server_free(struct kvs_server *server) {
  bool unused = true; /* by a thread */
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

/* -- fetching -------------------------------------------------------------------------------------------------- */

static int refuse(const struct kvs_export *from, const char *what, struct kvs_error *err) {
  const struct kvs_owner owner = {from->pid, from->start};
  if (!kvs_owner_alive(&owner))
    return kvs_fail(err, KVS_CLOSED, "process %" PRId64 ", which exported this memory, has ended", from->pid);
  return kvs_fail(err, KVS_CLOSED,
                  "process %" PRId64 " does not serve this export any more: %s (its Export must be kept)", from->pid,
                  what);
}

static int connect_to(const struct kvs_export *from, int *out, struct kvs_error *err) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  uint64_t start = kvs_clock_ns();
  pid_t pid = 0;
  memcpy(address.sun_path, from->socket, sizeof address.sun_path);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return kvs_fail(err, KVS_UNSUPPORTED, "cannot make a socket: %s", strerror(errno));
  while (connect(fd, (const struct sockaddr *)&address, sizeof address) != 0) {
    bool busy = errno == EAGAIN || errno == EINTR; /* others are in line before us */
    if (!busy || kvs_clock_ns() - start > (uint64_t)PATIENCE_MS * 1000000) {
      const char *why = busy ? "it is busy" : strerror(errno);
      close(fd);
      return refuse(from, why, err);
    }
    (void)poll(NULL, 0, 10);
  }
  if (is_ours(fd, &pid) && pid == (pid_t)from->pid) {
    *out = fd;
    return KVS_OK;
  }
  close(fd);
  return kvs_fail(err, KVS_INVALID, "the socket of the export belongs to another user or process");
}

static int fetch_chunk(int fd, const struct kvs_export *from, uint64_t index, struct kvs_range *range,
                       struct kvs_error *err) {
  struct chunk_message message;
  int chunk = -1, status;
  if (!receive_all(fd, &message, sizeof message, &chunk, -1)) return refuse(from, "it stopped half-way", err);
  message.why[sizeof message.why - 1] = '\0';
  if (message.status)
    status = kvs_fail(err, KVS_CLOSED, "process %" PRId64 " cannot share chunk %" PRIu64 ": %s", from->pid, index,
                      message.why);
  else if (chunk < 0 || message.index != index)
    status = kvs_fail(err, KVS_INVALID, "what came from the socket of the export is no chunk %" PRIu64, index);
  else
    status = kvs_range_add(range, message.nbytes, chunk, err);
  if (chunk >= 0) close(chunk);
  return status;
}

static int fetch_all(int fd, const struct kvs_export *from, struct kvs_range *range, struct kvs_error *err) {
  struct request request;
  struct answer answer;
  int status = KVS_OK;
  memcpy(request.magic, REQUEST, sizeof REQUEST);
  memcpy(request.token, from->token, sizeof request.token);
  if (!send_all(fd, &request, sizeof request, -1, -1) || !receive_all(fd, &answer, sizeof answer, NULL, -1))
    return refuse(from, "it does not answer", err);
  if (memcmp(answer.magic, ANSWER, sizeof ANSWER) != 0 || answer.count != from->nchunks)
    return kvs_fail(err, KVS_INVALID, "what came from the socket of the export is no answer to it");
  for (uint64_t i = 0; !status && i < answer.count; i++) status = fetch_chunk(fd, from, i, range, err);
  return status;
}

int kvs_serve_fetch(struct kvs_engine *engine, const struct kvs_export *from, struct kvs_range **fetched,
                    struct kvs_error *err) {
  struct kvs_range *range = NULL;
  int fd = -1, status = connect_to(from, &fd, err);
  if (status) return status;
  status = kvs_range_new(engine, from->allocation_nbytes, &range, err);
  if (!status) {
    status = fetch_all(fd, from, range, err);
    if (status)
      kvs_range_drop(range);
    else
      *fetched = range;
  }
  close(fd);
  return status;
}
