/* Fields to units.
 *
 * A page is cut into ranges: the fields, and what lies between them, which is raw. A range that fills the pitch is one
 * run of bytes: each repetition is cut by itself, into equal parts of at most a unit. A shorter range is repeated in
 * rows, a pitch apart: a unit takes as many whole rows as it can hold. A row that is longer than a unit is cut as a run
 * is. Parts are multiples of CUT bytes, so that no segment or block of a codec is divided; of rows
 * as many as are a multiple of ROWS, where there are more, as `exact` looks for channels. */
#include "codecs/coding.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codecs/table.h"
#include "status.h"

enum { CUT = 1024, ROWS = 16 };

#define MOST_NBYTES ((uint64_t)1 << 40)

/* A field or a gap, by offset. */
struct range {
  uint64_t offset, nbytes;
  enum kvs_kind kind;
  int codec;
};

/* -- validation ------------------------------------------------------------------------------------------------ */

static int check_sizes(struct kvs_coding_layout *layout, struct kvs_error *err) {
  if (layout->block_nbytes == 0 || layout->block_nbytes > MOST_NBYTES)
    return kvs_fail(err, KVS_INVALID, "block_nbytes is %llu; it is from 1 to 2^40",
                    (unsigned long long)layout->block_nbytes);
  if (layout->page_nbytes == 0) layout->page_nbytes = layout->block_nbytes;
  if (layout->block_nbytes % layout->page_nbytes)
    return kvs_fail(err, KVS_INVALID, "a block of %llu bytes is not a whole number of pages of %llu bytes",
                    (unsigned long long)layout->block_nbytes, (unsigned long long)layout->page_nbytes);
  if (layout->pitch == 0) layout->pitch = layout->page_nbytes;
  if (layout->page_nbytes % layout->pitch)
    return kvs_fail(err, KVS_INVALID, "the pitch of the fields is %llu, which does not divide a page of %llu bytes",
                    (unsigned long long)layout->pitch, (unsigned long long)layout->page_nbytes);
  return KVS_OK;
}

/* "bf16, fp16" */
static const char *kinds_text(const struct kvs_codec_ops *codec, char text[64]) {
  size_t used = 0;
  for (int kind = 0; kind < KVS_KINDS; kind++) {
    if (!(codec->kinds >> kind & 1)) continue;
    const char *name = kvs_kind_name((enum kvs_kind)kind);
    if (used) memcpy(text + used, ", ", 2), used += 2;
    memcpy(text + used, name, strlen(name));
    used += strlen(name);
  }
  text[used] = '\0';
  return text;
}

static int find_codec(const char *name, const char *what, int *codec, struct kvs_error *err) {
  *codec = name ? kvs_codec_named(name) : -1;
  if (*codec >= 0) return KVS_OK;
  char known[64];
  size_t used = 0;
  for (int i = KVS_CODEC_RAW + 1; i < KVS_CODECS; i++) {
    size_t length = strlen(kvs_codecs[i]->name);
    if (used) memcpy(known + used, ", ", 2), used += 2;
    memcpy(known + used, kvs_codecs[i]->name, length);
    used += length;
  }
  known[used] = '\0';
  return kvs_fail(err, KVS_INVALID, "%s is %.64s; there are %s", what, name ? name : "missing", known);
}

