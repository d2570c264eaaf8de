/* The relay on a host device, its copy side driven by hand as kernels.h says: run to its end, given up by the host,
 * given up for want of patience, and with addresses that are not there; threaded, and on deterministic devices over
 * many seeds. What must come of it is worked out by plain loops over the same places. */
#include <sys/mman.h>
#include <unistd.h>

#include "host_device.h"

/* -- the relay: scenes ----------------------------------------------------------------------------------------- */

enum { MAX_ROWS = 6, MAX_PLACES = 160, MAX_SEGMENTS = 4 * MAX_PLACES, COPY_STREAMS = 2 };

/* Bytes that move between [scattered, +nbytes) of one buffer and [image, +nbytes) of the other. */
struct place {
  size_t scattered, image, nbytes;
};

/* Places [first, end), which lie in [start, start + nbytes) of the image. */
struct filling {
  size_t first, end, start, nbytes;
};

struct buffer {
  unsigned char *bytes, *wanted; /* wanted: what it shall hold in the end */
  size_t nbytes;
};

struct scene {
  struct kvs_device *device;
  uint64_t random, seed;
  bool grid;
  struct kvs_relay_params params;
  unsigned ctas, threads;
  uint32_t warps;
  size_t nplaces, nfillings, nsegments;
  struct place places[MAX_PLACES];
  struct filling fillings[MAX_PLACES];
  struct kvs_segment segments[MAX_SEGMENTS];
  struct buffer scattered, image, ring;
  uint32_t *flags, *abort_word;
  kvs_stream kernel, copies[COPY_STREAMS];
};

static size_t below(struct scene *s, size_t limit) { return (size_t)check_below(&s->random, limit); }

static struct buffer make_buffer(struct scene *s, size_t nbytes) {
  struct buffer buffer = {make_memory(s->device, nbytes), malloc(nbytes), nbytes};
  fill_random(&s->random, buffer.bytes, nbytes);
  memcpy(buffer.wanted, buffer.bytes, nbytes);
  return buffer;
}

/* Where the fillings end: where the next place would not fit into the slot, and here and there before. */
static void cut_fillings(struct scene *s) {
  for (size_t i = 0; i < s->nplaces; i++) {
    const struct place *place = &s->places[i];
    struct filling *last = s->nfillings ? &s->fillings[s->nfillings - 1] : NULL;
    if (!last || place->image + place->nbytes - last->start > s->params.slot_nbytes || below(s, 12) == 0) {
      last = &s->fillings[s->nfillings++];
      *last = (struct filling){.first = i, .start = place->image};
    }
    last->end = i + 1;
    last->nbytes = place->image + place->nbytes - last->start;
  }
}

static void add_segment(struct scene *s, struct kvs_segment segment) { s->segments[s->nsegments++] = segment; }

/* -- as a list */

static void place_list(struct scene *s) {
  uint32_t order[MAX_PLACES];
  size_t at = MARGIN;
  s->nplaces = 1 + below(s, 60);
  shuffle(&s->random, order, s->nplaces);
  for (size_t i = 0; i < s->nplaces; i++) {
    struct place *place = &s->places[order[i]];
    place->nbytes = below(s, 20) ? below(s, 300) : below(s, 5000);
    place->scattered = at;
    at += place->nbytes + below(s, 20);
  }
  s->scattered.nbytes = at + MARGIN;
  at = MARGIN;
  for (size_t i = 0; i < s->nplaces; i++) {
    s->places[i].image = at;
    at += s->places[i].nbytes + (below(s, 2) ? below(s, 16) : 0);
    if (s->places[i].nbytes > s->params.slot_nbytes) s->params.slot_nbytes = s->places[i].nbytes;
  }
  s->image.nbytes = at + MARGIN;
}

static void describe_list(struct scene *s) {
  struct kvs_piece pieces[MAX_PLACES];
  uint64_t packed[MAX_PLACES];
  for (size_t f = 0; f < s->nfillings; f++) {
    const struct filling *filling = &s->fillings[f];
    size_t half = filling->first + below(s, filling->end - filling->first + 1); /* one part may be empty */
    add_segment(s, (struct kvs_segment){.first = filling->first, .count = half - filling->first, .base = 12345});
    add_segment(s, (struct kvs_segment){.first = half, .count = filling->end - half, .last = 1});
    for (size_t i = filling->first; i < filling->end; i++) {
      uint64_t there = address(s->scattered.bytes) + s->places[i].scattered;
      packed[i] = s->places[i].image - filling->start;
      pieces[i] = s->params.gather ? (struct kvs_piece){NOWHERE, there, s->places[i].nbytes}
                                   : (struct kvs_piece){there, NOWHERE, s->places[i].nbytes};
    }
  }
  s->params.units.pieces = make_table(s->device, pieces, s->nplaces * sizeof *pieces);
  s->params.packed = make_table(s->device, packed, s->nplaces * sizeof *packed);
}

