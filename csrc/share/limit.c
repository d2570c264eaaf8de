/* What a member asks of others where the host's memory is the limit; see limit.h. */
#include "share/limit.h"

#include <errno.h>

#include "paths/lend.h"
#include "plan/host_sum.h"

/* A member that does not read, because it is stopped, is told no more: a full socket would end its link. */
enum { UNHEARD = 16, DIRECTIONS = 1u << KVS_D2H | 1u << KVS_H2D };

static const double LEAST_SHARE = 0.1;

static uint32_t own_busy(const struct kvs_share *share) {
  uint32_t busy = 0;
  for (const struct kvs_share_job *job = share->jobs; job; job = job->next) busy |= UINT32_C(1) << job->direction;
  return busy;
}

/* GB/s of the links in use, but for the own one in `direction`, as if all links were as fast as the own. Returns the
 * number of the other members that are busy in that direction. */
static unsigned add_busy(const struct kvs_share *share, enum kvs_direction direction, double busy_gbps[2]) {
  unsigned members[2] = {0, 0}, others;
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++)
    for (int way = 0; share->links[i].state == KVS_LINK_LIVE && way < 2; way++)
      members[way] += share->links[i].busy >> way & 1;
  others = members[direction];
  members[1 - direction] += own_busy(share) >> (1 - direction) & 1;
  for (int way = 0; way < 2; way++)
    busy_gbps[way] = members[way] * kvs_link_gbps(share->engine, (enum kvs_direction)way);
  return others;
}

double kvs_limit_shares(const struct kvs_share *share, enum kvs_direction direction, double shares) {
  const struct kvs_tuning *tuning = &share->engine->costs.tuning;
  double busy[2], own = kvs_link_gbps(share->engine, direction);
  if (!tuning->host_links || !(shares > 0)) return shares;
  unsigned others = add_busy(share, direction, busy);
  if (direction == KVS_D2H && kvs_host_loads_first(tuning->host_gbps, busy, own * (1 + shares))) return 0;
  double room = kvs_host_room(tuning->host_gbps, busy, direction, own) / own / (1 + others);
  if (room < LEAST_SHARE) return 0;
  return room < shares ? room : shares;
}

/* Pieces that are on their way, of jobs that are not shared. */
static unsigned pieces_of(const struct kvs_share *share, const struct kvs_share_link *link,
                          enum kvs_direction direction) {
  unsigned count = 0;
  for (unsigned i = 0; i < share->nslots; i++) {
    const struct kvs_share_slot *slot = &link->slots[i];
    bool asked = slot->state == KVS_SLOT_FILLING || slot->state == KVS_SLOT_ASKED;
    count += asked && !slot->job->key && slot->job->direction == direction;
  }
  return count;
}

unsigned kvs_limit_pieces(const struct kvs_share *share, const struct kvs_share_link *link,
                          enum kvs_direction direction, double shares, unsigned helpers) {
  double allowed = kvs_limit_shares(share, direction, shares);
  unsigned all = helpers * share->nslots, used = 0;
  if (!helpers || allowed >= shares) return share->nslots;
  unsigned most = (unsigned)(allowed / shares * all + 0.5), of_link = (most + helpers - 1) / helpers;
  unsigned here = pieces_of(share, link, direction);
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++)
    if (share->links[i].state != KVS_LINK_UNUSED) used += pieces_of(share, &share->links[i], direction);
  unsigned left = most > used ? most - used : 0, left_here = of_link > here ? of_link - here : 0;
  return left < left_here ? left : left_here;
}

void kvs_limit_tell(struct kvs_share *share) {
  uint32_t busy = own_busy(share);
  if (!share->engine->costs.tuning.host_links) return;
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++) {
    struct kvs_share_link *link = &share->links[i];
    if (link->state != KVS_LINK_LIVE || link->told == busy || link->unheard == UNHEARD) continue;
    share->message = (struct kvs_share_message){.kind = KVS_SHARE_BUSY, .direction = busy};
    if (kvs_share_send(link->socket, &share->message))
      link->told = busy, link->unheard++;
    else
      link->broken |= errno != EAGAIN;
  }
}

bool kvs_limit_hear(struct kvs_share_link *link, const struct kvs_share_message *message) {
  link->busy = message->direction;
  return (message->direction & ~(uint32_t)DIRECTIONS) == 0 && message->count == 0;
}
