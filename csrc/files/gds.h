/* Blocks of pools by way of libcufile: between files and staging that lies in device memory, with header and checksum
 * compared there, before a byte goes on to a pool's blocks. For the file tier's own sources.
 *
 * The flow of a block is that of files/mover.c and files/item.c; what differs: the staging is device memory, requests
 * of staged blocks go to a queue and threads of their own (files/gds_worker.c), the header lies in a thread's scratch,
 * and the checksum is made by a kernel. */
#ifndef KVS_FILE_GDS_H
#define KVS_FILE_GDS_H

#include <sys/stat.h>

#include "files/cufile.h"
#include "files/store.h"

enum {
  KVS_FILE_GDS_THREADS = 8,
  KVS_FILE_GDS_SEAT = 2 * KVS_FILE_PAGE, /* of pinned memory: a header page, and where checksums arrive */
};

/* What a thread has. */
struct kvs_file_gds_seat {
  struct kvs_gds *gds;
  pthread_t thread;
  kvs_stream streams[2]; /* of loads [1], of stores [0] */
  uint8_t *page;         /* pinned: the seat's own KVS_FILE_GDS_SEAT bytes */
  uint64_t word;         /* device memory: a checksum */
  uint64_t bounce;       /* pinned room of a slot, for what libcufile does not take; 0: not needed yet */
};

struct kvs_file_gds_handle {
  void *handle; /* the library's; NULL: not registered */
  int fd;
  bool refused;      /* the library does not take it */
  struct stat which; /* the file that it was made of: a reader's place for a segment may become another's */
};

struct kvs_gds {
  struct kvs_file_store *store;
  struct kvs_engine *engine;
  struct kvs_device *device;
  const struct kvs_cufile *cu;
  bool real;       /* not the library's compatibility mode */
  char note[160];  /* by what */
  uint64_t memory; /* what was allocated for staging */
  uint8_t *staging;
  size_t staging_nbytes;
  bool registered;
  struct kvs_crc_params crc; /* of a block: all but where it lies */
  uint64_t pinned, words;    /* of all seats */
  struct kvs_file_queue queue;
  unsigned nseats, nthreads;
  struct kvs_file_gds_seat seats[KVS_FILE_GDS_THREADS];

  pthread_mutex_t lock;
  struct kvs_file_gds_handle *files; /* guarded by lock: of segments */
};

/* gds.c: a file for libcufile, by a descriptor of its own: it refuses flags that the store's have (O_NOFOLLOW). */
int kvs_file_gds_register(struct kvs_gds *, int fd, struct kvs_file_gds_handle *, struct kvs_error *);
void kvs_file_gds_deregister(struct kvs_gds *, struct kvs_file_gds_handle *); /* harmless if it is not */

/* gds_worker.c */
int kvs_file_gds_wait(struct kvs_gds *, kvs_stream, struct kvs_error *); /* until all on it is over */
int kvs_file_gds_start(struct kvs_gds *, struct kvs_error *);
void kvs_file_gds_stop(struct kvs_gds *); /* the queue is empty: ends the threads */

#endif
