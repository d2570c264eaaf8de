/* The built-in costs. */
#ifndef KVS_COSTS_DEFAULT_H
#define KVS_COSTS_DEFAULT_H

#include "plan/cost.h"

const struct kvs_costs *kvs_costs_default(void); /* of an H200 on PCIe 5, driver 580 */

#endif
