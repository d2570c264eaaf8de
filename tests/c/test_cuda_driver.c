/* The driver's table, filled from small fake drivers that this program compiles: which versions are asked for, what is
 * missing, what an old driver is asked through; then what the codes mean.
 *
 * Build: with csrc/cuda/driver.c and csrc/status.c, -Icsrc -ldl -pthread. Needs a C compiler when it runs ($CC, else
 * cc). */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "cuda/driver.h"

/* FAKE_VERSION; FAKE_OLD: no cuGetProcAddress_v2; FAKE_MISSING: the name of an entry that it lacks; FAKE_BARE: nothing.
 */
static const char fake_source[] =
    "#include <string.h>\n"
    "#ifndef FAKE_MISSING\n"
    "#define FAKE_MISSING \"\"\n"
    "#endif\n"
    "static struct { char name[64]; int version; } asked[256];\n"
    "static int nasked;\n"
    "unsigned long long fake_flags;\n"
    "static int answer(void) { return 0; }\n"
    "static int answer_12080(void) { return 12080; }\n"
    "static int answer_13000(void) { return 13000; }\n"
    "int fake_asked(const char *name, int version) {\n"
    "  for (int i = 0; i < nasked; i++)\n"
    "    if (strcmp(asked[i].name, name) == 0 && asked[i].version == version) return 1;\n"
    "  return 0;\n"
    "}\n"
    "static int find(const char *name, void **entry, int version, unsigned long long flags) {\n"
    "  int (*found)(void) = version == 12080 ? answer_12080 : version == 13000 ? answer_13000 : answer;\n"
    "  strcpy(asked[nasked].name, name);\n"
    "  asked[nasked++].version = version;\n"
    "  fake_flags = flags;\n"
    "  if (version > FAKE_VERSION) return 1;\n"
    "  if (strcmp(name, FAKE_MISSING) == 0) found = 0;\n"
    "  memcpy(entry, &found, sizeof found);\n"
    "  return 0;\n"
    "}\n"
    "#ifndef FAKE_BARE\n"
    "int cuDriverGetVersion(int *version) { *version = FAKE_VERSION; return 0; }\n"
    "#ifdef FAKE_OLD\n"
    "int cuGetProcAddress(const char *name, void **entry, int version, unsigned long long flags) {\n"
    "  return find(name, entry, version, flags);\n"
    "}\n"
    "#else\n"
    "int cuGetProcAddress(void) { return 999; }\n"
    "int cuGetProcAddress_v2(const char *name, void **entry, int version, unsigned long long flags, int *status) {\n"
    "  *status = strcmp(name, FAKE_MISSING) == 0;\n"
    "  return find(name, entry, version, flags);\n"
    "}\n"
    "#endif\n"
    "#else\n"
    "void *fake_unused(void) { return (void *)find; }\n"
    "#endif\n";

static char folder[] = "/tmp/kvswap-fake-XXXXXX";

/* Compile a fake with these flags and load it. */
static int load_fake(const char *flags, struct kvs_cuda_driver *driver, struct kvs_error *err) {
  static int number;
  char path[64], command[512];
  const char *cc = getenv("CC");
  snprintf(path, sizeof path, "%s/fake%d.so", folder, number++);
  snprintf(command, sizeof command, "%s -shared -fPIC -x c %s -o %s -", cc && *cc ? cc : "cc", flags, path);
  FILE *compiler = popen(command, "w");
  if (!compiler) abort();
  fputs(fake_source, compiler);
  if (pclose(compiler) != 0) {
    printf("cannot compile: %s\n", command);
    exit(1);
  }
  int status = kvs_cuda_driver_load(path, driver, err);
  unlink(path);
  return status;
}

static bool was_asked(const struct kvs_cuda_driver *driver, const char *name, int version) {
  int (*asked)(const char *, int);
  void *entry = dlsym(driver->library, "fake_asked");
  memcpy(&asked, &entry, sizeof asked);
  return entry && asked(name, version);
}

