/* Limits on memory.
 *
 * A process is in one control group of each hierarchy, and all its parent groups limit it too: the limit that leaves
 * the least applies. A group's usage includes page cache, which the kernel drops on demand if it is clean, so clean
 * page cache is subtracted. Swap is not counted on: a pool's pages are pinned, and what would be swapped out for them
 * is slow. */
#include "hostpool/budget.h"

#include <dirent.h>
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

/* Read a file with one number. "max" becomes UINT64_MAX. */
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
  return sscanf(line, "%" SCNu64, value) == 1;
}

static uint64_t meminfo(const char *root, const char *key) {
  char path[PATH_NBYTES];
  uint64_t kib;
  snprintf(path, sizeof path, "%s/proc/meminfo", root);
  return read_key(path, key, &kib) ? kib * 1024 : UINT64_MAX;
}

/* Clean pages of files can be dropped; dirty ones are counted with them. */
static uint64_t less_dirty(uint64_t active, uint64_t inactive, uint64_t dirty) {
  uint64_t files = active + inactive;
  return files > dirty ? files - dirty : 0;
}

static uint64_t node_field(const char *path, int node, const char *name, uint64_t otherwise) {
  char key[48];
  uint64_t kib;
  snprintf(key, sizeof key, "Node %d %s:", node, name);
  return read_key(path, key, &kib) ? kib * 1024 : otherwise;
}