/* -- as a grid */

struct shape {
  uint32_t nrows;
  size_t nblocks;
  struct kvs_row rows[MAX_ROWS]; /* `src`: offset in the scattered buffer, src_stride: of both sides */
  uint32_t ids[MAX_PLACES];
};

static void place_grid(struct scene *s, struct shape *shape) {
  size_t at = MARGIN, packed = 0, nslots;
  memset(shape, 0, sizeof *shape);
  shape->nrows = 1 + (uint32_t)below(s, MAX_ROWS);
  shape->nblocks = 1 + below(s, 20);
  nslots = shape->nblocks + below(s, 4);
  shuffle(&s->random, shape->ids, nslots);
  s->params.units.piece = 1 + (uint32_t)below(s, 150);
  s->params.units.nrows = shape->nrows;
  for (uint32_t r = 0; r < shape->nrows; r++) {
    struct kvs_row *row = &shape->rows[r];
    row->nbytes = below(s, 400);
    row->src = at;
    row->src_stride = row->nbytes + below(s, 30);
    row->packed = packed;
    at += nslots * row->src_stride;
    packed += row->nbytes + (below(s, 2) ? below(s, 16) : 0);
    uint32_t parts = (uint32_t)(row->nbytes / s->params.units.piece) + 1;
    if (parts > s->params.units.parts) s->params.units.parts = parts;
    if (row->nbytes > s->params.slot_nbytes) s->params.slot_nbytes = row->nbytes;
  }
  packed += below(s, 2) ? below(s, 40) : 0;
  s->scattered.nbytes = at + MARGIN;
  s->image.nbytes = 2 * MARGIN + shape->nblocks * packed;
  for (size_t b = 0; b < shape->nblocks; b++)
    for (uint32_t r = 0; r < shape->nrows; r++) {
      struct kvs_row *row = &shape->rows[r];
      row->packed_stride = packed;
      s->places[s->nplaces++] =
          (struct place){row->src + shape->ids[b] * row->src_stride, MARGIN + b * packed + row->packed, row->nbytes};
    }
}

/* Rows [row, row + nrows) of `count` blocks. Where they do not begin with the first row, the first block begins before
 * the slot does: `base` is below 0, in the arithmetic of addresses. */
static void add_rows(struct scene *s, const struct shape *shape, const struct filling *filling, size_t first,
                     size_t count, size_t row, size_t nrows) {
  if (count == 0) return;
  add_segment(s, (struct kvs_segment){.first = first,
                                      .count = count,
                                      .base = MARGIN + first * shape->rows[0].packed_stride - filling->start,
                                      .first_row = (uint32_t)row,
                                      .nrows = (uint32_t)nrows});
}

static void describe_grid(struct scene *s, struct shape *shape) {
  struct kvs_pair pairs[MAX_PLACES];
  size_t nrows = shape->nrows;
  for (size_t f = 0; f < s->nfillings; f++) {
    const struct filling *filling = &s->fillings[f];
    size_t block = filling->first / nrows, row = filling->first % nrows;
    size_t last = filling->end / nrows, rest = filling->end % nrows;
    if (block == last) {
      add_rows(s, shape, filling, block, 1, row, rest - row);
    } else {
      if (row) add_rows(s, shape, filling, block++, 1, row, nrows - row);
      size_t half = below(s, last - block + 1);
      add_rows(s, shape, filling, block, half, 0, nrows);
      add_rows(s, shape, filling, block + half, last - block - half, 0, nrows);
      if (rest) add_rows(s, shape, filling, last, 1, 0, rest);
    }
    s->segments[s->nsegments - 1].last = 1;
  }
  for (uint32_t r = 0; r < shape->nrows; r++) {
    struct kvs_row *row = &shape->rows[r];
    uint64_t there = address(s->scattered.bytes) + row->src, stride = row->src_stride;
    row->src = s->params.gather ? there : NOWHERE;
    row->dst = s->params.gather ? NOWHERE : there;
    row->src_stride = s->params.gather ? stride : 1;
    row->dst_stride = s->params.gather ? 1 : stride;
  }
  for (size_t b = 0; b < shape->nblocks; b++)
    pairs[b] =
        s->params.gather ? (struct kvs_pair){shape->ids[b], 1u << 31} : (struct kvs_pair){1u << 31, shape->ids[b]};
  s->params.units.rows = make_table(s->device, shape->rows, nrows * sizeof *shape->rows);
  s->params.units.pairs = make_table(s->device, pairs, shape->nblocks * sizeof *pairs);
}

