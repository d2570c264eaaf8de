/* The working state of one submitting call. For the core's own files only. */
#ifndef KVS_WORK_H
#define KVS_WORK_H

#include "codecs/coding.h"
#include "lanes/pool_state.h"
#include "plan/cost.h"
#include "plan/layout.h"
#include "plan/packing.h"
#include "plan/plan.h"
#include "plan/stride.h"

/* Unfinished transfers of `engine` that touch [low, high). A pool's slots are tracked only by the pool's own engine.
 * Between engines a transfer is ordered after all of them, reads too. Guarded by the hazard_lock of the pool's engine.
 */
struct kvs_foreign {
  struct kvs_engine *engine;
  uint64_t low, high;
};
struct kvs_foreign_list {
  struct kvs_foreign *items;
  size_t count, capacity;
};

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
  struct kvs_row_coding *codings; /* room for one a pair */
  struct kvs_foreign_list foreign;
  char holder[KVS_POOL_TEXT];   /* of the call's ids on the device, for messages */
  size_t pairs, nparts, blocks; /* capacities */
};

/* How rows of a transfer are coded; struct kvs_row has its number. */
struct kvs_row_coding {
  const struct kvs_coding *coding;
  uint64_t units; /* device address of its units, once they are placed; 0 before */
};

/* Ends of a layer in the lists. */
struct kvs_layer_end {
  size_t copies, rects, rows;
};

/* The regions of a call's tensors, kept for the next call with the same tensors (cover.h). */
struct kvs_cover {
  struct kvs_tensor *tensors;
  size_t ntensors, capacity;
  struct kvs_regions regions;
  uint64_t changes; /* engine->regions.changes at that call */
  bool right;
};

/* Working memory of one submitting call. */
struct kvs_scratch {
  int64_t *ids; /* copies of the caller's ids, or pointers and sizes, each read once */
  size_t ids_capacity;
  struct kvs_copies copies, single; /* copies: merged; single: one entry a block, made only after a refusal */
  struct kvs_rects rects;           /* the part of the plan that is rows at a pitch */
  struct kvs_rows rows;             /* with the pairs of slots: the whole plan */
  struct kvs_packing packing;
  struct kvs_layer_end *layers; /* made if layers matter */
  size_t nlayers, layers_capacity;
  struct kvs_regions regions; /* regions that this call touches */
  struct kvs_cover covers[2]; /* by direction */
  struct kvs_move_scratch *move;
  struct kvs_stacks stacks;
  struct kvs_plan_scratch plan;
  uint64_t since_ns; /* time of the call */
  struct kvs_scratch *next;
};

/* The forms of a plan. There are as many copies as blocks of all tensors, so copies and rects are made only when a path
 * wants them. Rows and pairs of slots are made at once. */
enum kvs_form {
  KVS_FORM_COPIES, /* scratch->copies, merged */
  KVS_FORM_RECTS,  /* scratch->rects, and copies for the rest */
  KVS_FORM_SINGLE, /* scratch->single: one copy a block, in the same order */
};

static inline void kvs_shape_add_rects(struct kvs_shape *shape, uint64_t rects, uint64_t rows, uint64_t row_nbytes,
                                       uint64_t host_pitch) {
  uint64_t all = rects * rows, apart = host_pitch == row_nbytes ? 0 : all;
  shape->rects += rects;
  shape->rect_rows += all;
  shape->rect_nbytes += all * row_nbytes;
  shape->apart_rows += apart;
  shape->apart_nbytes += apart * row_nbytes;
}

static inline uint32_t kvs_tokens_of(const struct kvs_device_ids *ids) {
  return ids->tokens > 1 ? (uint32_t)ids->tokens : 1;
}

/* A checked transfer, to be planned and submitted. */
struct kvs_work {
  struct kvs_scratch *scratch;
  enum kvs_direction direction;
  uint64_t nbytes, nblocks, entries; /* entries: blocks of all tensors */
  uint64_t coded_nbytes;             /* on the link; 0: nbytes */
  struct kvs_shape shape;
  int (*plan)(const void *call, enum kvs_form, struct kvs_scratch *, struct kvs_error *);
  bool planned; /* KVS_FORM_COPIES is made */
  bool grid;    /* rows and pairs of slots are made */
  bool packed;  /* rows are packed for bursts */
  bool layered; /* layers matter: lists are layer by layer, with marks */
  /* Note the accesses of one layer, or of all (SIZE_MAX), to the race checker; the lists are the copies and rects of
   * that layer. */
  void (*watch)(const void *call, const struct kvs_transfer *, size_t layer, const struct kvs_copies *,
                const struct kvs_rects *, const struct kvs_race_accessor *);
  const void *call;
  size_t nlayers; /* possible layers */
  const int64_t *src_slots, *dst_slots;
  size_t nslots;
  uint64_t cpu_slots; /* slots of the host's side are below this */
  /* Ids on the device: positions in them stand in src_slots or dst_slots, in place of slots. */
  struct kvs_ids_side {
    const struct kvs_device_ids *ids; /* NULL: all slots are known */
    bool write;                       /* they name destinations */
    uint64_t blocks;                  /* good ids are below */
    uint32_t tokens;                  /* ids a block, at least 1 */
    const char *name, *holder;        /* for messages: "src_ids", "pool 'kv'" */
  } on_device;
  /* Transfers between pools only; their caller holds hazard_lock. */
  struct kvs_row_coding *codings; /* all rows are coded, each by one of them; NULL: none is */
  size_t ncodings;
  bool decode;               /* the sources are coded, not the destinations */
  uint64_t valid_nbytes;     /* of each page that is coded */
  const char *coded_pool;    /* the first one, for messages */
  const uint32_t *positions; /* of slots in the caller's lists; NULL: their own */
  const struct kvs_touch *touches;
  size_t ntouches;
  const struct kvs_foreign_list *foreign; /* NULL: no other engines */
  const uint32_t *lost;                   /* blocks that are not copied, since their source is lost */
  size_t nlost;
  struct kvs_error lost_error;
  uint64_t dependencies; /* dependency mask of the sources, for kvs_transfer.dependencies */
  struct kvs_failure *
      *outcome; /* one record for all transfers of a job, made when needed; NULL: one for this transfer */
  void (*settle)(const void *call, const struct kvs_transfer *); /* called when the refused blocks are known */
};

/* Arguments of kvs_swap_cache(). */
struct kvs_cache_call {
  const struct kvs_tensor *tensors;
  size_t ntensors;
  const struct kvs_ids *gpu_ids, *cpu_ids;
  enum kvs_direction direction;
  uint64_t max_pitch;
  bool layered;
};

#endif
