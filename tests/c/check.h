/* What the C tests share: one check macro, one random generator, one closing line. */
#ifndef KVS_CHECK_H
#define KVS_CHECK_H

#include <stdint.h>
#include <stdio.h>

static int checks_passed, checks_failed;

#define CHECK(condition, ...)                                                                                          \
  do {                                                                                                                 \
    if (condition) {                                                                                                   \
      checks_passed++;                                                                                                 \
    } else {                                                                                                           \
      checks_failed++;                                                                                                 \
      fprintf(stderr, "%s:%d: not true: %s:", __FILE__, __LINE__, #condition);                                         \
      fprintf(stderr, " " __VA_ARGS__);                                                                                \
      fprintf(stderr, "\n");                                                                                           \
    }                                                                                                                  \
  } while (0)

static inline uint64_t check_random(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

static inline uint64_t check_below(uint64_t *state, uint64_t limit) { return check_random(state) % limit; }

static inline int check_close(void) {
  printf("%d passed, %d failed\n", checks_passed, checks_failed);
  return checks_failed != 0;
}

#endif
