/* Loads libcufile and keeps its driver open. See files/cufile.h. */
#include "files/cufile.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "device/device.h"

static struct {
  pthread_mutex_t lock;
  struct kvs_cufile table; /* guarded by lock, as are the fields below; constant while there are users */
  bool open, ours;         /* driver state; ours: opened by kvswap, so kvswap closes the driver */
  unsigned users;
  unsigned fork_generation; /* of the process that opened the driver */
} process = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* -- the library --------------------------------------------------------------------------------------------------- */

const char *kvs_cufile_named(void) {
  const char *name = getenv("KVSWAP_CUFILE");
  return name && name[0] ? name : NULL;
}

static void *find_library(char note[200]) {
  static const char *const names[] = {"libcufile.so.0", "libcufile.so"};
  const char *named = kvs_cufile_named();
  if (named) {
    void *library = dlopen(named, RTLD_NOW | RTLD_LOCAL);
    if (!library) snprintf(note, 200, "KVSWAP_CUFILE: %.180s", dlerror());
    return library;
  }
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (library) return library;
  }
  snprintf(note, 200, "libcufile.so.0 is not there");
  return NULL;
}

bool kvs_cufile_present(char note[200]) { return find_library(note) != NULL; }

bool kvs_cufile_kernel_module(void) { return access("/proc/driver/nvidia-fs/version", F_OK) == 0; }

static int fill_table(void *library, struct kvs_cufile *table, struct kvs_error *err) {
  static const struct {
    const char *symbol, *other;
    size_t offset;
  } entries[] = {
#define X(member, symbol, other, type, arguments) {symbol, other, offsetof(struct kvs_cufile, member)},
      KVS_CUFILE_ENTRIES(X)
#undef X
  };
  table->library = library;
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
    void *entry = dlsym(library, entries[i].symbol);
    if (!entry && entries[i].other) entry = dlsym(library, entries[i].other);
    if (!entry) return kvs_fail(err, KVS_UNSUPPORTED, "libcufile has no %s: it is too old", entries[i].symbol);
    memcpy((char *)table + entries[i].offset, &entry, sizeof entry);
  }
  return KVS_OK;
}

const char *kvs_cufile_text(int code, char text[96]) {
  static const struct {
    int code;
    const char *words;
  } known[] = {{5001, "nvidia-fs is not loaded"},
               {5004, "the version of nvidia-fs does not match"},
               {KVS_CUFILE_NO_PLATFORM, "not on this platform"},
               {KVS_CUFILE_NO_IO, "not for this file"},
               {KVS_CUFILE_NO_DEVICE, "not for this GPU"},
               {5011, "the CUDA driver refused"},
               {KVS_CUFILE_FILE_TYPE, "not for this kind of file"},
               {KVS_CUFILE_OPEN_FLAG, "not for files that are opened so"},
               {KVS_CUFILE_NO_DIRECT, "the file is not open with O_DIRECT"},
               {KVS_CUFILE_DISABLED, "switched off for this file"}};
  const char *words = "";
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].code == code) words = known[i].words;
  snprintf(text, 96, "libcufile's error %d%s%s", code, words[0] ? ": " : "", words);
  return text;
}

/* -- the cuFile driver --------------------------------------------------------------------------------------------- */

/* libcufile 1.20 loops forever in cuFileDriverOpen if /proc/modules is missing (kernels without modules, sandboxes). */
static bool would_hang(void) { return !kvs_cufile_named() && access("/proc/modules", R_OK) != 0; }

static int open_locked(struct kvs_error *err) {
  char note[200], text[96];
  if (would_hang())
    return kvs_fail(err, KVS_UNSUPPORTED, "there is no /proc/modules to read, for which libcufile would look for ever");
  void *library = find_library(note);
  if (!library) return kvs_fail(err, KVS_UNSUPPORTED, "%s", note);
  int status = fill_table(library, &process.table, err);
  if (status) return status;
  struct kvs_cufile_result result = process.table.driver_open();
  if (result.code && result.code != KVS_CUFILE_ALREADY_OPEN)
    return kvs_fail(err, KVS_UNSUPPORTED, "libcufile does not open its driver: %s (CUDA %d)",
                    kvs_cufile_text(result.code, text), result.cuda);
  process.open = true;
  process.ours = result.code == 0;
  process.fork_generation = kvs_fork_generation();
  return KVS_OK;
}

