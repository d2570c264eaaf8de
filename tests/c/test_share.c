/* What processes and devices share, below Python: messages between members, the form of an export, recordings of shared
 * events, handles and chunks of host devices, and streams of two devices that wait for each other from many threads. */
#include <pthread.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/share.h"
#include "host/device.h"
#include "host/words.h"
#include "host_device.h"
#include "kvswap.h"
#include "share/wire.h"

static uint64_t random_state = 88172645463325252u;

/* -- the form -------------------------------------------------------------------------------------------------- */

static struct kvs_export some_export(void) {
  struct kvs_export made = {.kind = KVS_EXPORT_HANDLE, .pid = 77, .start = 1, .ndim = 3};
  made.allocation_nbytes = 1u << 20;
  made.offset = check_below(&random_state, 1000);
  made.nbytes = 1 + check_below(&random_state, 1000);
  made.generation = check_random(&random_state);
  made.address = check_random(&random_state);
  for (int i = 0; i < KVS_EXPORT_DIMS; i++) made.shape[i] = check_random(&random_state);
  for (size_t i = 0; i < sizeof made.handle; i++) made.handle[i] = (unsigned char)check_random(&random_state);
  snprintf(made.dtype, sizeof made.dtype, "bfloat16");
  snprintf(made.device, sizeof made.device, "cuda:%d", (int)check_below(&random_state, 8));
  snprintf(made.socket, sizeof made.socket, "/tmp/a socket");
  return made;
}

static void test_the_form(void) {
  unsigned char bytes[KVS_EXPORT_NBYTES], again[KVS_EXPORT_NBYTES];
  struct kvs_export read;
  struct kvs_error why;
  for (int i = 0; i < 100; i++) {
    struct kvs_export made = some_export();
    kvs_export_write(&made, bytes);
    OK(kvs_export_read(bytes, sizeof bytes, &read, &err));
    kvs_export_write(&read, again);
    CHECK(memcmp(bytes, again, sizeof bytes) == 0);
    CHECK(read.generation == made.generation && read.shape[7] == made.shape[7] && read.ndim == 3);
    CHECK(strcmp(read.device, made.device) == 0 && memcmp(read.handle, made.handle, sizeof read.handle) == 0);
  }
  for (size_t i = 0; i < sizeof bytes; i++) { /* no byte of it may change */
    bytes[i] ^= (unsigned char)(1u << (i % 8));
    CHECK(kvs_export_read(bytes, sizeof bytes, &read, &why) == KVS_INVALID, "byte %zu", i);
    bytes[i] ^= (unsigned char)(1u << (i % 8));
  }
  for (size_t nbytes = 0; nbytes < sizeof bytes; nbytes++)
    CHECK(kvs_export_read(bytes, nbytes, &read, &why) == KVS_INVALID);
}

static void refuse_numbers(struct kvs_export made) {
  unsigned char bytes[KVS_EXPORT_NBYTES];
  struct kvs_export read;
  struct kvs_error why;
  kvs_export_write(&made, bytes);
  CHECK(kvs_export_read(bytes, sizeof bytes, &read, &why) == KVS_INVALID);
}

/* With the right sum: whoever wrote it, nothing may lead out of the allocation or of a text. */
static void test_numbers_that_cannot_be(void) {
  struct kvs_export made = some_export();
  made.nbytes = 0;
  refuse_numbers(made);
  made.nbytes = UINT64_MAX;
  refuse_numbers(made);
  made.offset = made.allocation_nbytes;
  made.nbytes = 1;
  refuse_numbers(made);
  made = some_export();
  made.ndim = KVS_EXPORT_DIMS + 1;
  refuse_numbers(made);
  made = some_export();
  memset(made.dtype, 'x', sizeof made.dtype);
  refuse_numbers(made);
  made = some_export();
  memset(made.socket, 'x', sizeof made.socket);
  refuse_numbers(made);
  made = some_export();
  made.kind = (enum kvs_export_kind)99;
  refuse_numbers(made);
}

/* -- recordings ------------------------------------------------------------------------------------------------ */