/* -- in all */

static unsigned char *slot_wanted(const struct scene *s, size_t f) {
  return s->ring.wanted + f % s->params.nslots * s->params.slot_nbytes;
}

/* What the kernel does with filling f, on the wanted bytes. */
static void move_wanted(struct scene *s, size_t f) {
  const struct filling *filling = &s->fillings[f];
  for (size_t i = filling->first; i < filling->end; i++) {
    const struct place *place = &s->places[i];
    unsigned char *there = s->scattered.wanted + place->scattered;
    unsigned char *packed = slot_wanted(s, f) + place->image - filling->start;
    memcpy(s->params.gather ? packed : there, s->params.gather ? there : packed, place->nbytes);
  }
}

static void relay_wanted(struct scene *s) {
  for (size_t f = 0; f < s->nfillings; f++) {
    const struct filling *filling = &s->fillings[f];
    if (!s->params.gather) memcpy(slot_wanted(s, f), s->image.wanted + filling->start, filling->nbytes);
    move_wanted(s, f);
    if (s->params.gather) memcpy(s->image.wanted + filling->start, slot_wanted(s, f), filling->nbytes);
  }
}

/* `salt` tells scenes of one seed apart. nslots 0: any number. */
static struct scene *make_scene(uint64_t seed, uint64_t salt, uint32_t nslots) {
  struct scene *s = calloc(1, sizeof *s);
  struct shape shape;
  s->device = open_device(seed);
  s->seed = seed;
  s->random = (seed + 1) * 1000003 + salt;
  for (int i = 0; i < 4; i++) check_random(&s->random);
  s->params.gather = below(s, 2) != 0;
  s->grid = below(s, 2) != 0;
  s->params.nslots = nslots ? nslots : 1 + (uint32_t)below(s, KVS_RELAY_SLOTS);
  s->params.slot_nbytes = 1;
  s->params.patience_ns = (uint64_t)60 * 1000 * MS;
  s->params.chunk = 1024;
  s->ctas = 1 + (unsigned)below(s, 4);
  s->threads = 32 * (1 + (unsigned)below(s, 4));
  s->warps = s->ctas * s->threads / 32;
  if (s->grid)
    place_grid(s, &shape);
  else
    place_list(s);
  s->params.slot_nbytes += below(s, 1000);
  cut_fillings(s);
  s->scattered = make_buffer(s, s->scattered.nbytes);
  s->image = make_buffer(s, s->image.nbytes);
  s->ring = make_buffer(s, s->params.nslots * s->params.slot_nbytes);
  if (s->grid)
    describe_grid(s, &shape);
  else
    describe_list(s);
  s->flags = memset(make_memory(s->device, 4 * KVS_RELAY_FLAGS), 0, 4 * KVS_RELAY_FLAGS);
  s->abort_word = memset(make_memory(s->device, 4), 0, 4);
  s->params.segments = make_table(s->device, s->segments, s->nsegments * sizeof *s->segments);
  s->params.nsegments = (uint32_t)s->nsegments;
  s->params.ring = address(s->ring.bytes);
  s->params.flags = address(s->flags);
  s->params.abort_word = address(s->abort_word);
  s->kernel = make_stream(s->device);
  for (int i = 0; i < COPY_STREAMS; i++) s->copies[i] = make_stream(s->device);
  return s;
}

static void free_scene(struct scene *s) {
  kvs_dev_close(s->device);
  free(s->scattered.wanted);
  free(s->image.wanted);
  free(s->ring.wanted);
  free(s);
}

/* -- the relay: both sides ------------------------------------------------------------------------------------- */

static uint64_t flag_address(const struct scene *s, bool filled, size_t slot) {
  return address(s->flags + (filled ? 0 : KVS_RELAY_SLOTS) + slot);
}

static void launch_relay(const struct scene *s) {
  struct kvs_launch launch = {KVS_KERNEL_RELAY, s->ctas, s->threads, 0, &s->params, sizeof s->params};
  OK(kvs_dev_launch(s->device, &launch, s->kernel, &err));
}

/* All fillings of one slot are copied by one stream. */
static kvs_stream copy_stream(const struct scene *s, size_t f) {
  return s->copies[f % s->params.nslots % COPY_STREAMS];
}