static void missing_library(void) {
  struct kvs_cuda_driver driver;
  struct kvs_error err;
  CHECK(kvs_cuda_driver_load("libkvswap-no-such-driver.so.1", &driver, &err) == KVS_UNSUPPORTED);
  CHECK(strncmp(err.message, "there is no CUDA driver here: libkvswap-no-such-driver.so.1", 58) == 0);
  CHECK(strstr(err.message, "install NVIDIA's driver") && strstr(err.message, "--gpus all"));
  CHECK(strstr(err.message, "or name host:0, which needs neither") != NULL); /* the end: nothing was cut off */
  CHECK(driver.library == NULL);
}

static void not_a_driver(void) {
  struct kvs_cuda_driver driver;
  struct kvs_error err;
  CHECK(load_fake("-DFAKE_VERSION=13000 -DFAKE_BARE", &driver, &err) == KVS_UNSUPPORTED);
  CHECK(strstr(err.message, "does not tell its version") != NULL);
}

static void newest(void) {
  struct kvs_cuda_driver driver;
  struct kvs_error err;
  CHECK(load_fake("-DFAKE_VERSION=13020", &driver, &err) == KVS_OK);
  CHECK(driver.version == 13020);
#define X(need, member, symbol, since, arguments)                                                                      \
  CHECK(driver.member != NULL);                                                                                        \
  CHECK(was_asked(&driver, symbol, since));
  KVS_CUDA_ENTRIES(X)
#undef X
  unsigned long long *flags = dlsym(driver.library, "fake_flags");
  CHECK(flags && *flags == KVS_CU_PROC_LEGACY_STREAM);
  CHECK(driver.cuMemcpyBatchAsync(NULL, NULL, NULL, 0, NULL, NULL, 0, NULL) == 13000);
  CHECK(driver.cuMemcpyBatchAsync_12080(NULL, NULL, NULL, 0, NULL, NULL, 0, NULL, NULL) == 12080);
}

/* A prototype that the driver does not have is not asked for, and the one that it has goes to its own member. */
static void before_13(void) {
  struct kvs_cuda_driver driver;
  struct kvs_error err;
  CHECK(load_fake("-DFAKE_VERSION=12090", &driver, &err) == KVS_OK);
  CHECK(driver.cuMemcpyBatchAsync == NULL);
  CHECK(!was_asked(&driver, "cuMemcpyBatchAsync", 13000));
  CHECK(driver.cuMemcpyBatchAsync_12080 != NULL);
  CHECK(was_asked(&driver, "cuStreamWriteValue32", 11070));
}

static void before_12(void) {
  struct kvs_cuda_driver driver;
  struct kvs_error err;
  CHECK(load_fake("-DFAKE_VERSION=11050 -DFAKE_OLD", &driver, &err) == KVS_OK);
  CHECK(driver.cuMemcpyBatchAsync == NULL && driver.cuMemcpyBatchAsync_12080 == NULL);
  CHECK(driver.cuStreamGetId == NULL && driver.cuFuncLoad == NULL);
  CHECK(driver.cuStreamWriteValue32 == NULL && driver.cuStreamWaitValue32 == NULL);
  CHECK(driver.cuMemcpyAsync != NULL);
}

static void too_old(void) {
  struct kvs_cuda_driver driver;
  struct kvs_error err;
  CHECK(load_fake("-DFAKE_VERSION=11030 -DFAKE_OLD", &driver, &err) == KVS_UNSUPPORTED);
  CHECK(strstr(err.message, "is for CUDA 11.3, and kvswap needs CUDA 11.4 or newer: update the driver to branch 470") !=
        NULL);
  CHECK(driver.library == NULL);
  CHECK(load_fake("-DFAKE_VERSION=11040 -DFAKE_OLD", &driver, &err) == KVS_OK);
}

