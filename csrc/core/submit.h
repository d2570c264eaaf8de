/* A transfer on its way to the device: what submit.c, choose.c, issue.c, launch.c and burst.c share. For the core's own
 * files only. */
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
  bool listed;                   /* kernel and burst: by pieces, rather than by rows and pairs */
  struct kvs_units units;        /* what their kernels read, once it is on its way to the device */
  struct kvs_slots *slots;       /* burst: locked, from the choice of the path on; NULL: none */
  kvs_stream first;              /* burst: its first stage */
  bool ahead;                    /* burst: its start is waited for on the front alone */
  size_t uploaded;               /* burst: pairs that are on their way to the device */
  bool begun;                    /* burst: the first one is queued */
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

static inline bool kvs_is_lost(int status) { return status == KVS_LOST; }

/* Nothing more can be issued. */
static inline void kvs_stop_issuing(struct kvs_submission *s, const struct kvs_error *why) {
  *s->err = *why;
  s->fatal = why->status;
}

/* issue.c: by the copy engine, on the spine. What is refused is tried smaller, down to single blocks; what still fails
 * is noted. */
void kvs_issue_copies(struct kvs_submission *);                        /* those in view */
void kvs_issue_rects(struct kvs_submission *, size_t from, size_t to); /* of the plan's copies of rows */
void kvs_note_failure(struct kvs_submission *, uint32_t block, const struct kvs_error *why);
void kvs_fail_all(struct kvs_submission *, const struct kvs_error *why); /* whatever may have arrived */
/* For each block that copy i of the view carries: issue it alone (`again`), or write it off with *why. */
void kvs_block_by_block(struct kvs_submission *, size_t i, bool again, const struct kvs_error *why);

/* choose.c. The path, and what it needs: before anything moves. */
int kvs_choose_path(struct kvs_submission *, enum kvs_path *);
int kvs_prepare_path(struct kvs_submission *);
void kvs_release_slots(struct kvs_submission *); /* those that it chose a burst with; none: nothing */

/* launch.c. What the path's kernels will read: a list of pieces, where those say more than rows and pairs, or a grid.
 */
bool kvs_wants_list(const struct kvs_submission *);
int kvs_prepare_list(struct kvs_submission *);
int kvs_prepare_grid(struct kvs_submission *);
double kvs_kernel_gbps(const struct kvs_submission *); /* what path kernel reaches at most; 0: what its costs say */
int kvs_launch_copies(struct kvs_submission *, struct kvs_error *why); /* what is in view, by a kernel on the spine */
/* Room in the transfer's staging: where the host writes, and where the device will read once it is uploaded. */
void *kvs_stage(struct kvs_submission *, size_t nbytes, uint64_t *device);
int kvs_upload(struct kvs_submission *, size_t from, size_t to, kvs_stream, struct kvs_error *why);
/* The rows, where kernels on that stream find them; and a list of the pieces of what is in view (returns how many). */
int kvs_place_rows(struct kvs_submission *, kvs_stream, struct kvs_error *why);
size_t kvs_place_list(struct kvs_submission *, struct kvs_piece **pieces);
/* Launch what copies `count` units; of a grid without pairs on the device, those from `first_pair` on. At most so many
 * CTAs, no faster than gbps (0: unpaced). */
struct kvs_width {
  enum kvs_kernel kernel;
  unsigned ctas;
  double gbps;
};
int kvs_launch_units(struct kvs_submission *, const struct kvs_units *, uint64_t count, size_t first_pair,
                     const struct kvs_width *, kvs_stream, struct kvs_error *why);

/* burst.c */
int kvs_pack_for_burst(struct kvs_submission *); /* the work's rows, once */
int kvs_prepare_burst(
    struct kvs_submission *); /* what its kernels will read, the stream of its first stage, its head */
/* One past the last layer that is issued together with this one; of other paths the next. */
size_t kvs_layer_group_end(const struct kvs_submission *, size_t layer);
/* Queue what is in view. Refused: some of it may be under way, and is over before what the spine gets next; it is to be
 * done again. */
int kvs_issue_bursts(struct kvs_submission *, struct kvs_error *why);
/* Behind the last of them: the end of one that queued none comes after its start all the same. */
void kvs_close_bursts(struct kvs_submission *);

#endif
