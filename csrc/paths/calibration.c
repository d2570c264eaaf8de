/* Files of costs. A line is a key and its numbers; key_at() lists the keys, for reading and writing:
 *
 *   kvswap calibration 5                  the first line. Files of version 4 are read too: they have no host_... lines
 *   machine ...                           the second line, for people
 *   link_gbps_d2h 55.4                    members of struct kvs_tuning, if known
 *   host_links 4
 *   kernel_high_d2h 8 0 51.2
 *   d2h.burst.start 50000                 a path's costs: all or none
 *   d2h.burst.each 21 33.5 ...
 *   d2h.burst.run 2600 ...
 *   d2h.strided.extra 2000                if the path has an extra cost
 *   end                                   the last line: missing from a truncated file
 *
 * Numbers are digits with at most three decimals, parsed here: no locale, nan, infinity or sign. */
#include "paths/calibration.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "paths/predict.h"
#include "paths/table.h"

static const char first_line[] = "kvswap calibration 5", last_line[] = "end";
static const char line_before[] = "kvswap calibration 4"; /* of the older version that is read too */
static const char first_words[] = "kvswap calibration ";  /* common to all versions */
static const char *const directions[2] = {"d2h", "h2d"}, *const parts[] = {"start", "extra", "each", "run"};
enum { START, EXTRA, EACH, RUN, PARTS };
enum { KEYS = KVS_TUNINGS + 2 * KVS_PATHS * PARTS, MOST_BYTES = 32 << 10, MOST_LINE = 400, MOST_PATH = 4096 };

/* -- tuning ---------------------------------------------------------------------------------------------------- */

enum { HOST_LINKS = 2, HOST_GBPS, KERNELS = 6 }; /* the tunings before are rates of one link */

const char *const kvs_tuning_names[KVS_TUNINGS] = {"link_gbps_d2h",     "link_gbps_h2d",   "host_links",
                                                   "host_gbps_d2h",     "host_gbps_h2d",   "host_gbps_both",
                                                   "kernel_normal_d2h", "kernel_high_d2h", "kernel_background_d2h",
                                                   "kernel_normal_h2d", "kernel_high_h2d", "kernel_background_h2d"};

static bool is_of_host(int i) { return i >= HOST_LINKS && i < KERNELS; }

static struct kvs_kernel_tuning *kernel_of(struct kvs_tuning *tuning, int i) {
  enum { KINDS = KVS_PRIORITIES - 1 };
  return &tuning->kernel[(i - KERNELS) / KINDS][KVS_PRIORITY_NORMAL + (i - KERNELS) % KINDS];
}

/* A rate; NULL: the tuning is another one. */
static double *rate_of(struct kvs_tuning *tuning, int i) {
  if (i < HOST_LINKS) return &tuning->link_gbps[i];
  return i >= HOST_GBPS && i < KERNELS ? &tuning->host_gbps[i - HOST_GBPS] : NULL;
}

int kvs_tuning_count(int i) { return i < KERNELS ? 1 : KVS_TUNING_NUMBERS; }

void kvs_tuning_get(const struct kvs_tuning *tuning, int i, double numbers[KVS_TUNING_NUMBERS]) {
  struct kvs_tuning copy = *tuning;
  const double *rate = rate_of(&copy, i);
  if (i < KERNELS) {
    numbers[0] = rate ? *rate : copy.host_links;
    return;
  }
  const struct kvs_kernel_tuning *kernel = kernel_of(&copy, i);
  numbers[0] = kernel->ctas;
  numbers[1] = kernel->pace_gbps;
  numbers[2] = kernel->gbps;
}

static bool is_rate(double number) { return number >= 0 && number <= KVS_COST_MOST_GBPS; }

bool kvs_tuning_set(struct kvs_tuning *tuning, int i, const double *numbers) {
  double *rate = rate_of(tuning, i);
  if (rate) {
    *rate = numbers[0];
    return is_rate(numbers[0]);
  }
  if (!(numbers[0] >= 0 && numbers[0] <= KVS_COST_MOST_CTAS)) return false;
  if (i == HOST_LINKS) {
    tuning->host_links = (unsigned)numbers[0];
    return tuning->host_links == numbers[0];
  }
  struct kvs_kernel_tuning *kernel = kernel_of(tuning, i);
  *kernel = (struct kvs_kernel_tuning){(unsigned)numbers[0], numbers[1], numbers[2]};
  return kernel->ctas == numbers[0] && is_rate(numbers[1]) && is_rate(numbers[2]);
}

/* -- keys ------------------------------------------------------------------------------------------------------ */

struct key {
  char name[40];
  int tuning;                 /* index of a tuning, or -1 */
  struct kvs_path_cost *cost; /* otherwise the costs of a path, */
  int part;                   /* and the part of them */
  int count;                  /* number of values; 0: no such key */
};

