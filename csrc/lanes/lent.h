/* Links that other devices lend, and the slots and streams of their pieces. For the core's own files only.
 *
 * A piece goes through three stages, each on a stream of its own. To the GPU: the lender's link fills the far slot, in
 * the lender's memory; the lender's copy engine brings it to the near slot, in the borrower's memory; a kernel of the
 * borrower scatters it. To the host: the same backwards. So as many pieces stand on the lender's link as there are
 * slots, and what the lender copies itself waits for no more than these. */
#ifndef KVS_LENT_H
#define KVS_LENT_H

#include <pthread.h>
#include <stdatomic.h>

#include "device/device.h"
#include "kvswap.h"

enum { KVS_LENDERS = 8, KVS_LENT_SLOTS = 4, KVS_LENT_STAGES = 3, KVS_LENT_TRANSFERS = 4 };

struct kvs_lent_stage {
  struct kvs_device *device;
  kvs_stream stream;
  kvs_event done[KVS_LENT_SLOTS]; /* the stage of that slot's last piece has ended */
  kvs_event tail;                 /* all that was queued on the stream when a transfer was refused */
};

/* One direction of a lent link. A transfer holds it while it is being queued. */
struct kvs_lent_way {
  pthread_mutex_t lock; /* guards all but `unsettled` */
  struct kvs_engine *lender;
  struct kvs_lending lending; /* slot_nbytes 0: nothing is lent */
  uint64_t near, far;         /* addresses of the slots: the borrower's memory, the lender's */
  struct kvs_lent_stage stages[KVS_LENT_STAGES];
  kvs_event begun[2]; /* of the borrower: where its first stream was when a view began, its lane stream a transfer */
  unsigned next, last;
  /* Pieces of the transfers of `lane` that have not ended, the oldest first; one more transfer counts with the last. */
  struct {
    uint64_t sequence;
    unsigned pieces;
  } queued[KVS_LENT_TRANSFERS];
  unsigned nqueued; /* transfers */
  uint64_t room;    /* bytes that a slot takes of the transfer that holds it */
  uint64_t given;   /* bytes of that transfer */
  double taken;     /* share of that transfer: lending.share, or less where the host is the limit */
  bool used;        /* by the view that is being queued */
  /* The transfer that used it last. */
  struct kvs_lane *lane; /* NULL: none did */
  uint64_t sequence;
  atomic_bool unsettled; /* a driver call was refused: the slots are free only when all streams are idle */
};

struct kvs_lent {
  struct kvs_lent_way ways[2]; /* by direction */
  /* For who asks: guarded by engine->note_lock. */
  struct kvs_engine *lender; /* NULL: unused */
  struct kvs_lending lending;
};

struct kvs_engine;
void kvs_lent_init(struct kvs_engine *);
void kvs_lent_destroy(struct kvs_engine *);
/* Whether no queued work uses a way's slots. Under its lock. */
bool kvs_lent_is_over(struct kvs_lent_way *);
/* The pieces of a way whose transfers have not ended. Under its lock. */
unsigned kvs_lent_queued(struct kvs_lent_way *);
/* After a refused call, whose work may still run on the streams of the direction's ways: KVS_OK if all of them are
 * idle, KVS_NOT_READY if one is not, or cannot be queried now. */
int kvs_lent_settled(struct kvs_engine *, enum kvs_direction, struct kvs_error *);

#endif
