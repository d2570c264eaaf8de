/* What kernels need of an engine: tables of rows that were uploaded once, and the relays. For the core's own files
 * only. */
#ifndef KVS_LAUNCH_H
#define KVS_LAUNCH_H

#include <pthread.h>
#include <stdatomic.h>

#include "plan/packing.h"

enum {
  KVS_TABLES = 32,
  KVS_RING_SLOTS = 3, /* measured, H200: benchmarks/tune_copy.cu */
  KVS_RING_SLOT_NBYTES = 16 << 20,
  KVS_RELAY_STREAMS = 2,
  /* Measured, H200, priority background beside an 8192^3 product, transfers of 1 GiB D2H: by one kernel they reach 0.86
   * of the link and slow it 1.06, in three turns 0.80 and 1.053, in four 0.76 and 1.049. */
  KVS_RELAY_TURN_NBYTES = 288 << 20,
};

struct kvs_engine;
struct kvs_staging;

struct kvs_disabled {
  bool kernel, batch, relay, strided;
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

/* Who used a relay last. */
struct kvs_relay_user {
  const struct kvs_lane *lane; /* NULL: nobody did */
  bool on_stream;
  uint64_t stream;
  enum kvs_priority priority;
};

/* The rings of one direction, their flags, and the streams on which the copy engine empties or fills them. */
struct kvs_relay {
  pthread_mutex_t lock;       /* one transfer of a direction is queued at a time */
  struct kvs_relay_user last; /* guarded by lock */
  struct kvs_ring_shape ring; /* address 0: there is none */
  uint64_t flags;
  kvs_stream copying[KVS_RELAY_STREAMS];
  kvs_event fork, joins[KVS_RELAY_STREAMS];
  kvs_event idle;            /* guarded by lock: the last transfer no longer uses the ring */
  _Atomic(kvs_stream) spine; /* written under lock: `idle` could not be recorded; that and the other streams being idle
                       stands for it. 0: it was */
};

/* tables.c. The rows, where the device will find them once `spine` gets there; the table is to be given back when the
 * transfer ended. KVS_NOT_READY: every table is in use. */
int kvs_tables_open(struct kvs_engine *, struct kvs_error *);
void kvs_tables_close(struct kvs_engine *);
int kvs_table_get(struct kvs_engine *, const struct kvs_rows *, kvs_stream spine, struct kvs_table_of_rows **,
                  uint64_t *rows, struct kvs_error *);
void kvs_table_put(struct kvs_engine *, struct kvs_table_of_rows *);

/* relay.c */
void kvs_relays_open(struct kvs_engine *); /* engine->relay_note says why there are none */
void kvs_relays_close(struct kvs_engine *);
/* Whether nobody will be in the way whom `idle` does not tell of. */
bool kvs_relay_usable(struct kvs_engine *, struct kvs_relay *);
/* Whether a transfer with those options would wait for no other lane's. */
bool kvs_relay_free(struct kvs_engine *, struct kvs_relay *, const struct kvs_options *);
/* Of a transfer that ended: whether its relay was given up and done again. */
bool kvs_relay_gave_up(const struct kvs_staging *);

#endif
