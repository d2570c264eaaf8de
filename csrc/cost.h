/* What a transfer takes on each path, from what was measured of a machine. Pure. */
#ifndef KVS_COST_H
#define KVS_COST_H

#include "kvswap.h"

/* Sizes at which costs are known: 512 bytes, 1 KiB, ... 4 MiB. Between two of them the cost is linear in the size,
 * which is exact for a fixed cost and a bandwidth; below, as the least; above, in proportion to the size. */
enum { KVS_COST_SIZES = 14, KVS_COST_LEAST = 512 };

/* Of one direction. All in nanoseconds from the call to the end of the wait. */
struct kvs_path_cost {
  double start;                /* of a transfer, however small */
  double each[KVS_COST_SIZES]; /* of one more copy of that size: DMA a merged copy; STRIDED a row; KERNEL a row of a
                                  block; RELAY a row gathered or scattered; DIRECT a merged copy */
  double run[KVS_COST_SIZES]; /* STRIDED: of one more copy of rows, over and above them (only [0] counts); RELAY: of one
                                 more run of the host's side, of that size. The others: not used, 0 */
};

/* What else was measured. 0: unknown, the built-in value serves. */
struct kvs_tuning {
  unsigned kernel_ctas;     /* the fewest that come within 3 % of what any number reaches */
  unsigned background_ctas; /* the fewest that keep up with the background's pace */
  double background_gbps;   /* pace of the kernel beside a model */
  double link_gbps[2];      /* one big copy, by direction */
};

struct kvs_costs {
  struct kvs_path_cost paths[2][KVS_PATHS]; /* by direction (KVS_D2H, KVS_H2D) and path; start < 0: unknown */
  struct kvs_tuning tuning;
};

/* What the planner knows of a transfer before it is planned. Sizes are means: nbytes over the number. */
struct kvs_shape {
  enum kvs_direction direction;
  uint64_t nbytes;
  uint64_t copies;      /* DMA, DIRECT: merged */
  uint64_t rects;       /* STRIDED: copies of rows */
  uint64_t rect_rows;   /* the rows in them */
  uint64_t rect_nbytes; /* their bytes */
  uint64_t rest_copies; /* STRIDED: plain copies beside them, of the other bytes; they cost what they do on DMA */
  uint64_t apart_rows;  /* of rect_rows, those that lie apart on the host */
  uint64_t apart_nbytes;
  uint64_t pieces;      /* KERNEL: rows of blocks, or merged copies */
  uint64_t rows;        /* RELAY: rows of blocks */
  uint64_t runs;        /* RELAY: contiguous runs of the host's side */
};

/* Of an H200 on PCIe 5 with driver 580 (cost_default.c). */
const struct kvs_costs *kvs_costs_default(void);

/* No path is known, nothing is tuned. */
void kvs_costs_clear(struct kvs_costs *costs);

/* KVS_INVALID, with the value, where one is no number or beyond what any machine takes. */
int kvs_costs_check(const struct kvs_costs *costs, struct kvs_error *err);
#define KVS_COST_MOST_NS 1e10 /* of a start, a copy or a run */
#define KVS_COST_MOST_GBPS 1e5
#define KVS_COST_MOST_CTAS 1024

/* Which of kvs_path_cost's lists a path uses: how many numbers of it count. `each` always does, whole. */
static inline int kvs_cost_runs(enum kvs_path path) {
  return path == KVS_PATH_RELAY ? KVS_COST_SIZES : path == KVS_PATH_STRIDED;
}

/* Predicted nanoseconds; infinity where the path's costs are unknown or the shape has nothing for it. RELAY: the
 * slower of gathering and of moving the runs. KVS_OTHER_DIRECTION costs as KVS_D2H. */
double kvs_cost_ns(const struct kvs_costs *costs, const struct kvs_shape *shape, enum kvs_path path);

#endif
