/* A process that is killed at any system call of clearing a directory leaves the old epoch or a new one. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "files/epoch.h"

enum { MOST_STOPS = 400, UNTRACED = -1 };

static int begin(const char *directory) {
  struct kvs_error err;
  return kvs_file_clear_directory(directory, &err);
}

/* A directory without a file yet; the epoch is not zero, so that a made file differs from none. */
static int make(const char *directory) {
  const struct kvs_file_epoch epoch = {{1, 2, 3}};
  int folder = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return folder < 0 ? errno : kvs_file_epoch_make(folder, &epoch, true, 1000000000);
}

/* Run `what` in a child that is killed at its nth stop; each call has two, before and after. Returns the number of
 * stops of a child that ends earlier, and 0 if it was killed. */
static int run_killed(int (*what)(const char *), const char *directory, int nth) {
  int status, stops = 0;
  pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL)) _exit(100);
    raise(SIGSTOP);
    _exit(what(directory) ? 101 : 0);
  }
  while (waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
    if (stops++ == nth) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      return 0;
    }
    ptrace(PTRACE_SYSCALL, child, NULL, NULL);
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 100) return UNTRACED;
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", (unsigned)status);
  return stops;
}

static struct kvs_file_epoch_place look(int folder) {
  struct kvs_file_epoch_place none = {.folder = folder}, found;
  return kvs_file_epoch_look(&none, &found) ? found : none;
}

/* Whether the epoch is another than that of a reader, who must know it without a look. */
static bool check_reader(const struct kvs_file_epoch_place *reader, int stop) {
  struct kvs_file_epoch_place now = look(reader->folder);
  bool other = !kvs_file_epoch_is(&now.epoch, &reader->epoch);
  CHECK(kvs_file_epoch_known(&now.epoch), "killed at stop %d", stop);
  CHECK(!other || !kvs_file_epoch_stands(reader), "killed at stop %d: a reader does not notice", stop);
  kvs_file_epoch_unmap(&now);
  return other;
}

static bool test_clearing(const char *directory) {
  int folder = open(directory, O_RDONLY | O_DIRECTORY), olds = 0, news = 0, stops = 0;
  CHECK(make(directory) == 0);
  for (int nth = 1; nth < MOST_STOPS && stops == 0; nth++) {
    struct kvs_file_epoch_place reader = look(folder), after;
    CHECK(kvs_file_epoch_stands(&reader));
    stops = run_killed(begin, directory, nth);
    if (stops == UNTRACED) return false;
    bool other = check_reader(&reader, nth);
    CHECK(!other || stops || news || olds, "new before anything was done");
    CHECK(other || !news, "old at stop %d, and new at an earlier one", nth);
    olds += !other;
    news += other;
    (void)kvs_file_epoch_unmark(folder); /* as opening does */
    after = look(folder);
    CHECK(kvs_file_epoch_stands(&after), "a mark stays after stop %d", nth);
    CHECK(begin(directory) == 0); /* the next one is not hindered */
    CHECK(check_reader(&after, nth));
    kvs_file_epoch_unmap(&after);
    kvs_file_epoch_unmap(&reader);
  }
  CHECK(stops > 20 && stops < MOST_STOPS && olds > 10 && news > 2, "%d stops, %d old, %d new", stops, olds, news);
  fprintf(stderr, "clearing: killed at %d stops, %d old, %d new\n", stops, olds, news);
  close(folder);
  return true;
}

/* Until the file has its name there is none, and the epoch is zero. */
static void test_making(const char *directory) {
  int folder = open(directory, O_RDONLY | O_DIRECTORY), none = 0, made = 0, stops = 0;
  for (int nth = 1; nth < MOST_STOPS && stops == 0; nth++) {
    unlinkat(folder, "epoch.kvs", 0);
    if (nth % 2) unlinkat(folder, "epoch.tmp", 0);
    struct kvs_file_epoch_place before = {.folder = folder}, after;
    stops = run_killed(make, directory, nth);
    bool there = check_reader(&before, nth);
    none += !there;
    made += there;
    CHECK(make(directory) == 0);
    after = look(folder);
    CHECK(after.epoch.bytes[0] == 1 && kvs_file_epoch_stands(&after));
    kvs_file_epoch_unmap(&after);
  }
  CHECK(stops < MOST_STOPS && none > 5 && made > 2, "%d stops, %d without, %d with", stops, none, made);
  close(folder);
}

/* What is no epoch is unknown, and a clear replaces it. */
static void test_damage(const char *directory) {
  static const char *const ways[] = {"truncate", "empty", "bytes", "mode", "directory"};
  int folder = open(directory, O_RDONLY | O_DIRECTORY);
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    struct kvs_file_epoch_place found;
    int fd = openat(folder, "epoch.kvs", O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && (i != 0 || ftruncate(fd, 4096) == 0) && (i != 1 || ftruncate(fd, 0) == 0));
    CHECK(i != 2 || pwrite(fd, "x", 1, 20) == 1);
    CHECK(i != 3 || fchmod(fd, 0666) == 0);
    close(fd);
    if (i == 4) CHECK(unlinkat(folder, "epoch.kvs", 0) == 0 && mkdirat(folder, "epoch.kvs", 0700) == 0);
    found = look(folder);
    CHECK(!kvs_file_epoch_known(&found.epoch) && !found.mark, "%s", ways[i]);
    if (i == 4) CHECK(begin(directory) != 0 && unlinkat(folder, "epoch.kvs", AT_REMOVEDIR) == 0);
    CHECK(begin(directory) == 0, "%s", ways[i]);
    found = look(folder);
    CHECK(kvs_file_epoch_known(&found.epoch) && kvs_file_epoch_stands(&found), "%s", ways[i]);
    kvs_file_epoch_unmap(&found);
  }
  close(folder);
}

/* A file that is removed changes nothing for a process that has mapped it. */
static void test_removal(const char *directory) {
  int folder = open(directory, O_RDONLY | O_DIRECTORY);
  struct kvs_file_epoch_place reader = look(folder), found;
  CHECK(unlinkat(folder, "epoch.kvs", 0) == 0);
  CHECK(!kvs_file_epoch_look(&reader, &found) && kvs_file_epoch_stands(&reader));
  CHECK(begin(directory) == 0);
  CHECK(kvs_file_epoch_look(&reader, &found) && !kvs_file_epoch_is(&found.epoch, &reader.epoch));
  kvs_file_epoch_unmap(&found);
  kvs_file_epoch_unmap(&reader);
  close(folder);
}

int main(void) {
  char directory[] = "/tmp/kvswap-epoch-XXXXXX", command[64];
  CHECK(mkdtemp(directory) != NULL);
  if (test_clearing(directory)) {
    test_making(directory);
  } else {
    fprintf(stderr, "ptrace is not permitted here: no process is killed\n");
    CHECK(make(directory) == 0);
  }
  test_damage(directory);
  test_removal(directory);
  snprintf(command, sizeof command, "rm -rf %s", directory);
  CHECK(system(command) == 0);
  return check_close();
}
