/* The crew of a host pool: the threads that populate it. */
#ifndef KVS_POPULATE_H
#define KVS_POPULATE_H

#include "hostpool/state.h"

int kvs_crew_hire(struct kvs_host_pool *, struct kvs_error *); /* start threads for all unpopulated chunks */
void kvs_crew_dismiss(struct kvs_host_pool *);                 /* stop the threads and join them */

#endif