static int check_field(const struct kvs_field *field, size_t index, uint64_t pitch, int codec, struct range *range,
                       struct kvs_error *err) {
  char name[48], text[64];
  if (field->kind < 0 || (int)field->kind >= KVS_KINDS)
    return kvs_fail(err, KVS_INVALID, "fields[%zu]: kind %d is unknown", index, (int)field->kind);
  uint32_t each = kvs_kind_nbytes(field->kind);
  if (field->nbytes == 0 || field->nbytes > pitch || field->offset > pitch - field->nbytes)
    return kvs_fail(err, KVS_INVALID, "fields[%zu] has %llu bytes from offset %llu; it must lie within the pitch, %llu",
                    index, (unsigned long long)field->nbytes, (unsigned long long)field->offset,
                    (unsigned long long)pitch);
  if (field->nbytes % each)
    return kvs_fail(err, KVS_INVALID, "fields[%zu] has %llu bytes; a value of %s has %u", index,
                    (unsigned long long)field->nbytes, kvs_kind_name(field->kind), (unsigned)each);
  *range = (struct range){field->offset, field->nbytes, field->kind, codec};
  if (field->codec && strcmp(field->codec, kvs_codec_raw.name) == 0) {
    range->codec = KVS_CODEC_RAW;
  } else if (field->codec) {
    (void)snprintf(name, sizeof name, "the codec of fields[%zu]", index);
    int status = find_codec(field->codec, name, &range->codec, err);
    if (status) return status;
    if (!(kvs_codecs[range->codec]->kinds >> field->kind & 1))
      return kvs_fail(err, KVS_INVALID, "fields[%zu] is %s, but codec %s codes %s; without a codec it is kept as it is",
                      index, kvs_kind_name(field->kind), field->codec, kinds_text(kvs_codecs[range->codec], text));
  }
  if (!(kvs_codecs[range->codec]->kinds >> field->kind & 1)) range->codec = KVS_CODEC_RAW;
  return kvs_check_reserved(field->reserved, 2, "kvs_field", err);
}

static int by_offset(const void *left, const void *right) {
  const struct range *a = left, *b = right;
  return a->offset < b->offset ? -1 : a->offset > b->offset;
}

/* -- text ------------------------------------------------------------------------------------------------------ */

/* JSON with sorted keys and no spaces, as Python's json writes it. */
static void print_to(FILE *file, const struct kvs_coding *coding, const struct kvs_coding_layout *layout,
                     const struct range *ranges, size_t count) {
  fprintf(file, "{\"block_nbytes\":%llu,\"codec\":\"%s\",\"fields\":[", (unsigned long long)coding->block_nbytes,
          layout->codec);
  for (size_t i = 0; i < count; i++) {
    const struct kvs_codec_ops *codec = kvs_codecs[ranges[i].codec];
    fprintf(file, "%s[%llu,%llu,\"%s\",\"%s\",%d]", i ? "," : "", (unsigned long long)ranges[i].offset,
            (unsigned long long)ranges[i].nbytes, kvs_kind_name(ranges[i].kind), codec->name, codec->version);
  }
  fprintf(file, "],\"page_nbytes\":%llu,\"pitch\":%llu,\"unit\":%d}", (unsigned long long)coding->page_nbytes,
          (unsigned long long)layout->pitch, KVS_UNIT_NBYTES);
}

static int make_text(struct kvs_coding *coding, const struct kvs_coding_layout *layout, const struct range *ranges,
                     size_t count, struct kvs_error *err) {
  size_t nbytes;
  FILE *file = open_memstream(&coding->text, &nbytes);
  if (file) print_to(file, coding, layout, ranges, count);
  if (file && fclose(file) == 0) return KVS_OK;
  return kvs_fail(err, KVS_NOMEM, "no memory for the text of a coding of %zu fields", count);
}

/* -- cutting --------------------------------------------------------------------------------------------------- */

static int push(struct kvs_coding *coding, const struct range *range, uint64_t offset, uint64_t pitch,
                uint64_t row_nbytes, uint64_t rows, struct kvs_error *err) {
  if (coding->nunits == coding->capacity) {
    size_t capacity = coding->capacity ? 2 * coding->capacity : 8;
    struct kvs_unit *units = realloc(coding->units, capacity * sizeof *units);
    if (!units) return kvs_fail(err, KVS_NOMEM, "no memory for %zu units", capacity);
    coding->units = units;
    coding->capacity = capacity;
  }
  const struct kvs_codec_ops *codec = kvs_codecs[range->codec];
  struct kvs_unit unit = {.offset = offset,
                          .coded = coding->coded_page_nbytes,
                          .pitch = pitch,
                          .row_nbytes = (uint32_t)row_nbytes,
                          .rows = (uint32_t)rows,
                          .coded_nbytes = codec->coded_nbytes((uint32_t)(row_nbytes * rows), range->kind),
                          .codec = (uint16_t)range->codec,
                          .kind = (uint16_t)range->kind};
  coding->units[coding->nunits++] = unit;
  coding->coded_page_nbytes += unit.coded_nbytes;
  if (kvs_unit_nbytes(&unit) > coding->largest_unit) coding->largest_unit = kvs_unit_nbytes(&unit);
  coding->lossless = coding->lossless && codec->lossless;
  return KVS_OK;
}

