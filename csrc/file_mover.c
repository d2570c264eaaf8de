#include "file_store.h"
int kvs_file_mover_open(struct kvs_file_store *s, struct kvs_error *e) {
  (void)s;
  return kvs_fail(e, KVS_UNSUPPORTED, "x");
}
void kvs_file_mover_close(struct kvs_file_store *s) { (void)s; }
int kvs_file_mover_prepare(struct kvs_file_transfer *t, const struct kvs_file_blocks *b,
                           const struct kvs_file_options *o, struct kvs_error *e) {
  (void)t;
  (void)b;
  (void)o;
  return kvs_fail(e, KVS_UNSUPPORTED, "x");
}
void kvs_file_mover_push(struct kvs_file_item *i) { (void)i; }
void kvs_file_mover_forget(struct kvs_file_transfer *i) { (void)i; }
void kvs_file_mover_arrived(struct kvs_file_item *i) { (void)i; }
void kvs_file_mover_release(struct kvs_file_item *i) { (void)i; }
