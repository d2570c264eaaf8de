/* Copies by the copy engine on the lane stream. A refused copy is retried in smaller parts, down to single blocks;
 * blocks that still fail are recorded in the transfer. */
#ifndef KVS_COPIES_H
#define KVS_COPIES_H

#include "paths/submission.h"

void kvs_issue_copies(struct kvs_submission *); /* the copies in view */
void kvs_issue_rects(struct kvs_submission *);  /* the rects in view */
void kvs_note_failure(struct kvs_submission *, uint32_t block, const struct kvs_error *why);
/* All blocks count as failed, even those that were copied. */
void kvs_fail_all(struct kvs_submission *, const struct kvs_error *why);
/* For each block that copy i of the view carries: issue it alone (`again`), or mark it failed with *why. */
void kvs_block_by_block(struct kvs_submission *, size_t i, bool again, const struct kvs_error *why);

/* The first region of pageable memory; NULL: there is none. */
const struct kvs_region *kvs_pageable(const struct kvs_regions *);
/* Before copies from pageable memory are issued: wait until what comes before has ended. False: the transfer has
 * failed, and nothing may be issued. */
bool kvs_await_source(struct kvs_submission *);

/* Make the plan's list of copies, if it is not made yet. */
int kvs_plan_copies(struct kvs_submission *, struct kvs_error *);

#endif