int kvs_costs_runs(enum kvs_path path) { return kvs_paths[path] && kvs_paths[path]->has_run ? KVS_COST_SIZES : 0; }

/* Number of values of a part of a path's costs. */
static int count_of(const struct kvs_path_ops *path, int part) {
  switch (path ? part : PARTS) {
  case START:
    return 1;
  case EXTRA:
    return path->has_extra;
  case EACH:
    return KVS_COST_SIZES;
  case RUN:
    return path->has_run ? KVS_COST_SIZES : 0;
  default:
    return 0;
  }
}

static struct key key_at(struct kvs_costs *costs, int i) {
  struct key key = {.tuning = i < KVS_TUNINGS ? i : -1, .count = 1};
  if (i < KVS_TUNINGS) {
    snprintf(key.name, sizeof key.name, "%s", kvs_tuning_names[i]);
    key.count = kvs_tuning_count(i);
    return key;
  }
  i -= KVS_TUNINGS;
  key.part = i % PARTS;
  enum kvs_path path = (enum kvs_path)(i / PARTS % KVS_PATHS);
  int direction = i / PARTS / KVS_PATHS;
  key.cost = &costs->paths[direction][path];
  key.count = count_of(kvs_paths[path], key.part);
  snprintf(key.name, sizeof key.name, "%s.%s.%s", directions[direction], kvs_path_name(path), parts[key.part]);
  return key;
}

static double *numbers_of(const struct key *key) {
  switch (key->part) {
  case START:
    return &key->cost->start;
  case EXTRA:
    return &key->cost->extra;
  case EACH:
    return key->cost->each;
  default:
    return key->cost->run;
  }
}

/* -- reading --------------------------------------------------------------------------------------------------- */

struct reader {
  const char *path;
  char *next, *end; /* unread text */
  unsigned line;
  bool older; /* of the version before */
  struct kvs_costs costs;
  bool seen[KEYS];
  struct kvs_error *err;
};

static int complain(const struct reader *r, const char *format, ...) __attribute__((format(printf, 2, 3), cold));
static int complain(const struct reader *r, const char *format, ...) {
  char text[160];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return kvs_fail(r->err, KVS_INVALID, "%s, line %u: %s; `kvswap calibrate` makes it anew", r->path, r->line, text);
}

/* Reads the next line without its newline; printable only, since messages quote it. */
static int read_line(struct reader *r, char **line) {
  char *end = memchr(r->next, '\n', (size_t)(r->end - r->next));
  r->line++;
  if (!end) return complain(r, "the file is cut off");
  if (end - r->next > MOST_LINE) return complain(r, "longer than %d characters", MOST_LINE);
  for (const char *at = r->next; at < end; at++)
    if (*at < ' ' || *at > '~') return complain(r, "a character that does not print (code %d)", (unsigned char)*at);
  *end = '\0';
  *line = r->next;
  r->next = end + 1;
  return KVS_OK;
}

static bool read_number(const char *word, double *number) {
  const char *at = word;
  uint64_t thousandths = 0;
  int after = -1; /* decimals */
  for (; *at; at++) {
    if (*at == '.' && after < 0 && at > word) {
      after = 0;
    } else if (*at >= '0' && *at <= '9' && at - word < 16 && after < 3) {
      thousandths = thousandths * 10 + (uint64_t)(*at - '0');
      after += after >= 0;
    } else {
      return false;
    }
  }
  if (at == word || after == 0) return false;
  for (int i = after < 0 ? 0 : after; i < 3; i++) thousandths *= 10;
  *number = (double)thousandths / 1000;
  return true;
}

static int read_numbers(struct reader *r, const struct key *key, char *words) {
  double numbers[KVS_COST_SIZES];
  char text[80];
  int count = 0;
  snprintf(text, sizeof text, "%s", words + strspn(words, " ")); /* for messages: the line is modified below */
  for (char *rest, *word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest), count++) {
    if (count == key->count) return complain(r, "more than %d number%s", count, count == 1 ? "" : "s");
    if (!read_number(word, &numbers[count])) return complain(r, "'%.40s' is no number", word);
    if (key->tuning < 0 && numbers[count] > KVS_COST_MOST_NS)
      return complain(r, "%.40s is more than %.0f", word, KVS_COST_MOST_NS);
  }
  if (count < key->count) return complain(r, "%d of %d number%s", count, key->count, key->count == 1 ? "" : "s");
  if (key->tuning < 0)
    memcpy(numbers_of(key), numbers, (size_t)count * sizeof *numbers);
  else if (!kvs_tuning_set(&r->costs.tuning, key->tuning, numbers))
    return complain(r, "%s cannot be %s", key->name, text);
  return KVS_OK;
}