static void test_recordings(void) {
  struct kvs_host_words *words = NULL;
  OK(kvs_host_words_new(&words, &err));
  CHECK(kvs_host_words_latest(words) == 0);
  for (uint64_t i = 1; i <= 64; i++) CHECK(kvs_host_words_begin(words) == i);
  CHECK(kvs_host_words_begin(words) == 0, "no place");
  kvs_host_words_end(words, 2);
  CHECK(kvs_host_words_ended(words, 2) && !kvs_host_words_ended(words, 1));
  CHECK(kvs_host_words_begin(words) == 0, "the first has the next place");
  kvs_host_words_end(words, 1);
  CHECK(kvs_host_words_begin(words) == 65 && kvs_host_words_begin(words) == 66);
  CHECK(kvs_host_words_ended(words, 1) == false || kvs_host_words_latest(words) == 66);
  CHECK(!kvs_host_words_ended(words, 65) && !kvs_host_words_abandoned(words, 65));
  kvs_host_words_unref(words);
}

/* A child records and dies, or records and reaches. */
static void test_recordings_of_a_child(void) {
  struct kvs_host_words *words = NULL;
  OK(kvs_host_words_new(&words, &err));
  pid_t child = fork();
  if (child == 0) {
    kvs_host_words_begin(words);
    kvs_host_words_begin(words);
    kvs_host_words_end(words, 1);
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(kvs_host_words_latest(words) == 2 && kvs_host_words_ended(words, 1) && !kvs_host_words_ended(words, 2));
  CHECK(kvs_host_words_abandoned(words, 2));
  kvs_host_words_unref(words);
}

/* -- handles --------------------------------------------------------------------------------------------------- */

static int open_in_child(const struct kvs_handle *handle, uint64_t nbytes) {
  struct kvs_device *device = NULL;
  struct kvs_error err;
  uint64_t ptr = 0;
  if (kvs_device_host_open(0, 0, &device, &err)) return 1;
  if (kvs_dev_memory_open(device, handle, nbytes + 1, &ptr, &err) != KVS_REFUSED) return 2;
  if (kvs_dev_memory_open(device, handle, nbytes, &ptr, &err)) return 3;
  unsigned char *bytes = (unsigned char *)(uintptr_t)ptr;
  for (uint64_t i = 0; i < nbytes; i++)
    if (bytes[i] != (unsigned char)(i * 7)) return 4;
  bytes[0] = 99;
  if (kvs_dev_free(device, ptr, &err) != KVS_REFUSED) return 5;
  if (kvs_dev_memory_close(device, ptr, &err)) return 6;
  if (kvs_dev_memory_close(device, ptr, &err) != KVS_REFUSED) return 7;
  kvs_dev_close(device);
  return 0;
}

static void test_handles(void) {
  enum { NBYTES = 10000 };
  struct kvs_device *device = open_device(0);
  struct kvs_handle handle;
  struct kvs_error why;
  uint64_t ptr = 0, elsewhere = 0;
  OK(kvs_dev_alloc(device, NBYTES, &ptr, &err));
  unsigned char *bytes = (unsigned char *)(uintptr_t)ptr;
  for (int i = 0; i < NBYTES; i++) bytes[i] = (unsigned char)(i * 7);
  OK(kvs_dev_memory_share(device, ptr + 5000, &handle, &err));
  CHECK(kvs_dev_memory_open(device, &handle, NBYTES, &elsewhere, &why) == KVS_REFUSED, "in its own process");
  CHECK(kvs_dev_memory_close(device, ptr, &why) == KVS_REFUSED, "it was not opened");
  pid_t child = fork();
  if (child == 0) _exit(open_in_child(&handle, NBYTES));
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0, "the child ended with %d", WEXITSTATUS(status));
  CHECK(bytes[0] == 99);
  OK(kvs_dev_free(device, ptr, &err));
  CHECK(kvs_dev_memory_share(device, ptr, &handle, &why) != KVS_OK);
  OK(kvs_dev_host_alloc(device, 100, &ptr, &err));
  CHECK(kvs_dev_memory_share(device, ptr, &handle, &why) == KVS_REFUSED, "host memory");
  kvs_dev_close(device);
}

/* -- chunks ---------------------------------------------------------------------------------------------------- */

