#include "base/owner.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* State and start time of a process; false: no such process, or not readable. In /proc/<pid>/stat the 3rd field is the
 * state and the 22nd the start time. The 2nd field, the name, is in parentheses and may contain spaces and
 * parentheses. */
static bool read_stat(int64_t pid, char *state, uint64_t *start) {
  char path[48], text[1024];
  snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  ssize_t nbytes = read(fd, text, sizeof text - 1);
  close(fd);
  if (nbytes <= 0) return false;
  text[nbytes] = '\0';
  const char *end = strrchr(text, ')');
  return end && sscanf(end + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %" SCNu64,
                       state, start) == 2;
}

static bool has_ended(char state) { return state == 'Z' || state == 'X'; }

uint64_t kvs_process_start(int64_t pid) {
  uint64_t start;
  char state;
  return read_stat(pid, &state, &start) && !has_ended(state) ? start : 0;
}

bool kvs_process_alive(int64_t pid, uint64_t start) {
  uint64_t started;
  char state;
  if (pid <= 0 || (kill((pid_t)pid, 0) != 0 && errno == ESRCH)) return false;
  if (!read_stat(pid, &state, &started)) return kill((pid_t)pid, 0) == 0 || errno != ESRCH;
  return !has_ended(state) && (start == 0 || started == start);
}

struct kvs_owner kvs_owner_self(void) {
  int64_t pid = getpid();
  return (struct kvs_owner){.pid = pid, .start = kvs_process_start(pid)};
}

bool kvs_owner_is_self(const struct kvs_owner *owner) {
  return owner->pid == getpid() && kvs_process_alive(owner->pid, owner->start);
}

bool kvs_owner_alive(const struct kvs_owner *owner) {
  return owner->pid == 0 || kvs_process_alive(owner->pid, owner->start);
}