static uint64_t ceiling(uint64_t n, uint64_t by) { return (n + by - 1) / by; }

/* One run of bytes. */
static int cut_run(struct kvs_coding *coding, const struct range *range, uint64_t offset, struct kvs_error *err) {
  uint64_t parts = ceiling(range->nbytes, KVS_UNIT_NBYTES), part = ceiling(ceiling(range->nbytes, parts), CUT) * CUT;
  int status = KVS_OK;
  for (uint64_t at = 0; !status && at < range->nbytes; at += part) {
    uint64_t left = range->nbytes - at;
    status = push(coding, range, offset + at, 0, left < part ? left : part, 1, err);
  }
  return status;
}

static int cut_range(struct kvs_coding *coding, const struct range *range, uint64_t pitch, struct kvs_error *err) {
  uint64_t rows = coding->page_nbytes / pitch, most = KVS_UNIT_NBYTES / range->nbytes;
  int status = KVS_OK;
  if (range->nbytes == pitch || most == 0) {
    for (uint64_t row = 0; !status && row < rows; row++)
      status = cut_run(coding, range, row * pitch + range->offset, err);
    return status;
  }
  uint64_t each = ceiling(rows, ceiling(rows, most)), up = ceiling(each, ROWS) * ROWS;
  if (up <= most)
    each = up;
  else if (each >= ROWS)
    each = each / ROWS * ROWS;
  for (uint64_t row = 0; !status && row < rows; row += each)
    status = push(coding, range, row * pitch + range->offset, pitch, range->nbytes,
                  rows - row < each ? rows - row : each, err);
  return status;
}

/* The ranges are sorted, and there is room for a gap before each and one at the end. */
static int cut_page(struct kvs_coding *coding, const struct range *ranges, size_t count, uint64_t pitch,
                    struct kvs_error *err) {
  uint64_t at = 0;
  int status = KVS_OK;
  for (size_t i = 0; !status && i <= count; i++) {
    uint64_t next = i < count ? ranges[i].offset : pitch;
    if (at > next)
      return kvs_fail(err, KVS_INVALID, "two fields share bytes: one ends at %llu, the next begins at %llu",
                      (unsigned long long)at, (unsigned long long)next);
    struct range gap = {at, next - at, KVS_KIND_RAW, KVS_CODEC_RAW};
    if (gap.nbytes) status = cut_range(coding, &gap, pitch, err);
    if (!status && i < count) status = cut_range(coding, &ranges[i], pitch, err);
    if (i < count) at = next + ranges[i].nbytes;
  }
  return status;
}

/* Whether a field says that it is kept as it is. */
static bool is_kept(const struct kvs_field *fields, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (fields[i].codec && strcmp(fields[i].codec, kvs_codec_raw.name) == 0) return true;
  return false;
}

static bool is_coded(const struct kvs_coding *coding) {
  for (size_t i = 0; i < coding->nunits; i++)
    if (coding->units[i].codec != KVS_CODEC_RAW) return true;
  return false;
}

