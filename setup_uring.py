"""Finds liburing for io_uring in the file tier. Used by setup.py: the build goes without where there is none."""

import subprocess
import tempfile
from pathlib import Path

PROGRAM = """
#include <liburing.h>
int probe(void);
int probe(void) {
  struct io_uring ring;
  int fd = -1;
  return io_uring_queue_init(1, &ring, 0) + io_uring_register_files_update(&ring, 0, &fd, 1);
}
"""
# The archive first: it leaves nothing to be installed where the wheel goes, and its symbols stay inside. Not every
# archive can be put into a library.
WAYS = (["-l:liburing.a", "-Wl,--exclude-libs,liburing.a"], ["-luring"])


def try_to_link(compiler, folder, link):
    source = Path(folder, "probe.c")
    source.write_text(PROGRAM)
    command = [*compiler, "-fPIC", "-shared", "-Wl,-z,defs", str(source), "-o", str(Path(folder, "probe.so")), *link]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def find_uring(compiler):
    """What to link with, or None. `compiler` is a command as a list."""
    with tempfile.TemporaryDirectory() as folder:
        return next((link for link in WAYS if try_to_link(compiler, folder, link)), None)
