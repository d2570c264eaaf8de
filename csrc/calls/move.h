/* kvs_move_blocks(): its call and working memory, for move.c and move_plan.c. */
#ifndef KVS_MOVE_H
#define KVS_MOVE_H

#include "lanes/peer.h"
#include "lanes/work.h"
#include "plan/layout.h"

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

#endif