static int read_key(struct reader *r, char *line) {
  size_t length = strcspn(line, " ");
  for (int i = 0; i < KEYS; i++) {
    struct key key = key_at(&r->costs, i);
    if (key.count == 0 || strlen(key.name) != length || strncmp(key.name, line, length) != 0) continue;
    if (r->older && is_of_host(key.tuning)) break;
    if (r->seen[i]) return complain(r, "%s once more", key.name);
    r->seen[i] = true;
    return read_numbers(r, &key, line + length);
  }
  return complain(r, "'%.40s' is no key", line);
}

static int check_whole_paths(struct reader *r) {
  for (int i = KVS_TUNINGS; i < KEYS; i += PARTS) {
    bool some = false;
    for (int part = 0; part < PARTS; part++) some |= r->seen[i + part];
    for (int part = 0; some && part < PARTS; part++) {
      struct key key = key_at(&r->costs, i + part);
      if (key.count && !r->seen[i + part]) return complain(r, "it ends without %s", key.name);
    }
  }
  return KVS_OK;
}

static int read_first(struct reader *r, const char *line) {
  r->older = strcmp(line, line_before) == 0;
  if (r->older || strcmp(line, first_line) == 0) return KVS_OK;
  if (strncmp(line, first_words, sizeof first_words - 1) == 0)
    return complain(r, "the format is version %.20s, this kvswap reads versions %s and %s",
                    line + sizeof first_words - 1, line_before + sizeof first_words - 1,
                    first_line + sizeof first_words - 1);
  return complain(r, "it is not '%s'", first_line);
}

static int parse(struct reader *r) {
  char *line;
  int status = read_line(r, &line);
  if (!status) status = read_first(r, line);
  if (!status) status = read_line(r, &line);
  if (!status && strncmp(line, "machine ", 8) != 0) status = complain(r, "it does not begin with 'machine '");
  kvs_costs_clear(&r->costs);
  while (!status && !(status = read_line(r, &line)) && strcmp(line, last_line) != 0) status = read_key(r, line);
  if (status) return status;
  return r->next == r->end ? check_whole_paths(r) : complain(r, "something follows '%s'", last_line);
}

static int check_owner(const char *path, int fd, struct kvs_error *err) {
  struct stat info;
  if (fstat(fd, &info) != 0) return kvs_fail(err, KVS_INVALID, "%s: %s", path, strerror(errno));
  if (!S_ISREG(info.st_mode)) return kvs_fail(err, KVS_INVALID, "%s: a calibration is a plain file", path);
  if (info.st_uid != geteuid() && info.st_uid != 0)
    return kvs_fail(err, KVS_INVALID, "%s: it belongs to another user (%u), so it is not used: run `kvswap calibrate`",
                    path, (unsigned)info.st_uid);
  if (info.st_mode & (S_IWGRP | S_IWOTH))
    return kvs_fail(err, KVS_INVALID, "%s: others can write it (mode %03o), so it is not used: chmod 600 it", path,
                    (unsigned)info.st_mode & 0777);
  return KVS_OK;
}

static int read_whole(const char *path, int fd, char *text, size_t *nbytes, struct kvs_error *err) {
  for (*nbytes = 0;;) {
    ssize_t got = read(fd, text + *nbytes, MOST_BYTES + 1 - *nbytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return kvs_fail(err, KVS_INVALID, "%s: %s", path, strerror(errno));
    *nbytes += (size_t)got;
    if (got == 0) return KVS_OK;
    if (*nbytes > MOST_BYTES)
      return kvs_fail(err, KVS_INVALID, "%s: more than %d bytes, so no calibration", path, MOST_BYTES);
  }
}

int kvs_costs_read(const char *path, struct kvs_costs *costs, struct kvs_error *err) {
  char text[MOST_BYTES + 1];
  struct reader r = {.path = path, .next = text, .err = err};
  size_t nbytes;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* O_NONBLOCK: opening a pipe must not block */
  if (fd < 0)
    return kvs_fail(err, errno == ENOENT || errno == ENOTDIR ? KVS_RANGE : KVS_INVALID, "%s: %s", path,
                    strerror(errno));
  int status = check_owner(path, fd, err);
  if (!status) status = read_whole(path, fd, text, &nbytes, err);
  close(fd);
  if (status) return status;
  r.end = text + nbytes;
  status = parse(&r);
  if (!status) *costs = r.costs;
  return status;
}

/* -- writing --------------------------------------------------------------------------------------------------- */

static void write_number(FILE *file, double number) {
  char text[32];
  uint64_t thousandths = (uint64_t)(number * 1000 + 0.5);
  int n = snprintf(text, sizeof text, "%" PRIu64 ".%03u", thousandths / 1000, (unsigned)(thousandths % 1000));
  while (text[n - 1] == '0') n--;
  if (text[n - 1] == '.') n--;
  fprintf(file, " %.*s", n, text);
}

static void write_keys(FILE *file, const struct kvs_costs *costs) {
  struct kvs_costs copy = *costs; /* key_at() needs pointers to non-const */
  for (int i = 0; i < KEYS; i++) {
    struct key key = key_at(&copy, i);
    double tuned[KVS_TUNING_NUMBERS];
    if (key.tuning >= 0) kvs_tuning_get(&copy.tuning, key.tuning, tuned);
    bool known = key.tuning < 0 ? kvs_cost_is_known(key.cost) : tuned[0] > 0;
    const double *numbers = key.tuning < 0 ? numbers_of(&key) : tuned;
    if (key.count == 0 || !known) continue;
    fputs(key.name, file);
    for (int n = 0; n < key.count; n++) write_number(file, numbers[n]);
    fputc('\n', file);
  }
}

static int make_folders(const char *path, struct kvs_error *err) {
  char folder[MOST_PATH];
  snprintf(folder, sizeof folder, "%s", path);
  for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    if (mkdir(folder, 0700) != 0 && errno != EEXIST)
      return kvs_fail(err, KVS_INVALID, "folder %s: %s", folder, strerror(errno));
    *slash = '/';
  }
  return KVS_OK;
}

