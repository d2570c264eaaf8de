/* The paths, for what is made from a list of them: the table, and docs. A row is the name in enum kvs_path and the
 * path's own, in the order of the enum. */
#ifndef KVS_NAMES_H
#define KVS_NAMES_H

/* clang-format off */
#define KVS_PATH_ROWS(ROW) \
  ROW(DMA, dma)            \
  ROW(STRIDED, strided)    \
  ROW(BORROW, borrow)      \
  ROW(BURST, burst)        \
  ROW(KERNEL, kernel)      \
  ROW(DIRECT, direct)
/* clang-format on */

#endif
