/* Encoding and decoding of the store's pages. See files/format.h. */
#include "files/format.h"

#include <string.h>

#include "base/crc32c.h"

/* Fields of all pages: magic at 0, version at 8, checksum at 12. Each kind of page has its own magic. */
enum { VERSION_AT = 8, CRC_AT = 12 };
static const char store_magic[] = "KVSSTORE", segment_magic[] = "KVSSEGMT", block_magic[] = "KVSBLOCK",
                  check_magic[] = "KVSCHECK", epoch_magic[] = "KVSEPOCH", bound_magic[] = "KVSBOUND";

/* Fields of the first page of the store's file and of a segment. */
enum {
  G_HASH = 16,
  G_BLOCK = 32,
  G_SLOT = 40,
  G_SEGMENT_NBYTES = 48,
  G_SLOTS = 56,
  G_SEGMENT = 60,
  G_TEXT = 64,
  G_LAYOUT = 68
};
/* Fields of a block's header page. */
enum { H_HASH = 16, H_SEQUENCE = 32, H_NBYTES = 40, H_DATA_CRC = 48, H_KEY_NBYTES = 52, H_KEY = 56, H_EPOCH = 568 };
/* Fields of a checkpoint page. */
enum { C_GENERATION = 16, C_SEQUENCE = 24, C_CLEAN = 32 };
/* Field of the page of an epoch. */
enum { E_EPOCH = 16 };
/* Fields of the page of bound.kvs. */
enum { B_LIMIT = 16, B_NBYTES = 24, B_TURN = 32 };

static void put(uint8_t *page, size_t at, uint64_t value, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i++) page[at + i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get(const uint8_t *page, size_t at, size_t nbytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < nbytes; i++) value |= (uint64_t)page[at + i] << (8 * i);
  return value;
}

static uint32_t page_crc(const uint8_t *page) {
  static const uint8_t zeros[4];
  uint32_t crc = kvs_crc32c(0, page, CRC_AT);
  crc = kvs_crc32c(crc, zeros, sizeof zeros);
  return kvs_crc32c(crc, page + CRC_AT + 4, KVS_FILE_PAGE - CRC_AT - 4);
}

static void begin(uint8_t *page, const char magic[8]) {
  memset(page, 0, KVS_FILE_PAGE);
  memcpy(page, magic, 8);
  put(page, VERSION_AT, KVS_FILE_VERSION, 4);
}

static void end(uint8_t *page) { put(page, CRC_AT, page_crc(page), 4); }

static bool all_zero(const uint8_t *page) { return page[0] == 0 && memcmp(page, page + 1, KVS_FILE_PAGE - 1) == 0; }

static enum kvs_file_page look(const uint8_t *page, const char magic[8]) {
  if (memcmp(page, magic, 8) != 0) return all_zero(page) ? KVS_FILE_EMPTY : KVS_FILE_DAMAGED;
  if (get(page, CRC_AT, 4) != page_crc(page)) return KVS_FILE_DAMAGED;
  return get(page, VERSION_AT, 4) == KVS_FILE_VERSION ? KVS_FILE_GOOD : KVS_FILE_FOREIGN;
}

static bool is_number(uint64_t number) { return number >= 1 && number <= KVS_FILE_LAST_SEQUENCE; }

/* -- layouts ------------------------------------------------------------------------------------------------------- */

/* 128-bit FNV-1a over the format version and block_nbytes (8 bytes each) and the layout text. */
static void hash_layout(const char *layout, uint64_t block_nbytes, uint8_t hash[16]) {
  __extension__ typedef unsigned __int128 wide;
  const wide prime = ((wide)1 << 88) | 0x13b;
  wide value = ((wide)0x6c62272e07bb0142u << 64) | 0x62b821756295c58du;
  uint8_t numbers[16];
  put(numbers, 0, KVS_FILE_VERSION, 8);
  put(numbers, 8, block_nbytes, 8);
  for (size_t i = 0; i < sizeof numbers; i++) value = (value ^ numbers[i]) * prime;
  for (const char *at = layout; *at; at++) value = (value ^ (uint8_t)*at) * prime;
  for (int i = 0; i < 16; i++) hash[i] = (uint8_t)(value >> (8 * i));
}

