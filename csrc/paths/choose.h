/* Choosing the path of a transfer, and getting what it needs, before anything moves. */
#ifndef KVS_CHOOSE_H
#define KVS_CHOOSE_H

#include "paths/submission.h"

/* Fill in the engine's defaults where the caller's options (NULL: none) leave a choice. Once for each call. */
int kvs_options_resolve(struct kvs_engine *, const struct kvs_options *given, struct kvs_options *, struct kvs_error *);
/* Whether a call that moves `entries` blocks of all tensors may use rects; and rows with pairs of slots. */
bool kvs_may_stride(const struct kvs_engine *, const struct kvs_options *, uint64_t entries);
bool kvs_wants_rows(const struct kvs_engine *, const struct kvs_options *, uint64_t entries);

int kvs_choose_path(struct kvs_submission *, enum kvs_path *);
int kvs_prepare_path(struct kvs_submission *);
void kvs_release_path(struct kvs_submission *); /* what the path has taken, if anything */

#endif
