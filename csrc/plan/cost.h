/* What paths cost, as it was measured, and the shape of a transfer whose time is to be predicted. Pure. */
#ifndef KVS_COST_H
#define KVS_COST_H

#include "kvswap.h"

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

/* A negative start, or a table without the path. */
static inline bool kvs_cost_is_known(const struct kvs_path_cost *cost) {
  return cost->start > 0 || (cost->start == 0 && cost->each[KVS_COST_SIZES - 1] > 0);
}

enum { KVS_PRIORITIES = KVS_PRIORITY_BACKGROUND + 1 };

/* Kernel path settings that keep the promise of a priority. */
struct kvs_kernel_tuning {
  unsigned ctas;    /* 0: unknown, use the built-in values */
  double pace_gbps; /* 0: unpaced */
  double gbps; /* bandwidth alone with these settings and 32 KiB blocks; 0: derived from the costs, as `normal`'s */
};

enum { KVS_HOST_BOTH = 2 }; /* both directions at once, where KVS_D2H and KVS_H2D are each alone */

/* Other measurements, by direction. */
struct kvs_tuning {
  double link_gbps[2]; /* of one large copy; 0: unknown */
  unsigned host_links; /* links of several devices that were measured together; 0: none were */
  double host_gbps[3]; /* what these links reach together; 0: unknown */
  struct kvs_kernel_tuning kernel[2][KVS_PRIORITIES]; /* entry KVS_PRIORITY_DEFAULT is unused */
};

struct kvs_costs {
  struct kvs_path_cost paths[2][KVS_PATHS]; /* indexed by direction (KVS_D2H, KVS_H2D) and path */
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

/* Cost of `count` parts with nbytes in total, each at their mean size; costs: KVS_COST_SIZES of them. */
double kvs_cost_of_all(const double *costs, uint64_t nbytes, uint64_t count);
/* The same by `each`; other_count of the parts, with other_nbytes, cost `run`. */
double kvs_cost_of_both(const struct kvs_path_cost *cost, uint64_t nbytes, uint64_t count, uint64_t other_nbytes,
                        uint64_t other_count);

#endif
