/* Memory that is about to go: no pool outlives it. For the core, and for who unmaps memory of its own. */
#ifndef KVS_VACATE_H
#define KVS_VACATE_H

#include "core/engine.h"

/* A range of memory on its way out. The caller keeps it in its place from kvs_vacate_begin() to kvs_vacate_end(). */
struct kvs_vacating {
  uint64_t base, end;
  struct kvs_vacating *next;
};

/* Close the pools over [base, base + nbytes), of all devices of the process and of `engine`, and until kvs_vacate_end()
 * let none be opened there: the memory may be given back in between. No transfer of these pools is being submitted then
 * or is unfinished. KVS_TIMEOUT: a transfer of any kind still uses the memory; nothing was changed. Any thread; takes
 * the hazard_lock of all devices, but does not wait for transfers. */
int kvs_vacate_begin(struct kvs_engine *engine, uint64_t base, uint64_t nbytes, struct kvs_vacating *vacating,
                     struct kvs_error *err);
void kvs_vacate_end(struct kvs_vacating *vacating);

/* There is new memory at [base, base + nbytes): what was there before has gone, even if kvs_vacate_end() is yet to
 * come. */
void kvs_vacate_over(uint64_t base, uint64_t nbytes);

/* Whether memory of [base, end) is about to go. */
bool kvs_vacate_meets(uint64_t base, uint64_t end);

#endif
