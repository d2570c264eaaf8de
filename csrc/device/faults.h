/* Faults of a device, which tests inject. The wrappers of device.c count them. */
#ifndef KVS_FAULTS_H
#define KVS_FAULTS_H

#include "device/device.h"

/* Faults that tests inject, counted by the wrappers. One fault a kind; zero-initialised: none. */
enum kvs_fault_kind { KVS_FAULT_CALL, KVS_FAULT_COPY, KVS_FAULT_CODE, KVS_FAULT_KINDS };
enum kvs_fault_action {
  KVS_FAULT_NONE,
  KVS_FAULT_FAIL,  /* CALL: the driver call is refused with `code`; COPY: that copy is refused with `code` */
  KVS_FAULT_SKIP,  /* COPY: that copy is silently skipped */
  KVS_FAULT_LOSE,  /* CALL: the device is lost with `code` */
  KVS_FAULT_DELAY, /* CALL: the call returns `delay_ns` later, or when a fault is set or removed */
  KVS_FAULT_SPOIL, /* CODE: four bytes of that coded unit are wrong */
};
struct kvs_fault {
  enum kvs_fault_action action;
  char operation[32]; /* CALL: only this member ("copy_batch"); empty: any */
  uint64_t nth;       /* first occurrence that fails, from 1 */
  uint64_t every;     /* then every n-th after it; 0: only once */
  int code;
  uint64_t delay_ns;
};

/* Faults. Set at any time; counters of that kind start again at 0. */
int kvs_dev_fault_set(struct kvs_device *, enum kvs_fault_kind, const struct kvs_fault *, struct kvs_error *);
/* Every path passes its planned copies through this. KVS_FAULT_SKIP drops entries. KVS_FAULT_FAIL moves them behind the
 * new `count`: entries [count, refused_end) are refused with *code. Without faults *refused_end = count. */
void kvs_dev_fault_copies(struct kvs_device *, struct kvs_copies *, size_t *refused_end, int *code);
bool kvs_dev_fault_on_copies(struct kvs_device *); /* if true, paths should issue plain copies only */

/* Counts the units of a launch that codes; returns which of them is to be spoilt, UINT64_MAX: none. */
uint64_t kvs_dev_fault_units(struct kvs_device *, uint64_t count);

/* For device.c: what a set fault makes of a call; when the device is closed. */
int kvs_dev_fault_call(struct kvs_device *, const char *operation, struct kvs_error *);
void kvs_dev_faults_free(struct kvs_device *);

#endif
