"""The shared pools of replicas (kvswap_replicas), by their names in /dev/shm."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from kvswap.replay.units import format_size

_FOLDER = Path("/dev/shm")


def segment_of(name: str) -> str:
    """The name of the SharedPool: of this user's replicas of that name."""
    return f"replicas-{os.geteuid()}-{name}"


@dataclass(frozen=True)
class ReplicaPool:
    """A pool that exists, even if all of its engines were killed."""

    name: str  # as in the configuration
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name}: {format_size(self.nbytes)} of host memory for all engines of this name"


def held_nbytes(name: str, root: str = "") -> int:
    """Memory that the pool of this name has by now. root: put before the path, for tests."""
    try:
        return 512 * os.stat(f"{root}{_FOLDER}/kvswap.{segment_of(name)}").st_blocks
    except OSError:
        return 0


def pools() -> list[ReplicaPool]:
    """Those of this user."""
    prefix, found = f"kvswap.{segment_of('')}", []
    with contextlib.suppress(OSError):
        for path in sorted(_FOLDER.iterdir()):
            if path.name.startswith(prefix):
                with contextlib.suppress(OSError):
                    found.append(ReplicaPool(path.name.removeprefix(prefix), path.stat().st_size))
    return found