uint64_t kvs_budget_node(const char *root, int node) {
  char path[PATH_NBYTES];
  snprintf(path, sizeof path, "%s/sys/devices/system/node/node%d/meminfo", root, node);
  uint64_t unused = node_field(path, node, "MemFree", UINT64_MAX);
  if (unused == UINT64_MAX) return unused;
  return unused + less_dirty(node_field(path, node, "Active(file)", 0), node_field(path, node, "Inactive(file)", 0),
                             node_field(path, node, "Dirty", 0));
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

enum { LIMITS = 2, FILE_PAGES = 3, SEARCHED_FOLDERS = 4096 };

/* File and field names of the two versions of control groups. */
struct group_kind {
  const char *type; /* file system type */
  bool unified;
  struct {
    const char *max, *used;
    const char *above; /* in memory.stat: the smallest limit of the group and those above it; NULL: not there */
  } limits[LIMITS];
  const char *pages[FILE_PAGES]; /* in memory.stat: active and inactive ones, and dirty ones among them */
};

static const struct group_kind kinds[] = {
    {"cgroup2",
     true,
     {{"memory.max", "memory.current", NULL}, {"memory.high", "memory.current", NULL}},
     {"active_file", "inactive_file", "file_dirty"}},
    {"cgroup",
     false,
     {{"memory.limit_in_bytes", "memory.usage_in_bytes", "hierarchical_memory_limit"},
      {"memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes", "hierarchical_memsw_limit"}},
     {"total_active_file", "total_inactive_file", "total_dirty"}},
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

/* mountinfo writes a space or a backslash as a backslash and three octal digits. */
static void unescape(char *text) {
  char *to = text;
  for (const char *at = text; *at; to++) {
    unsigned code;
    int length = 0;
    if (*at == '\\' && sscanf(at + 1, "%3o%n", &code, &length) == 1 && length == 3)
      *to = (char)code, at += 4;
    else
      *to = *at++;
  }
  *to = '\0';
}

/* The next mount of the hierarchy with the memory controller, and the mounted part of the hierarchy. */
static bool next_mount(FILE *file, const struct group_kind *kind, char *part, char *mount) {
  char line[4 * LINE_NBYTES], type[64], options[LINE_NBYTES];
  while (fgets(line, sizeof line, file)) {
    const char *behind = strstr(line, " - ");
    if (!behind || sscanf(behind, " - %63s %*s %1023s", type, options) != 2 || strcmp(type, kind->type) != 0) continue;
    if (!kind->unified && !lists(options, "memory")) continue;
    if (sscanf(line, "%*s %*s %*s %1023s %1023s", part, mount) != 2) continue;
    unescape(part);
    unescape(mount);
    return true;
  }
  return false;
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

/* -- the folder of the process's group ------------------------------------------------------------------------- */

/* The first component of a path, behind its slashes. */
static const char *component(const char *path, size_t *length) {
  path += strspn(path, "/");
  *length = strcspn(path, "/");
  return path;
}

/* The number of leading ".." of a path, and what follows them. */
static int climbs(const char **path) {
  int count = 0;
  size_t length;
  for (const char *at; at = component(*path, &length), length == 2 && strncmp(at, "..", 2) == 0; count++)
    *path = at + length;
  return count;
}

static bool lists_this_process(const char *folder) {
  char path[3 * PATH_NBYTES];
  long pid = 0;
  snprintf(path, sizeof path, "%s/cgroup.procs", folder);
  FILE *file = fopen(path, "re");
  if (!file) return false;
  while (pid != (long)getpid() && fscanf(file, "%ld", &pid) == 1) continue;
  fclose(file);
  return pid == (long)getpid();
}

/* Find the folder `levels` below, of unknown names, in which `rest` is this process's group, and append both. */
static bool search(char *folder, size_t capacity, int levels, const char *rest, int *searched) {
  size_t length = strlen(folder);
  bool found = false;
  if (levels == 0) {
    snprintf(folder + length, capacity - length, "%s", rest);
    found = lists_this_process(folder);
  }
  DIR *inside = levels ? opendir(folder) : NULL;
  for (struct dirent *entry; !found && inside && *searched < SEARCHED_FOLDERS && (entry = readdir(inside)) != NULL;) {
    if (entry->d_name[0] == '.' || (entry->d_type != DT_DIR && entry->d_type != DT_UNKNOWN)) continue;
    ++*searched;
    snprintf(folder + length, capacity - length, "/%s", entry->d_name);
    found = search(folder, capacity, levels - 1, rest, searched);
  }
  if (inside) closedir(inside);
  if (!found) folder[length] = '\0';
  return found;
}

/* Both paths are relative to the root of the process's cgroup namespace. A mount of an outer namespace begins above it
 * ("/.."), and says nothing of the names in between. False: the group is not in the mounted part. */
static bool locate(const char *part, const char *group, char *folder, size_t capacity) {
  size_t n, m;
  int searched = 0;
  for (;;) {
    const char *one = component(part, &n), *other = component(group, &m);
    if (n == 0 || n != m || strncmp(one, other, n) != 0) break;
    part = one + n;
    group = other + m;
  }
  int levels = climbs(&part);
  if (component(part, &n), n != 0) return false; /* another part of the hierarchy */
  if (climbs(&group)) return false;              /* the group lies above the mounted part */
  if (strcmp(group, "/") == 0) group = "";
  if (levels) return search(folder, capacity, levels, group, &searched);
  snprintf(folder + strlen(folder), capacity - strlen(folder), "%s", group);
  return access(folder, F_OK) == 0;
}

/* For a mount that hides what it shows: leading components are removed until the group's path names a folder. */
static bool guess(const char *part, const char *group, char *folder, size_t capacity) {
  size_t length = strlen(folder);
  if (climbs(&group)) return false;
  if (climbs(&part)) return true; /* the mount's root is a group above */
  for (;;) {
    snprintf(folder + length, capacity - length, "%s", strcmp(group, "/") ? group : "");
    if (!*group || access(folder, F_OK) == 0) return true;
    const char *slash = strchr(group + 1, '/');
    group = slash ? slash : "";
  }
}

/* The folder, and the length of the mount's path in it. */
static bool find_folder(const char *root, const struct group_kind *kind, char *folder, size_t capacity, size_t *least) {
  char path[PATH_NBYTES], group[LINE_NBYTES], part[LINE_NBYTES], mount[LINE_NBYTES];
  bool found = false;
  snprintf(path, sizeof path, "%s/proc/self/mountinfo", root);
  if (!find_group(root, kind, group)) return false;
  for (int guessing = 0; !found && guessing < 2; guessing++) {
    FILE *file = fopen(path, "re");
    while (file && !found && next_mount(file, kind, part, mount)) {
      snprintf(folder, capacity, "%s%s", root, mount);
      *least = strlen(folder);
      found = (guessing ? guess : locate)(part, group, folder, capacity);
    }
    if (file) fclose(file);
  }
  return found;
}

/* -- their limits ---------------------------------------------------------------------------------------------- */

static uint64_t read_stat(const char *folder, const char *name, uint64_t otherwise) {
  char path[3 * PATH_NBYTES], key[64];
  uint64_t value;
  snprintf(path, sizeof path, "%s/memory.stat", folder);
  snprintf(key, sizeof key, "%s ", name);
  return read_key(path, key, &value) ? value : otherwise;
}

/* Bytes that the kernel frees on demand. Pages of tmpfs and shared memory are not among these, nor are locked ones. */
static uint64_t reclaimable(const char *folder, const struct group_kind *kind) {
  return less_dirty(read_stat(folder, kind->pages[0], 0), read_stat(folder, kind->pages[1], 0),
                    read_stat(folder, kind->pages[2], 0));
}

/* Keep the limit if it leaves less memory than those seen so far. Version 1 writes a large number for "no limit". */
static void keep_least(struct kvs_budget *budget, uint64_t max, uint64_t used, const char *knob, const char *where,
                       const char *folder) {
  uint64_t left = max > used ? max - used : 0;
  uint64_t least = budget->group_max > budget->group_used ? budget->group_max - budget->group_used : 0;
  if (max >= INT64_MAX / 2 || (budget->group_max != UINT64_MAX && left >= least)) return;
  budget->group_max = max;
  budget->group_used = used;
  budget->group_knob = knob;
  snprintf(budget->group, sizeof budget->group, "%s%.240s", where, folder);
}

/* `topmost`: groups above this one cannot be seen. */
static void look_at(const char *folder, const struct group_kind *kind, bool topmost, struct kvs_budget *budget) {
  char path[3 * PATH_NBYTES];
  for (int i = 0; i < LIMITS; i++) {
    uint64_t max, used, free_on_demand;
    snprintf(path, sizeof path, "%s/%s", folder, kind->limits[i].max);
    if (!read_number(path, &max)) continue;
    snprintf(path, sizeof path, "%s/%s", folder, kind->limits[i].used);
    if (!read_number(path, &used)) continue;
    free_on_demand = reclaimable(folder, kind);
    used -= free_on_demand < used ? free_on_demand : used;
    keep_least(budget, max, used, kind->limits[i].max, "", folder);
    if (!topmost || !kind->limits[i].above) continue;
    uint64_t above = read_stat(folder, kind->limits[i].above, UINT64_MAX);
    if (above < max) keep_least(budget, above, used, kind->limits[i].max, "above ", folder);
  }
}

static void read_groups(const char *root, const struct group_kind *kind, struct kvs_budget *budget) {
  char folder[2 * PATH_NBYTES];
  size_t least = 0;
  if (!find_folder(root, kind, folder, sizeof folder, &least)) return;
  for (bool topmost = false; !topmost;) {
    char *slash = strrchr(folder, '/');
    topmost = strlen(folder) <= least || !slash || slash < folder + least;
    look_at(folder, kind, topmost, budget);
    if (!topmost) *slash = '\0';
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
                  "%s of host memory do not fit: control group %.200s allows %s, of which %s are used (page cache "
                  "that the kernel can drop is not counted). Raise %s there (docker run --memory, "
                  "resources.limits.memory in Kubernetes), or ask for less",
                  wanted, budget->group, kvs_size_text(budget->group_max, there),
                  kvs_size_text(budget->group_used, used), budget->group_knob);
}
