"""Rank 0's record of the blocks of one side (GPU or host): the task that wrote each last, if it is under way or failed.

A task reads what the last task before it wrote. If that task fails, on any rank and for any reason, the block is lost,
and every task that reads it fails too. The order is that in which rank 0 took the tasks, whatever the order in which
the ranks end their parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Write", "Writes"]


@dataclass(eq=False)
class Write:
    """The write of one task. number: the task's. client: its sender; empty once the client has ended."""

    number: int
    client: bytes
    task_id: str
    blocks: list[int]
    readers: list[int] = field(default_factory=list)  # later tasks that read one of these blocks
    failed: tuple[int, str] | None = None  # the rank that failed, and the task's failure that it began with


class Writes:
    """The last writes of one side. Blocks with a successful last write, or none, take no room."""

    def __init__(self) -> None:
        self._last: dict[int, Write] = {}

    def before(self, blocks: Iterable[int]) -> dict[int, Write]:
        """The last writes of these blocks that are under way or have failed."""
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
        """The memory of all blocks was replaced: drop all records."""
        self._last.clear()

    def gone(self, client: bytes) -> None:
        """A client has ended: clear_failures() may drop its failed writes."""
        for write in self._last.values():
            if write.client == client:
                write.client = b""

    def clear_failures(self) -> None:
        """An engine opens the caches: drop the failed writes of clients that have ended."""
        self._last = {block: write for block, write in self._last.items() if write.client or write.failed is None}
