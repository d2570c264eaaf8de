/* Memory that is about to go: no pool outlives it. For the core, and for who unmaps memory of its own. */
#ifndef KVS_VACATE_H
#define KVS_VACATE_H

#include "private.h"

/* A range of memory on its way out. The caller keeps it in its place from kvs_vacate_begin() to kvs_vacate_end(). */
struct kvs_vacating {
  uint64_t base, end;
  struct kvs_vacating *next;
};

/* Close the pools over [base, base + nbytes), of all devices of the process and of `engine`, once no transfer uses that
 * memory, and until kvs_vacate_end() let none be opened there: the memory may be given back in between. KVS_TIMEOUT:
 * a transfer still used the memory after timeout_ns (negative: no limit); nothing was changed. Any thread; takes the
 * hazard_lock of all devices. */
int kvs_vacate_begin(struct kvs_engine *engine, uint64_t base, uint64_t nbytes, int64_t timeout_ns,
                     struct kvs_vacating *vacating, struct kvs_error *err);
void kvs_vacate_end(struct kvs_vacating *vacating);

/* Wait until no memory of [base, end) is being vacated, and take engine->hazard_lock. While it is held, no other thread
 * begins to vacate memory. KVS_TIMEOUT: the memory was still being vacated after timeout_ns; the lock is not held. */
int kvs_vacate_lock(struct kvs_engine *engine, uint64_t base, uint64_t end, int64_t timeout_ns, struct kvs_error *err);

#endif
