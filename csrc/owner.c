#include "owner.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The third field of /proc/<pid>/stat is the state, the 22nd the start. The second, the name, is in parentheses and may
 * hold anything, parentheses and spaces too. */
uint64_t kvs_process_start(int64_t pid) {
  char path[48], text[1024], state;
  uint64_t start = 0;
  snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t nbytes = read(fd, text, sizeof text - 1);
  close(fd);
  if (nbytes <= 0) return 0;
  text[nbytes] = '\0';
  const char *end = strrchr(text, ')');
  if (!end || sscanf(end + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %" SCNu64,
                     &state, &start) != 2)
    return 0;
  return state == 'Z' || state == 'X' ? 0 : start;
}

struct kvs_owner kvs_owner_self(void) {
  int64_t pid = getpid();
  return (struct kvs_owner){.pid = pid, .start = kvs_process_start(pid)};
}

bool kvs_owner_is_self(const struct kvs_owner *owner) {
  return owner->pid == getpid() && owner->start == kvs_process_start(owner->pid);
}

bool kvs_owner_alive(const struct kvs_owner *owner) {
  if (owner->pid == 0) return true;
  uint64_t start = kvs_process_start(owner->pid);
  return start != 0 && start == owner->start;
}
