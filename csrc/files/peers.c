/* The other writers of a shared directory. Each writer has a directory of its own in it, writer-NNNN, which is the
 * directory of a store with one writer: segments, checkpoints, a lock. All that makes one writer safe holds for each.
 * This process writes the first that was free and only reads the others, through one index. An own block of a key is
 * preferred: another writer may give up its block at any time.
 *
 * What the others store and evict comes from their notices, which calls take in under the store's lock. A thread does
 * what needs files: it looks for new writers, opens new segments, and reads a writer's headers where notices were
 * missed. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/thread.h"
#include "base/wait.h"
#include "files/checks.h"
#include "files/directory.h"
#include "files/peers.h"
#include "files/retire.h"
#include "files/scan.h"
#include "files/segment.h"
#include "files/slot.h"
#include "files/state.h"

static const int64_t LOOK_NS = 200 * 1000 * 1000; /* between looks for new writers */
static const int64_t CLOCK_NS = 50 * 1000 * 1000; /* more than the steps in which a file system's times rise */

/* -- finding ------------------------------------------------------------------------------------------------------- */

static bool is_known(const struct kvs_file_store *store, uint32_t number) {
  bool known = number == store->writer;
  for (unsigned i = 0; i < store->npeers; i++) known |= store->peers[i].number == number;
  return known;
}

static void close_peer(struct kvs_file_peer *peer) {
  kvs_file_notices_close(&peer->notices);
  if (peer->root.folder >= 0) close(peer->root.folder);
  free(peer->root.path);
}

/* The first geometry found is this store's, if it has none of its own yet. */
static int match_geometry(struct kvs_file_store *store, unsigned at, bool *ready, struct kvs_error *err) {
  struct kvs_file_geometry there;
  size_t nsegments;
  int status = kvs_file_find_geometry(store, store->nroots + at, &there, ready, &nsegments, err);
  if (status || !*ready) return status;
  if (!kvs_file_same_layout(&there, &store->geometry))
    return kvs_file_refuse_layout(store, &store->peers[at].root, &there, "store.kvs", err);
  if (!store->geometry_known) {
    store->geometry.slots = there.slots;
    store->geometry.segment_nbytes = there.segment_nbytes;
    store->geometry_known = true;
  }
  *ready = there.slots == store->geometry.slots;
  return KVS_OK;
}

/* False: a writer that is only just being made, or another user's. Where a writer that has ended left no notices, its
 * blocks are found by their headers. */