static void queue_filling(const struct scene *s, size_t f) {
  const struct filling *filling = &s->fillings[f];
  size_t slot = f % s->params.nslots;
  uint32_t k = (uint32_t)(f / s->params.nslots) + 1;
  uint64_t packed = s->params.ring + slot * s->params.slot_nbytes, image = address(s->image.bytes) + filling->start;
  kvs_stream stream = copy_stream(s, f);
  bool gather = s->params.gather;
  OK(kvs_dev_wait32(s->device, flag_address(s, gather, slot), (gather ? k : k - 1) * s->warps, stream, &err));
  OK(kvs_dev_copy(s->device, gather ? image : packed, gather ? packed : image, filling->nbytes, stream, &err));
  OK(kvs_dev_write32(s->device, flag_address(s, !gather, slot), k, stream, &err));
}

/* After both sides, if the relay was given up: the same copies, without the ring. */
static void queue_again(struct scene *s) {
  struct kvs_piece pieces[MAX_PLACES];
  struct kvs_copy_params params = {.count = s->nplaces, .only_if = address(s->flags + 2 * KVS_RELAY_SLOTS)};
  kvs_event event = 0;
  for (size_t i = 0; i < s->nplaces; i++) {
    uint64_t there = address(s->scattered.bytes) + s->places[i].scattered;
    uint64_t image = address(s->image.bytes) + s->places[i].image;
    pieces[i] =
        (struct kvs_piece){s->params.gather ? image : there, s->params.gather ? there : image, s->places[i].nbytes};
  }
  params.units.pieces = make_table(s->device, pieces, s->nplaces * sizeof *pieces);
  OK(kvs_dev_event_create(s->device, false, &event, &err));
  for (int i = 0; i < COPY_STREAMS; i++) {
    OK(kvs_dev_event_record(s->device, event, s->copies[i], &err));
    OK(kvs_dev_stream_wait(s->device, s->kernel, event, &err));
  }
  launch_copy(s->device, KVS_KERNEL_COPY, &params, 3, s->kernel);
}

static bool aborted(const struct scene *s) { return load32(s->flags + 2 * KVS_RELAY_SLOTS) != 0; }

static bool holds(const struct buffer *buffer) { return memcmp(buffer->bytes, buffer->wanted, buffer->nbytes) == 0; }

/* It ran to its end: every byte, of the ring and of gaps too, and every flag. */
static void check_whole(const struct scene *s) {
  bool flags_right = true;
  CHECK(holds(&s->scattered), "seed %d: scattered", (int)s->seed);
  CHECK(holds(&s->image), "seed %d: image", (int)s->seed);
  CHECK(holds(&s->ring), "seed %d: ring", (int)s->seed);
  CHECK(!aborted(s) && load32(s->abort_word) == 0, "seed %d", (int)s->seed);
  for (size_t slot = 0; slot < KVS_RELAY_SLOTS; slot++) {
    uint32_t uses = 0;
    for (size_t f = slot; slot < s->params.nslots && f < s->nfillings; f += s->params.nslots) uses++;
    uint32_t kernels = uses * s->warps, filled = load32(s->flags + slot), emptied = load32(s->flags + 16 + slot);
    flags_right &= (s->params.gather ? filled : emptied) == kernels && (s->params.gather ? emptied : filled) == uses;
  }
  CHECK(flags_right, "seed %d", (int)s->seed);
}

/* It was given up, with nothing in work, and the copies were made again: every byte that is to be moved. What lies
 * between them in the image may have come from the ring. */
static void check_given_up(const struct scene *s) {
  bool released = true, right = true;
  CHECK(aborted(s) && load32(s->abort_word) == 1, "seed %d", (int)s->seed);
  for (size_t slot = 0; slot < KVS_RELAY_SLOTS;
       slot++) { /* those that the kernel writes; the others may be written on */
    uint32_t word = load32(s->flags + (s->params.gather ? 0 : KVS_RELAY_SLOTS) + slot);
    released &= word == KVS_RELAY_RELEASED;
  }
  CHECK(released, "seed %d", (int)s->seed);
  CHECK(holds(&s->scattered), "seed %d: scattered", (int)s->seed);
  for (size_t i = 0; i < s->nplaces; i++) {
    size_t at = s->places[i].image;
    right &= memcmp(s->image.bytes + at, s->image.wanted + at, s->places[i].nbytes) == 0;
  }
  const struct filling *last = &s->fillings[s->nfillings - 1];
  size_t end = last->start + last->nbytes;
  right &= memcmp(s->image.bytes, s->image.wanted, s->fillings[0].start) == 0;
  right &= memcmp(s->image.bytes + end, s->image.wanted + end, s->image.nbytes - end) == 0;
  CHECK(right, "seed %d: image", (int)s->seed);
}

