/* Messages between the chunk server and its client, and sending them piece by piece. For ipc/ only. */
#ifndef KVS_EXCHANGE_H
#define KVS_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define KVS_REQUEST_MAGIC "kvswapQ1" /* 8 bytes, no terminating 0 */
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
  char why[100]; /* set if status is not KVS_OK; such an answer has no descriptor */
};

/* A message in progress: `done` bytes have been moved. */
struct kvs_piece_moved {
  void *data;
  size_t nbytes, done;
  int fd; /* sent or received with the message; -1: none */
};

enum kvs_moved { KVS_MOVED, KVS_MOVED_PART, KVS_MOVE_FAILED };

void kvs_piece_begin(struct kvs_piece_moved *, void *data, size_t nbytes);
void kvs_piece_close(struct kvs_piece_moved *); /* closes its descriptor */
/* Move as much as possible without blocking. */
enum kvs_moved kvs_piece_send(int socket, struct kvs_piece_moved *);
enum kvs_moved kvs_piece_receive(int socket, struct kvs_piece_moved *);

/* The peer process; false: it belongs to another user. */
bool kvs_exchange_peer(int socket, pid_t *pid);
/* The deadline of a whole exchange of so many chunks; the time left in ms, for poll(). */
uint64_t kvs_exchange_deadline(uint64_t nchunks);
int kvs_exchange_left_ms(uint64_t deadline);

#endif
