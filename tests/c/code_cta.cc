/* codecs/unit.cuh on the CPU: the CUDA code of encode_unit() and decode_unit(), compiled as C++ with stand-ins for what
 * CUDA adds, against csrc/codecs/unit_code.c. The threads of a CTA are contexts that run in turn, each until it waits
 * for the others, in an order drawn from a seed. So a missing barrier shows, and the bytes of both must be the same.
 * Not a GPU: memory is strongly ordered here, and a warp's lanes do not step together unless they exchange something.
 */
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" {
#include "check.h"
}

/* -- what CUDA adds -------------------------------------------------------------------------------------------- */

#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
struct uint4 {
  uint32_t x, y, z, w;
};

enum { WARP = 32, THREADS = 512, STACK = 64 << 10 };
enum what { RUNNING, IN_WARP, IN_CTA, DONE };
struct place_of_thread {
  unsigned x;
};
static struct place_of_thread threadIdx, blockDim;
static ucontext_t contexts[THREADS], scheduler;
static char stacks[THREADS][STACK];
static enum what doing[THREADS];
static uint32_t given[THREADS], results[THREADS][WARP]; /* what each lane gave; what a lane sees of its warp */
static uint32_t any_of_cta;
static uint64_t seed = 7;

static void wait_as(enum what how) {
  const unsigned self = threadIdx.x;
  doing[self] = how;
  swapcontext(&contexts[self], &scheduler);
  threadIdx.x = self;
}

/* The values of all lanes of the warp. */
static const uint32_t *exchange(uint32_t value) {
  given[threadIdx.x] = value;
  wait_as(IN_WARP);
  return results[threadIdx.x];
}

static uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  const uint32_t *all = exchange(value);
  uint32_t most = 0;
  for (int i = 0; i < WARP; i++) most = all[i] > most ? all[i] : most;
  return most;
}

static uint32_t __reduce_add_sync(unsigned, uint32_t value) {
  const uint32_t *all = exchange(value);
  uint32_t sum = 0;
  for (int i = 0; i < WARP; i++) sum += all[i];
  return sum;
}

static uint32_t __shfl_sync(unsigned, uint32_t value, int from) { return exchange(value)[from]; }

static uint32_t __shfl_xor_sync(unsigned, uint32_t value, int apart) {
  return exchange(value)[(threadIdx.x % WARP) ^ (unsigned)apart];
}

static uint32_t __shfl_up_sync(unsigned, uint32_t value, unsigned by) {
  const unsigned lane = threadIdx.x % WARP;
  return exchange(value)[lane >= by ? lane - by : lane];
}

static int __any_sync(unsigned, int value) { return __reduce_max_sync(0, value != 0) != 0; }

static void atomicMax(uint32_t *word, uint32_t value) { *word = value > *word ? value : *word; }

static void atomicOr(uint32_t *word, uint32_t value) { *word |= value; }

static int __popc(uint32_t value) { return __builtin_popcount(value); }

/* Of two halves of 16 bits. */
template <typename Function> static uint32_t of_halves(uint32_t a, uint32_t b, Function function) {
  return (function(a & 0xffffu, b & 0xffffu) & 0xffffu) | function(a >> 16, b >> 16) << 16;
}

static uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return of_halves(a, b, [](uint32_t x, uint32_t y) { return x > y ? x : y; });
}

static uint32_t __vminu2(uint32_t a, uint32_t b) {
  return of_halves(a, b, [](uint32_t x, uint32_t y) { return x < y ? x : y; });
}

static uint32_t __viaddmin_u16x2(uint32_t a, uint32_t b, uint32_t most) {
  return __vminu2(of_halves(a, b, [](uint32_t x, uint32_t y) { return x + y; }), most);
}

/* Between 0 and `most`, signed. */
static uint32_t __viaddmin_s16x2_relu(uint32_t a, uint32_t b, uint32_t most) {
  const auto limit = (int16_t)most;
  return of_halves(a, b, [limit](uint32_t x, uint32_t y) {
    const auto sum = (int16_t)(x + y);
    return (uint32_t)(sum < 0 ? 0 : sum < limit ? sum : limit);
  });
}

