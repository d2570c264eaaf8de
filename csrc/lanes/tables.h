/* What kernels need of an engine: uploaded tables of rows, and the slots of bursts. For the core's own files only. */
#ifndef KVS_TABLES_H
#define KVS_TABLES_H

#include <pthread.h>
#include <stdatomic.h>

#include "plan/packing.h"

enum {
  KVS_TABLES = 32,
  KVS_SLOTS_MOST = 8, /* in a set */
  KVS_SLOT_SETS = 2,  /* for each direction */
};

struct kvs_engine;
struct kvs_staging;

struct kvs_disabled {
  bool kernel, batch, burst, strided, gaps;
};

/* Rows in device memory. A table that no unfinished transfer reads may be replaced. */
struct kvs_table_of_rows {
  uint64_t hash;
  size_t count; /* 0: empty */
  size_t tail_nbytes;
  struct kvs_staging *staging;
  kvs_event uploaded;
  bool arrived; /* the host saw `uploaded` reached */
  unsigned users;
  uint64_t last_used;
};

struct kvs_tables {
  pthread_mutex_t lock;
  struct kvs_table_of_rows items[KVS_TABLES]; /* guarded by lock */
  uint64_t clock;                             /* guarded by lock */
  kvs_stream upload;                          /* the stream of uploads; it never waits for other work */
};

/* A set of slots: device memory in which bursts are packed. A transfer holds one set of its direction while it is being
 * queued. Work on a slot's streams never waits for another lane's unmet start dependency. So a set whose last transfer
 * has not started serves only the lane of that transfer; other lanes take the spare set or another path. */
struct kvs_slots {
  pthread_mutex_t lock;
  uint64_t address;
  atomic_uint_fast64_t nbytes; /* of all slots; 0: there are none. Written under lock, summed without it */
  uint64_t slot_nbytes;
  unsigned count, next;             /* guarded by lock; next: the slot to use next */
  kvs_event packed[KVS_SLOTS_MOST]; /* its first stage has ended: packed, or filled from the host */
  kvs_event free[KVS_SLOTS_MOST];   /* its second stage has ended */
  /* The transfer that used the set last. All guarded by lock. */
  struct kvs_lane *lane; /* NULL: none did */
  uint64_t sequence;
  enum kvs_priority priority;
  kvs_event begun;         /* that transfer has started */
  bool steps;              /* it also waits for start dependencies of layers */
  unsigned last;           /* the slot of its last burst */
  bool shared;             /* a transfer of another lane before it may still use other slots of the set */
  kvs_stream unsettled[2]; /* a driver call was refused: the slots are free only when these streams are idle */
};

/* Bytes that lie behind the rows of a table: the units of a transfer's codings. */
struct kvs_table_tail {
  const void *bytes;
  size_t nbytes;
};

/* tables.c. The device address of the rows, and of the tail behind them; `stream` waits until they are uploaded. The
 * caller returns the table when the transfer has ended. KVS_NOT_READY: every table is in use. */
int kvs_tables_open(struct kvs_engine *, struct kvs_error *);
void kvs_tables_close(struct kvs_engine *);
int kvs_table_get(struct kvs_engine *, const struct kvs_rows *, const struct kvs_table_tail *, kvs_stream stream,
                  struct kvs_table_of_rows **, uint64_t *rows, struct kvs_error *);
void kvs_table_put(struct kvs_engine *, struct kvs_table_of_rows *);

const char *kvs_kernels_off(const struct kvs_engine *); /* why; NULL: they are on */

#endif