static int cut(struct kvs_coding *coding, const struct kvs_coding_layout *layout, struct range *ranges,
               struct kvs_error *err) {
  const struct kvs_field all = {.nbytes = layout->pitch, .kind = KVS_KIND_BF16};
  const struct kvs_field *fields = layout->nfields ? layout->fields : &all;
  size_t count = layout->nfields ? layout->nfields : 1;
  int codec, status = find_codec(layout->codec, "the codec", &codec, err);
  for (size_t i = 0; !status && i < count; i++)
    status = check_field(&fields[i], i, layout->pitch, codec, &ranges[i], err);
  if (status) return status;
  qsort(ranges, count, sizeof *ranges, by_offset);
  status = cut_page(coding, ranges, count, layout->pitch, err);
  if (!status && !is_coded(coding) && !is_kept(fields, count))
    return kvs_fail(err, KVS_INVALID, "codec %s codes none of the fields", layout->codec);
  return status ? status : make_text(coding, layout, ranges, count, err);
}

/* -- the surface ----------------------------------------------------------------------------------------------- */

int kvs_coding_open(const struct kvs_coding_layout *given, struct kvs_coding **opened, struct kvs_error *err) {
  struct kvs_coding_layout layout = *given;
  int status = KVS_CHECK_RESERVED(given, "kvs_coding_layout", err);
  if (!status) status = check_sizes(&layout, err);
  if (status) return status;
  struct kvs_coding *coding = calloc(1, sizeof *coding);
  struct range *ranges = calloc(layout.nfields + 1, sizeof *ranges);
  if (coding && ranges) {
    atomic_init(&coding->refs, 1);
    coding->block_nbytes = layout.block_nbytes;
    coding->page_nbytes = layout.page_nbytes;
    coding->pages = layout.block_nbytes / layout.page_nbytes;
    coding->lossless = true;
    status = cut(coding, &layout, ranges, err);
  } else {
    status = kvs_fail(err, KVS_NOMEM, "no memory for a coding of %zu fields", layout.nfields);
  }
  free(ranges);
  if (status)
    kvs_coding_close(coding);
  else
    *opened = coding;
  return status;
}

void kvs_coding_close(struct kvs_coding *coding) {
  if (!coding || atomic_fetch_sub(&coding->refs, 1) != 1) return;
  free(coding->units);
  free(coding->text);
  free(coding);
}

const struct kvs_coding *kvs_coding_ref(const struct kvs_coding *coding) {
  atomic_fetch_add(&((struct kvs_coding *)coding)->refs, 1);
  return coding;
}

enum kvs_coded kvs_coding_check(const struct kvs_coding *coding, const void *coded) {
  enum kvs_unit_verdict worst = KVS_UNIT_GOOD;
  for (uint64_t page = 0; page < coding->pages; page++) {
    const uint8_t *from = (const uint8_t *)coded + page * coding->coded_page_nbytes;
    for (size_t i = 0; i < coding->nunits; i++) {
      const struct kvs_unit *unit = &coding->units[i];
      struct kvs_unit_head head;
      memcpy(&head, from + unit->coded, sizeof head);
      enum kvs_unit_verdict one = kvs_unit_check(unit, kvs_codecs[unit->codec]->version, &head);
      if (one > worst) worst = one;
    }
  }
  return (enum kvs_coded)worst;
}

const char *kvs_coding_text(const struct kvs_coding *coding) { return coding->text; }

bool kvs_coding_is(const struct kvs_coding *a, const struct kvs_coding *b) {
  if (a == b) return true;
  return a->block_nbytes == b->block_nbytes && a->page_nbytes == b->page_nbytes && a->nunits == b->nunits &&
         memcmp(a->units, b->units, a->nunits * sizeof *a->units) == 0;
}

void kvs_coding_get_info(const struct kvs_coding *coding, struct kvs_coding_info *info) {
  *info = (struct kvs_coding_info){.block_nbytes = coding->block_nbytes,
                                   .page_nbytes = coding->page_nbytes,
                                   .coded_nbytes = kvs_coding_nbytes(coding),
                                   .coded_page_nbytes = coding->coded_page_nbytes,
                                   .units = coding->nunits,
                                   .lossless = coding->lossless};
}
