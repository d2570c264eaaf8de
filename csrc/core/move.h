/* The working memory of kvs_move_blocks(): for move.c and move_room.c. */
#ifndef KVS_MOVE_H
#define KVS_MOVE_H

#include "core/peer.h"
#include "core/work.h"
#include "plan/layout.h"

/* A part with its runs; strided: the runs may be copied as rects. */
struct planned_part {
  struct kvs_part part;
  size_t runs_end;
  bool strided;
};

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
  size_t pairs, nparts, blocks; /* capacities */
};

int kvs_move_make_room(struct kvs_scratch *, size_t pairs, size_t parts, size_t blocks, struct kvs_error *);

#endif
