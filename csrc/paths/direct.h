/* Path direct: plain memcpy by the threads of a host device. */
#ifndef KVS_DIRECT_H
#define KVS_DIRECT_H

#include "lanes/state.h"

/* Whether AUTO takes path direct for every transfer of the engine. Not on deterministic devices: they are for testing
 * the programs of the other paths. */
bool kvs_prefers_direct(const struct kvs_engine *);

#endif
