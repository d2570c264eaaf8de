/* Encoding and decoding of units and blocks by the CPU. */
#ifndef KVS_CODECS_UNIT_CODE_H
#define KVS_CODECS_UNIT_CODE_H

#include "codecs/unit.h"

/* The unit of a page, whose bytes behind valid_nbytes are read as zeros. A unit that is NOT_STORED has a head that says
 * so. */
enum kvs_unit_verdict kvs_unit_encode(const struct kvs_unit *unit, const void *page, uint64_t valid_nbytes,
                                      void *coded_page);
/* From any bytes. Unless GOOD, the unit's bytes of the page are zeros. */
enum kvs_unit_verdict kvs_unit_decode(const struct kvs_unit *unit, const void *coded_page, void *page);
void kvs_unit_zero(const struct kvs_unit *unit, void *page);

#endif
