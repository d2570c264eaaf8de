#include "share/wire.h"

#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>

static const uint32_t MAGIC = UINT32_C(0x3153564b); /* "KVS1" */

static size_t size_of(const struct kvs_share_message *message) {
  return offsetof(struct kvs_share_message, ids) + message->count * sizeof message->ids[0];
}

/* What is on its way is bounded by the slots and fits the socket's buffer: a full one means that nobody reads. */
bool kvs_share_send(int socket, struct kvs_share_message *message) {
  ssize_t sent;
  message->magic = MAGIC;
  do sent = send(socket, message, size_of(message), MSG_NOSIGNAL | MSG_DONTWAIT);
  while (sent < 0 && errno == EINTR);
  return sent == (ssize_t)size_of(message);
}

/* recv() and not recvmsg(): the kernel closes descriptors that come with a message. ECONNRESET says, once, that the
 * other side ended with messages that it had not read: what it sent before that follows. */
enum kvs_share_got kvs_share_receive(int socket, struct kvs_share_message *message) {
  const size_t least = offsetof(struct kvs_share_message, ids);
  ssize_t got;
  do got = recv(socket, message, sizeof *message, MSG_DONTWAIT | MSG_TRUNC);
  while (got < 0 && (errno == EINTR || errno == ECONNRESET));
  if (got < 0 && errno == EAGAIN) return KVS_SHARE_NONE;
  if (got < (ssize_t)least || message->magic != MAGIC || message->count > KVS_SHARE_BLOCKS) return KVS_SHARE_ENDED;
  return (size_t)got == size_of(message) ? KVS_SHARE_GOT : KVS_SHARE_ENDED;
}
