/* Sets of slots for path burst. For the core's own files only. */
#ifndef KVS_SLOTS_H
#define KVS_SLOTS_H

#include "lanes/state.h"

void kvs_slots_open(struct kvs_engine *); /* engine->burst_note says why there are none, or fewer than wanted */
void kvs_slots_close(struct kvs_engine *);
/* A locked set of slots for the next transfer of this lane. NULL: every set would make it wait for other lanes. */
struct kvs_slots *kvs_slots_take(struct kvs_engine *, const struct kvs_lane *, enum kvs_direction);
bool kvs_bursts_off(struct kvs_engine *, char why[KVS_BURST_NOTE]); /* if so, and only then, with the reason */

#endif
