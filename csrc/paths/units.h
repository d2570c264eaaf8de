/* What the kernels of paths kernel and burst read, and their launches: a list of pieces, or a grid of rows and pairs of
 * slots; ids that are on the device. */
#ifndef KVS_UNITS_H
#define KVS_UNITS_H

#include "paths/submission.h"

/* Bytes that a warp (RING) or a CTA (COPY) takes at a time. With ids on the device a warp of PACK takes no more, and in
 * the place of a bad source there are so many zeros. */
enum { KVS_KERNEL_PIECE = 32 << 10 };

/* Whether kernels keep the priority's promise, or nothing else can move the blocks as well. */
bool kvs_kernels_allowed(const struct kvs_submission *);

/* Whether the kernels must read pieces, which cost O(copies) on the CPU. */
bool kvs_needs_list(const struct kvs_submission *);
int kvs_prepare_list(struct kvs_submission *);
/* Pairs of slots, and staging for them and for the rows in case all tables are in use. The caller sets s->units. */
int kvs_prepare_grid(struct kvs_submission *);

int kvs_upload(struct kvs_submission *, size_t from, size_t to, kvs_stream, struct kvs_error *why);
/* Place the rows, and the units of codings, for kernels on that stream. Place a list of pieces for the view (returns
 * their number); `aliased`: the kernels reach host memory by its device alias. */
int kvs_place_rows(struct kvs_submission *, kvs_stream, struct kvs_error *why);
size_t kvs_place_list(struct kvs_submission *, bool aliased, struct kvs_piece **pieces);

/* Once: let a kernel put slots in the place of positions, and write ids and verdicts to the host. The stream comes
 * after the start dependencies. Nothing to do where all slots are known. */
int kvs_resolve_ids(struct kvs_submission *, kvs_stream, struct kvs_error *why);
/* After a refusal of that: bring ids of destinations back by a plain copy, since the slots that they name are lost. */
void kvs_fetch_ids(struct kvs_submission *);

/* Upload the pairs before `end`, unless they are there or few enough to go as parameters. */
int kvs_place_pairs(struct kvs_submission *, size_t first, size_t end, kvs_stream, struct kvs_error *why);

/* Coded transfers, once: a word for the verdict of each pair. */
void kvs_place_verdicts(struct kvs_submission *);
/* Launch kernels that code rows [first_row, first_row + nrows) of *units, whose pairs begin with first_pair. */
int kvs_launch_code(struct kvs_submission *, const struct kvs_units *, size_t first_row, size_t first_pair,
                    unsigned ctas, kvs_stream, struct kvs_error *why);

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

#endif
