/* A submission in progress: what submit.c, choose.c, issue.c, launch.c and burst.c share. For the core's own files
 * only. */
#ifndef KVS_SUBMIT_H
#define KVS_SUBMIT_H

#include "lanes/state.h"

struct kvs_submission {
  struct kvs_engine *engine;
  struct kvs_device *device;
  struct kvs_work *work;
  const struct kvs_options *options;
  struct kvs_transfer *transfer;
  struct kvs_lane *lane;
  struct kvs_copies view;        /* the copies of the layers that are being issued */
  size_t first_row, rows_end;    /* the rows of the layers that are being issued */
  size_t staged;                 /* bytes of staging in use */
  bool picked;                   /* AUTO picked the path */
  const struct kvs_region *peer; /* the other side, if it is memory of another device; else NULL */
  bool peer_direct;              /* kernels of this device reach `peer` */
  bool listed;                   /* kernel and burst: the kernels read pieces rather than rows and pairs */
  struct kvs_units units;        /* what the kernels read, in device memory */
  struct kvs_slots *slots;       /* burst: locked from the choice of the path on; NULL: none */
  kvs_stream first;              /* burst: the stream of the first stage */
  bool ahead;                    /* burst: start dependencies are waited for on the burst stream alone */
  size_t uploaded;               /* burst: number of pairs uploaded or being uploaded */
  bool begun;                    /* burst: the first burst is queued */
  uint64_t most_unbroken;        /* bytes that the copy engine is given between two gaps */
  bool reads_early;              /* the driver reads the source before its turn: kvs_await_source() */
  size_t failed_capacity;
  size_t cursor;         /* where kvs_block_by_block() continues */
  bool leftovers;        /* work may be on the streams although the call fails */
  int fatal;             /* KVS_OK, or why issuing has stopped */
  struct kvs_error *err; /* error of the call */
};

/* From host to device the driver copies the first ones of less than this by the processor (H200, driver 580). */
enum { KVS_SLOW_COPY_NBYTES = 28 << 10, KVS_SLOW_COPY_NS_PER_KIB = 160 };

static inline bool kvs_is_lost(int status) { return status == KVS_LOST; }

/* The device is lost: no more work is issued. */
static inline void kvs_stop_issuing(struct kvs_submission *s, const struct kvs_error *why) {
  *s->err = *why;
  s->fatal = why->status;
}

/* parts.c: what one call gives the copy engine, on that stream. kvs_begin_giving: before the first of a transfer.
 * kvs_call_end: where the call that begins at `from` ends, after `issued` copies of a mean size. kvs_give: that call.
 */
void kvs_begin_giving(struct kvs_submission *, bool pageable);
size_t kvs_call_end(const struct kvs_submission *, const struct kvs_copies *, size_t from, size_t to, uint64_t mean,
                    size_t issued);
int kvs_give(struct kvs_submission *, const struct kvs_copies *, size_t from, size_t to, kvs_stream,
             struct kvs_error *);
int kvs_give_one(struct kvs_submission *, uint64_t dst, uint64_t src, uint64_t nbytes, kvs_stream, struct kvs_error *);
int kvs_give_rect(struct kvs_submission *, const struct kvs_rect *, kvs_stream, struct kvs_error *);

/* issue.c: pageable memory. The first region that is; NULL: none. Before copies from there are issued: wait until what
 * comes before has ended; false: the transfer has failed, and nothing may be issued. */
const struct kvs_region *kvs_pageable(const struct kvs_regions *);
bool kvs_await_source(struct kvs_submission *);

/* issue.c: copies on the lane stream. A refused copy is retried in smaller parts, down to single blocks; blocks that
 * still fail are noted. */
void kvs_issue_copies(struct kvs_submission *);                        /* the copies in view */
void kvs_issue_rects(struct kvs_submission *, size_t from, size_t to); /* of the plan's rects */
void kvs_note_failure(struct kvs_submission *, uint32_t block, const struct kvs_error *why);
void kvs_fail_all(struct kvs_submission *,
                  const struct kvs_error *why); /* all blocks count as failed, even those that were copied */
/* For each block that copy i of the view carries: issue it alone (`again`), or mark it failed with *why. */
void kvs_block_by_block(struct kvs_submission *, size_t i, bool again, const struct kvs_error *why);

/* choose.c. Choose the path and get what it needs, before anything moves. */
int kvs_choose_path(struct kvs_submission *, enum kvs_path *);
int kvs_prepare_path(struct kvs_submission *);
void kvs_release_slots(struct kvs_submission *); /* the locked set, if there is one */

/* Bytes that a warp (RING) or a CTA (COPY) takes at a time. With ids on the device a warp of PACK takes no more, and in
 * the place of a bad source there are so many zeros. */
enum { KVS_KERNEL_PIECE = 32 << 10 };

/* launch.c. What the path's kernels read: a list of pieces, or a grid of rows and pairs. */
bool kvs_wants_list(const struct kvs_submission *);
int kvs_prepare_list(struct kvs_submission *);
int kvs_prepare_grid(struct kvs_submission *);
double kvs_kernel_ns(const struct kvs_submission *);                   /* predicted time of path kernel */
int kvs_launch_copies(struct kvs_submission *, struct kvs_error *why); /* the view, by a kernel on the lane stream */
/* Once: let a kernel put slots in the place of positions, and write ids and verdicts to the host. The stream comes
 * after the start dependencies. Nothing to do where all slots are known. */
int kvs_resolve_ids(struct kvs_submission *, kvs_stream, struct kvs_error *why);
/* After a refusal of that: bring ids of destinations back by a plain copy, since the slots that they name are lost. */
void kvs_fetch_ids(struct kvs_submission *);
/* Space in the transfer's staging: the host address, and the device address after the upload. */
void *kvs_stage(struct kvs_submission *, size_t nbytes, uint64_t *device);
int kvs_upload(struct kvs_submission *, size_t from, size_t to, kvs_stream, struct kvs_error *why);
/* Place the rows for kernels on that stream; place a list of pieces for the view (returns their number). */
int kvs_place_rows(struct kvs_submission *, kvs_stream, struct kvs_error *why);
size_t kvs_place_list(struct kvs_submission *, struct kvs_piece **pieces);
/* Launch a kernel that copies `count` units. Pairs that are not in device memory go as parameters, from `first_pair`
 * on. Limits: `ctas` CTAs, gbps (0: unpaced). chunk: bytes of a stage of RING. */
struct kvs_width {
  enum kvs_kernel kernel;
  unsigned ctas;
  double gbps;
  uint32_t chunk;
};
int kvs_launch_units(struct kvs_submission *, const struct kvs_units *, uint64_t count, size_t first_pair,
                     const struct kvs_width *, kvs_stream, struct kvs_error *why);

/* burst.c */
int kvs_pack_for_burst(struct kvs_submission *); /* pack the work's rows, once */
int kvs_prepare_burst(struct kvs_submission *);  /* what the kernels read, the first stage's stream, the head */
/* Whether path kernel copies all of the work's layers by one launch, if none has a start dependency of its own. */
bool kvs_is_one_launch(const struct kvs_work *);
/* One past the last layer that is issued together with this one: the next layer where copies are issued one by one. */
size_t kvs_layer_group_end(const struct kvs_submission *, size_t layer);
/* Queue the view. After a refusal part of it may run; that part ends before later work of the lane stream, and the
 * caller repeats the whole view. */
int kvs_issue_bursts(struct kvs_submission *, struct kvs_error *why);
/* After the last burst: if none was queued, let the lane stream wait for the start dependencies. */
void kvs_close_bursts(struct kvs_submission *);

#endif
