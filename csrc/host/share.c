/* Implementation of share.h for host devices: sharing with other processes. */
#include "host/share.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "host/queue.h"
#include "host/range.h"
#include "host/state.h"

/* -- identity -------------------------------------------------------------------------------------------------- */

static void read_boot_id(unsigned char id[16]) {
  char text[64];
  int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  ssize_t nbytes = fd < 0 ? 0 : read(fd, text, sizeof text);
  if (fd >= 0) close(fd);
  memset(id, 0, 16);
  for (ssize_t i = 0, digit = 0; i < nbytes && digit < 32; i++) {
    int value = text[i] >= '0' && text[i] <= '9' ? text[i] - '0' : text[i] >= 'a' && text[i] <= 'f' ? text[i] - 87 : -1;
    if (value < 0) continue;
    id[digit / 2] = (unsigned char)(id[digit / 2] << 4 | value);
    digit++;
  }
}

void kvs_host_uuid(unsigned char uuid[16], int ordinal, uint64_t seed) {
  uint64_t words[2];
  read_boot_id(uuid);
  memcpy(words, uuid, sizeof words);
  words[0] = kvs_pattern_word(words[0], (uint64_t)ordinal);
  words[1] = kvs_pattern_word(words[1] ^ words[0], seed ? seed ^ (uint64_t)getpid() << 32 : 0);
  memcpy(uuid, words, sizeof words);
}

/* -- memory ---------------------------------------------------------------------------------------------------- */

static int memory_share(struct kvs_device *device, uint64_t ptr, struct kvs_handle *handle, struct kvs_error *err) {
  return kvs_host_memory_share(&host_of(device)->memory, ptr, handle, err);
}

static int memory_open(struct kvs_device *device, const struct kvs_handle *handle, uint64_t nbytes, uint64_t *ptr,
                       struct kvs_error *err) {
  return kvs_host_memory_open(&host_of(device)->memory, handle, nbytes, ptr, err);
}

/* Unlike a GPU, a worker would fault on unmapped memory: closing waits for the device, like freeing. */
static int memory_close(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) {
  int status = kvs_host_synchronize(&host_of(device)->queue, "memory_close", err);
  return status ? status : kvs_host_memory_close(&host_of(device)->memory, ptr, err);
}

/* -- events ---------------------------------------------------------------------------------------------------- */

/* A deterministic device runs only inside calls on it, so it cannot wait for another process. */
static int event_create_shared(struct kvs_device *device, kvs_event *event, struct kvs_error *err) {
  struct kvs_host_words *words;
  if (device->stepped) return kvs_fail(err, KVS_UNSUPPORTED, "a deterministic device shares no events");
  int status = kvs_host_words_new(&words, err);
  return status ? status : kvs_host_event_adopt(&host_of(device)->queue, words, event, err);
}

static int event_share(struct kvs_device *device, kvs_event event, struct kvs_handle *handle, struct kvs_error *err) {
  struct kvs_host_words *words = kvs_host_event_words(&host_of(device)->queue, event, err);
  if (!words) return err->status;
  int status = kvs_host_words_share(words, handle, err);
  kvs_host_words_unref(words);
  return status;
}

static int event_open(struct kvs_device *device, const struct kvs_handle *handle, kvs_event *event,
                      struct kvs_error *err) {
  struct kvs_host_words *words;
  if (device->stepped) return kvs_fail(err, KVS_UNSUPPORTED, "a deterministic device shares no events");
  int status = kvs_host_words_open(handle, &words, err);
  return status ? status : kvs_host_event_adopt(&host_of(device)->queue, words, event, err);
}

/* -- chunks ---------------------------------------------------------------------------------------------------- */

static int chunk_granularity(struct kvs_device *device, uint64_t *nbytes, struct kvs_error *err) {
  (void)device, (void)err;
  *nbytes = 65536;
  return KVS_OK;
}

static int range_reserve(struct kvs_device *device, uint64_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  return kvs_host_range_reserve(&host_of(device)->memory, nbytes, ptr, err);
}

static int range_free(struct kvs_device *device, uint64_t ptr, uint64_t nbytes, struct kvs_error *err) {
  return kvs_host_range_free(&host_of(device)->memory, ptr, nbytes, err);
}

static int chunk_map(struct kvs_device *device, uint64_t at, uint64_t nbytes, int fd, struct kvs_error *err) {
  return kvs_host_chunk_map(&host_of(device)->memory, at, nbytes, fd, err);
}

static int chunk_unmap(struct kvs_device *device, uint64_t at, uint64_t nbytes, struct kvs_error *err) {
  return kvs_host_chunk_unmap(&host_of(device)->memory, at, nbytes, err);
}

static int chunk_query(struct kvs_device *device, uint64_t address, uint64_t *base, uint64_t *nbytes,
                       struct kvs_error *err) {
  return kvs_host_chunk_query(&host_of(device)->memory, address, base, nbytes, err);
}

static int chunk_share(struct kvs_device *device, uint64_t address, int *fd, struct kvs_error *err) {
  return kvs_host_chunk_share(&host_of(device)->memory, address, fd, err);
}

/* -- other devices --------------------------------------------------------------------------------------------- */

static int peer(struct kvs_device *device, const struct kvs_region *region, bool *direct, struct kvs_error *err) {
  (void)err;
  *direct = kvs_host_memory_reaches(&host_of(device)->memory, region);
  return KVS_OK;
}

static int stream_wait_foreign(struct kvs_device *device, kvs_stream stream, struct kvs_device *other, kvs_event event,
                               struct kvs_error *err) {
  return kvs_host_stream_wait_foreign(&host_of(device)->queue, stream, &host_of(other)->queue, event, err);
}

const struct kvs_share_ops kvs_host_share_ops = {
    .memory_share = memory_share,
    .memory_open = memory_open,
    .memory_close = memory_close,
    .event_create_shared = event_create_shared,
    .event_share = event_share,
    .event_open = event_open,
    .chunk_granularity = chunk_granularity,
    .range_reserve = range_reserve,
    .range_free = range_free,
    .chunk_map = chunk_map,
    .chunk_unmap = chunk_unmap,
    .chunk_query = chunk_query,
    .chunk_share = chunk_share,
    .peer = peer,
    .stream_wait_foreign = stream_wait_foreign,
};
