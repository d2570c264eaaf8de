"""Finds liburing for io_uring in the file tier. The build goes without where there is none."""

import subprocess
import tempfile
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "cmake" / "uring.c"
# The archive first: it leaves nothing to be installed where the wheel goes, and its symbols stay inside. Not every
# archive can be put into a library.
WAYS = (["-l:liburing.a", "-Wl,--exclude-libs,liburing.a"], ["-luring"])


def try_to_link(compiler, folder, link):
    command = [*compiler, "-fPIC", "-shared", "-Wl,-z,defs", str(PROGRAM), "-o", str(Path(folder, "probe.so")), *link]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def find_uring(compiler):
    """What to link with, or None. `compiler` is a command as a list."""
    with tempfile.TemporaryDirectory() as folder:
        return next((link for link in WAYS if try_to_link(compiler, folder, link)), None)
