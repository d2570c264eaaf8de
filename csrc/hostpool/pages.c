/* Pages of host memory. Newer kernel constants are defined here, since many systems have older headers. */
#include "hostpool/pages.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "hostpool/budget.h"

enum { POPULATE_WRITE = 23 };                                             /* MADV_POPULATE_WRITE, Linux 5.14 */
enum { POLICY_PREFERRED = 1, POLICY_INTERLEAVE = 3, POLICY_OF_PAGE = 3 }; /* MPOL_*, MPOL_F_NODE | MPOL_F_ADDR */
enum { HUGE_SHIFT = 26 };                                                 /* MAP_HUGE_SHIFT */

#define TWO_MIB (UINT64_C(2) << 20)
#define ONE_GIB (UINT64_C(1) << 30)
#define ANONYMOUS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static void *at(uint64_t address) { return (void *)(uintptr_t)address; }

uint64_t kvs_page_nbytes(enum kvs_pages pages) {
  if (pages == KVS_PAGES_2MIB) return TWO_MIB;
  if (pages == KVS_PAGES_1GIB) return ONE_GIB;
  return (uint64_t)sysconf(_SC_PAGESIZE);
}

static const char *name_of(enum kvs_pages pages) {
  static const char *const names[] = {[KVS_PAGES_DEFAULT] = "default",
                                      [KVS_PAGES_TRANSPARENT] = "transparent",
                                      [KVS_PAGES_2MIB] = "2MiB",
                                      [KVS_PAGES_1GIB] = "1GiB"};
  return names[pages];
}

bool kvs_pages_transparent(void) {
  char line[128] = "";
  FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
  if (!file) return false;
  bool read = fgets(line, sizeof line, file) != NULL;
  fclose(file);
  return read && !strstr(line, "[never]");
}

/* -- address space --------------------------------------------------------------------------------------------- */

int kvs_pages_reserve(uint64_t nbytes, uint64_t align, uint64_t *base, struct kvs_error *err) {
  char size[KVS_SIZE_TEXT];
  if (align < TWO_MIB) align = TWO_MIB;
  uint64_t room = nbytes + align;
  char *pages = room < nbytes ? MAP_FAILED : mmap(NULL, room, PROT_READ | PROT_WRITE, ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED)
    return kvs_fail(err, KVS_NOMEM,
                    "no address space for %s (%s): ask for less, or look at RLIMIT_AS (ulimit -v) and, where "
                    "vm.overcommit_memory is 2, at vm.overcommit_ratio",
                    kvs_size_text(nbytes, size), strerror(room < nbytes ? ENOMEM : errno));
  uint64_t begin = (uint64_t)(uintptr_t)pages, first = kvs_round_up(begin, align);
  if (first > begin) munmap(pages, first - begin);
  if (first - begin < align) munmap(at(first + nbytes), align - (first - begin));
  *base = first;
  return KVS_OK;
}

