/* Names and version of the public interface. */
#include "kvswap.h"

#ifndef KVSWAP_VERSION
#define KVSWAP_VERSION "unknown" /* defined by setup.py */
#endif

const char *kvs_version(void) { return KVSWAP_VERSION; }

const char *kvs_path_name(enum kvs_path path) {
  static const char *const list[] = {"auto", "dma", "strided", "burst", "kernel", "direct"};
  return (unsigned)path < KVS_PATHS ? list[path] : "unknown";
}
