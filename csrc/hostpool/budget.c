/* Limits on memory.
 *
 * A process is in one control group of each hierarchy, and all its parent groups limit it too: the tightest limit
 * applies. In a container the path in /proc/self/cgroup may start above the mounted part of the hierarchy; leading
 * components are then removed until the path names a folder. A group's usage includes page cache, which the kernel
 * reclaims on demand, so page cache is subtracted. */
#include "hostpool/budget.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { PATH_NBYTES = 1024, LINE_NBYTES = 1024, CAP_IPC_LOCK_BIT = 14 };

/* -- kernel files ---------------------------------------------------------------------------------------------- */

/* The number after `key` at the start of a line; false: not found. */
static bool read_key(const char *path, const char *key, uint64_t *value) {
  char line[LINE_NBYTES];
  FILE *file = fopen(path, "re");
  bool found = false;
  if (!file) return false;
  while (!found && fgets(line, sizeof line, file))
    found = strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%" SCNu64, value) == 1;
  fclose(file);
  return found;
}

/* Read a file with one number. "max", and the value that stands for no limit, become UINT64_MAX. */
static bool read_number(const char *path, uint64_t *value) {
  char line[64];
  FILE *file = fopen(path, "re");
  if (!file) return false;
  bool found = fgets(line, sizeof line, file) != NULL;
  fclose(file);
  if (!found) return false;
  if (strncmp(line, "max", 3) == 0) {
    *value = UINT64_MAX;
    return true;
  }
  if (sscanf(line, "%" SCNu64, value) != 1) return false;
  if (*value >= INT64_MAX / 2) *value = UINT64_MAX; /* version 1 writes this for "no limit" */
  return true;
}

static uint64_t meminfo(const char *root, const char *key) {
  char path[PATH_NBYTES];
  uint64_t kib;
  snprintf(path, sizeof path, "%s/proc/meminfo", root);
  return read_key(path, key, &kib) ? kib * 1024 : UINT64_MAX;
}

uint64_t kvs_budget_node(const char *root, int node) {
  char path[PATH_NBYTES], key[48];
  uint64_t unused, cached = 0;
  snprintf(path, sizeof path, "%s/sys/devices/system/node/node%d/meminfo", root, node);
  snprintf(key, sizeof key, "Node %d MemFree:", node);
  if (!read_key(path, key, &unused)) return UINT64_MAX;
  snprintf(key, sizeof key, "Node %d Inactive(file):", node);
  if (!read_key(path, key, &cached)) cached = 0;
  return (unused + cached) * 1024;
}

size_t kvs_budget_list(const char *text, uint64_t *bits, size_t words) {
  size_t count = 0;
  memset(bits, 0, words * sizeof *bits);
  for (const char *at = text; *at >= '0' && *at <= '9';) {
    char *end;
    unsigned long first = strtoul(at, &end, 10), last = first;
    if (*end == '-') last = strtoul(end + 1, &end, 10);
    for (unsigned long i = first; i <= last && i < words * 64; i++, count++) bits[i / 64] |= UINT64_C(1) << (i % 64);
    at = *end == ',' ? end + 1 : end;
  }
  return count;
}

/* -- control groups -------------------------------------------------------------------------------------------- */

/* File and field names of the two versions of control groups. */
struct group_kind {
  const char *type; /* file system type */
  bool unified;
  const char *max, *used, *cached;
};

static const struct group_kind kinds[] = {
    {"cgroup2", true, "memory.max", "memory.current", "inactive_file"},
    {"cgroup", false, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"},
};

/* Whether a comma-separated list contains a word. */
static bool lists(const char *list, const char *word) {
  size_t length = strlen(word);
  for (const char *at = list; *at;) {
    size_t n = strcspn(at, ",\n");
    if (n == length && strncmp(at, word, n) == 0) return true;
    at += n + (at[n] != '\0');
  }
  return false;
}

/* The mount point of the hierarchy with the memory controller, and the mounted part. */
static bool find_mount(const char *root, const struct group_kind *kind, char *part, char *folder) {
  char path[PATH_NBYTES], line[4 * LINE_NBYTES], type[64], options[LINE_NBYTES];
  bool found = false;
  snprintf(path, sizeof path, "%s/proc/self/mountinfo", root);
  FILE *file = fopen(path, "re");
  if (!file) return false;
  while (!found && fgets(line, sizeof line, file)) {
    const char *behind = strstr(line, " - ");
    if (!behind || sscanf(behind, " - %63s %*s %1023s", type, options) != 2 || strcmp(type, kind->type) != 0) continue;
    if (!kind->unified && !lists(options, "memory")) continue;
    found = sscanf(line, "%*s %*s %*s %1023s %1023s", part, folder) == 2;
  }
  fclose(file);
  return found;
}

/* This process's group in that hierarchy. */
static bool find_group(const char *root, const struct group_kind *kind, char *group) {
  char path[PATH_NBYTES], line[2 * LINE_NBYTES];
  bool found = false;
  snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
  FILE *file = fopen(path, "re");
  if (!file) return false;
  while (!found && fgets(line, sizeof line, file)) {
    char *controllers = strchr(line, ':');
    char *name = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!name) continue;
    *name++ = '\0';
    name[strcspn(name, "\n")] = '\0';
    found = kind->unified ? controllers[1] == '\0' : lists(controllers + 1, "memory");
    if (found) snprintf(group, LINE_NBYTES, "%s", name);
  }
  fclose(file);
  return found;
}

