"""What rank 0 knows of the blocks of one side: which task wrote each last, and whether that is under way or failed.

A task reads what the last one before it wrote. If that one fails, on whatever rank and for whatever reason, the block
does not hold what it should, and whoever reads it fails too. Only tasks that were taken count; who is asked, and in
which order ranks end their parts, does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Write", "Writes"]


@dataclass(eq=False)
class Write:
    """Of one task. number: the task's. client: who sent it; empty: is gone."""

    number: int
    client: bytes
    task_id: str
    blocks: list[int]
    readers: list[int] = field(default_factory=list)  # tasks that were taken since, and read what it writes
    failed: tuple[int, str] | None = None  # the rank that failed, and which task's failure it began with


class Writes:
    """Of one side. Blocks whose last write has ended well, or that nobody has written, take no room."""

    def __init__(self) -> None:
        self._last: dict[int, Write] = {}

    def before(self, blocks: Iterable[int]) -> dict[int, Write]:
        """Of these blocks, those whose last write is under way or has failed."""
        last = self._last
        return {block: last[block] for block in blocks if block in last}

    def begin(self, write: Write) -> None:
        self._last.update(dict.fromkeys(write.blocks, write))

    def end(self, write: Write, failed: tuple[int, str] | None) -> None:
        write.failed = failed
        if failed is None:
            for block in write.blocks:
                if self._last.get(block) is write:
                    del self._last[block]

    def forget(self) -> None:
        """Other memory is in the place of all blocks."""
        self._last.clear()

    def gone(self, client: bytes) -> None:
        """Nobody is left who could be told."""
        for write in self._last.values():
            if write.client == client:
                write.client = b""

    def forgive(self) -> None:
        """An engine begins: it does not ask for what others failed to write who are gone."""
        self._last = {block: write for block, write in self._last.items() if write.client or write.failed is None}