int kvs_pages_clear(uint64_t base, uint64_t nbytes, struct kvs_error *err) {
  if (nbytes == 0 || mmap(at(base), nbytes, PROT_READ | PROT_WRITE, ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED)
    return KVS_OK;
  return kvs_fail(err, KVS_NOMEM, "memory cannot be given back: %s", strerror(errno));
}

static int commit_huge(uint64_t base, uint64_t nbytes, enum kvs_pages pages, struct kvs_error *err) {
  struct kvs_error ignored;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_HUGETLB | (pages == KVS_PAGES_1GIB ? 30 : 21) << HUGE_SHIFT;
  if (mmap(at(base), nbytes, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED) return KVS_OK;
  int code = errno;
  (void)kvs_pages_clear(base, nbytes, &ignored); /* a failed mapping may have removed the old one */
  char size[KVS_SIZE_TEXT];
  return kvs_fail(err, KVS_NOMEM,
                  "the system has no %s of free %s pages (%s); vm.nr_hugepages and hugepagesz= make some",
                  kvs_size_text(nbytes, size), name_of(pages), strerror(code));
}

int kvs_pages_commit(uint64_t base, uint64_t nbytes, enum kvs_pages pages, struct kvs_error *err) {
  int status = KVS_OK;
  if (nbytes == 0) return status;
  if (pages == KVS_PAGES_2MIB || pages == KVS_PAGES_1GIB) status = commit_huge(base, nbytes, pages, err);
  if (status) return status;
  if (pages == KVS_PAGES_TRANSPARENT) (void)madvise(at(base), nbytes, MADV_HUGEPAGE);
  /* Copy-on-write in a child of fork() would detach these pages from the GPU's mapping. */
  (void)madvise(at(base), nbytes, MADV_DONTFORK);
  return KVS_OK;
}

void kvs_pages_unmap(uint64_t base, uint64_t nbytes) {
  if (nbytes) munmap(at(base), nbytes);
}

/* -- NUMA ------------------------------------------------------------------------------------------------------ */

bool kvs_nodes_with_memory(struct kvs_nodes *nodes) {
  char line[1024] = "";
  FILE *file = fopen("/sys/devices/system/node/has_memory", "re");
  if (!file) return false;
  bool read = fgets(line, sizeof line, file) != NULL;
  fclose(file);
  return read && kvs_budget_list(line, nodes->bits, KVS_NODE_WORDS) > 0;
}

int kvs_pages_bind(uint64_t base, uint64_t nbytes, const struct kvs_nodes *nodes, struct kvs_error *err) {
  long policy = nodes->interleave ? POLICY_INTERLEAVE : POLICY_PREFERRED;
  if (syscall(SYS_mbind, base, nbytes, policy, nodes->bits, KVS_NODE_WORDS * 64ul, 0ul) == 0) return KVS_OK;
  return kvs_fail(err, KVS_UNSUPPORTED, "the kernel refuses to place memory (mbind: %s)%s", strerror(errno),
                  errno == EPERM ? "; in a container allow it (docker run --cap-add SYS_NICE)" : "");
}

int kvs_pages_node(uint64_t address) {
  int node = -1;
  return syscall(SYS_get_mempolicy, &node, NULL, 0ul, address, (unsigned long)POLICY_OF_PAGE) == 0 ? node : -1;
}

void kvs_run_on_node(int node) {
  uint64_t bits[CPU_SETSIZE / 64];
  char path[80], line[1024] = "";
  cpu_set_t allowed, both;
  snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
  FILE *file = fopen(path, "re");
  if (!file) return;
  bool read = fgets(line, sizeof line, file) != NULL;
  fclose(file);
  if (!read || !kvs_budget_list(line, bits, CPU_SETSIZE / 64) || sched_getaffinity(0, sizeof allowed, &allowed)) return;
  CPU_ZERO(&both);
  for (size_t i = 0; i < CPU_SETSIZE; i++)
    if (CPU_ISSET(i, &allowed) && bits[i / 64] >> (i % 64) & 1) CPU_SET(i, &both);
  if (CPU_COUNT(&both)) (void)sched_setaffinity(0, sizeof both, &both);
}

/* -- population ------------------------------------------------------------------------------------------------ */

void kvs_pages_touch(uint64_t base, uint64_t nbytes) {
  uint64_t page = kvs_page_nbytes(KVS_PAGES_DEFAULT);
  /* Atomic, since another process may write there; adding 0 keeps the contents. */
  for (uint64_t i = 0; i < nbytes; i += page)
    (void)__atomic_fetch_add((unsigned char *)at(base + i), 0, __ATOMIC_RELAXED);
}

bool kvs_pages_can_populate(void) { return madvise(NULL, 0, POPULATE_WRITE) == 0; }

int kvs_pages_populate(uint64_t base, uint64_t nbytes, struct kvs_error *err) {
  char size[KVS_SIZE_TEXT];
  int code = 0;
  do code = madvise(at(base), nbytes, POPULATE_WRITE) ? errno : 0;
  while (code == EINTR);
  if (code == 0) return KVS_OK;
  if (code == EINVAL) {
    kvs_pages_touch(base, nbytes);
    return KVS_OK;
  }
  return kvs_fail(err, KVS_NOMEM,
                  "the system has no memory left for the next %s (%s): ask for less; reserve= keeps some free",
                  kvs_size_text(nbytes, size), strerror(code));
}