int kvs_cufile_get(const struct kvs_cufile **table, struct kvs_error *err) {
  static struct kvs_fork_guard guard = {.lock = &process.lock};
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&process.lock);
  int status = process.open ? KVS_OK : open_locked(err);
  if (!status && process.fork_generation != kvs_fork_generation())
    status = kvs_fail(err, KVS_UNSUPPORTED, "libcufile was opened before fork(): a child cannot use it");
  process.users += !status;
  pthread_mutex_unlock(&process.lock);
  *table = status ? NULL : &process.table;
  return status;
}

void kvs_cufile_release(bool lost) {
  pthread_mutex_lock(&process.lock);
  process.users--;
  if (lost) process.ours = false;
  pthread_mutex_unlock(&process.lock);
}

bool kvs_cufile_close(void) {
  pthread_mutex_lock(&process.lock);
  bool mine = process.open && process.users == 0 && process.fork_generation == kvs_fork_generation();
  if (mine && process.ours) (void)process.table.driver_close();
  if (mine) process.open = false;
  bool closed = !process.open;
  pthread_mutex_unlock(&process.lock);
  return closed;
}

/* -- capabilities -------------------------------------------------------------------------------------------------- */

/* File systems by magic number, each with the property bits that support it. For file systems on a block device the
 * support depends on the device, so any block device bit is accepted. */
static const struct {
  unsigned long magic;
  unsigned bits;
  const char *name;
} file_systems[] = {
#define BIT(n) (1u << (n))
#define BLOCK (BIT(4) | BIT(5) | BIT(6) | BIT(7) | BIT(8) | BIT(11))
    {0xef53, BLOCK, "ext4"},           {0x58465342, BLOCK, "xfs"},   {0x6969, BIT(2), "NFS"},
    {0x0bd00bd0, BIT(0), "Lustre"},    {0x47504653, BIT(3), "GPFS"}, {0x19830326, BIT(9), "BeeGFS"},
    {0x65735546, BIT(13), "virtiofs"},
#undef BLOCK
#undef BIT
};

static bool serves(unsigned bits, int fd, char note[160]) {
  struct statfs info;
  if (fstatfs(fd, &info)) {
    snprintf(note, 160, "the file system does not say what it is");
    return false;
  }
  unsigned long magic = (unsigned long)info.f_type & 0xffffffffu;
  for (size_t i = 0; i < sizeof file_systems / sizeof *file_systems; i++) {
    if (file_systems[i].magic != magic) continue;
    if (bits & file_systems[i].bits) return true;
    snprintf(note, 160, "the driver says that it does not serve %s here", file_systems[i].name);
    return false;
  }
  snprintf(note, 160, "the driver does not say that it serves this file system (type %#lx)", magic);
  return false;
}

bool kvs_cufile_is_direct(const struct kvs_cufile *cu, int fd, char note[160]) {
  struct kvs_cufile_properties properties = {0};
  char text[96];
  struct kvs_cufile_result result = cu->get_properties(&properties);
  if (result.code) {
    snprintf(note, 160, "the driver does not tell its properties: %s", kvs_cufile_text(result.code, text));
    return false;
  }
  if (properties.major == 0 && properties.minor == 0) {
    snprintf(note, 160, "nvidia-fs is not loaded: libcufile has only its compatibility mode");
    return false;
  }
  bool certain = !(properties.flags >> KVS_CUFILE_COMPAT_ALLOWED & 1);
  if (!certain && !serves(properties.file_systems, fd, note)) return false;
  snprintf(note, 160, "nvidia-fs %u.%u", properties.major, properties.minor);
  return true;
}