static float __uint_as_float(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

static uint32_t __float_as_uint(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t from) {
  const uint64_t bytes = a | (uint64_t)b << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= (uint32_t)(bytes >> 8 * (from >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

static void __syncthreads(void) { wait_as(IN_CTA); }

static int __syncthreads_or(int value) {
  given[threadIdx.x] = value != 0;
  wait_as(IN_CTA);
  return (int)any_of_cta;
}

/* In place of kernels/common.cuh. */
#define KVS_COMMON_CUH
#define KVS_WARP 32u
#define KVS_ALL_LANES 0xffffffffu
template <typename Word> static void word_load(Word *word, const Word *from) {
  if ((uintptr_t)from % sizeof(Word)) abort();
  memcpy(word, from, sizeof *word);
}
template <typename Word> static void word_store(Word *to, const Word *word) {
  if ((uintptr_t)to % sizeof(Word)) abort();
  memcpy(to, word, sizeof *word);
}

#define word_store_once word_store

#include "codecs/verify.cuh"

extern "C" {
#include "codecs/unit_code.h"
#include "kvswap_codec.h"
}

/* -- a CTA ----------------------------------------------------------------------------------------------------- */

static struct {
  const struct kvs_unit *unit;
  uint64_t page, coded, valid_nbytes;
  uint64_t next_coded; /* of the CTA's next unit: the page with no more than half of its bytes valid */
  enum { ENCODE, DECODE, VERIFY } what;
  uint64_t scratch;
  enum kvs_unit_verdict verdicts[THREADS];
} call;
static struct code_shared shared;

static void work(void) {
  const unsigned self = threadIdx.x;
  if (call.what == call.ENCODE) {
    call.verdicts[self] = encode_unit(*call.unit, call.page, call.valid_nbytes, call.coded, 0, &shared);
    (void)encode_unit(*call.unit, call.page, call.valid_nbytes / 2, call.next_coded, 1, &shared);
  } else if (call.what == call.DECODE) {
    call.verdicts[self] = decode_unit(*call.unit, call.coded, call.page);
  } else {
    call.verdicts[self] = verify_unit(*call.unit, call.page, call.valid_nbytes, call.coded, call.scratch, &shared);
  }
  doing[self] = DONE;
}

static bool all(unsigned first, unsigned count, enum what how) {
  for (unsigned i = first; i < first + count; i++)
    if (doing[i] != how) return false;
  return true;
}

/* Let the waiting of a whole warp, or of the whole CTA, end. */
static void release(unsigned threads) {
  for (unsigned warp = 0; warp < threads; warp += WARP)
    if (all(warp, WARP, IN_WARP))
      for (unsigned i = warp; i < warp + WARP; i++) {
        memcpy(results[i], given + warp, sizeof results[i]);
        doing[i] = RUNNING;
      }
  if (!all(0, threads, IN_CTA)) return;
  any_of_cta = 0;
  for (unsigned i = 0; i < threads; i++) any_of_cta |= given[i], doing[i] = RUNNING;
}

static enum kvs_unit_verdict run_cta(void) {
  const unsigned threads = kvs_code_threads(kvs_unit_nbytes(call.unit)) << check_below(&seed, 2);
  if (threads > THREADS) return run_cta();
  blockDim.x = threads;
  memset(&shared, 0xa5, sizeof shared);
  for (unsigned i = 0; i < threads; i++) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stacks[i];
    contexts[i].uc_stack.ss_size = STACK;
    contexts[i].uc_link = &scheduler;
    makecontext(&contexts[i], work, 0);
    doing[i] = RUNNING;
  }
  uint64_t slow = 0; /* a bit for each warp that is paused, so that other warps are ahead */
  while (!all(0, threads, DONE)) {
    bool ran = false;
    if (check_below(&seed, 8) == 0) slow = check_random(&seed) & check_random(&seed);
    const unsigned begin = (unsigned)check_below(&seed, threads);
    for (unsigned k = 0; k < threads; k++) {
      const unsigned i = (begin + k * 5u) % threads; /* 5 and the number of threads have no common divisor */
      if (doing[i] != RUNNING || slow >> i / WARP & 1) continue;
      threadIdx.x = i;
      swapcontext(&scheduler, &contexts[i]);
      ran = true;
      if (check_below(&seed, 16) == 0) release(threads);
    }
    release(threads);
    CHECK(ran || slow, "the CTA waits for ever");
    if (!ran && !slow) exit(check_close());
    if (!ran) slow = 0;
  }
  for (unsigned i = 1; i < threads; i++) CHECK(call.verdicts[i] == call.verdicts[0], "thread %u", i);
  return call.verdicts[0];
}

/* -- the tests ------------------------------------------------------------------------------------------------- */

/* How 7 to 9: a pair of channels is some 2^8 times as large as the others, another one in each head; heads of 128 or 64
 * channels with 16 values each, or all in rows of a 16th of the unit. */
static bool is_large(uint64_t value, uint64_t nbytes, int how) {
  const uint64_t inner = how == 7 ? 128 : how == 8 ? 64 : nbytes / 32;
  return inner && (value % inner + 10 * (value / (16 * inner))) % inner >= inner - 2;
}

static void fill(uint8_t *bytes, uint64_t nbytes, int how) {
  bytes[nbytes - 1] = 0x3f; /* where no value of 16 bits has it */
  for (uint64_t i = 0; i + 1 < nbytes; i += 2) {
    uint64_t random = check_random(&seed);
    uint16_t value = (uint16_t)((random & 0x807f) | (118 + random % 1000 % 9) << 7);
    if (how == 1) value = (uint16_t)(random >> 20);
    if (how >= 2 && check_below(&seed, 250) == 0) /* an escape: NaN, infinity or far below the others; or exponent 0 */
      value = (uint16_t)((random & 0x807f) | (random % 3 == 0 ? 0x7f80 : (random >> 30) % 90 << 7));
    if (how >= 7)
      value = (uint16_t)((random & 0x807f) | (is_large(i / 2, nbytes, how) ? 132 : 116 + random % 1000 % 9) << 7);
    memcpy(bytes + i, &value, 2);
  }
}

static uint64_t differ, decoded_bad, not_stored, miscoded, guesses[256];

/* Of what was coded just now, and of that with a wrong bit. Both sides leave the same bytes. */
static void verify(const struct kvs_unit *unit, const uint8_t *page, const uint8_t *coded,
                   enum kvs_unit_verdict verdict) {
  static uint8_t scratch[KVS_VERIFY_NBYTES] __attribute__((aligned(16)));
  uint8_t *mine = (uint8_t *)aligned_alloc(16, unit->coded_nbytes), *other = (uint8_t *)malloc(unit->coded_nbytes);
  for (int wrong = 0; wrong < 2; wrong++) {
    memcpy(mine, coded, unit->coded_nbytes);
    if (wrong) mine[check_below(&seed, unit->coded_nbytes)] ^= (uint8_t)(1 << check_below(&seed, 8));
    memcpy(other, mine, unit->coded_nbytes);
    call.what = call.VERIFY, call.coded = (uint64_t)(uintptr_t)mine, call.scratch = (uint64_t)(uintptr_t)scratch;
    const enum kvs_unit_verdict found = kvs_unit_verify(unit, page, call.valid_nbytes, other, scratch);
    CHECK(run_cta() == found, "wrong %d", wrong);
    CHECK(wrong || found == verdict, "%d, not %d", (int)found, (int)verdict);
    miscoded += found == KVS_UNIT_MISCODED;
    differ += memcmp(mine, other, unit->coded_nbytes) != 0;
  }
  call.coded = (uint64_t)(uintptr_t)coded;
  free(mine), free(other);
}

static void compare(const struct kvs_unit *unit, uint64_t page_nbytes, int how) {
  const uint64_t apart = check_below(&seed, 3) == 0 ? 1 + check_below(&seed, 15) : 0;
  uint8_t *page = (uint8_t *)aligned_alloc(16, (page_nbytes + 47) & ~15ull) + apart;
  uint8_t *back = (uint8_t *)malloc(page_nbytes), *coded = (uint8_t *)aligned_alloc(16, unit->coded_nbytes);
  uint8_t *wanted = (uint8_t *)malloc(unit->coded_nbytes), *again = (uint8_t *)malloc(page_nbytes);
  static uint8_t next[KVS_VERIFY_NBYTES] __attribute__((aligned(16)));
  const uint64_t valid = check_below(&seed, 4) == 0 ? check_below(&seed, page_nbytes) : page_nbytes;
  fill(page, page_nbytes, how);
  memset(coded, 0x5a, unit->coded_nbytes);
  call.unit = unit, call.page = (uint64_t)(uintptr_t)page, call.coded = (uint64_t)(uintptr_t)coded;
  call.valid_nbytes = valid, call.what = call.ENCODE, call.next_coded = (uint64_t)(uintptr_t)next;
  const enum kvs_unit_verdict verdict = kvs_unit_encode(unit, page, valid, wanted);
  CHECK(run_cta() == verdict, "how %d", how);
  differ += memcmp(coded, wanted, unit->coded_nbytes) != 0;
  (void)kvs_unit_encode(unit, page, valid / 2, wanted);
  differ += memcmp(next, wanted, unit->coded_nbytes) != 0;
  not_stored += verdict != KVS_UNIT_GOOD;
  const struct kvs_exact_layout layout = kvs_exact_layout_of(kvs_unit_nbytes(unit));
  if (unit->codec == KVS_CODEC_EXACT && verdict == KVS_UNIT_GOOD && layout.classes) guesses[coded[layout.marks]]++;
  verify(unit, page, coded, verdict);
  for (uint64_t i = check_below(&seed, 3); how && i > 0; i--) /* damage */
    coded[check_below(&seed, 2) ? check_below(&seed, 16)
                                : unit->coded_nbytes - 1 - check_below(&seed, unit->coded_nbytes / 40 + 1)] =
        (uint8_t)check_random(&seed);
  if (how == 5 && unit->codec == KVS_CODEC_EXACT && coded[6] > 1) { /* two escapes in the wrong order */
    uint8_t *first = coded + kvs_exact_layout_of(kvs_unit_nbytes(unit)).escapes, held[3];
    memcpy(held, first, 3), memcpy(first, first + 3, 3), memcpy(first + 3, held, 3);
  }
  if (unit->codec == KVS_CODEC_EXACT && layout.classes && how % 2) /* any marks can be decoded */
    for (uint32_t at = layout.marks; at < layout.escapes; at++) coded[at] = (uint8_t)check_random(&seed);
  memset(back, 0x11, page_nbytes);
  memset(page, 0x11, page_nbytes);
  call.what = call.DECODE;
  const enum kvs_unit_verdict found = kvs_unit_decode(unit, coded, back);
  CHECK(run_cta() == found, "how %d", how);
  decoded_bad += found != KVS_UNIT_GOOD;
  differ += memcmp(page, back, page_nbytes) != 0;
  free(page - apart), free(back), free(coded), free(wanted), free(again);
}

static void test_unit(const char *codec, enum kvs_kind kind, uint32_t row_nbytes, uint32_t rows, uint64_t pitch);

int main(void) {
  for (int kind = KVS_KIND_BF16; kind <= KVS_KIND_FP16; kind++)
    for (int codec = kind == KVS_KIND_BF16 ? 0 : 1; codec < 4; codec++) {
      static const char *const names[] = {"exact", "mxfp8", "fp4", "raw"};
      test_unit(names[codec], (enum kvs_kind)kind, 32768, 1, 0);
      test_unit(names[codec], (enum kvs_kind)kind, 8192, 1, 0);
      test_unit(names[codec], (enum kvs_kind)kind, 1034, 1, 0);
      test_unit(names[codec], (enum kvs_kind)kind, 2, 1, 0);
      test_unit(names[codec], (enum kvs_kind)kind, 128, 50, 656);
      test_unit(names[codec], (enum kvs_kind)kind, 50, 30, 77);
      test_unit(names[codec], (enum kvs_kind)kind, 4608, 1, 0); /* the last segment is a half */
      test_unit(names[codec], (enum kvs_kind)kind, 256, 48, 520);
      test_unit(names[codec], (enum kvs_kind)kind, 96, 48, 101);
    }
  static const uint32_t rows[][3] = {{32768, 1, 0}, {512, 64, 656}, {512, 16, 656},
                                     {2045, 1, 0},  {50, 30, 77},   {1, 1, 0}};
  for (int i = 0; i < 6; i++) test_unit("fp4", KVS_KIND_E4M3, rows[i][0], rows[i][1], rows[i][2]);
  CHECK(differ == 0, "%d blocks differ from what the CPU's codec gives", (int)differ);
  CHECK(guesses[0] && guesses[64] && guesses[8] && guesses[4], "%d %d %d %d", (int)guesses[0], (int)guesses[64],
        (int)guesses[8], (int)guesses[4]); /* rows of 1,024, 128 and 64 values */
  CHECK(miscoded > 100, "%d wrong units were found", (int)miscoded);
  CHECK(not_stored > 0 && decoded_bad > not_stored, "%d, %d", (int)not_stored, (int)decoded_bad);
  return check_close();
}

static void test_unit(const char *codec, enum kvs_kind kind, uint32_t row_nbytes, uint32_t rows, uint64_t pitch) {
  struct kvs_unit unit;
  memset(&unit, 0, sizeof unit);
  unit.offset = rows > 1 ? 3 * (kind == KVS_KIND_FP16) : 0;
  unit.row_nbytes = row_nbytes, unit.rows = rows, unit.pitch = pitch;
  unit.kind = (uint16_t)kind;
  const uint32_t nbytes = row_nbytes * rows;
  unit.codec = codec[0] == 'e'   ? KVS_CODEC_EXACT
               : codec[0] == 'm' ? KVS_CODEC_MXFP8
               : codec[0] == 'f' ? KVS_CODEC_FP4
                                 : KVS_CODEC_RAW;
  unit.coded_nbytes = codec[0] == 'e'         ? kvs_exact_layout_of(nbytes).nbytes
                      : codec[0] == 'm'       ? kvs_mxfp8_layout_of(nbytes).nbytes
                      : kind == KVS_KIND_E4M3 ? kvs_fp4_e4m3_layout_of(nbytes).nbytes
                      : codec[0] == 'f'       ? kvs_fp4_layout_of(nbytes).nbytes
                                              : KVS_UNIT_HEAD + kvs_round16(nbytes);
  for (int how = 0; how < 10; how++) compare(&unit, unit.offset + (rows - 1) * pitch + row_nbytes, how);
}
