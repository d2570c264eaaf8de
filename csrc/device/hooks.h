/* What the wrappers of device.c do besides calling the device: inject faults, and report to a watcher. */
#ifndef KVS_HOOKS_H
#define KVS_HOOKS_H

#include "device/device.h"

/* Faults that tests inject, counted by the wrappers. One fault a kind; zero-initialised: none. */
enum kvs_fault_kind { KVS_FAULT_CALL, KVS_FAULT_COPY, KVS_FAULT_KINDS };
enum kvs_fault_action {
  KVS_FAULT_NONE,
  KVS_FAULT_FAIL,  /* CALL: the driver call is refused with `code`; COPY: that copy is refused with `code` */
  KVS_FAULT_SKIP,  /* COPY: that copy is silently skipped */
  KVS_FAULT_LOSE,  /* CALL: the device is lost with `code` */
  KVS_FAULT_DELAY, /* CALL: the call returns `delay_ns` later, or when a fault is set or removed */
};
struct kvs_fault {
  enum kvs_fault_action action;
  char operation[32]; /* CALL: only this member ("copy_batch"); empty: any */
  uint64_t nth;       /* first occurrence that fails, from 1 */
  uint64_t every;     /* then every n-th after it; 0: only once */
  int code;
  uint64_t delay_ns;
};

/* device.c */
/* Faults. Set at any time; counters of that kind start again at 0. */
int kvs_dev_fault_set(struct kvs_device *, enum kvs_fault_kind, const struct kvs_fault *, struct kvs_error *);
/* Every path passes its planned copies through this. KVS_FAULT_SKIP drops entries. KVS_FAULT_FAIL moves them behind the
 * new `count`: entries [count, refused_end) are refused with *code. Without faults *refused_end = count. */
void kvs_dev_fault_copies(struct kvs_device *, struct kvs_copies *, size_t *refused_end, int *code);
bool kvs_dev_fault_on_copies(struct kvs_device *); /* if true, paths should issue plain copies only */

/* Callbacks about order, for the race checker. Called after the device call succeeded (forget_event: before the call).
 * One watcher in the process, NULL for none; set at any time. */
struct kvs_watch {
  void (*recorded)(struct kvs_device *, kvs_event, kvs_stream);
  void (*waits)(struct kvs_device *, kvs_stream, kvs_event); /* later work of the stream comes after the event */
  void (*reached)(struct kvs_device *, kvs_event);           /* the host saw the event reached */
  void (*idle)(struct kvs_device *, kvs_stream);             /* the host saw the stream idle */
  void (*all_idle)(struct kvs_device *);
  void (*forget_event)(struct kvs_device *, kvs_event); /* the event is destroyed: its handle may be reused */
};
void kvs_dev_watch(const struct kvs_watch *watch);

/* Entry of every wrapper: refuses after fork() and on a lost device, injects faults. Leave: notes a loss. */
int kvs_dev_enter(struct kvs_device *, const char *operation, struct kvs_error *);
int kvs_dev_leave(struct kvs_device *, int status, const struct kvs_error *);

#endif
