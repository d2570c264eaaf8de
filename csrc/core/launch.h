/* What kernels need of an engine: tables of rows that were uploaded once, and the slots of bursts. For the core's own
 * files only. */
#ifndef KVS_LAUNCH_H
#define KVS_LAUNCH_H

#include <pthread.h>
#include <stdatomic.h>

#include "plan/packing.h"

enum {
  KVS_TABLES = 32,
  KVS_SLOTS_MOST = 8, /* of a set */
  KVS_SLOT_SETS = 2,  /* of a direction */
};

struct kvs_engine;
struct kvs_staging;

struct kvs_disabled {
  bool kernel, batch, burst, strided;
  bool auto_burst; /* AUTO takes none: the driver has one queue for all streams */
};

/* Rows in device memory. Those that no unfinished transfer reads may give way to others. */
struct kvs_table_of_rows {
  uint64_t hash;
  size_t count; /* 0: nothing is here */
  struct kvs_staging *staging;
  kvs_event uploaded;
  bool arrived; /* the host saw it */
  unsigned users;
  uint64_t last_used;
};

struct kvs_tables {
  pthread_mutex_t lock;
  struct kvs_table_of_rows items[KVS_TABLES]; /* guarded by lock */
  uint64_t clock;                             /* guarded by lock */
  kvs_stream upload;                          /* on which nothing waits for anybody */
};

/* A set of slots, device memory in which bursts are packed, and who may use it next. A transfer takes one set of its
 * direction, for as long as it is being queued. Nothing on a slot's streams ever waits for another lane's unmet start
 * dependency: a set whose last transfer has not started serves its own lane alone, and others take the spare set or
 * another path. */
struct kvs_slots {
  pthread_mutex_t lock;
  uint64_t address;
  atomic_uint_fast64_t nbytes; /* of all; 0: there are none. Written under lock, read without it for the sum */
  uint64_t slot_nbytes;
  unsigned count, next;             /* guarded by lock: the slot that is used next */
  kvs_event packed[KVS_SLOTS_MOST]; /* its first stage is over: packed, or filled from the host */
  kvs_event free[KVS_SLOTS_MOST];   /* its second stage is over */
  /* The transfer that used it last. All guarded by lock. */
  struct kvs_lane *lane; /* NULL: nobody did */
  uint64_t sequence;
  enum kvs_priority priority;
  kvs_event begun;     /* it started */
  bool steps;          /* it waits for more than its start: for layers */
  unsigned last;       /* its last slot */
  bool shared;         /* another lane's before it may still use other slots than it took */
  kvs_stream doubt[2]; /* a call of it was refused: only these streams being idle says that nothing uses the slots */
};

/* tables.c. The rows, where the device will find them once `spine` gets there; the table is to be given back when the
 * transfer ended. KVS_NOT_READY: every table is in use. */
int kvs_tables_open(struct kvs_engine *, struct kvs_error *);
void kvs_tables_close(struct kvs_engine *);
int kvs_table_get(struct kvs_engine *, const struct kvs_rows *, kvs_stream stream, struct kvs_table_of_rows **,
                  uint64_t *rows, struct kvs_error *);
void kvs_table_put(struct kvs_engine *, struct kvs_table_of_rows *);

#endif
