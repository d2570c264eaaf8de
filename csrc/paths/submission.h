/* A submission in progress: what the files of paths/ share. */
#ifndef KVS_SUBMISSION_H
#define KVS_SUBMISSION_H

#include "lanes/state.h"

struct kvs_path_ops;

struct kvs_submission {
  struct kvs_engine *engine;
  struct kvs_device *device;
  struct kvs_work *work;
  const struct kvs_options *options;
  struct kvs_transfer *transfer;
  struct kvs_lane *lane;
  struct kvs_copies view;           /* the copies of the layers that are being issued */
  size_t first_row, rows_end;       /* the rows of these layers */
  size_t first_rect, rects_end;     /* the rects of these layers */
  size_t staged;                    /* bytes of staging in use */
  bool picked;                      /* AUTO picked the path */
  const struct kvs_region *peer;    /* the other side, if it is memory of another device; else NULL */
  bool peer_direct;                 /* kernels of this device reach `peer` */
  bool listed;                      /* the kernels read pieces rather than rows and pairs */
  struct kvs_units units;           /* what the kernels read, in device memory */
  const struct kvs_path_ops *taken; /* the path that holds something (take), until it is released; NULL: none does */
  struct kvs_slots *slots;          /* burst: locked while the path is taken; NULL: none */
  uint64_t burst_nbytes;            /* burst: most bytes of one, in its slot */
  struct kvs_lent_way *lent[KVS_LENDERS]; /* borrow: locked while the path is taken */
  unsigned nlent;
  uint64_t given;          /* borrow: bytes that went over the device's own link */
  struct kvs_device *link; /* whose copy engine is given copies: the device's own, or a lender's */
  kvs_stream first;        /* burst: the stream of the first stage */
  bool ahead;              /* start dependencies are waited for on the burst stream only */
  uint64_t scratch[2];     /* of VERIFY, on the lane's stream and on another one; 0: not used yet */
  size_t uploaded;         /* number of pairs uploaded or being uploaded */
  bool begun;              /* burst: the first burst is queued */
  uint64_t most_unbroken;  /* bytes that the copy engine is given between two gaps */
  bool reads_early;        /* the driver reads the source before its turn: kvs_await_source() */
  size_t failed_capacity;
  size_t cursor;         /* where kvs_block_by_block() continues */
  bool loads_first;      /* it goes behind the loads that are in progress: loads_first.h */
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

/* A layer with a start dependency of its own begins a group of layers, since that dependency may wait for the previous
 * layer. */
static inline bool kvs_starts_alone(const struct kvs_submission *s, size_t layer) {
  const struct kvs_options *options = s->options;
  return layer < options->nafter_layers && options->after_layers[layer].kind != KVS_AFTER_NONE;
}

#endif
