/* The engines that are open, and what every part of the core asks of one. For the core's own files only. */
#ifndef KVS_REGISTRY_H
#define KVS_REGISTRY_H

#include "lanes/state.h"

/* Register an engine until the process ends, under the next number. One caller at a time. */
void kvs_engine_add(struct kvs_engine *);
int kvs_open_for_work(
    struct kvs_engine *,
    struct kvs_error *); /* refuses an engine that was shut down, is lost, or was opened before fork() */
/* Whether its device is lost. The driver reports a fault only in a later call, so this function makes one. */
int kvs_engine_look(struct kvs_engine *, struct kvs_error *);
/* Add `engine` to the transfer's dependency mask: the transfer fails if that engine's device is lost before the
 * transfer ends. kvs_peer_check: whether one is lost. */
void kvs_peer_depend(struct kvs_transfer *, const struct kvs_engine *);
int kvs_peer_check(const struct kvs_transfer *, struct kvs_error *);
/* Set the function that kvs_shutdown() calls first: it stops the servers for other processes. */
void kvs_before_shutdown(void (*stop)(void));
void kvs_begin_shutdown(void);

#endif