static bool hear(struct kvs_file_store *store, struct kvs_file_peer *peer) {
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  if (kvs_file_notices_open(&store->faults, peer->root.folder, &peer->notices) == 0) return true;
  return fcntl(peer->root.folder, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* A writer that is only just being made is found the next time. With peers_lock, or while the store is being opened. */
static int add_peer(struct kvs_file_store *store, uint32_t number, struct kvs_error *err) {
  const unsigned at = store->npeers;
  struct kvs_file_peer *peer = &store->peers[at];
  const size_t room = strlen(store->settings.directory) + 32;
  bool ready = false;
  *peer = (struct kvs_file_peer){
      .root = {.folder = -1, .state = -1}, .number = number, .notices = {.fd = -1}, .rescan = true};
  peer->root.path = malloc(room);
  if (!peer->root.path) return kvs_fail(err, KVS_NOMEM, "no memory for another writer");
  kvs_file_writer_path(store->settings.directory, number, peer->root.path, room);
  int status = kvs_file_open_folder(&peer->root, false, err);
  if (!status) status = match_geometry(store, at, &ready, err);
  if (!status && ready) ready = hear(store, peer);
  if (status || !ready) {
    close_peer(peer);
    return status;
  }
  pthread_mutex_lock(&store->lock);
  store->npeers++;
  pthread_mutex_unlock(&store->lock);
  return KVS_OK;
}

/* What has a writer's name and cannot be opened counts as no writer, and is tried again at the next look. Other
 * failures do not end the search for the others either; the error is that of the last one. */
int kvs_file_peers_find(struct kvs_file_store *store, struct kvs_error *err) {
  DIR *dir = opendir(store->settings.directory);
  if (!dir) return kvs_file_fail(err, errno, "reading the directory %.200s", store->settings.directory);
  struct kvs_error failure;
  int status = KVS_OK;
  uint32_t number;
  char again[32];
  for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
    if (sscanf(entry->d_name, "writer-%4u", &number) != 1 || number >= KVS_FILE_WRITERS) continue;
    snprintf(again, sizeof again, "writer-%04u", number);
    if (strcmp(entry->d_name, again) != 0 || is_known(store, number)) continue;
    int added = add_peer(store, number, &failure);
    if (added == KVS_OK || added == KVS_FILE) continue;
    status = added;
    *err = failure;
  }
  closedir(dir);
  return status;
}

/* -- notices ------------------------------------------------------------------------------------------------------- */

static bool is_segment(const struct kvs_file_segment *segment, unsigned root, uint32_t number) {
  return segment->root == root && segment->number == number && !segment->gone && !segment->removed;
}

/* The position of the notice's segment; nsegments: it is not open. */
static uint32_t find_segment_locked(const struct kvs_file_store *store, unsigned root, uint32_t number, uint32_t hint) {
  const struct kvs_file_segment *all = store->segments;
  if (hint < store->nsegments && is_segment(&all[hint], root, number)) return hint;
  uint32_t at = 0;
  while (at < store->nsegments && !is_segment(&all[at], root, number)) at++;
  return at;
}

static void apply_locked(struct kvs_file_store *store, const struct kvs_file_notice *notice, uint32_t slot) {
  struct kvs_file_index *index = &store->index;
  struct kvs_file_entry *entry = notice->gone ? kvs_file_index_find(index, notice->key, notice->key_nbytes)
                                              : kvs_file_index_add(index, notice->key, notice->key_nbytes);
  if (!entry) return;
  if (!notice->gone) kvs_file_learn_locked(store, entry, slot);
  if (notice->gone && entry->other == slot) entry->other = KVS_NO_SLOT;
  if (notice->gone && entry->foreign && entry->slot == slot) kvs_file_set_slot_locked(store, entry, KVS_NO_SLOT);
  kvs_file_fall_back_locked(store, entry);
  kvs_file_index_settle(index, entry);
}

/* False: the watcher has to do something first. */
static bool catch_up_peer_locked(struct kvs_file_store *store, unsigned at) {
  struct kvs_file_peer *peer = &store->peers[at];
  const uint32_t slots = store->geometry.slots;
  struct kvs_file_notice notice;
  while (!peer->rescan && !peer->adopt) {
    enum kvs_file_noticed noticed = kvs_file_notices_next(&peer->notices, &notice);
    if (noticed == KVS_FILE_NOTHING_NEW || noticed == KVS_FILE_UNHEARD) {
      peer->unheard |= noticed == KVS_FILE_UNHEARD;
      return true;
    }
    peer->rescan = noticed == KVS_FILE_BEHIND || notice.slot >= slots;
    if (peer->rescan) break;
    uint32_t segment = find_segment_locked(store, store->nroots + at, notice.segment, peer->last);
    bool there = segment < store->nsegments, tried = peer->tried == peer->notices.seen + 1;
    peer->adopt = !there && !tried && !notice.gone;
    if (peer->adopt) break;
    if (there) apply_locked(store, &notice, segment * slots + notice.slot);
    peer->last = there ? segment : peer->last;
    kvs_file_notices_advance(&peer->notices);
  }
  return false;
}

void kvs_file_catch_up_locked(struct kvs_file_store *store) {
  bool all = true;
  for (unsigned i = 0; i < store->npeers; i++) all &= catch_up_peer_locked(store, i);
  if (all || store->watch_now) return;
  store->watch_now = true;
  pthread_cond_signal(&store->watch);
}

/* -- the watcher --------------------------------------------------------------------------------------------------- */

/* The file of a peer's notices was missing or cut: open what is there now. Then its headers are read. */
static void hear_again(struct kvs_file_store *store, struct kvs_file_peer *peer) {
  struct kvs_file_notices anew = {.fd = -1};
  if (kvs_file_notices_open(&store->faults, peer->root.folder, &anew)) return;
  pthread_mutex_lock(&store->lock);
  struct kvs_file_notices before = peer->notices;
  peer->notices = anew;
  peer->unheard = false;
  peer->rescan = true;
  pthread_mutex_unlock(&store->lock);
  kvs_file_notices_close(&before);
}

/* The own notices: where they were cut or replaced they begin anew. */
static void mend_notices(struct kvs_file_store *store) {
  struct kvs_file_notices anew = {.fd = -1};
  const int folder = store->nroots ? store->roots[0].folder : -1;
  if (folder < 0 || kvs_file_notices_are_whole(folder, &store->notices)) return;
  if (kvs_file_notices_make(&store->faults, folder, &anew)) return;
  pthread_mutex_lock(&store->lock);
  struct kvs_file_notices before = store->notices;
  store->notices = anew;
  store->notices.lost = true; /* blocks published meanwhile were announced in the previous file */
  pthread_mutex_unlock(&store->lock);
  kvs_file_notices_close(&before);
}

/* Segments that cannot be opened are left out, and their notices skipped. */
static int serve_peer(struct kvs_file_store *store, unsigned at, struct kvs_error *err) {
  struct kvs_file_peer *peer = &store->peers[at];
  const unsigned root = store->nroots + at;
  pthread_mutex_lock(&store->lock);
  const bool rescan = peer->rescan, adopt = peer->adopt || rescan;
  if (rescan) kvs_file_notices_skip(&peer->notices); /* what is told from now on is taken in after the scan */
  pthread_mutex_unlock(&store->lock);
  if (!adopt) return KVS_OK;
  if (rescan) (void)kvs_file_note_removed(store, root);
  int status = kvs_file_adopt_from(store, root, err);
  if (rescan && !status) status = kvs_file_scan_peer(store, at, err);
  pthread_mutex_lock(&store->lock);
  peer->adopt = false;
  peer->tried = rescan ? 0 : peer->notices.seen + 1; /* a later notice may be of a segment made since */
  kvs_file_catch_up_locked(store);
  pthread_mutex_unlock(&store->lock);
  if (rescan && !status) kvs_file_close_removed(store);
  return status;
}

/* Whether the names in a peer's directory may have changed since the last look. */
static bool has_changed(struct kvs_file_peer *peer) {
  struct timespec now;
  struct stat info;
  if (fstat(peer->root.folder, &info) || clock_gettime(CLOCK_REALTIME, &now)) return false;
  const int64_t second = 1000000000, when = info.st_mtim.tv_sec * second + info.st_mtim.tv_nsec;
  const bool changed = when != peer->names_ns, settled = now.tv_sec * second + now.tv_nsec - when > CLOCK_NS;
  peer->names_ns = settled ? when : 0;
  return changed;
}

/* Forget the blocks of segments that are no longer there: of a writer that has ended nothing is told when another
 * process removes its files. */
static void forget_removed(struct kvs_file_store *store) {
  bool removed = false;
  for (unsigned i = 0; i < store->npeers; i++) {
    removed |= has_changed(&store->peers[i]) && kvs_file_note_removed(store, store->nroots + i);
  }
  if (removed) kvs_file_sweep(store);
  kvs_file_close_removed(store);
}

/* *unread: some writer's files could not be read, and are read again later. That is no failure of this store. */
static int serve_peers(struct kvs_file_store *store, bool look, bool *unread, struct kvs_error *err) {
  struct kvs_error failure;
  pthread_mutex_lock(&store->peers_lock);
  int status = look ? kvs_file_peers_find(store, err) : KVS_OK;
  if (look) mend_notices(store);
  for (unsigned i = 0; look && i < store->npeers; i++) {
    struct kvs_file_peer *peer = &store->peers[i];
    pthread_mutex_lock(&store->lock);
    const bool unheard = peer->unheard;
    pthread_mutex_unlock(&store->lock);
    if (unheard || !kvs_file_notices_are_whole(peer->root.folder, &peer->notices)) hear_again(store, peer);
  }
  for (unsigned i = 0; i < store->npeers; i++) {
    int served = serve_peer(store, i, &failure);
    *unread |= served == KVS_FILE;
    if (served == KVS_OK || served == KVS_FILE) continue;
    status = served;
    *err = failure;
  }
  if (look) forget_removed(store);
  pthread_mutex_unlock(&store->peers_lock);
  return status;
}

/* Sleep until there is something to do, after a failure in any case until the next look. True: the store stops. */
static bool wait_for_work(struct kvs_file_store *store, uint64_t look_ns, bool failed) {
  pthread_mutex_lock(&store->lock);
  kvs_file_catch_up_locked(store);
  while (!store->watch_stop && (failed || !store->watch_now) && kvs_cond_wait(&store->watch, &store->lock, look_ns))
    continue;
  store->watch_now = false;
  bool stop = store->watch_stop;
  pthread_mutex_unlock(&store->lock);
  return stop;
}

static void *watch(void *arg) {
  struct kvs_file_store *store = arg;
  struct kvs_error ignored;
  uint64_t look_ns = kvs_deadline(LOOK_NS);
  bool failed = false;
  while (!wait_for_work(store, look_ns, failed)) {
    const bool look = kvs_clock_ns() >= look_ns;
    if (look) look_ns = kvs_deadline(LOOK_NS);
    bool unread = false;
    failed = serve_peers(store, look, &unread, &ignored) != KVS_OK || unread;
  }
  return NULL;
}

int kvs_file_peers_start(struct kvs_file_store *store, struct kvs_error *err) {
  int code = store->nroots ? kvs_file_notices_make(&store->faults, store->roots[0].folder, &store->notices) : 0;
  if (code) return kvs_file_fail(err, code, "making notices.kvs in %.200s", store->roots[0].path);
  bool unread = false;
  int status = serve_peers(store, true, &unread, err);
  if (status) return status;
  store->watched = kvs_thread_start(&store->watcher, "kvswap-files", watch, store) == 0;
  return store->watched ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no thread could be started");
}

void kvs_file_peers_stop(struct kvs_file_store *store) {
  if (!store->watched) return;
  pthread_mutex_lock(&store->lock);
  store->watch_stop = true;
  pthread_cond_signal(&store->watch);
  pthread_mutex_unlock(&store->lock);
  pthread_join(store->watcher, NULL);
  store->watched = false;
}

/* Calls on keys may still come, also after the store is closed. */
void kvs_file_peers_close(struct kvs_file_store *store) {
  pthread_mutex_lock(&store->lock);
  struct kvs_file_notices own = store->notices;
  const unsigned npeers = store->npeers;
  store->notices.fd = -1;
  store->npeers = 0;
  pthread_mutex_unlock(&store->lock);
  kvs_file_notices_close(&own);
  for (unsigned i = 0; i < npeers; i++) close_peer(&store->peers[i]);
}

int kvs_file_peers_refresh(struct kvs_file_store *store, struct kvs_error *err) {
  bool unread = false;
  int status = serve_peers(store, true, &unread, err);
  pthread_mutex_lock(&store->lock);
  kvs_file_catch_up_locked(store);
  pthread_mutex_unlock(&store->lock);
  return status ? status : serve_peers(store, false, &unread, err);
}
