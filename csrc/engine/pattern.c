/* Test patterns on a stream: `kvswap replay` and the tests write them into blocks and check where they arrive. The
 * pattern uses its own kernels and plain driver copies, and shares nothing with the paths under test. */
#include "engine/pattern.h"

#include <stdlib.h>
#include <string.h>

#include "base/wait.h"
#include "lanes/buffers.h"
#include "lanes/state.h"
#include "memory/reclaim.h"

enum { PATTERN_CTAS = 264, PATTERN_THREADS = 256 };

struct kvs_pattern_job {
  struct kvs_engine *engine;
  struct kvs_staging *staging; /* struct kvs_pattern_result, then the items */
  kvs_event event;
};

int kvs_delay(struct kvs_engine *engine, uint64_t ns, kvs_stream stream, struct kvs_error *err) {
  struct kvs_delay_params params = {.ns = ns};
  struct kvs_launch launch = {
      .kernel = KVS_KERNEL_DELAY, .grid = 1, .threads = 1, .params = &params, .params_nbytes = sizeof params};
  return kvs_dev_launch(engine->device, &launch, stream, err);
}

static struct kvs_pattern_result *result_of(const struct kvs_pattern_job *job) {
  return (struct kvs_pattern_result *)(uintptr_t)job->staging->host;
}

/* All on the caller's stream: upload the items, launch, copy the result back. */
static int enqueue(struct kvs_pattern_job *job, enum kvs_pattern_mode mode, enum kvs_pattern_kind kind, size_t nitems,
                   kvs_stream stream, struct kvs_error *err) {
  struct kvs_device *device = job->engine->device;
  const struct kvs_staging *staging = job->staging;
  size_t head = sizeof(struct kvs_pattern_result);
  struct kvs_pattern_params params = {
      .items = staging->device + head, .nitems = nitems, .result = staging->device, .mode = mode, .kind = kind};
  struct kvs_launch launch = {.kernel = KVS_KERNEL_PATTERN,
                              .grid = nitems < PATTERN_CTAS ? (unsigned)nitems : PATTERN_CTAS,
                              .threads = PATTERN_THREADS,
                              .params = &params,
                              .params_nbytes = sizeof params};
  size_t nbytes = head + nitems * sizeof(struct kvs_pattern_item);
  int status = kvs_dev_copy(device, staging->device, staging->host, nbytes, stream, err);
  if (!status && nitems) status = kvs_dev_launch(device, &launch, stream, err);
  if (!status && mode == KVS_PATTERN_CHECK)
    status = kvs_dev_copy(device, staging->host, staging->device, head, stream, err);
  return status;
}

int kvs_pattern_submit(struct kvs_engine *engine, enum kvs_pattern_mode mode, enum kvs_pattern_kind kind,
                       const struct kvs_pattern_item *items, size_t nitems, kvs_stream stream,
                       struct kvs_pattern_job **out, struct kvs_error *err) {
  struct kvs_error ignored;
  int status = kvs_dev_check(engine->device, err);
  if (status) return status;
  struct kvs_pattern_job *job = calloc(1, sizeof *job);
  if (!job) return kvs_fail(err, KVS_NOMEM, "no memory for a pattern of %zu items", nitems);
  job->engine = engine;
  status = kvs_dev_event_create(engine->device, false, &job->event, err);
  if (!status)
    status =
        kvs_engine_staging_get(engine, sizeof(struct kvs_pattern_result) + nitems * sizeof *items, &job->staging, err);
  if (!status) {
    *result_of(job) = (struct kvs_pattern_result){.wrong = 0, .first = UINT64_MAX};
    if (nitems) memcpy(result_of(job) + 1, items, nitems * sizeof *items);
    status = enqueue(job, mode, kind, nitems, stream, err);
    if (!status) status = kvs_dev_event_record(engine->device, job->event, stream, err);
    if (status) (void)kvs_dev_synchronize(engine->device, &ignored); /* part of the job may be queued: wait for it */
  }
  if (status) {
    if (job->staging) kvs_engine_staging_put(engine, job->staging);
    if (job->event) (void)kvs_dev_event_destroy(engine->device, job->event, &ignored);
    free(job);
    return status;
  }
  kvs_engine_ref(engine);
  *out = job;
  return KVS_OK;
}

static int poll(void *arg, struct kvs_error *err) {
  struct kvs_pattern_job *job = arg;
  int status = kvs_dev_event_query(job->engine->device, job->event, err);
  return status == KVS_REFUSED ? KVS_NOT_READY : status; /* a refused query says nothing about the job */
}

bool kvs_pattern_done(struct kvs_pattern_job *job) {
  struct kvs_error ignored;
  return poll(job, &ignored) != KVS_NOT_READY;
}

int kvs_pattern_wait(struct kvs_pattern_job *job, int64_t timeout_ns, struct kvs_pattern_result *result,
                     struct kvs_error *err) {
  int status = kvs_wait_until(poll, job, job->engine->device->stepped, timeout_ns, err);
  if (!status) *result = *result_of(job);
  return status;
}

static void release_job(struct kvs_pattern_job *job, bool ended) {
  struct kvs_engine *engine = job->engine;
  struct kvs_error ignored;
  if (ended) kvs_engine_staging_put(engine, job->staging); /* else leak it: the queued kernel may still read it */
  if (!kvs_dev_forked(engine->device)) (void)kvs_dev_event_destroy(engine->device, job->event, &ignored);
  free(job);
  kvs_engine_unref(engine);
}

/* The function of a reclaim task. */
static int free_now(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  int status = poll(what, err);
  (void)engine;
  if (status == KVS_NOT_READY) return kvs_fail(err, KVS_TIMEOUT, "it has not ended");
  release_job(what, status == KVS_OK);
  return KVS_OK;
}

void kvs_pattern_free(struct kvs_pattern_job *job) {
  struct kvs_error ignored;
  bool ended = poll(job, &ignored) == KVS_OK;
  if (ended || kvs_dev_forked(job->engine->device) || atomic_load(&job->engine->closed))
    release_job(job, ended);
  else
    kvs_reclaim_later(job->engine, free_now, job);
}