void kvs_file_geometry_make(const char *layout, uint64_t block_nbytes, uint64_t segment_nbytes,
                            struct kvs_file_geometry *g) {
  const uint64_t page = KVS_FILE_PAGE;
  memset(g, 0, sizeof *g);
  strncpy(g->layout, layout, KVS_FILE_LAYOUT_NBYTES);
  /* Hash g's copy of the layout: the caller may modify the original. */
  hash_layout(g->layout, block_nbytes, g->layout_hash);
  g->block_nbytes = block_nbytes;
  g->slot_nbytes = page + (block_nbytes + page - 1) / page * page;
  uint64_t slots = segment_nbytes > page ? (segment_nbytes - page) / g->slot_nbytes : 0;
  g->slots = (uint32_t)(slots < 1 ? 1 : slots > 65536 ? 65536 : slots);
  g->segment_nbytes = page + g->slots * g->slot_nbytes;
}

void kvs_file_geometry_write(const struct kvs_file_geometry *g, bool of_segment, void *to) {
  uint8_t *page = to;
  size_t length = strlen(g->layout);
  begin(page, of_segment ? segment_magic : store_magic);
  memcpy(page + G_HASH, g->layout_hash, 16);
  put(page, G_BLOCK, g->block_nbytes, 8);
  put(page, G_SLOT, g->slot_nbytes, 8);
  put(page, G_SEGMENT_NBYTES, g->segment_nbytes, 8);
  put(page, G_SLOTS, g->slots, 4);
  put(page, G_SEGMENT, of_segment ? g->segment : 0, 4);
  put(page, G_TEXT, length, 4);
  memcpy(page + G_LAYOUT, g->layout, length);
  end(page);
}

/* Check that the sizes match each other and the hash matches the text, without overflow. */
static bool sizes_agree(const struct kvs_file_geometry *g) {
  uint8_t hash[16];
  const uint64_t page = KVS_FILE_PAGE;
  if (g->block_nbytes == 0 || g->block_nbytes > KVS_FILE_BLOCK_NBYTES || g->slots == 0 || g->slots > 65536)
    return false;
  if (g->slot_nbytes != page + (g->block_nbytes + page - 1) / page * page) return false;
  if (g->segment_nbytes != page + g->slots * g->slot_nbytes) return false;
  hash_layout(g->layout, g->block_nbytes, hash);
  return memcmp(hash, g->layout_hash, sizeof hash) == 0;
}

