/* Calibrations: costs in small text files, one for each GPU, driver and version of kvswap (docs/calibration.md). */
#ifndef KVS_CALIBRATION_H
#define KVS_CALIBRATION_H

#include "device/device.h"
#include "paths/costs.h"

/* KVS_RANGE: no file. KVS_INVALID: the file cannot be used; the error has the line and the reason. *costs is written on
 * success only. The opened file must be a plain file of this user or root that no other user can write; a link to such
 * a file is accepted. */
int kvs_costs_read(const char *path, struct kvs_costs *costs, struct kvs_error *err);

/* Write a new file (mode 0600) that replaces the old one; missing folders are made with mode 0700. Keeps three
 * decimals. `machine`: one printable line for people. */
int kvs_costs_write(const char *path, const struct kvs_costs *costs, const char *machine, struct kvs_error *err);

/* Name of a device's calibration: product, driver and kvswap version, in letters, digits, '.' and '-'. */
enum { KVS_COSTS_WHAT = 160 };
void kvs_costs_what(const struct kvs_device_info *info, char what[KVS_COSTS_WHAT]);

/* Path of the file: KVSWAP_CALIBRATION, or kvswap/calibration-<what>.txt in XDG_CACHE_HOME or HOME/.cache. KVS_RANGE:
 * none of these is set, or `capacity` is too small. */
int kvs_costs_path(const char *what, char *path, size_t capacity, struct kvs_error *err);

int kvs_costs_runs(enum kvs_path path); /* numbers of `run` that a path has: KVS_COST_SIZES or 0 */

/* The members of struct kvs_tuning by their names in files and in Python. Those of the links and of the host have one
 * number, a kernel's three: CTAs, pace_gbps and gbps. */
enum { KVS_TUNINGS = 12, KVS_TUNING_NUMBERS = 3 };
extern const char *const kvs_tuning_names[KVS_TUNINGS];
int kvs_tuning_count(int i); /* number of values */
void kvs_tuning_get(const struct kvs_tuning *tuning, int i, double numbers[KVS_TUNING_NUMBERS]);
/* false: a number is out of range, or one of CTAs or links is not an integer */
bool kvs_tuning_set(struct kvs_tuning *tuning, int i, const double *numbers);

#endif
