/* The wire format of an export: fixed size, little-endian, with a checksum over the whole record. One list of fields
 * serves encoding and decoding. */
#include <inttypes.h>
#include <string.h>

#include "base/crc32c.h"
#include "kvswap.h"
#include "status.h"

#define MAGIC "kvswapX1"
#define VERSION 1u

/* X(field, bytes): the fields after magic, version and length. */
#define NUMBERS(X)                                                                                                     \
  X(pid)                                                                                                               \
  X(start)                                                                                                             \
  X(generation)                                                                                                        \
  X(allocation_nbytes)                                                                                                 \
  X(offset)                                                                                                            \
  X(nbytes)                                                                                                            \
  X(address)                                                                                                           \
  X(buffer_id)                                                                                                         \
  X(num_blocks)                                                                                                        \
  X(block_nbytes)                                                                                                      \
  X(stride)                                                                                                            \
  X(rows)                                                                                                              \
  X(pitch)                                                                                                             \
  X(nchunks)
#define TEXTS(X)                                                                                                       \
  X(uuid)                                                                                                              \
  X(device)                                                                                                            \
  X(dtype)                                                                                                             \
  X(pool)                                                                                                              \
  X(handle)                                                                                                            \
  X(token)                                                                                                             \
  X(socket)

static const size_t SUM_AT = KVS_EXPORT_NBYTES - 4;

static void put(unsigned char **at, uint64_t value, int nbytes) {
  for (int i = 0; i < nbytes; i++) *(*at)++ = (unsigned char)(value >> (8 * i));
}

static uint64_t get(const unsigned char **at, int nbytes) {
  uint64_t value = 0;
  for (int i = 0; i < nbytes; i++) value |= (uint64_t)*(*at)++ << (8 * i);
  return value;
}

void kvs_export_write(const struct kvs_export *from, unsigned char bytes[KVS_EXPORT_NBYTES]) {
  unsigned char *at = bytes;
  memset(bytes, 0, KVS_EXPORT_NBYTES);
  memcpy(at, MAGIC, 8);
  at += 8;
  put(&at, VERSION, 4);
  put(&at, KVS_EXPORT_NBYTES, 4);
  put(&at, from->kind, 4);
  put(&at, from->ndim, 4);
#define X(field) put(&at, (uint64_t)from->field, 8);
  NUMBERS(X)
#undef X
  for (int i = 0; i < KVS_EXPORT_DIMS; i++) put(&at, from->shape[i], 8);
#define X(field)                                                                                                       \
  memcpy(at, from->field, sizeof from->field);                                                                         \
  at += sizeof from->field;
  TEXTS(X)
#undef X
  at = bytes + SUM_AT;
  put(&at, kvs_crc32c(0, bytes, SUM_AT), 4);
}

static int check_form(const unsigned char *bytes, size_t nbytes, struct kvs_error *err) {
  const unsigned char *version = bytes + 8, *sum = bytes + SUM_AT;
  if (nbytes < 16 || memcmp(bytes, MAGIC, 8) != 0)
    return kvs_fail(err, KVS_INVALID, "these %zu bytes are no export of kvswap's", nbytes);
  uint64_t number = get(&version, 4);
  if (number != VERSION)
    return kvs_fail(err, KVS_INVALID, "the export has form %" PRIu64 ", and this kvswap reads form %u: use one version",
                    number, VERSION);
  if (nbytes != KVS_EXPORT_NBYTES)
    return kvs_fail(err, KVS_INVALID, "the export has %zu bytes instead of %d: it was cut or added to", nbytes,
                    KVS_EXPORT_NBYTES);
  if (get(&sum, 4) != kvs_crc32c(0, bytes, SUM_AT))
    return kvs_fail(err, KVS_INVALID, "the export's checksum is wrong: it was damaged on its way");
  return KVS_OK;
}

static bool ends(const char *text, size_t nbytes) { return memchr(text, '\0', nbytes) != NULL; }

/* The record is untrusted: no field may lead outside the allocation. */
static int check_numbers(const struct kvs_export *made, struct kvs_error *err) {
  bool memory = made->kind == KVS_EXPORT_HANDLE || made->kind == KVS_EXPORT_CHUNKS;
  if (!memory && made->kind != KVS_EXPORT_EVENT)
    return kvs_fail(err, KVS_INVALID, "the export is of kind %d, which this kvswap does not know", (int)made->kind);
  if (memory && (made->nbytes == 0 || made->offset > made->allocation_nbytes ||
                 made->nbytes > made->allocation_nbytes - made->offset))
    return kvs_fail(err, KVS_INVALID,
                    "the export is of %" PRIu64 " bytes at byte %" PRIu64 " of an allocation of %" PRIu64 " bytes",
                    made->nbytes, made->offset, made->allocation_nbytes);
  if (made->ndim > KVS_EXPORT_DIMS || !ends(made->device, sizeof made->device) ||
      !ends(made->socket, sizeof made->socket) || !ends(made->dtype, sizeof made->dtype) ||
      !ends(made->pool, sizeof made->pool))
    return kvs_fail(err, KVS_INVALID, "the export's shape or a text in it is none");
  return KVS_OK;
}

int kvs_export_read(const void *given, size_t nbytes, struct kvs_export *made, struct kvs_error *err) {
  const unsigned char *bytes = given, *at = bytes + 16;
  int status = check_form(bytes, nbytes, err);
  if (status) return status;
  memset(made, 0, sizeof *made);
  made->kind = (enum kvs_export_kind)get(&at, 4);
  made->ndim = (uint32_t)get(&at, 4);
  uint64_t number;
#define X(field)                                                                                                       \
  number = get(&at, 8);                                                                                                \
  memcpy(&made->field, &number, sizeof number);
  NUMBERS(X)
#undef X
  for (int i = 0; i < KVS_EXPORT_DIMS; i++) made->shape[i] = get(&at, 8);
#define X(field)                                                                                                       \
  memcpy(made->field, at, sizeof made->field);                                                                         \
  at += sizeof made->field;
  TEXTS(X)
#undef X
  return check_numbers(made, err);
}

#define X(field) _Static_assert(sizeof(((struct kvs_export *)0)->field) == 8, #field);
NUMBERS(X)
#undef X
enum {
#define X(field) +8
  NUMBERS_NBYTES = 0 NUMBERS(X),
#undef X
#define X(field) +sizeof(((struct kvs_export *)0)->field)
  TEXTS_NBYTES = 0 TEXTS(X),
#undef X
};
_Static_assert(24 + NUMBERS_NBYTES + 8 * KVS_EXPORT_DIMS + TEXTS_NBYTES + 4 <= KVS_EXPORT_NBYTES, "it fits");