/* -- the relay: to its end ------------------------------------------------------------------------------------- */

static uint64_t run_whole(uint64_t seed, uint64_t salt) {
  struct scene *s = make_scene(seed, salt, 0);
  uint64_t trace;
  relay_wanted(s);
  launch_relay(s);
  for (size_t f = 0; f < s->nfillings; f++) {
    if (below(s, 10) == 0) delay(s->device, 100000, copy_stream(s, f));
    queue_filling(s, f);
  }
  queue_again(s); /* does nothing */
  OK(kvs_dev_synchronize(s->device, &err));
  check_whole(s);
  trace = kvs_host_trace(s->device);
  free_scene(s);
  return trace;
}

static void test_relay(void) {
  for (uint64_t salt = 0; salt < 60; salt++) run_whole(0, salt);
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    uint64_t trace = run_whole(seed, 0);
    if (seed <= 20) CHECK(run_whole(seed, 0) == trace, "seed %d is no replay", (int)seed);
  }
}

/* No segments, no filling: it ends at once. */
static void test_nothing_to_relay(uint64_t seed) {
  struct scene *s = make_scene(seed, 3, 0);
  s->params.nsegments = 0;
  launch_relay(s);
  OK(kvs_dev_synchronize(s->device, &err));
  CHECK(holds(&s->scattered) && holds(&s->ring) && !aborted(s), "seed %d", (int)seed);
  free_scene(s);
}

/* -- the relay: given up --------------------------------------------------------------------------------------- */

/* The host said so before it began: nothing is moved, and who waits is released. */
static void test_told_before(uint64_t seed) {
  struct scene *s = make_scene(seed, 11, 0);
  unsigned char *scattered = malloc(s->scattered.nbytes), *ring = malloc(s->ring.nbytes);
  memcpy(scattered, s->scattered.bytes, s->scattered.nbytes);
  memcpy(ring, s->ring.bytes, s->ring.nbytes);
  *s->abort_word = 1;
  launch_relay(s);
  OK(kvs_dev_synchronize(s->device, &err));
  CHECK(memcmp(scattered, s->scattered.bytes, s->scattered.nbytes) == 0, "seed %d", (int)seed);
  CHECK(memcmp(ring, s->ring.bytes, s->ring.nbytes) == 0, "seed %d", (int)seed);
  for (int i = 0; i < 2 * KVS_RELAY_SLOTS; i++) CHECK(s->flags[i] == KVS_RELAY_RELEASED, "flag %d", i);
  relay_wanted(s);
  for (size_t f = 0; f < s->nfillings; f++) queue_filling(s, f);
  queue_again(s);
  OK(kvs_dev_synchronize(s->device, &err));
  check_given_up(s);
  free(scattered);
  free(ring);
  free_scene(s);
}

/* The copy side stops at a gate that the host holds, before its filling `m`. The host waits until the relay can do no
 * more without it, gives up, and opens the gate. True if there was something to give up. */
static bool told_at_gate(uint64_t salt) {
  struct scene *s = make_scene(0, 1000 + salt, 1 + (uint32_t)(salt % 3));
  size_t m = below(s, s->nfillings);
  size_t blocked = m + (s->params.gather ? s->params.nslots : 0); /* the first filling that cannot be */
  bool some = blocked < s->nfillings;
  uint32_t *gate = memset(make_memory(s->device, 4), 0, 4);
  relay_wanted(s);
  launch_relay(s);
  for (size_t f = 0; f < s->nfillings; f++) {
    if (f == m)
      for (int i = 0; i < COPY_STREAMS; i++) OK(kvs_dev_wait32(s->device, address(gate), 1, s->copies[i], &err));
    queue_filling(s, f);
  }
  queue_again(s);
  if (some && blocked > 0) { /* the flag of the last filling that can be */
    size_t last = blocked - 1;
    const uint32_t *flag = (const uint32_t *)(uintptr_t)flag_address(s, s->params.gather, last % s->params.nslots);
    while (load32(flag) < (last / s->params.nslots + 1) * s->warps) usleep(50);
  }
  if (some) {
    __atomic_store_n(s->abort_word, 1, __ATOMIC_RELEASE);
    while (!aborted(s)) usleep(50);
  }
  __atomic_store_n(gate, 1, __ATOMIC_RELEASE);
  OK(kvs_dev_synchronize(s->device, &err));
  if (some)
    check_given_up(s);
  else
    check_whole(s);
  free_scene(s);
  return some;
}

