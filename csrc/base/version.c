/* The version, which the build system passes to this file alone. */
#include "kvswap.h"

#ifndef KVSWAP_VERSION
#define KVSWAP_VERSION "unknown" /* defined by setup.py */
#endif

const char *kvs_version(void) { return KVSWAP_VERSION; }
