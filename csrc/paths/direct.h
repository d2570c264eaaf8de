/* Path direct: plain memcpy by the threads of a host device. */
#ifndef KVS_DIRECT_H
#define KVS_DIRECT_H

#include "lanes/state.h"

/* Whether AUTO takes it for every transfer of the engine. A deterministic device runs the programs of the other paths
 * instead. */
bool kvs_prefers_direct(const struct kvs_engine *);

#endif