/* The host gives up at any moment, and the transfer is whole all the same. True if the relay noticed. */
static bool told_any_time(uint64_t seed, uint64_t salt) {
  struct scene *s = make_scene(seed, 2000 + salt, 0);
  size_t when = below(s, s->nfillings + 1);
  relay_wanted(s);
  launch_relay(s);
  for (size_t f = 0; f < s->nfillings; f++) {
    if (f == when) __atomic_store_n(s->abort_word, 1, __ATOMIC_RELEASE);
    queue_filling(s, f);
  }
  queue_again(s);
  __atomic_store_n(s->abort_word, 1, __ATOMIC_RELEASE);
  OK(kvs_dev_synchronize(s->device, &err));
  bool noticed = aborted(s);
  if (noticed) {
    check_given_up(s);
  } else {
    __atomic_store_n(s->abort_word, 0, __ATOMIC_RELEASE);
    check_whole(s);
  }
  free_scene(s);
  return noticed;
}

/* The host gives up while a filling is made: nobody is released before that one is whole. Where the host is too early
 * or too late nothing is shown, and nothing fails. */
static void test_told_in_work(void) {
  enum { NBYTES = 24 << 20 };
  struct kvs_device *device = open_device(0);
  unsigned char *from = make_memory(device, NBYTES), *ring = make_memory(device, NBYTES);
  unsigned char *to = make_memory(device, NBYTES);
  uint32_t *flags = memset(make_memory(device, 4 * KVS_RELAY_FLAGS), 0, 4 * KVS_RELAY_FLAGS), word = 0;
  uint64_t packed[2] = {0, 0};
  struct kvs_piece pieces[2] = {{0, address(from), NBYTES}, {0, address(from), NBYTES}};
  struct kvs_segment segments[2] = {{.first = 0, .count = 1, .last = 1}, {.first = 1, .count = 1, .last = 1}};
  struct kvs_relay_params params = {.units = {.pieces = address(pieces)},
                                    .packed = address(packed),
                                    .segments = address(segments),
                                    .ring = address(ring),
                                    .slot_nbytes = NBYTES,
                                    .flags = address(flags),
                                    .abort_word = address(&word),
                                    .patience_ns = UINT64_MAX,
                                    .nsegments = 2,
                                    .nslots = 1,
                                    .gather = 1};
  struct kvs_launch launch = {KVS_KERNEL_RELAY, 2, 64, 0, &params, sizeof params};
  kvs_stream stream = make_stream(device);
  OK(kvs_dev_wait32(device, address(flags), 8, stream, &err)); /* two fillings by four warps */
  OK(kvs_dev_copy(device, address(to), address(ring), NBYTES, stream, &err));
  OK(kvs_dev_launch(device, &launch, make_stream(device), &err));
  usleep(3000);
  __atomic_store_n(&word, 1, __ATOMIC_RELEASE);
  OK(kvs_dev_synchronize(device, &err));
  CHECK(flags[0] == KVS_RELAY_RELEASED, "0x%x", (unsigned)flags[0]);
  CHECK(memcmp(to, ring, NBYTES) == 0, "copied before it was whole");
  kvs_dev_close(device);
}

static void test_told(void) {
  int noticed = 0, given_up = 0;
  for (uint64_t seed = 0; seed <= SEEDS; seed++) test_told_before(seed);
  for (uint64_t salt = 0; salt < 40; salt++) given_up += told_at_gate(salt);
  CHECK(given_up > 10 && given_up < 40, "%d of 40", given_up);
  for (uint64_t salt = 0; salt < 40; salt++) told_any_time(0, salt);
  for (uint64_t seed = 1; seed <= SEEDS; seed++) noticed += told_any_time(seed, 0);
  CHECK(noticed > SEEDS / 10 && noticed < SEEDS * 9 / 10, "%d of %d", noticed, (int)SEEDS);
}

