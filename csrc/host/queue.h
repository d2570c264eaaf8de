/* What a host device does with its streams, events and queued work: the functions of device.h. */
#ifndef KVS_HOST_QUEUE_H
#define KVS_HOST_QUEUE_H

#include "host/ops.h"

int kvs_host_queue_init(struct kvs_host_queue *queue, unsigned max_workers, uint64_t seed,
                        struct kvs_host_memory *memory, atomic_int *lost, struct kvs_error *err);
void kvs_host_queue_destroy(struct kvs_host_queue *queue); /* drops queued work */

/* Queue the operation and take it over, also on failure. `operation` is the device function's name, for errors. */
int kvs_host_enqueue(struct kvs_host_queue *queue, struct kvs_host_op *op, kvs_stream handle, const char *operation,
                     struct kvs_error *err);

int kvs_host_stream_create(struct kvs_host_queue *queue, int priority, kvs_stream *handle, struct kvs_error *err);
int kvs_host_stream_destroy(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_error *err);
int kvs_host_stream_query(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_error *err);
int kvs_host_stream_info(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_stream_info *info,
                         struct kvs_error *err);
int kvs_host_stream_capture(struct kvs_host_queue *queue, kvs_stream handle, bool begin, struct kvs_error *err);
int kvs_host_stream_wait(struct kvs_host_queue *queue, kvs_stream handle, kvs_event event, struct kvs_error *err);
/* For an event of another host device. */
int kvs_host_stream_wait_foreign(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_host_queue *other,
                                 kvs_event event, struct kvs_error *err);
int kvs_host_synchronize(struct kvs_host_queue *queue, const char *operation, struct kvs_error *err);
int kvs_host_event_create(struct kvs_host_queue *queue, bool timing, kvs_event *event, struct kvs_error *err);
/* Takes over the reference to the words, also on failure. */
int kvs_host_event_adopt(struct kvs_host_queue *queue, struct kvs_host_words *words, kvs_event *event,
                         struct kvs_error *err);
/* The words of an event, with a reference; NULL: the event is not shared, see *err. */
struct kvs_host_words *kvs_host_event_words(struct kvs_host_queue *queue, kvs_event event, struct kvs_error *err);
int kvs_host_event_destroy(struct kvs_host_queue *queue, kvs_event event, struct kvs_error *err);
int kvs_host_event_record(struct kvs_host_queue *queue, kvs_event event, kvs_stream handle, struct kvs_error *err);
int kvs_host_event_query(struct kvs_host_queue *queue, kvs_event event, struct kvs_error *err);
int kvs_host_event_elapsed(struct kvs_host_queue *queue, kvs_event from, kvs_event to, uint64_t *ns,
                           struct kvs_error *err);

#endif
