/* Pool blocks through libcufile, between files and staging in device memory. Header and checksum are verified before a
 * block is copied from staging to its pool. For the file tier's own sources.
 *
 * A block takes the steps of files/mover.c and files/item.c, with these differences: staging is device memory; requests
 * of staged blocks go to a separate queue and its threads (files/gds_worker.c); the header is in the thread's scratch;
 * a kernel computes the checksum. */
#ifndef KVS_FILE_GDS_H
#define KVS_FILE_GDS_H

#include <sys/stat.h>

#include "device/device.h"
#include "files/cufile.h"
#include "files/state.h"

enum {
  KVS_FILE_GDS_THREADS = 8,
  KVS_FILE_GDS_PINNED_NBYTES = 2 * KVS_FILE_PAGE, /* a thread's: a header page, and a page that receives checksums */
};

/* State of one thread. */
struct kvs_file_gds_worker {
  struct kvs_gds *gds;
  pthread_t thread;
  kvs_stream streams[2]; /* [1]: loads, [0]: stores */
  uint8_t *page;         /* pinned memory, KVS_FILE_GDS_PINNED_NBYTES bytes */
  uint64_t word;         /* device memory for one checksum */
  uint64_t bounce;       /* pinned slot for requests that libcufile refuses; 0: not allocated yet */
};

struct kvs_file_gds_handle {
  void *handle; /* libcufile's handle; NULL: not registered */
  int fd;
  bool refused;      /* libcufile refuses this file */
  struct stat which; /* identity of the registered file: after a refresh, another file may have this segment's index */
};

struct kvs_gds {
  struct kvs_file_store *store;
  struct kvs_engine *engine;
  struct kvs_device *device;
  const struct kvs_cufile *cu;
  bool real;       /* direct transfers; false: libcufile's compatibility mode */
  char note[160];  /* the driver's version, or why not */
  uint64_t memory; /* the allocation that holds the staging */
  uint8_t *staging;
  size_t staging_nbytes;
  bool registered;
  struct kvs_crc_params crc; /* parameters of a block's checksum, except the address */
  uint64_t pinned, words;    /* for all threads */
  struct kvs_file_queue queue;
  unsigned nworkers, nthreads;
  struct kvs_file_gds_worker workers[KVS_FILE_GDS_THREADS];

  pthread_mutex_t lock;
  struct kvs_file_gds_handle *files; /* guarded by lock; one a segment */
};

/* Allocate staging in device memory and set store->gds. False: store->gds_note says why it must be pinned memory. */
bool kvs_file_gds_open(struct kvs_file_store *, size_t staging_nbytes, uint64_t *staging);
void kvs_file_gds_close(struct kvs_file_store *); /* no item is in flight any more; frees the staging */
/* gds_worker.c */
void kvs_file_gds_push(struct kvs_file_item *); /* queue a staged item's request for the GDS threads */
/* Checksum of the block in the item's staging; called by the thread that serves the request. On failure *code is the
 * driver's code. */
int kvs_file_gds_checksum(struct kvs_file_item *, uint32_t *crc, int *code);

/* gds.c: register a file with libcufile. A new descriptor is opened, since libcufile refuses some of the store's open
 * flags (O_NOFOLLOW). */
int kvs_file_gds_register(struct kvs_gds *, int fd, struct kvs_file_gds_handle *, struct kvs_error *);
void kvs_file_gds_deregister(struct kvs_gds *, struct kvs_file_gds_handle *); /* no effect if not registered */

/* gds_worker.c */
int kvs_file_gds_wait(struct kvs_gds *, kvs_stream, struct kvs_error *); /* wait for the stream's work */
int kvs_file_gds_start(struct kvs_gds *, struct kvs_error *);
void kvs_file_gds_stop(struct kvs_gds *); /* joins the threads; the queue is empty */

#endif
