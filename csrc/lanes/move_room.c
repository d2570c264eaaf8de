#include <stdlib.h>

#include "calls/move.h"
#include "lanes/state.h"

void kvs_move_scratch_free(struct kvs_move_scratch *room) {
  if (!room) return;
  free(room->runs.items);
  free(room->parts);
  free(room->touches);
  free(room->next_byte);
  free(room->covered);
  free(room->slots);
  free(room->positions);
  free(room->foreign.items);
  free(room);
}

/* Reallocate; old contents are dropped. */
static bool renew(void *pointer, size_t count, size_t size) {
  void **at = pointer;
  free(*at);
  *at = calloc(count ? count : 1, size);
  return *at != NULL;
}

int kvs_move_make_room(struct kvs_scratch *scratch, size_t pairs, size_t parts, size_t blocks, struct kvs_error *err) {
  struct kvs_move_scratch *room = scratch->move;
  bool ok = true;
  if (!room) room = scratch->move = calloc(1, sizeof *room);
  if (!room) return kvs_fail(err, KVS_NOMEM, "no memory for a plan");
  if (pairs > room->pairs) {
    room->pairs = 0;
    ok = renew(&room->touches, 2 * pairs, sizeof *room->touches) &&
         renew(&room->next_byte, pairs, sizeof *room->next_byte) && renew(&room->covered, pairs, sizeof *room->covered);
    if (ok) room->pairs = pairs;
  }
  if (ok && parts > room->nparts) {
    room->nparts = 0;
    ok = renew(&room->parts, parts, sizeof *room->parts);
    if (ok) room->nparts = parts;
  }
  if (ok && blocks > room->blocks) {
    room->blocks = 0;
    ok = renew(&room->slots, 4 * blocks, sizeof *room->slots) &&
         renew(&room->positions, blocks, sizeof *room->positions);
    if (ok) room->blocks = blocks;
  }
  room->runs.count = room->foreign.count = 0;
  return ok ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory for a plan of %zu pools and %zu blocks", pairs, blocks);
}
