/* For the race checker: who accesses memory, and which blocks of pools lie under plain copies. */
#ifndef KVS_WATCH_H
#define KVS_WATCH_H

#include "lanes/state.h"
#include "racecheck/racecheck.h"

/* An accessor on a stream (`where` may be NULL); report the pool blocks under plain
 * copies. */
struct kvs_race_accessor kvs_watch_accessor(const struct kvs_engine *, kvs_stream, const char *where);
void kvs_watch_copies(const void *unused, const struct kvs_transfer *, size_t layer, const struct kvs_copies *,
                      const struct kvs_rects *, const struct kvs_race_accessor *);

#endif