/* The copy side never comes. Others wait for flags of the relay, and for the relay. */
static void never_comes(uint64_t seed, uint64_t salt) {
  struct scene *s = make_scene(seed, 3000 + salt, 1 + (uint32_t)(salt % 3));
  uint32_t *passed = memset(make_memory(s->device, 4), 0, 4);
  bool gather = s->params.gather, stuck = !gather || s->nfillings > s->params.nslots;
  uint64_t begin = now_ns();
  s->params.patience_ns = 3 * MS;
  launch_relay(s);
  for (size_t f = 0; gather && f < s->nfillings && f < s->params.nslots; f++) move_wanted(s, f);
  if (stuck) {
    uint32_t never = 1000 * s->warps;
    OK(kvs_dev_wait32(s->device, flag_address(s, gather, 0), never, s->copies[0], &err));
    OK(kvs_dev_wait32(s->device, flag_address(s, gather, KVS_RELAY_SLOTS - 1), never, s->copies[0], &err));
  }
  OK(kvs_dev_write32(s->device, address(passed), 1, s->copies[0], &err));
  OK(kvs_dev_synchronize(s->device, &err));
  CHECK(load32(passed) == 1 && aborted(s) == stuck && (load32(s->abort_word) == 1) == stuck, "seed %d", (int)seed);
  CHECK(!stuck || seed || now_ns() - begin >= 3 * MS, "too early");
  CHECK(holds(&s->scattered) && holds(&s->image) && holds(&s->ring), "seed %d", (int)seed);
  if (stuck)
    for (int i = 0; i < 2 * KVS_RELAY_SLOTS; i++) CHECK(s->flags[i] == KVS_RELAY_RELEASED, "flag %d", i);
  free_scene(s);
}

/* Patience begins anew with each filling: waits of less than it, of more than it in sum, and one of more. */
static void slow_copies(uint64_t seed, uint64_t patience_ns, uint64_t ns, bool long_enough) {
  struct scene *s;
  for (uint64_t salt = 4000; s = make_scene(seed, salt, 1), s->nfillings < 9; salt++) free_scene(s);
  relay_wanted(s);
  s->params.patience_ns = patience_ns;
  launch_relay(s);
  for (size_t f = 0; f < s->nfillings; f++) {
    delay(s->device, ns, s->copies[0]);
    queue_filling(s, f);
  }
  queue_again(s);
  OK(kvs_dev_synchronize(s->device, &err));
  if (long_enough)
    check_whole(s);
  else
    check_given_up(s);
  free_scene(s);
}

static void test_patience(void) {
  for (uint64_t salt = 0; salt < 20; salt++) never_comes(0, salt);
  for (uint64_t seed = 1; seed <= SEEDS; seed++) {
    never_comes(seed, seed);
    slow_copies(seed, 30 * MS, 20 * MS, true);
    slow_copies(seed, 20 * MS, 30 * MS, false);
  }
  slow_copies(0, 1000 * MS, 125 * MS, true);
  slow_copies(0, 5 * MS, 50 * MS, false);
}

/* On a deterministic device time does not run while somebody queues, whatever the patience. */
static void test_queuing_takes_no_time(void) {
  for (uint64_t seed = 1; seed <= SEEDS; seed++) slow_copies(seed, 2 * MS, 0, true);
}

/* -- the relay: what is not there ------------------------------------------------------------------------------ */

/* What is wrong with a relay: in lists and grids, in lists alone, in grids alone. */
#define BAD_RELAYS(X)                                                                                                  \
  X(flags, true, true, p->flags = NOWHERE)                                                                             \
  X(odd_flags, true, true, p->flags = p->ring + 1)                                                                     \
  X(flags_past_the_end, true, true, p->flags += 4)                                                                     \
  X(abort_word, true, true, p->abort_word = 0)                                                                         \
  X(odd_abort_word, true, true, p->abort_word = p->ring + 2)                                                           \
  X(constant_abort_word, true, true, p->abort_word = constant)                                                         \
  X(segments, true, true, p->segments = NOWHERE)                                                                       \
  X(segments_past_the_end, true, true, p->nsegments = UINT32_MAX)                                                      \
  X(no_slots, true, true, p->nslots = 0)                                                                               \
  X(too_many_slots, true, true, p->nslots = KVS_RELAY_SLOTS + 1)                                                       \
  X(ring, true, true, p->ring = NOWHERE)                                                                               \
  X(ring_past_the_end, true, true, p->ring += p->nslots * p->slot_nbytes)                                              \
  X(small_slots, true, true, p->slot_nbytes = largest - 1)                                                             \
  X(endless_segment, true, true, segment->count = UINT64_MAX)                                                          \
  X(long_segment, true, true, segment->count = 100000)                                                                 \
  X(far_segment, true, true, segment->first = UINT64_MAX - 5)                                                          \
  X(pieces, true, false, p->units.pieces = NOWHERE)                                                                    \
  X(packed, true, false, p->packed = NOWHERE)                                                                          \
  X(packed_past_the_slot, true, false, *packed = p->slot_nbytes)                                                       \
  X(packed_overflow, true, false, *packed = UINT64_MAX)                                                                \
  X(piece, true, false, (piece->src = NOWHERE, piece->dst = NOWHERE))                                                  \
  X(endless_piece, true, false, piece->nbytes = UINT64_MAX)                                                            \
  X(rows, false, true, p->units.rows = NOWHERE)                                                                        \
  X(no_pairs, false, true, p->units.pairs = 0)                                                                         \
  X(far_rows, false, true, segment->first_row = UINT32_MAX)                                                            \
  X(row, false, true, (row->src = NOWHERE, row->dst = NOWHERE))                                                        \
  X(row_before_the_slot, false, true, segment->base--)                                                                 \
  X(id, false, true, (pair->src = 1u << 30, pair->dst = 1u << 30))

