/* Lending: the part of kvswap.h (which includes this file) for links that one device lends to another. */
#ifndef KVSWAP_LEND_H
#define KVSWAP_LEND_H

#include <stdint.h>

#include "kvswap_status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvs_engine;

/* Let transfers of `borrower` go over the link of `lender` too (path borrow), both of this process, of one kind, and
 * with peer access. At most `count` (2 to 4) pieces of slot_nbytes (a multiple of 128 KiB, at most 64 MiB) stand on
 * that link in each direction, and as much memory is allocated on either device. share: bytes that the lender's link
 * gets for each byte of the borrower's own, 0.1 to 10. Lending again changes these; slot_nbytes 0 ends it. Both wait,
 * at most timeout_ns, until the link carries nothing of the borrower's; the memory is freed behind all work of its
 * device. Lending makes streams, which some drivers do only when all that is queued has run. KVS_UNSUPPORTED: no peer
 * access, or a deterministic device. After KVS_TIMEOUT, wrong values or a lost lender nothing has changed; else nothing
 * is lent any more. What is lent is work of the lender, too: waits for its whole device wait for it. No member has a
 * default: Device.lend() of Python has {8 << 20, 2, 1.0}. Ends with slot_nbytes 0 or the process. */
struct kvs_lending {
  uint64_t slot_nbytes;
  unsigned count;
  double share;
  uint64_t reserved[4];
};
KVS_API int kvs_engine_lend(struct kvs_engine *lender, struct kvs_engine *borrower, const struct kvs_lending *lending,
                            int64_t timeout_ns, struct kvs_error *err);
/* The `index`-th lender of a device, borrowed (no unref), and what it lends; NULL: there are no more. */
KVS_API struct kvs_engine *kvs_engine_lender(struct kvs_engine *borrower, unsigned index, struct kvs_lending *lending);

#ifdef __cplusplus
}
#endif

#endif