static void test_chunks(void) {
  struct kvs_device *device = open_device(0), *other = NULL;
  struct kvs_error why;
  struct kvs_region region;
  uint64_t granule = 0, ptr = 0, there = 0, base = 0, nbytes = 0;
  int fd = -1;
  OK(kvs_device_host_open(1, 0, &other, &err));
  OK(kvs_dev_chunk_granularity(device, &granule, &err));
  CHECK(kvs_dev_range_reserve(device, granule - 1, &ptr, &why) == KVS_REFUSED);
  OK(kvs_dev_range_reserve(device, 4 * granule, &ptr, &err));
  CHECK(kvs_dev_chunk_map(device, ptr, 5 * granule, -1, &why) == KVS_REFUSED, "too long");
  CHECK(kvs_dev_chunk_map(device, ptr + 1, granule, -1, &why) == KVS_REFUSED, "between granules");
  OK(kvs_dev_chunk_map(device, ptr, 3 * granule, -1, &err));
  CHECK(kvs_dev_chunk_map(device, ptr + granule, granule, -1, &why) == KVS_REFUSED, "there is one");
  OK(kvs_dev_chunk_map(device, ptr + 3 * granule, granule, -1, &err));
  memset((void *)(uintptr_t)ptr, 5, 4 * granule);
  OK(kvs_dev_chunk_query(device, ptr + 3 * granule + 9, &base, &nbytes, &err));
  CHECK(base == ptr + 3 * granule && nbytes == granule);
  OK(kvs_dev_pointer_query(device, ptr + granule, &region, &err));
  CHECK(region.base == ptr && region.nbytes == 4 * granule && region.memory == KVS_MEMORY_DEVICE);
  OK(kvs_dev_chunk_share(device, ptr + 1, &fd, &err));
  OK(kvs_dev_range_reserve(other, 4 * granule, &there, &err));
  CHECK(kvs_dev_chunk_map(other, there, granule, fd, &why) == KVS_REFUSED, "it is longer");
  OK(kvs_dev_chunk_map(other, there, 3 * granule, fd, &err));
  close(fd);
  ((unsigned char *)(uintptr_t)there)[7] = 6;
  CHECK(((unsigned char *)(uintptr_t)ptr)[7] == 6 && ((unsigned char *)(uintptr_t)there)[8] == 5);
  CHECK(kvs_dev_range_free(device, ptr, 4 * granule, &why) == KVS_REFUSED, "chunks are mapped in it");
  CHECK(kvs_dev_free(device, ptr, &why) == KVS_REFUSED);
  CHECK(kvs_dev_memory_close(device, ptr, &why) == KVS_REFUSED);
  CHECK(kvs_dev_chunk_unmap(device, ptr, granule, &why) == KVS_REFUSED, "a part of one");
  OK(kvs_dev_chunk_unmap(device, ptr, 3 * granule, &err));
  CHECK(kvs_dev_chunk_query(device, ptr, &base, &nbytes, &why) == KVS_REFUSED);
  OK(kvs_dev_chunk_unmap(device, ptr + 3 * granule, granule, &err));
  OK(kvs_dev_range_free(device, ptr, 4 * granule, &err));
  CHECK(((unsigned char *)(uintptr_t)there)[7] == 6, "who has it open keeps it");
  kvs_dev_close(device);
  kvs_dev_close(other); /* with a chunk mapped */
}

/* -- two devices ----------------------------------------------------------------------------------------------- */

enum { ROUNDS = 200, THREADS = 4 };

struct player {
  struct kvs_device *devices[2];
  unsigned char *words[2];
  int number;
};

