/* What a transfer takes on each path, from what was measured of a machine. Pure. */
#ifndef KVS_COST_H
#define KVS_COST_H

#include "kvswap.h"

/* Sizes at which costs are known: 512 bytes, 1 KiB, ... 4 MiB. Between two of them the cost is linear in the size,
 * which is exact for a fixed cost and a bandwidth; below, as the least; above, in proportion to the size. */
enum { KVS_COST_SIZES = 14, KVS_COST_LEAST = 512 };

enum {
  KVS_COST_BATCH = 128,     /* copies that the processor hands over before the copy engine begins */
  KVS_COST_ALONE = 8 << 20, /* bytes of a transfer in bursts that nothing overlaps: the first burst, or the last */
  KVS_COST_SLOT = 16 << 20, /* from so many bytes on bursts pay all of `extra` */
  KVS_COST_LINE = 64,       /* bytes: a kernel that reaches over the link off these pays for parts of lines */
};

/* Of one direction. All in nanoseconds from the call to the end of the wait. */
struct kvs_path_cost {
  double start;                /* of a transfer, however small */
  double extra;                /* DMA: of each of the first KVS_COST_BATCH copies, where there are several; STRIDED: of
                                  one more copy of rows, over and above them; BURST: once, of a transfer of
                                  KVS_COST_SLOT bytes and more, and in proportion of less. The others: not used, 0 */
  double each[KVS_COST_SIZES]; /* of one more copy of that size: DMA, DIRECT a merged copy; STRIDED a row that the
                                  host's next one touches; KERNEL a piece whose host side is at a multiple of
                                  KVS_COST_LINE; BURST a row gathered or scattered */
  double run[KVS_COST_SIZES];  /* STRIDED: of a row where the host's rows lie apart; KERNEL: of a piece whose host side
                                  is off the lines; BURST: of one more run of the host's side. The others: 0 */
};

enum { KVS_PRIORITIES = KVS_PRIORITY_BACKGROUND + 1 };

/* How path kernel runs, so that it keeps what a priority promises to a model beside it. */
struct kvs_kernel_tuning {
  unsigned ctas;    /* 0: unknown, the built-in values serve */
  double pace_gbps; /* 0: unpaced */
  double gbps;      /* what it reaches so alone, with blocks of 32 KiB; 0: what its costs say */
};

/* What else was measured, by direction. */
struct kvs_tuning {
  double link_gbps[2];                                /* one big copy; 0: unknown */
  struct kvs_kernel_tuning kernel[2][KVS_PRIORITIES]; /* KVS_PRIORITY_DEFAULT: not used */
};

/* As measured, else as built in. KVS_PRIORITY_DEFAULT counts as KVS_PRIORITY_NORMAL. KVS_OTHER_DIRECTION, which crosses
 * no link to the host, counts as KVS_D2H, and `normal` needs no pace there: it is as `high`. */
struct kvs_kernel_tuning kvs_kernel_tuning_of(const struct kvs_tuning *tuning, enum kvs_direction direction,
                                              enum kvs_priority priority);

struct kvs_costs {
  struct kvs_path_cost paths[2][KVS_PATHS]; /* by direction (KVS_D2H, KVS_H2D) and path; start < 0: unknown */
  struct kvs_tuning tuning;
};

/* What the planner knows of a transfer before it is planned. Sizes are means: nbytes over the number. */
struct kvs_shape {
  enum kvs_direction direction;
  uint64_t nbytes;
  uint64_t copies;                   /* DMA, DIRECT: merged */
  uint64_t rects;                    /* STRIDED: copies of rows */
  uint64_t rect_rows;                /* the rows in them */
  uint64_t rect_nbytes;              /* their bytes */
  uint64_t apart_rows, apart_nbytes; /* of these, those that lie apart on the host */
  uint64_t rest_copies; /* STRIDED: plain copies beside them, of the other bytes; they cost what they do on DMA */
  uint64_t pieces;      /* KERNEL: rows of blocks, or merged copies where it takes these */
  uint64_t skew_pieces, skew_nbytes; /* of pieces and nbytes, those that the host has at no multiple of KVS_COST_LINE */
  uint64_t rows;                     /* BURST: rows of blocks */
  uint64_t runs;                     /* BURST: contiguous runs of the host's side */
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

/* Which of kvs_path_cost's members a path uses; `start` and `each` always count. */
static inline bool kvs_cost_has_extra(enum kvs_path path) {
  return path == KVS_PATH_DMA || path == KVS_PATH_STRIDED || path == KVS_PATH_BURST;
}
static inline bool kvs_cost_has_run(enum kvs_path path) {
  return path == KVS_PATH_STRIDED || path == KVS_PATH_BURST || path == KVS_PATH_KERNEL;
}

/* Predicted nanoseconds; infinity where the path's costs are unknown or the shape has nothing for it. BURST: gathering
 * and moving the runs overlap, but for one burst. KVS_OTHER_DIRECTION costs as KVS_D2H. */
double kvs_cost_ns(const struct kvs_costs *costs, const struct kvs_shape *shape, enum kvs_path path);

#endif
