/* kvs_move_blocks(): its call and working memory, for move.c, move_plan.c and move_room.c. */
#ifndef KVS_MOVE_H
#define KVS_MOVE_H

#include "lanes/peer.h"
#include "lanes/work.h"
#include "plan/layout.h"

/* A part with its runs; strided: the runs may be copied as rects. */
struct planned_part {
  struct kvs_part part;
  size_t runs_end;
  bool strided;
};

enum { KVS_POOL_TEXT = 48 };

/* Kept from call to call with the rest of the scratch. */
struct kvs_move_scratch {
  struct kvs_run_list runs;
  struct planned_part *parts;
  struct kvs_touch *touches;
  uint64_t *next_byte; /* for each pair: where its next part may begin */
  uint64_t *covered;   /* for each pair: bytes of a block in its parts */
  int64_t *slots;      /* copies of both lists, then both without the lost blocks */
  uint32_t *positions;
  struct kvs_foreign_list foreign;
  char holder[KVS_POOL_TEXT];   /* of the call's ids on the device, for messages */
  size_t pairs, nparts, blocks; /* capacities */
};

struct kvs_late; /* late.h */

struct move_call {
  const struct kvs_move *move;
  struct kvs_engine *engine, *other; /* the engines of the pools; other NULL: all pools are of one engine */
  struct kvs_move_scratch *room;
  size_t nparts, ntouches;
  bool rows; /* rects may be used */
  bool layered;
  const int64_t *all_src, *all_dst; /* slots as named by the caller */
  size_t all;
  const int64_t *src, *dst;  /* the slots to copy */
  const uint32_t *positions; /* their positions in the caller's lists; NULL: the same */
  size_t count;
  const struct kvs_device_ids *ids; /* in place of one list, whose slots are then positions; NULL: none */
  bool on_src;                      /* they name sources */
  struct kvs_late *late;            /* the transfer will be settled late; taken over once it is queued */
};

/* move_plan.c. Of a checked call: the plan (kvs_work.plan), and the shape. A run as a rect: false if the driver takes
 * none of that pitch. */
int kvs_move_plan(const void *call, enum kvs_form, struct kvs_scratch *, struct kvs_error *);
int kvs_move_find_shape(const struct move_call *, struct kvs_work *, const struct kvs_options *, struct kvs_error *);
bool kvs_move_rect(const struct move_call *, const struct kvs_run *, struct kvs_rect *);

int kvs_move_make_room(struct kvs_scratch *, size_t pairs, size_t parts, size_t blocks, struct kvs_error *);

#endif