/* Keep the group if it leaves less memory than those seen so far. */
static void look_at(const char *folder, const struct group_kind *kind, struct kvs_budget *budget) {
  char path[2 * PATH_NBYTES + 64];
  uint64_t max, used, cached = 0;
  snprintf(path, sizeof path, "%s/%s", folder, kind->max);
  if (!read_number(path, &max) || max == UINT64_MAX) return;
  snprintf(path, sizeof path, "%s/%s", folder, kind->used);
  if (!read_number(path, &used)) return;
  snprintf(path, sizeof path, "%s/memory.stat", folder);
  (void)read_key(path, kind->cached, &cached);
  used -= cached < used ? cached : used;
  uint64_t left = max > used ? max - used : 0;
  uint64_t least = budget->group_max > budget->group_used ? budget->group_max - budget->group_used : 0;
  if (budget->group_max != UINT64_MAX && left >= least) return;
  budget->group_max = max;
  budget->group_used = used;
  budget->group_knob = kind->max;
  snprintf(budget->group, sizeof budget->group, "%.255s", folder);
}

static void read_groups(const char *root, const struct group_kind *kind, struct kvs_budget *budget) {
  char part[LINE_NBYTES], mount[LINE_NBYTES], group[LINE_NBYTES], folder[2 * PATH_NBYTES];
  if (!find_mount(root, kind, part, mount) || !find_group(root, kind, group)) return;
  const char *within = group;
  size_t n = strlen(part);
  if (n > 1 && strncmp(group, part, n) == 0 && (group[n] == '/' || !group[n])) within += n;
  for (;; within = strchr(within + 1, '/') ? strchr(within + 1, '/') : "") {
    snprintf(folder, sizeof folder, "%s%s%s", root, mount, strcmp(within, "/") ? within : "");
    if (!*within || access(folder, F_OK) == 0) break;
  }
  for (size_t least = strlen(root) + strlen(mount);;) {
    look_at(folder, kind, budget);
    char *slash = strrchr(folder, '/');
    if (strlen(folder) <= least || !slash || slash < folder + least) break;
    *slash = '\0';
  }
}

/* -- public functions ------------------------------------------------------------------------------------------ */

static bool may_lock(const char *root) {
  char path[PATH_NBYTES], line[LINE_NBYTES];
  uint64_t capabilities = 0;
  snprintf(path, sizeof path, "%s/proc/self/status", root);
  FILE *file = fopen(path, "re");
  if (!file) return false;
  while (fgets(line, sizeof line, file))
    if (sscanf(line, "CapEff: %" SCNx64, &capabilities) == 1) break;
  fclose(file);
  return capabilities >> CAP_IPC_LOCK_BIT & 1;
}

void kvs_budget_read(const char *root, struct kvs_budget *budget) {
  struct rlimit memlock;
  *budget = (struct kvs_budget){.group_max = UINT64_MAX, .memlock = UINT64_MAX};
  budget->total = meminfo(root, "MemTotal:");
  budget->available = meminfo(root, "MemAvailable:");
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) read_groups(root, &kinds[i], budget);
  if (getrlimit(RLIMIT_MEMLOCK, &memlock) == 0 && memlock.rlim_cur != RLIM_INFINITY && !may_lock(root))
    budget->memlock = memlock.rlim_cur;
}

int64_t kvs_budget_reserve(const struct kvs_budget *budget) {
  const int64_t least = INT64_C(256) << 20, most = INT64_C(8) << 30;
  if (budget->total >= (uint64_t)most * 32) return most;
  int64_t share = (int64_t)(budget->total / 32);
  return share < least ? least : share;
}

int kvs_budget_check(const struct kvs_budget *budget, uint64_t nbytes, int64_t reserve, struct kvs_error *err) {
  char wanted[KVS_SIZE_TEXT], there[KVS_SIZE_TEXT], kept[KVS_SIZE_TEXT], used[KVS_SIZE_TEXT];
  kvs_size_text(nbytes, wanted);
  uint64_t size = reserve < 0 ? 0 - (uint64_t)reserve : (uint64_t)reserve;
  uint64_t free_bytes = budget->available;
  if (reserve < 0) free_bytes = free_bytes > UINT64_MAX - size ? UINT64_MAX : free_bytes + size;
  if (reserve >= 0) free_bytes = free_bytes > size ? free_bytes - size : 0;
  if (budget->available != UINT64_MAX && nbytes > free_bytes)
    return kvs_fail(err, KVS_NOMEM,
                    "%s of host memory do not fit: the machine has %s available, and reserve= %s %s. Ask for less, "
                    "free some, or pass reserve= or KVSWAP_RESERVE (bytes to leave free; negative: how much the "
                    "memory of a virtual machine will grow as it is used)",
                    wanted, kvs_size_text(budget->available, there), reserve < 0 ? "expects another" : "keeps free",
                    kvs_size_text(size, kept));
  if (budget->group_max == UINT64_MAX) return KVS_OK;
  uint64_t left = budget->group_max > budget->group_used ? budget->group_max - budget->group_used : 0;
  if (nbytes <= left) return KVS_OK;
  return kvs_fail(err, KVS_NOMEM,
                  "%s of host memory do not fit: control group %.200s allows %s, of which %s are used. Raise %s there "
                  "(docker run --memory, resources.limits.memory in Kubernetes), or ask for less",
                  wanted, budget->group, kvs_size_text(budget->group_max, there),
                  kvs_size_text(budget->group_used, used), budget->group_knob);
}
