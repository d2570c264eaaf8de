/* Recordings of a shared event: words in memory shared by several processes. */
#ifndef KVS_HOST_WORDS_H
#define KVS_HOST_WORDS_H

#include "device/share.h"

struct kvs_host_words;

int kvs_host_words_new(struct kvs_host_words **words, struct kvs_error *err);
int kvs_host_words_share(struct kvs_host_words *words, struct kvs_handle *handle, struct kvs_error *err);
int kvs_host_words_open(const struct kvs_handle *handle, struct kvs_host_words **words, struct kvs_error *err);
struct kvs_host_words *kvs_host_words_ref(struct kvs_host_words *words);
void kvs_host_words_unref(struct kvs_host_words *words); /* NULL: no effect */

/* Allocate the number of a recording before it is queued, from 1; 0: 64 recordings, of all processes, are pending. Then
 * mark it complete. */
uint64_t kvs_host_words_begin(struct kvs_host_words *words);
void kvs_host_words_end(struct kvs_host_words *words, uint64_t number);

uint64_t kvs_host_words_latest(const struct kvs_host_words *words); /* 0: never recorded */
bool kvs_host_words_ended(const struct kvs_host_words *words, uint64_t number);
/* The recording's process has ended before completion. Takes some microseconds. */
bool kvs_host_words_abandoned(const struct kvs_host_words *words, uint64_t number);

#endif
