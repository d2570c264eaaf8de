/* A transfer on its way to the device: what submit.c, issue.c, launch.c and relay.c share. For the core's own files
 * only. */
#ifndef KVS_SUBMIT_H
#define KVS_SUBMIT_H

#include "core/core.h"

struct kvs_submission {
  struct kvs_engine *engine;
  struct kvs_device *device;
  struct kvs_work *work;
  const struct kvs_options *options;
  struct kvs_transfer *transfer;
  struct kvs_lane *lane;
  struct kvs_copies view;        /* of the plan's copies: those of the layer that is being issued */
  size_t first_row, rows_end;    /* of the plan's rows: the same */
  size_t staged;                 /* bytes of the staging that are used */
  bool picked;                   /* its path was, by AUTO */
  const struct kvs_region *peer; /* memory of another device that is the other side, or NULL */
  bool peer_direct;              /* kernels reach it */
  bool listed;                   /* kernel and relay: by pieces, rather than by rows and pairs */
  struct kvs_units units;        /* what they read, once it is on its way to the device */
  size_t failed_capacity;
  size_t cursor;         /* where block_by_block() goes on */
  bool leftovers;        /* something may stand on the spine although the call fails */
  int fatal;             /* KVS_OK, or why nothing more can be issued */
  struct kvs_error *err; /* of the whole call */
};

/* Copies of one batch call, by their mean size. One large call is slow and, below 28 KiB from host to device, very
 * slow: the driver does far better with the same list in parts, all on one stream (H200, driver 580, 8192 x 16 KiB: 25
 * -> 45 GB/s D2H, 6 -> 43 H2D; more streams undo it; benchmarks/batch_parts.cu). */
static inline size_t kvs_batch_part(uint64_t mean_nbytes) { return mean_nbytes >= 32 << 10 ? 256 : 128; }

static inline bool kvs_beyond_hope(int status) { return status == KVS_LOST; }

/* Nothing more can be issued. */
static inline void kvs_give_up(struct kvs_submission *s, const struct kvs_error *why) {
  *s->err = *why;
  s->fatal = why->status;
}

/* issue.c: by the copy engine, on the spine. What is refused is tried smaller, down to single blocks; what still fails
 * is noted. */
void kvs_issue_copies(struct kvs_submission *);                        /* those in view */
void kvs_issue_rects(struct kvs_submission *, size_t from, size_t to); /* of the plan's copies of rows */
void kvs_note_failure(struct kvs_submission *, uint32_t block, const struct kvs_error *why);
void kvs_fail_whole(struct kvs_submission *, const struct kvs_error *why); /* whatever may have arrived */
/* For each block that copy i of the view carries: issue it alone (`again`), or write it off with *why. */
void kvs_block_by_block(struct kvs_submission *, size_t i, bool again, const struct kvs_error *why);

/* launch.c */
int kvs_prepare_launch(struct kvs_submission *);     /* before anything moves: what the path's kernels will read */
int kvs_pack_for_relay(struct kvs_submission *);     /* the work's rows, once */
double kvs_pace_gbps(const struct kvs_submission *); /* of its kernels; 0: unpaced */
int kvs_launch_copies(struct kvs_submission *, struct kvs_error *why); /* what is in view, by a kernel on the spine */
/* Room in the transfer's staging: where the host writes, and where the device will read once it is uploaded. */
void *kvs_stage(struct kvs_submission *, size_t nbytes, uint64_t *device);
int kvs_upload(struct kvs_submission *, size_t from, struct kvs_error *why); /* what was staged from there on */
/* Stage what units name: rows and pairs of the plan, or pieces of what is in view (returns how many). */
int kvs_place_grid(struct kvs_submission *, struct kvs_error *why);
size_t kvs_place_list(struct kvs_submission *, const struct kvs_piece **pieces);
/* Grid, threads and shared memory of a copying kernel with so many units to share. */
struct kvs_launch kvs_launch_of(const struct kvs_submission *, enum kvs_kernel, uint64_t units);
int kvs_launch_units(struct kvs_submission *, const struct kvs_units *, uint64_t count, uint64_t only_if,
                     struct kvs_error *why);

/* relay.c. Refused: nothing of it was queued that could still happen. */
int kvs_issue_relay(struct kvs_submission *, struct kvs_error *why);

#endif