/* The oldest driver is the oldest that has every entry that is needed. */
static void oldest(void) {
  int newest_needed = 0;
#define REQUIRED true
#define OPTIONAL false
#define X(need, member, symbol, since, arguments)                                                                      \
  if (need && since > newest_needed) newest_needed = since;
  KVS_CUDA_ENTRIES(X)
#undef X
#undef REQUIRED
#undef OPTIONAL
  CHECK(newest_needed == KVS_CUDA_OLDEST);
}

static void without_table(void) {
  struct kvs_cuda_driver driver;
  struct kvs_error err;
  CHECK(load_fake("-DFAKE_VERSION=12040 -DFAKE_OLD -DcuGetProcAddress=cuOther", &driver, &err) == KVS_UNSUPPORTED);
  CHECK(strstr(err.message, "is for CUDA 12.4 and lacks cuGetProcAddress: the driver's installation is damaged") !=
        NULL);
}

static void missing_required(void) {
  struct kvs_cuda_driver driver;
  struct kvs_error err;
  CHECK(load_fake("-DFAKE_VERSION=13000 -DFAKE_MISSING='\"cuMemcpy2DAsync\"'", &driver, &err) == KVS_UNSUPPORTED);
  CHECK(strstr(err.message, "(for CUDA 13.0) has no cuMemcpy2DAsync") != NULL);
}

static void missing_optional(void) {
  struct kvs_cuda_driver driver;
  struct kvs_error err;
  CHECK(load_fake("-DFAKE_VERSION=13000 -DFAKE_MISSING='\"cuStreamGetId\"'", &driver, &err) == KVS_OK);
  CHECK(driver.cuStreamGetId == NULL);
  CHECK(driver.cuFuncLoad != NULL);
}

static void statuses(void) {
  static const int lost[] = {4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999};
  static const int refused[] = {1, 3, 100, 101, 201, 209, 222, 304, 400, 701, 712, 713, 720, 800, 801, 899, 909, 910};
  CHECK(kvs_cuda_status(0) == KVS_OK);
  CHECK(kvs_cuda_status(600) == KVS_NOT_READY);
  CHECK(kvs_cuda_status(2) == KVS_NOMEM);
  for (int code = 900; code <= 908; code++) CHECK(kvs_cuda_status(code) == KVS_CAPTURING);
  for (size_t i = 0; i < sizeof lost / sizeof *lost; i++) CHECK(kvs_cuda_status(lost[i]) == KVS_LOST);
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) CHECK(kvs_cuda_status(refused[i]) == KVS_REFUSED);
}

static int say_name(int code, const char **text) {
  *text = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
  return code == 700 ? 0 : 1;
}

static int say_text(int code, const char **text) {
  *text = code == 700 ? "an illegal memory access was encountered" : NULL;
  return code == 700 ? 0 : 1;
}

static void results(void) {
  struct kvs_cuda_driver driver = {.cuGetErrorName = say_name, .cuGetErrorString = say_text};
  struct kvs_error err = {.status = 1};
  CHECK(kvs_cuda_result(&driver, 0, "cuEventQuery", &err) == KVS_OK && err.status == 1);
  CHECK(kvs_cuda_result(&driver, 600, "cuEventQuery", &err) == KVS_NOT_READY && err.code == 600);
  CHECK(kvs_cuda_result(&driver, 700, "cuMemcpyAsync", &err) == KVS_LOST && err.code == 700);
  CHECK(strcmp(err.operation, "cuMemcpyAsync") == 0);
  CHECK(strstr(err.message, "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)") != NULL);
  CHECK(kvs_cuda_result(&driver, 12345, "cuMemcpyAsync", &err) == KVS_REFUSED && err.code == 12345);
  CHECK(strstr(err.message, "does not name") != NULL);
}

int main(void) {
  if (!mkdtemp(folder)) return 1;
  missing_library();
  not_a_driver();
  newest();
  before_13();
  before_12();
  too_old();
  oldest();
  without_table();
  missing_required();
  missing_optional();
  statuses();
  results();
  rmdir(folder);
  return check_close();
}
