/* Non-blocking messages over a Unix socket. */
#include "ipc/exchange.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/wait.h"

#define MS UINT64_C(1000000)

/* A driver takes some milliseconds to map a chunk. */
uint64_t kvs_exchange_deadline(uint64_t nchunks) {
  return kvs_clock_ns() + 15000 * MS + (nchunks < 12000 ? nchunks : 12000) * 5 * MS;
}

void kvs_piece_begin(struct kvs_piece_moved *piece, void *data, size_t nbytes) {
  *piece = (struct kvs_piece_moved){.data = data, .nbytes = nbytes, .fd = -1};
}

enum kvs_moved kvs_piece_send(int socket, struct kvs_piece_moved *piece) {
  while (piece->done < piece->nbytes) {
    struct iovec part = {.iov_base = (char *)piece->data + piece->done, .iov_len = piece->nbytes - piece->done};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (piece->fd >= 0 && piece->done == 0) { /* sent with the first byte */
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      struct cmsghdr *header = CMSG_FIRSTHDR(&message);
      *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
      memcpy(CMSG_DATA(header), &piece->fd, sizeof piece->fd);
    }
    ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) return KVS_MOVED_PART;
    if (sent <= 0) return KVS_MOVE_FAILED;
    piece->done += (size_t)sent;
  }
  return KVS_MOVED;
}

/* The first descriptor of a message, or -1. Closes the others: the padding of the control buffer has room for more. */
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

/* Keeps the first of several descriptors. */
enum kvs_moved kvs_piece_receive(int socket, struct kvs_piece_moved *piece) {
  while (piece->done < piece->nbytes) {
    struct iovec part = {.iov_base = (char *)piece->data + piece->done, .iov_len = piece->nbytes - piece->done};
    char control[CMSG_SPACE(sizeof(int))];
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t received = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && errno == EAGAIN) return KVS_MOVED_PART;
    if (received <= 0) return KVS_MOVE_FAILED;
    int fd = descriptor_of(&message);
    if (piece->fd < 0)
      piece->fd = fd;
    else if (fd >= 0)
      close(fd);
    piece->done += (size_t)received;
  }
  return KVS_MOVED;
}

void kvs_piece_close(struct kvs_piece_moved *piece) {
  if (piece->fd >= 0) close(piece->fd);
  piece->fd = -1;
}

int kvs_exchange_left_ms(uint64_t until) {
  uint64_t now = kvs_clock_ns(), left = now < until ? (until - now + MS - 1) / MS : 0;
  return left < 60000 ? (int)left : 60000;
}

bool kvs_exchange_peer(int fd, pid_t *pid) {
  struct ucred peer;
  socklen_t nbytes = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) != 0) return false;
  *pid = peer.pid;
  return peer.uid == geteuid();
}