enum kvs_file_page kvs_file_geometry_read(const void *from, bool of_segment, struct kvs_file_geometry *g) {
  const uint8_t *page = from;
  enum kvs_file_page what = look(page, of_segment ? segment_magic : store_magic);
  if (what != KVS_FILE_GOOD) return what;
  uint64_t length = get(page, G_TEXT, 4);
  if (length > KVS_FILE_LAYOUT_NBYTES) return KVS_FILE_DAMAGED;
  memset(g, 0, sizeof *g);
  memcpy(g->layout_hash, page + G_HASH, 16);
  memcpy(g->layout, page + G_LAYOUT, length);
  if (strlen(g->layout) != length) return KVS_FILE_DAMAGED;
  g->block_nbytes = get(page, G_BLOCK, 8);
  g->slot_nbytes = get(page, G_SLOT, 8);
  g->segment_nbytes = get(page, G_SEGMENT_NBYTES, 8);
  g->slots = (uint32_t)get(page, G_SLOTS, 4);
  g->segment = (uint32_t)get(page, G_SEGMENT, 4);
  return sizes_agree(g) ? KVS_FILE_GOOD : KVS_FILE_DAMAGED;
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */

void kvs_file_header_write(const struct kvs_file_header *h, void *to) {
  uint8_t *page = to;
  begin(page, block_magic);
  memcpy(page + H_HASH, h->layout_hash, 16);
  put(page, H_SEQUENCE, h->sequence, 8);
  put(page, H_NBYTES, h->nbytes, 8);
  put(page, H_DATA_CRC, h->data_crc, 4);
  put(page, H_KEY_NBYTES, h->key_nbytes, 2);
  memcpy(page + H_KEY, h->key, h->key_nbytes);
  memcpy(page + H_EPOCH, h->epoch.bytes, sizeof h->epoch.bytes);
  end(page);
}

enum kvs_file_page kvs_file_header_read(const void *from, struct kvs_file_header *h) {
  const uint8_t *page = from;
  enum kvs_file_page what = look(page, block_magic);
  if (what != KVS_FILE_GOOD) return what;
  uint64_t key_nbytes = get(page, H_KEY_NBYTES, 2);
  if (key_nbytes == 0 || key_nbytes > KVS_FILE_KEY_NBYTES) return KVS_FILE_DAMAGED;
  memset(h, 0, sizeof *h);
  memcpy(h->layout_hash, page + H_HASH, 16);
  h->sequence = get(page, H_SEQUENCE, 8);
  h->nbytes = get(page, H_NBYTES, 8);
  h->data_crc = (uint32_t)get(page, H_DATA_CRC, 4);
  h->key_nbytes = (uint16_t)key_nbytes;
  memcpy(h->key, page + H_KEY, key_nbytes);
  memcpy(h->epoch.bytes, page + H_EPOCH, sizeof h->epoch.bytes);
  return is_number(h->sequence) ? KVS_FILE_GOOD : KVS_FILE_DAMAGED;
}

/* -- checkpoints --------------------------------------------------------------------------------------------------- */

void kvs_file_checkpoint_write(const struct kvs_file_checkpoint *c, void *to) {
  uint8_t *page = to;
  begin(page, check_magic);
  put(page, C_GENERATION, c->generation, 8);
  put(page, C_SEQUENCE, c->sequence, 8);
  put(page, C_CLEAN, c->clean, 1);
  end(page);
}

enum kvs_file_page kvs_file_checkpoint_read(const void *from, struct kvs_file_checkpoint *c) {
  const uint8_t *page = from;
  enum kvs_file_page what = look(page, check_magic);
  if (what != KVS_FILE_GOOD) return what;
  c->generation = get(page, C_GENERATION, 8);
  c->sequence = get(page, C_SEQUENCE, 8);
  c->clean = get(page, C_CLEAN, 1) != 0;
  return is_number(c->generation) && c->sequence <= KVS_FILE_LAST_SEQUENCE + 1 ? KVS_FILE_GOOD : KVS_FILE_DAMAGED;
}

/* -- epochs -------------------------------------------------------------------------------------------------------- */

void kvs_file_epoch_write(const struct kvs_file_epoch *epoch, void *to) {
  uint8_t *page = to;
  begin(page, epoch_magic);
  memcpy(page + E_EPOCH, epoch->bytes, sizeof epoch->bytes);
  end(page);
}

enum kvs_file_page kvs_file_epoch_read(const void *from, struct kvs_file_epoch *epoch) {
  const uint8_t *page = from;
  enum kvs_file_page what = look(page, epoch_magic);
  if (what == KVS_FILE_GOOD) memcpy(epoch->bytes, page + E_EPOCH, sizeof epoch->bytes);
  return what;
}

/* -- bounds -------------------------------------------------------------------------------------------------------- */

void kvs_file_bound_write(const struct kvs_file_bound_page *b, void *to) {
  uint8_t *page = to;
  begin(page, bound_magic);
  put(page, B_LIMIT, b->limit, 8);
  put(page, B_NBYTES, b->nbytes, 8);
  put(page, B_TURN, b->turn, 8);
  end(page);
}

enum kvs_file_page kvs_file_bound_read(const void *from, struct kvs_file_bound_page *b) {
  const uint8_t *page = from;
  enum kvs_file_page what = look(page, bound_magic);
  if (what != KVS_FILE_GOOD) return what;
  b->limit = get(page, B_LIMIT, 8);
  b->nbytes = get(page, B_NBYTES, 8);
  b->turn = get(page, B_TURN, 8);
  return is_number(b->limit) ? KVS_FILE_GOOD : KVS_FILE_DAMAGED;
}
