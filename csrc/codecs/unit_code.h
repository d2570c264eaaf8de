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
/* Whether the coded unit is that of the page. GOOD, NOT_STORED, or MISCODED: it does not decode to the page's values;
 * of a codec with loss, it does not code to the same bytes, anew or after decoding. A unit that is MISCODED gets a head
 * that says NOT_STORED. scratch: KVS_VERIFY_NBYTES. */
enum kvs_unit_verdict kvs_unit_verify(const struct kvs_unit *unit, const void *page, uint64_t valid_nbytes,
                                      void *coded_page, void *scratch);
void kvs_unit_zero(const struct kvs_unit *unit, void *page);

#endif
