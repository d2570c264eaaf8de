/* Predicted time of a transfer on each path, from measured costs. Pure. */
#ifndef KVS_COST_H
#define KVS_COST_H

#include "kvswap.h"

extern const char *const kvs_path_names[KVS_PATHS]; /* kvs_path_name()'s */

/* Sizes with known costs: 512 bytes, 1 KiB, ... 4 MiB. Between two sizes the cost is interpolated linearly, which is
 * exact for a fixed cost plus a bandwidth. Below the first size the cost is constant, above the last proportional. */
enum { KVS_COST_SIZES = 14, KVS_COST_LEAST = 512 };

enum {
  KVS_COST_BATCH = 16,      /* copies submitted before the copy engine starts */
  KVS_COST_ALONE = 8 << 20, /* bytes of a burst transfer that overlap nothing: the first or the last burst */
  KVS_COST_SLOT = 16 << 20, /* burst transfers of this size pay the whole `extra` */
  KVS_COST_LINE = 64,       /* bytes: the kernel path pays for partial lines on the link if not aligned to this */
};

/* Costs of one direction, in ns from the call to the end of the wait. */
struct kvs_path_cost {
  double start; /* of a transfer of any size */
  double extra; /* DMA: for each of the first KVS_COST_BATCH copies, if there are several. STRIDED: for each further 2-D
                   copy, in addition to its rows. BURST: once for a transfer of KVS_COST_SLOT bytes or more,
                   proportionally less below. Other paths: unused, 0 */
  double each[KVS_COST_SIZES]; /* for each further part of that size. DMA, DIRECT: a merged copy. STRIDED: a row
                                  adjacent to the next one on the host. KERNEL: a piece whose host address is a multiple
                                  of KVS_COST_LINE, with `normal`'s CTAs and pace. BURST: a row gathered or scattered */
  double run[KVS_COST_SIZES];  /* STRIDED: a row not adjacent on the host. KERNEL: a piece not aligned to KVS_COST_LINE.
                                  BURST: a further contiguous run on the host. Other paths: 0 */
};

enum { KVS_PRIORITIES = KVS_PRIORITY_BACKGROUND + 1 };

/* Kernel path settings that keep the promise of a priority. */
struct kvs_kernel_tuning {
  unsigned ctas;    /* 0: unknown, use the built-in values */
  double pace_gbps; /* 0: unpaced */
  double gbps; /* bandwidth alone with these settings and 32 KiB blocks; 0: derived from the costs, as `normal`'s */
};

/* Other measurements, by direction. */
struct kvs_tuning {
  double link_gbps[2];                                /* of one large copy; 0: unknown */
  struct kvs_kernel_tuning kernel[2][KVS_PRIORITIES]; /* entry KVS_PRIORITY_DEFAULT is unused */
};

/* Measured values, or the built-in ones. KVS_PRIORITY_DEFAULT means KVS_PRIORITY_NORMAL. KVS_OTHER_DIRECTION, which
 * does not use the link to the host, uses the values of KVS_D2H, and `normal` is unpaced there, like `high`. */
struct kvs_kernel_tuning kvs_kernel_tuning_of(const struct kvs_tuning *tuning, enum kvs_direction direction,
                                              enum kvs_priority priority);

struct kvs_costs {
  struct kvs_path_cost paths[2][KVS_PATHS]; /* indexed by direction (KVS_D2H, KVS_H2D) and path; start < 0: unknown */
  struct kvs_tuning tuning;
};

/* Properties of a transfer before it is planned. Part sizes are means: bytes over count. */
struct kvs_shape {
  enum kvs_direction direction;
  uint64_t nbytes;
  uint64_t copies;                   /* DMA, DIRECT: merged copies */
  uint64_t rects;                    /* STRIDED: 2-D copies */
  uint64_t rect_rows;                /* rows in them */
  uint64_t rect_nbytes;              /* bytes in them */
  uint64_t apart_rows, apart_nbytes; /* those of the rows that are not adjacent on the host */
  uint64_t rest_copies;              /* STRIDED: plain copies of the remaining bytes, at the cost of DMA */
  uint64_t pieces;                   /* KERNEL: rows of blocks, or merged copies if the kernel gets a list */
  uint64_t skew_pieces, skew_nbytes; /* those of the pieces that are not aligned to KVS_COST_LINE on the host */
  uint64_t rows;                     /* BURST: rows of blocks */
  uint64_t runs;                     /* BURST: contiguous runs on the host */
};

/* Of an H200 on PCIe 5, driver 580 (cost_default.c). */
const struct kvs_costs *kvs_costs_default(void);

/* The costs to use on a device whose memory has so many GB/s (0: unknown): those of its calibration, or the built-in
 * ones (NULL). Kernel settings that no calibration has set suit that memory. */
void kvs_costs_fit(struct kvs_costs *costs, const struct kvs_costs *calibrated, int memory_gbps);

/* All paths unknown, nothing tuned. */
void kvs_costs_clear(struct kvs_costs *costs);

/* KVS_INVALID, with the value: not a number, or out of the plausible range. */
int kvs_costs_check(const struct kvs_costs *costs, struct kvs_error *err);
#define KVS_COST_MOST_NS 1e10 /* of a start, copy or run */
#define KVS_COST_MOST_GBPS 1e5
#define KVS_COST_MOST_CTAS 1024

/* The members of kvs_path_cost that a path uses; `start` and `each` are always used. */
static inline bool kvs_cost_has_extra(enum kvs_path path) {
  return path == KVS_PATH_DMA || path == KVS_PATH_STRIDED || path == KVS_PATH_BURST;
}
static inline bool kvs_cost_has_run(enum kvs_path path) {
  return path == KVS_PATH_STRIDED || path == KVS_PATH_BURST || path == KVS_PATH_KERNEL;
}

/* Predicted nanoseconds; infinity if the path's costs are unknown or the shape has no parts for the path. BURST:
 * gathering overlaps the copies, except for one burst. KVS_OTHER_DIRECTION costs as KVS_D2H. */
double kvs_cost_ns(const struct kvs_costs *costs, const struct kvs_shape *shape, enum kvs_path path);

#endif
