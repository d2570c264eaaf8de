/* Where the host's memory is the limit, loads go before stores. For the core's own files only. */
#ifndef KVS_LOADS_FIRST_H
#define KVS_LOADS_FIRST_H

#include "paths/submission.h"

/* Before the lane is locked: whether this store goes behind the loads that are in progress (s->loads_first). */
void kvs_loads_first_look(struct kvs_submission *);
/* The transfer's head waits for them. Under lane->submit. A wait that the driver refuses is left out: only speed
 * depends on it. */
void kvs_loads_first_wait(struct kvs_submission *);

#endif
