/* Faults of a device, which tests inject. */
#include "device/faults.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/wait.h"

struct kvs_faults {
  pthread_mutex_t lock;
  pthread_cond_t changed;                  /* signalled when a fault is set or removed */
  struct kvs_fault fault[KVS_FAULT_KINDS]; /* guarded by lock */
  uint64_t seen[KVS_FAULT_KINDS];          /* guarded by lock */
  uint64_t changes;                        /* guarded by lock */
};

static struct kvs_faults *faults_of(struct kvs_device *device) {
  return atomic_load_explicit(&device->faults, memory_order_acquire);
}

int kvs_dev_fault_set(struct kvs_device *device, enum kvs_fault_kind kind, const struct kvs_fault *fault,
                      struct kvs_error *err) {
  struct kvs_faults *faults = faults_of(device);
  if (!faults) {
    struct kvs_faults *none = NULL;
    faults = calloc(1, sizeof *faults);
    if (!faults) return kvs_fail(err, KVS_NOMEM, "no memory for the device's faults");
    pthread_mutex_init(&faults->lock, NULL);
    kvs_cond_init(&faults->changed);
    if (!atomic_compare_exchange_strong(&device->faults, &none, faults)) {
      free(faults);
      faults = none;
    }
  }
  pthread_mutex_lock(&faults->lock);
  faults->fault[kind] = *fault;
  faults->seen[kind] = 0;
  faults->changes++;
  pthread_cond_broadcast(&faults->changed);
  pthread_mutex_unlock(&faults->lock);
  return KVS_OK;
}

/* Whether the fault hits occurrence `seen` (from 1). */
static bool hits(const struct kvs_fault *fault, uint64_t seen) {
  if (fault->action == KVS_FAULT_NONE || seen < fault->nth) return false;
  return seen == fault->nth || (fault->every != 0 && (seen - fault->nth) % fault->every == 0);
}

static void delay_locked(struct kvs_faults *faults, uint64_t delay_ns) {
  uint64_t deadline = kvs_deadline((int64_t)delay_ns), changes = faults->changes;
  while (faults->changes == changes && kvs_cond_wait(&faults->changed, &faults->lock, deadline)) continue;
}

int kvs_dev_fault_call(struct kvs_device *device, const char *operation, struct kvs_error *err) {
  struct kvs_faults *faults = faults_of(device);
  struct kvs_fault fault = {.action = KVS_FAULT_NONE};
  if (!faults) return KVS_OK;
  pthread_mutex_lock(&faults->lock);
  const struct kvs_fault *set = &faults->fault[KVS_FAULT_CALL];
  if (set->action != KVS_FAULT_NONE && (!set->operation[0] || strcmp(set->operation, operation) == 0) &&
      hits(set, ++faults->seen[KVS_FAULT_CALL]))
    fault = *set;
  if (fault.action == KVS_FAULT_DELAY) delay_locked(faults, fault.delay_ns);
  pthread_mutex_unlock(&faults->lock);
  switch (fault.action) {
  case KVS_FAULT_FAIL: {
    int status = fault.code == KVS_DRIVER_OUT_OF_MEMORY ? KVS_NOMEM : KVS_REFUSED;
    return kvs_fail_driver(err, status, fault.code, operation, "injected fault");
  }
  case KVS_FAULT_LOSE:
    return kvs_fail_driver(err, KVS_LOST, fault.code, operation, "injected loss of the device");
  case KVS_FAULT_DELAY:
  case KVS_FAULT_NONE:
  case KVS_FAULT_SKIP:
  case KVS_FAULT_SPOIL:
    break;
  }
  return KVS_OK;
}

static void swap_entries(struct kvs_copies *copies, size_t a, size_t b) {
  uint64_t dst = copies->dst[a], src = copies->src[a], nbytes = copies->nbytes[a];
  uint32_t block = copies->block[a];
  copies->dst[a] = copies->dst[b], copies->src[a] = copies->src[b];
  copies->nbytes[a] = copies->nbytes[b], copies->block[a] = copies->block[b];
  copies->dst[b] = dst, copies->src[b] = src, copies->nbytes[b] = nbytes, copies->block[b] = block;
}

void kvs_dev_fault_copies(struct kvs_device *device, struct kvs_copies *copies, size_t *refused_end, int *code) {
  struct kvs_faults *faults = faults_of(device);
  size_t end = copies->count;
  *refused_end = copies->count;
  if (!faults) return;
  pthread_mutex_lock(&faults->lock);
  const struct kvs_fault *fault = &faults->fault[KVS_FAULT_COPY];
  *code = fault->code;
  for (size_t i = 0; fault->action != KVS_FAULT_NONE && i < end;) {
    if (hits(fault, ++faults->seen[KVS_FAULT_COPY]))
      swap_entries(copies, i, --end); /* the entry swapped in is not counted yet: look at i again */
    else
      i++;
  }
  if (fault->action == KVS_FAULT_SKIP) *refused_end = end;
  pthread_mutex_unlock(&faults->lock);
  copies->count = end;
}

bool kvs_dev_fault_on_copies(struct kvs_device *device) {
  struct kvs_faults *faults = faults_of(device);
  if (!faults) return false;
  pthread_mutex_lock(&faults->lock);
  bool on = faults->fault[KVS_FAULT_COPY].action != KVS_FAULT_NONE;
  pthread_mutex_unlock(&faults->lock);
  return on;
}

uint64_t kvs_dev_fault_units(struct kvs_device *device, uint64_t count) {
  struct kvs_faults *faults = faults_of(device);
  uint64_t first = UINT64_MAX;
  if (!faults) return first;
  pthread_mutex_lock(&faults->lock);
  const struct kvs_fault *fault = &faults->fault[KVS_FAULT_CODE];
  for (uint64_t i = 0; fault->action != KVS_FAULT_NONE && i < count; i++)
    if (hits(fault, ++faults->seen[KVS_FAULT_CODE]) && first == UINT64_MAX) first = i;
  pthread_mutex_unlock(&faults->lock);
  return first;
}

void kvs_dev_faults_free(struct kvs_device *device) {
  struct kvs_faults *faults = faults_of(device);
  if (!faults) return;
  pthread_cond_destroy(&faults->changed);
  pthread_mutex_destroy(&faults->lock);
  free(faults);
}
