/* Calibrations: costs in small text files, one a GPU, driver and version of kvswap (docs/calibration.md). */
#ifndef KVS_CALIBRATION_H
#define KVS_CALIBRATION_H

#include "device/device.h"
#include "plan/cost.h"

/* KVS_RANGE where there is no file; KVS_INVALID, with the file, the line and what is wrong with it, where it cannot be
 * used. *costs is written only on success. Who could have written the file is checked on what was opened: it must be a
 * plain file of this user or of root that nobody else can write. A link to such a file is as good. */
int kvs_costs_read(const char *path, struct kvs_costs *costs, struct kvs_error *err);

/* To a new file of mode 0600 that takes the old one's place; folders that are missing are made with mode 0700. Kept are
 * three digits after the point. `machine`: one printable line for people. */
int kvs_costs_write(const char *path, const struct kvs_costs *costs, const char *machine, struct kvs_error *err);

/* What a device's calibration is called: its product, driver and kvswap's version, in letters, digits, '.' and '-'. */
enum { KVS_COSTS_WHAT = 160 };
void kvs_costs_what(const struct kvs_device_info *info, char what[KVS_COSTS_WHAT]);

/* Where it lies: KVSWAP_CALIBRATION (a file), else XDG_CACHE_HOME or HOME/.cache, then
 * kvswap/calibration-<what>.txt. KVS_RANGE: nowhere, or `capacity` is too small. */
int kvs_costs_path(const char *what, char *path, size_t capacity, struct kvs_error *err);

/* The members of struct kvs_tuning by the names that files and Python give them: the link's, of one number each, and
 * the kernel's, of three: CTAs, pace_gbps and gbps. */
enum { KVS_TUNINGS = 8, KVS_TUNING_NUMBERS = 3 };
extern const char *const kvs_tuning_names[KVS_TUNINGS];
int kvs_tuning_count(int i); /* of its numbers */
void kvs_tuning_get(const struct kvs_tuning *tuning, int i, double numbers[KVS_TUNING_NUMBERS]);
/* false: one is out of its range, or CTAs that are no whole number. */
bool kvs_tuning_set(struct kvs_tuning *tuning, int i, const double *numbers);

#endif
