"""Which node holds a block: rendezvous hashing over a list of nodes. No node knows of another.

Each node has a score for each key, and the nodes with the highest scores hold its block. A node that is added takes its
share from all others; the blocks of a node that is removed spread over all others; no other block moves.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap._regular import open_regular

_MOST_NBYTES = 1 << 20
_LOOK_SECONDS = 1.0  # between two looks at a watched file
_LINE = re.compile(r"(?P<address>\S+:\d{1,5})\s+(?P<key>\S{40})(?:\s+(?P<name>\S+))?")


@dataclass(frozen=True)
class Node:
    """A node: HOST:PORT of its control messages, its public key, and its name, by which blocks are placed."""

    address: str
    key: str
    name: str = ""

    @property
    def placed_by(self) -> str:
        """The name, or else the address."""
        return self.name or self.address


def parse_nodes(text: str, source: str = "nodes") -> list[Node]:
    """One node a line: HOST:PORT PUBLIC-KEY [NAME]. Empty lines and those that begin with # are skipped. ValueError."""
    found: list[Node] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        parts = _LINE.fullmatch(line)
        if parts is None:
            raise ValueError(f"{source}, line {number}: must be HOST:PORT PUBLIC-KEY [NAME], not {line!r}")
        found.append(Node(parts["address"], parts["key"], parts["name"] or ""))
    check_nodes(found, source)
    return found


def check_nodes(nodes: Sequence[Node], source: str = "nodes") -> None:
    for what in ("address", "placed_by"):
        values = [getattr(node, what) for node in nodes]
        twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
        if twice is not None:
            raise ValueError(f"{source}: {twice} stands there twice")


class NodeFile:
    """A file of nodes that is looked at again once a second. A file that is missing or wrong later on leaves the list
    as it was; `problem` says why."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.problem = Path(path), ""
        self._seen: tuple[int, ...] = ()
        self._next = 0.0
        self.nodes: list[Node] = self._read()

    def changed(self) -> bool:
        """Whether the list has changed since the last call; looks at most once a second."""
        if time.monotonic() < self._next:
            return False
        before = self.nodes
        try:
            if self._stamp() != self._seen:
                self.nodes = self._read()
            self.problem = ""
        except (OSError, ValueError, _C.Error) as error:
            self.problem = str(error)
        self._next = time.monotonic() + _LOOK_SECONDS
        return self.nodes != before

    def _stamp(self) -> tuple[int, ...]:
        found = os.stat(self.path)
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> list[Node]:
        stamp = self._stamp()
        with open(open_regular(self.path, follow=True), "rb") as file:
            text = file.read(_MOST_NBYTES + 1)
        if len(text) > _MOST_NBYTES:
            raise ValueError(f"{self.path} has more than {_MOST_NBYTES} bytes")
        nodes = parse_nodes(text.decode("utf-8", "replace"), str(self.path))
        self._seen = stamp
        return nodes


class Placement:
    """The order of nodes for each key. Immutable; many threads may use it."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in self.names]
        self._seeds: NDArray[np.uint64] = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)

    def order(self, keys: bytes, replicas: int) -> NDArray[np.int64]:
        """(keys, replicas): positions of the nodes that hold each key's block, the first choice first."""
        count = min(replicas, len(self.names))
        words = np.frombuffer(keys, "<u8").reshape(-1, 2)[:, 0].astype(np.uint64)
        if count == 0 or len(self.names) == 1:
            return np.zeros((len(words), count), np.int64)
        scores = _mixed(words[:, None] ^ self._seeds[None, :])
        found = np.empty((len(words), count), np.int64)
        for rank in range(count):  # few: sorting would look at all nodes
            best = found[:, rank] = np.argmax(scores, axis=1)
            scores[np.arange(len(words)), best] = 0
        return found


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of a word changes about half of the result's bits (the finalizer of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
