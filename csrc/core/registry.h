/* The engines that are open, and what every part of the core asks of one. For the core's own files only. */
#ifndef KVS_REGISTRY_H
#define KVS_REGISTRY_H

#include "core/core.h"

/* An engine that stays until the process ends gets the next number: one caller at a time. */
void kvs_engine_add(struct kvs_engine *);
int kvs_open_for_work(struct kvs_engine *, struct kvs_error *); /* neither shut down nor lost, nor a parent's */
/* Whether its device is lost: a fault is known once some call on the device was told of it, and this makes one. */
int kvs_engine_look(struct kvs_engine *, struct kvs_error *);
/* The transfer comes after work of another engine: if that one's device is lost before it ends, it fails too. */
void kvs_peer_depend(struct kvs_transfer *, const struct kvs_engine *);
int kvs_peer_check(const struct kvs_transfer *, struct kvs_error *);
/* What is stopped first when the process ends: one function, of who serves other processes. */
void kvs_before_shutdown(void (*stop)(void));
void kvs_begin_shutdown(void);

#endif
