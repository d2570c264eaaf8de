/* Execution of a host device's work: by workers, or by steps inside calls on a deterministic device. */
#ifndef KVS_HOST_RUN_H
#define KVS_HOST_RUN_H

#include "host/ops.h"

int kvs_host_workers_start_locked(struct kvs_host_queue *queue, struct kvs_error *err);
void kvs_host_workers_stop(struct kvs_host_queue *queue);
/* Runs up to `steps` steps; returns how many. `jump`: if only delays are left, advance the virtual time. */
int64_t kvs_host_steps_locked(struct kvs_host_queue *queue, int64_t steps, bool jump);
/* A manual device: run the head of the stream. False: there is none, or it cannot run yet. */
bool kvs_host_step_stream_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream);
uint64_t kvs_host_random_locked(struct kvs_host_queue *queue, uint64_t below);

#endif
