/* What one submitting call works with: the plan, and what there is to know of it. For the core's own files only. */
#ifndef KVS_WORK_H
#define KVS_WORK_H

#include "core/pool.h"
#include "plan/cost.h"
#include "plan/packing.h"
#include "plan/plan.h"
#include "plan/stride.h"

struct kvs_move_scratch; /* move.c's own */
struct kvs_foreign_list; /* peer.h */

/* Where a layer ends in each of the lists. */
struct kvs_layer_end {
  size_t copies, rects, rows;
};

/* What the tensors of a call cover, kept for the next one with the same tensors (cover.h). */
struct kvs_cover {
  struct kvs_tensor *tensors;
  size_t ntensors, capacity;
  struct kvs_regions regions;
  uint64_t changes; /* engine->regions.changes then */
  bool right;
};

/* Working memory of one submitting call. */
struct kvs_scratch {
  int64_t *ids; /* the caller's lists of ids, or of pointers and sizes, as they were when they were read, once */
  size_t ids_capacity;
  struct kvs_copies copies, single; /* merged; one entry a block, made only when something was refused */
  struct kvs_rects rects;           /* of copies: those that are rows at a pitch */
  struct kvs_rows rows;             /* with the pairs of slots: all of it */
  struct kvs_packing packing;
  struct kvs_layer_end *layers; /* made where layers matter */
  size_t nlayers, layers_capacity;
  struct kvs_regions regions; /* those that this call touches */
  struct kvs_cover covers[2]; /* by direction */
  struct kvs_move_scratch *move;
  struct kvs_stacks stacks;
  struct kvs_plan_scratch plan;
  struct kvs_scratch *next;
};

/* The forms of a plan. Copies and copies of rows are made when a path wants them, for there are as many as blocks of
 * all tensors; rows and pairs of slots are made at once. */
enum kvs_form {
  KVS_FORM_COPIES, /* scratch->copies, merged */
  KVS_FORM_RECTS,  /* scratch->rects, and copies for what is in none */
  KVS_FORM_SINGLE, /* scratch->single: one copy a block, in the order of the others */
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

/* What is to be moved, checked. */
struct kvs_work {
  struct kvs_scratch *scratch;
  enum kvs_direction direction;
  uint64_t nbytes, nblocks, entries; /* entries: blocks of all tensors */
  struct kvs_shape shape;
  int (*plan)(const void *call, enum kvs_form, struct kvs_scratch *, struct kvs_error *);
  bool planned; /* FORM_COPIES is there already */
  bool grid;    /* rows and the pairs of slots are there */
  bool packed;  /* the rows, for bursts */
  bool layered; /* layers matter: lists go layer by layer, with marks */
  /* Tell the race checker of the accesses of one layer, or of all (SIZE_MAX), which are these copies and rows. */
  void (*watch)(const void *call, const struct kvs_transfer *, size_t layer, const struct kvs_copies *,
                const struct kvs_rects *, const struct kvs_race_party *);
  const void *call;
  size_t nlayers; /* that there could be */
  const int64_t *src_slots, *dst_slots;
  size_t nslots;
  uint64_t cpu_slots; /* those of the host's side are below it */
  /* Of transfers between pools, whose caller holds hazard_lock. */
  const struct kvs_touch *touches;
  size_t ntouches;
  const struct kvs_foreign_list *foreign; /* NULL: nothing of other engines */
  const uint32_t *lost;                   /* blocks that are not copied since their source is lost */
  size_t nlost;
  struct kvs_error lost_error;
  uint64_t dependencies;        /* that its sources' bytes depend on, as kvs_transfer.others */
  struct kvs_failure **outcome; /* the caller's, of all transfers of one job, made when one needs it; NULL: its own */
  void (*settle)(const void *call, const struct kvs_transfer *); /* once it is known which blocks failed */
};

/* swap.c */
/* Blocks of tensors by their ids. */
struct kvs_cache_call {
  const struct kvs_tensor *tensors;
  size_t ntensors;
  const struct kvs_ids *gpu_ids, *cpu_ids;
  enum kvs_direction direction;
  uint64_t max_pitch;
  bool layered;
};
int kvs_cache_plan(const void *call, enum kvs_form, struct kvs_scratch *, struct kvs_error *);
/* Find what memory a checked call touches, and what the planner wants to know of it. The work has its slots already. */
int kvs_cache_prepare(struct kvs_engine *, struct kvs_work *, const struct kvs_cache_call *, const struct kvs_options *,
                      struct kvs_error *);
int kvs_check_layer_options(const struct kvs_options *, size_t nlayers, struct kvs_error *);
bool kvs_wants_layers(const struct kvs_options *);
bool kvs_may_cross_seams(const struct kvs_regions *);
enum kvs_direction kvs_direction_of(const struct kvs_region *src, const struct kvs_region *dst);
const char *kvs_direction_text(enum kvs_direction); /* "device to host" */

/* submit.c */
/* The caller's options (NULL: none), and the engine's defaults where they leave it open: each call does it once. */
void kvs_options_resolve(struct kvs_engine *, const struct kvs_options *given, struct kvs_options *);
/* Whether copies of rows, and rows and pairs, may be of use to a call that moves so many blocks of all tensors. */
bool kvs_may_stride(const struct kvs_engine *, const struct kvs_options *, uint64_t entries);
bool kvs_wants_rows(const struct kvs_engine *, const struct kvs_options *, uint64_t entries);
/* From the rows in scratch and the pairs of slots: work out what the planner wants to know, but the copies of rows; how
 * many runs the host's side has is counted where it matters. `cpu_slots`: the slots of the host's side are below it. */
void kvs_find_shape(struct kvs_work *, uint64_t cpu_slots);
int kvs_submit(struct kvs_engine *, struct kvs_work *, const struct kvs_options *, struct kvs_transfer **,
               struct kvs_error *);

/* order.c, on the lane that the caller holds: the transfer's head waits for what it must start after; what comes after
 * it waits for the spine. */
int kvs_order_before(struct kvs_transfer *, const struct kvs_work *, const struct kvs_options *, struct kvs_error *);
int kvs_order_before_layer(struct kvs_transfer *, const struct kvs_options *, size_t layer, struct kvs_error *);
int kvs_order_behind(struct kvs_transfer *, const struct kvs_work *, const struct kvs_options *, struct kvs_error *);

#endif