static bool spoil_relay(struct scene *s, int which, const char **what, uint64_t constant) {
  struct kvs_relay_params *p = &s->params;
  struct kvs_segment *segment = (struct kvs_segment *)(uintptr_t)p->segments;
  struct kvs_piece *piece = (struct kvs_piece *)(uintptr_t)p->units.pieces;
  uint64_t *packed = (uint64_t *)(uintptr_t)p->packed;
  struct kvs_row *row = (struct kvs_row *)(uintptr_t)p->units.rows;
  struct kvs_pair *pair = (struct kvs_pair *)(uintptr_t)p->units.pairs;
  size_t largest = 0;
  int at = 0;
  for (size_t f = 0; f < s->nfillings; f++)
    for (size_t i = s->fillings[f].first; i < s->fillings[f].end; i++) {
      size_t end = s->places[i].image + s->places[i].nbytes - s->fillings[f].start;
      if (s->places[i].nbytes && end > largest) largest = end;
    }
#define X(name, in_lists, in_grids, spoil)                                                                             \
  if (which == at++) {                                                                                                 \
    *what = #name;                                                                                                     \
    if (!(s->grid ? (in_grids) : (in_lists))) return false;                                                            \
    (void)(spoil);                                                                                                     \
  }
  BAD_RELAYS(X)
#undef X
  return true;
}

/* A scene in which the first place matters, so that whatever is wrong with it does. */
static struct scene *make_plain_scene(uint64_t seed, uint64_t salt) {
  for (;;) {
    struct scene *s = make_scene(seed, salt++, 0);
    const struct kvs_segment *segment = (const struct kvs_segment *)(uintptr_t)s->params.segments;
    if (s->places[0].nbytes && s->places[s->nplaces - 1].nbytes && segment->count) return s;
    free_scene(s);
  }
}

static void test_bad_relays(uint64_t seed, uint64_t constant) {
  enum {
#define X(name, in_lists, in_grids, spoil) BAD_##name,
    BAD_RELAYS(X)
#undef X
        BAD_KINDS
  };
  for (int which = 0; which < BAD_KINDS; which++) {
    struct scene *s = make_plain_scene(seed, 100 * (uint64_t)which);
    const char *what = NULL;
    if (spoil_relay(s, which, &what, constant)) {
      OK(kvs_dev_wait32(s->device, flag_address(s, true, 0), 1, s->copies[0], &err)); /* is dropped */
      launch_relay(s);
      expect_lost(s->device, what, seed);
      CHECK(holds(&s->scattered) && holds(&s->image) && holds(&s->ring), "%s, seed %d", what, (int)seed);
      CHECK(!aborted(s), "%s, seed %d", what, (int)seed);
    }
    free_scene(s);
  }
}

/* A device that is lost while a relay waits drops it. */
static void test_loss(uint64_t seed) {
  struct scene *s = make_scene(seed, 7, 1);
  struct kvs_error err = {0};
  struct kvs_copy_params bad = {.units = {.pieces = NOWHERE}, .count = 1};
  launch_relay(s);
  for (size_t f = 1; f < s->nfillings; f++) /* the first one is left out: it comes to nothing */
    queue_filling(s, f);
  if (!seed) usleep(1000);
  launch_copy(s->device, KVS_KERNEL_COPY, &bad, 1, make_stream(s->device));
  CHECK(kvs_dev_synchronize(s->device, &err) == KVS_LOST && !aborted(s), "seed %d", (int)seed);
  free_scene(s);
}

int main(void) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  void *constant = mmap(NULL, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  test_relay();
  test_told();
  test_told_in_work();
  test_patience();
  test_queuing_takes_no_time();
  for (uint64_t seed = 0; seed < 20; seed++) {
    test_nothing_to_relay(seed);
    test_loss(seed);
  }
  for (uint64_t seed = 0; seed < 10; seed++) test_bad_relays(seed, address(constant));
  munmap(constant, page);
  return check_close();
}
