/* Sets of slots for path burst. For the core's own files only. */
#ifndef KVS_SLOTS_H
#define KVS_SLOTS_H

#include "lanes/state.h"
#include "paths/submission.h"

void kvs_slots_open(struct kvs_engine *); /* engine->burst_note says why there are none, or fewer than wanted */
void kvs_slots_close(struct kvs_engine *);
/* A locked set of slots for the next transfer of this lane. NULL: every set would make it wait for other lanes. */
struct kvs_slots *kvs_slots_take(struct kvs_engine *, const struct kvs_lane *, enum kvs_direction);
/* The most bytes that a burst of this transfer has in a slot of that size. Coded bytes are fewer than the kernel's: of
 * these, too, a burst has no more than a slot holds, so that its kernel takes no longer than another one. */
uint64_t kvs_slot_room(const struct kvs_submission *, uint64_t slot_nbytes);
bool kvs_bursts_off(struct kvs_engine *, char why[KVS_BURST_NOTE]); /* if so, and only then, with the reason */

#endif
