/* The race checker. */
#ifndef KVS_PY_RACES_H
#define KVS_PY_RACES_H

#include "py/bind.h"

void kvs_py_tell_races(struct kvs_py_state *state); /* call the hook for new races; keeps the current exception */
/* The calling Python line for race reports: "engine.py:12 in step"; NULL while no checker runs. */
const char *kvs_py_where(struct kvs_py_state *state, char *text, size_t capacity);

#endif