/* What the threads check: the counters of the others are not for several threads. */
#define MUST(call)                                                                                                     \
  do {                                                                                                                 \
    if (call) printf("%s:%d: %s\n", __FILE__, __LINE__, #call), exit(1);                                               \
  } while (0)

/* A word goes to and fro between two devices, each copy after the other's event. */
static void *play(void *arg) {
  const struct player *player = arg;
  kvs_stream streams[2];
  kvs_event events[2];
  struct kvs_error err;
  uint64_t words[2] = {address(player->words[0] + 64 * player->number),
                       address(player->words[1] + 64 * player->number)};
  for (int i = 0; i < 2; i++) {
    MUST(kvs_dev_stream_create(player->devices[i], 0, &streams[i], &err));
    MUST(kvs_dev_event_create(player->devices[i], false, &events[i], &err));
  }
  for (uint32_t round = 1; round <= ROUNDS; round++) {
    MUST(kvs_dev_fill(player->devices[0], words[0], round, 1, streams[0], &err));
    MUST(kvs_dev_event_record(player->devices[0], events[0], streams[0], &err));
    MUST(kvs_dev_stream_wait_foreign(player->devices[1], streams[1], player->devices[0], events[0], &err));
    MUST(kvs_dev_copy(player->devices[1], words[1], words[0], 4, streams[1], &err));
    MUST(kvs_dev_event_record(player->devices[1], events[1], streams[1], &err));
    MUST(kvs_dev_stream_wait_foreign(player->devices[0], streams[0], player->devices[1], events[1], &err));
    MUST(kvs_dev_fill(player->devices[0], words[0], 0, 1, streams[0], &err));
    if (round % 50) continue;
    MUST(kvs_dev_synchronize(player->devices[1], &err));
    uint32_t word;
    memcpy(&word, (const void *)(uintptr_t)words[1], sizeof word);
    MUST(word != round);
  }
  return NULL;
}

static void test_two_devices(void) {
  struct player players[THREADS] = {0};
  pthread_t threads[THREADS];
  struct kvs_region region;
  bool direct = false;
  struct kvs_device *devices[2] = {open_device(0), NULL};
  OK(kvs_device_host_open(1, 0, &devices[1], &err));
  unsigned char *words[2] = {make_memory(devices[0], 64 * THREADS), make_memory(devices[1], 64 * THREADS)};
  OK(kvs_dev_pointer_query(devices[0], address(words[1]), &region, &err));
  CHECK(region.memory == KVS_MEMORY_DEVICE && region.device == 1 && region.base == address(words[1]));
  OK(kvs_dev_peer(devices[0], &region, &direct, &err));
  CHECK(direct);
  OK(kvs_host_set_peer(devices[0], 1, false, &err));
  OK(kvs_dev_peer(devices[0], &region, &direct, &err));
  CHECK(!direct);
  for (int i = 0; i < THREADS; i++) {
    players[i] = (struct player){.devices = {devices[0], devices[1]}, .words = {words[0], words[1]}, .number = i};
    CHECK(pthread_create(&threads[i], NULL, play, &players[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  kvs_dev_close(devices[0]);
  kvs_dev_close(devices[1]);
}

/* A lost device lets those go who wait for it. */
static void test_a_lost_device(void) {
  struct kvs_device *devices[2] = {open_device(0), NULL};
  struct kvs_error why;
  kvs_event event = 0;
  uint32_t flag = 0;
  OK(kvs_device_host_open(1, 0, &devices[1], &err));
  kvs_stream first = make_stream(devices[0]), second = make_stream(devices[1]);
  OK(kvs_dev_event_create(devices[0], false, &event, &err));
  OK(kvs_dev_wait32(devices[0], address(&flag), 1, first, &err));
  OK(kvs_dev_event_record(devices[0], event, first, &err));
  OK(kvs_dev_stream_wait_foreign(devices[1], second, devices[0], event, &err));
  CHECK(kvs_dev_stream_query(devices[1], second, &why) == KVS_NOT_READY);
  struct kvs_piece nowhere = {NOWHERE, NOWHERE, 64};
  struct kvs_copy_params params = {.units = {.pieces = address(&nowhere)}, .count = 1};
  struct kvs_launch launch = {KVS_KERNEL_COPY, 1, 32, 0, &params, sizeof params};
  OK(kvs_dev_launch(devices[0], &launch, make_stream(devices[0]), &err));
  OK(kvs_dev_synchronize(devices[1], &err));
  CHECK(kvs_dev_synchronize(devices[0], &why) == KVS_LOST);
  kvs_dev_close(devices[0]);
  kvs_dev_close(devices[1]);
}

/* -- messages -------------------------------------------------------------------------------------------------- */

/* What a side sent before it ended is read, also if that side had not read all that was sent to it. */
static void test_messages_before_an_end(bool unread) {
  static struct kvs_share_message sent = {.kind = KVS_SHARE_REPORT, .count = 2, .ids = {3, 4}}, got;
  int pair[2];
  CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
  CHECK(kvs_share_receive(pair[0], &got) == KVS_SHARE_NONE);
  if (unread) CHECK(kvs_share_send(pair[0], &sent));
  CHECK(kvs_share_send(pair[1], &sent));
  close(pair[1]);
  CHECK(kvs_share_receive(pair[0], &got) == KVS_SHARE_GOT && got.kind == KVS_SHARE_REPORT && got.ids[1] == 4);
  CHECK(kvs_share_receive(pair[0], &got) == KVS_SHARE_ENDED);
  CHECK(!kvs_share_send(pair[0], &sent));
  close(pair[0]);
}

int main(void) {
  test_messages_before_an_end(false);
  test_messages_before_an_end(true);
  test_the_form();
  test_numbers_that_cannot_be();
  test_recordings();
  test_recordings_of_a_child();
  test_handles();
  test_chunks();
  test_two_devices();
  test_a_lost_device();
  return check_close();
}
