"""Opens regular files only: opening a pipe could block, and opening a device could have effects."""

from __future__ import annotations

import os
import stat

__all__ = ["open_regular"]


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """A descriptor of a regular file, made with mode 0600 where `flags` say so; never waits.

    follow: also where the name is a symbolic link. OSError: it cannot be opened, or is no regular file.
    """
    flags |= os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        _require_regular(path, os.stat(path, follow_symlinks=follow))  # opening a device is an act
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    fd = os.open(path, flags, 0o600)
    try:
        _require_regular(path, os.fstat(fd))
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_regular(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{os.fspath(path)} is a link, directory, pipe, socket or device, not a file: remove it")