static int check_machine(const char *machine, struct kvs_error *err) {
  size_t length = strlen(machine);
  for (const char *at = machine; *at; at++)
    if (*at < ' ' || *at > '~') length = 0;
  if (length > 0 && length <= MOST_LINE / 2) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "machine must be one line of 1 to %d ASCII characters that print", MOST_LINE / 2);
}

int kvs_costs_write(const char *path, const struct kvs_costs *costs, const char *machine, struct kvs_error *err) {
  char beside[MOST_PATH];
  int status = kvs_costs_check(costs, err);
  if (!status) status = check_machine(machine, err);
  if (!status && snprintf(beside, sizeof beside, "%s.XXXXXX", path) >= (int)sizeof beside)
    status = kvs_fail(err, KVS_RANGE, "a path of %zu bytes is too long", strlen(path));
  if (!status) status = make_folders(path, err);
  if (status) return status;
  int fd = mkostemp(beside, O_CLOEXEC); /* mode 0600 */
  FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
  if (!file) {
    status = kvs_fail(err, KVS_INVALID, "%s: %s", beside, strerror(errno));
    if (fd < 0) return status;
    close(fd);
  } else {
    fprintf(file, "%s\nmachine %s\n", first_line, machine);
    write_keys(file, costs);
    fprintf(file, "%s\n", last_line);
    bool failed = ferror(file); /* no short-circuit: the file must be closed */
    failed |= fclose(file) != 0;
    if (!failed && rename(beside, path) == 0) return KVS_OK;
    status = kvs_fail(err, KVS_INVALID, "%s: %s", path, strerror(errno));
  }
  unlink(beside);
  return status;
}

/* -- file names ------------------------------------------------------------------------------------------------ */

static bool fits(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-';
}

void kvs_costs_what(const struct kvs_device_info *info, char what[KVS_COSTS_WHAT]) {
  char all[KVS_COSTS_WHAT], *to = what;
  snprintf(all, sizeof all, "%s driver %d.%d kvswap %s", info->name, info->driver / 1000, info->driver % 1000 / 10,
           kvs_version());
  for (const char *at = all; *at; at++) {
    if (fits(*at))
      *to++ = *at;
    else if (to > what && to[-1] != '-')
      *to++ = '-'; /* replaces any number of other characters */
  }
  *to = '\0';
}

int kvs_costs_path(const char *what, char *path, size_t capacity, struct kvs_error *err) {
  const char *file = getenv("KVSWAP_CALIBRATION"), *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  int length;
  for (const char *at = what; *at; at++)
    if (!fits(*at)) return kvs_fail(err, KVS_INVALID, "'%s' is no name of a calibration", what);
  if (*what == '\0') return kvs_fail(err, KVS_INVALID, "a calibration has a name");
  if (file && *file)
    length = snprintf(path, capacity, "%s", file);
  else if (cache && *cache == '/') /* the XDG specification ignores relative paths */
    length = snprintf(path, capacity, "%s/kvswap/calibration-%s.txt", cache, what);
  else if (home && *home == '/')
    length = snprintf(path, capacity, "%s/.cache/kvswap/calibration-%s.txt", home, what);
  else
    return kvs_fail(err, KVS_RANGE, "no place for a calibration: set HOME, XDG_CACHE_HOME or KVSWAP_CALIBRATION");
  if (length < 0 || (size_t)length >= capacity)
    return kvs_fail(err, KVS_RANGE, "the path of the calibration is longer than %zu bytes", capacity);
  return KVS_OK;
}
