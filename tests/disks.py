"""Small file systems of their own for the tests of the file tier: full, over quota, read-only. They need root."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KINDS = ("tmpfs", "ext4", "xfs", "overlay", "btrfs", "quota")
RESERVES = ("tmpfs", "ext4", "xfs", "overlay")  # keep what fallocate() has reserved; the others copy on write
_MIB = {"tmpfs": 32, "overlay": 32, "ext4": 48, "xfs": 300, "btrfs": 128, "quota": 128}


def cannot(why: str) -> None:
    """Skip the test, visibly; in a release's run (KVSWAP_RELEASE=1) fail."""
    if os.environ.get("KVSWAP_RELEASE") == "1":
        pytest.fail(f"a release needs this test: {why}")
    pytest.skip(why)


def _run(*command: object, fatal: bool = True) -> None:
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if run.returncode and fatal:
        cannot(f"{' '.join(map(str, command))}: {run.stderr.strip() or run.stdout.strip()}")


class Disk:
    """A mounted file system: `path` is an empty directory on it."""

    def __init__(self, kind: str, place: Path) -> None:
        self.kind, self.place = kind, place
        self.image = place / "image"
        self.mounts: list[Path] = []
        self.path = place / "disk"

    def make(self) -> None:
        if os.geteuid():
            cannot("a file system can be mounted by root only")
        self.path.mkdir()
        size = _MIB[self.kind]
        if self.kind == "tmpfs":
            self._mount(self.path, "-t", "tmpfs", "-o", f"size={size}m", "tmpfs")
        elif self.kind == "overlay":
            below = self.place / "below"
            below.mkdir()
            self._mount(below, "-t", "tmpfs", "-o", f"size={size}m", "tmpfs")
            for name in ("lower", "upper", "work"):
                (below / name).mkdir()
            options = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
            self._mount(self.path, "-t", "overlay", "-o", options, "overlay")
        else:
            what = "btrfs" if self.kind == "quota" else self.kind
            with open(self.image, "wb") as file:
                file.truncate(size << 20)
            flags = {"ext4": ["-q", "-m", "0"], "xfs": ["-q"], "btrfs": ["-q"]}[what]
            if shutil.which(f"mkfs.{what}") is None:
                cannot(f"there is no mkfs.{what}")
            _run(f"mkfs.{what}", *flags, self.image)
            self._mount(self.path, "-o", "loop", self.image)
        if self.kind == "quota":
            _run("btrfs", "quota", "enable", self.path)
            _run("btrfs", "subvolume", "create", self.path / "bounded")
            _run("btrfs", "qgroup", "limit", f"{size // 4}M", self.path / "bounded")
            self.path = self.path / "bounded"
        os.chmod(self.path, 0o700)

    def _mount(self, at: Path, *options: object) -> None:
        _run("mount", *options, at)
        self.mounts.append(at)

    def fill(self) -> None:
        """Until not a byte more goes in."""
        with open(self.path / "filler", "ab", buffering=0) as file:
            for nbytes in (1 << 20, 4096, 1):
                try:
                    while file.write(b"x" * nbytes):
                        if nbytes == 1 and file.tell() % 4096 == 0:
                            break
                except OSError as error:
                    assert error.errno in (errno.ENOSPC, errno.EDQUOT), error
        os.sync()

    def drain(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)
        os.sync()

    def remount(self, how: str) -> bool:
        """`ro` or `rw`. False: a file is still open."""
        command = ["mount", "-o", f"remount,{how}", str(self.mounts[-1])]
        # By mount(2): with fsconfig(2) newer programs name all options again, and overlay permits none.
        environment = {**os.environ, "LIBMOUNT_FORCE_MOUNT2": "always"}
        for _ in range(50):  # a closed ring of io_uring gives its files back a little later
            if subprocess.run(command, check=False, capture_output=True, env=environment).returncode == 0:
                return True
            time.sleep(0.1)
        return False

    def cut(self) -> None:
        """The second half of the device cannot be read any more: EIO."""
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        os.truncate(self.image, self.image.stat().st_size // 2)
        Path("/proc/sys/vm/drop_caches").write_text("3")

    def uncut(self) -> None:
        os.truncate(self.image, _MIB[self.kind] << 20)

    def end(self) -> None:
        for at in reversed(self.mounts):
            subprocess.run(["umount", "-l", str(at)], check=False, capture_output=True)
        self.image.unlink(missing_ok=True)


@contextmanager
def disk(kind: str, place: Path) -> Iterator[Disk]:
    place.mkdir(parents=True, exist_ok=True)
    made = Disk(kind, place)
    try:
        made.make()
        yield made
    finally:
        made.end()
