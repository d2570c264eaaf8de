/* What the server of chunks and its client share: the messages, and moving them piece by piece. For ipc/ alone. */
#ifndef KVS_EXCHANGE_H
#define KVS_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define KVS_REQUEST_MAGIC "kvswapQ1" /* 8 bytes, without an end */
#define KVS_ANSWER_MAGIC "kvswapA1"

struct kvs_request {
  char magic[8];
  unsigned char token[16];
};

struct kvs_answer {
  char magic[8];
  uint64_t count;
};

struct kvs_chunk_message {
  uint64_t index, nbytes;
  int32_t status;
  char why[100]; /* where status is not KVS_OK, and then there is no descriptor */
};

/* A message of an exchange, of which `done` bytes have been moved. */
struct kvs_piece_moved {
  void *data;
  size_t nbytes, done;
  int fd; /* the descriptor that goes with it or came with it, -1: none */
};

enum kvs_moved { KVS_MOVED, KVS_MOVED_PART, KVS_MOVE_FAILED };

void kvs_piece_begin(struct kvs_piece_moved *, void *data, size_t nbytes);
void kvs_piece_close(struct kvs_piece_moved *); /* its descriptor */
/* As much of it as can be moved without waiting. */
enum kvs_moved kvs_piece_send(int socket, struct kvs_piece_moved *);
enum kvs_moved kvs_piece_receive(int socket, struct kvs_piece_moved *);

/* The process at the other end; false if its user is not ours. */
bool kvs_exchange_peer(int socket, pid_t *pid);
/* When a whole exchange of so many chunks has to be over, from now; and how long until then, for poll(). */
uint64_t kvs_exchange_deadline(uint64_t nchunks);
int kvs_exchange_left_ms(uint64_t deadline);

#endif
