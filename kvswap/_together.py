"""What the links of several devices reach together, for kvswap calibrate: copies on all of them at once, for a short
time. The sum is what the host's memory lets pass, or what is between it and the links."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvswap import _C
from kvswap._rig import DIRECTIONS, WAIT_LIMIT, Direction, Words
from kvswap.replay.check import WrongBytes
from kvswap.replay.pattern import POISON_KEY, mix

# Of each device and direction. All places together are more than a processor's cache holds.
PLACE = {"cuda": 32 << 20, "host": 256 << 10}
PLACES = 8
WINDOW = {"cuda": 0.15, "host": 0.01}  # seconds of a measurement
_QUEUED = 3  # copies of a link: one that moves, and some behind it

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Together:
    """GB/s of so many links at once: their sums, by direction and with both at once, and the slowest link of each."""

    links: int
    d2h: float
    h2d: float
    both: float
    d2h_least: float
    h2d_least: float


class _Link:
    """The places of one device: sources and targets on both sides. The host's are on the node of the device's link."""

    def __init__(self, device: _C.Device, keys: Words, stack: ExitStack) -> None:
        self.device, self._keys = device, keys
        self._nbytes = PLACE[device.kind]
        self._stream = _C.Stream(device)
        gpu = device.alloc(2 * PLACES * self._nbytes)
        stack.callback(gpu.free)
        pool = stack.enter_context(_C.HostPool(2 * PLACES, self._nbytes, device=device))
        stack.callback(device.synchronize, WAIT_LIMIT)
        first, second = (np.arange(PLACES, dtype=np.uint64) + np.uint64(i * PLACES) for i in range(2))
        size = np.uint64(self._nbytes)
        self._from = {"d2h": gpu.ptr + first * size, "h2d": pool.ptr + second * size}
        self._to = {"d2h": pool.ptr + first * size, "h2d": gpu.ptr + second * size}
        self._next = dict.fromkeys(DIRECTIONS, 0)
        for direction in DIRECTIONS:
            self._pattern(False, self._from[direction], self._keys)
            self._pattern(False, self._to[direction], np.full(PLACES, POISON_KEY))

    def _pattern(self, check: bool, ptrs: Words, keys: Words) -> tuple[int, int | None, int | None]:
        sizes = np.full(len(ptrs), self._nbytes, np.uint64)
        return _C._pattern(self.device, check, ptrs, sizes, keys, self._stream).result(WAIT_LIMIT)

    def submit(self, direction: Direction) -> _C.Transfer:
        """The next place. Priority high: without gaps, and no store goes behind loads."""
        at = self._next[direction] % PLACES
        self._next[direction] += 1
        one = slice(at, at + 1)
        source, target = self._from[direction][one], self._to[direction][one]
        return _C.swap_blocks_batch(
            source, target, self._nbytes, device=self.device, path="dma", priority="high", stream=None
        )

    def check(self) -> int:
        """Bytes that are right: of each place to which a copy went, the last one. WrongBytes: not all are."""
        for direction in DIRECTIONS:
            count = min(PLACES, self._next[direction])
            wrong, item, offset = self._pattern(True, self._to[direction][:count], self._keys[:count])
            if wrong:
                message = f"WRONG BYTES: {direction} of {self.device.name} with others at once: copy {item}, offset "
                message += f"{offset}; {wrong} wrong bytes in all; nothing is stored"
                raise WrongBytes(message, wrong_bytes=wrong, block=item or 0, layer=0, offset=offset or 0)
        return sum(min(PLACES, count) for count in self._next.values()) * self._nbytes


def numbers(count: int) -> list[int]:
    """How many links are measured at once: 2, 4, ... and all."""
    some = [2]
    while 2 * some[-1] < count:
        some.append(2 * some[-1])
    return some if some[-1] == count else [*some, count]


def measure(
    devices: Sequence[_C.Device], progress: Progress = lambda done, total, what: None
) -> tuple[list[Together], int]:
    """For each of numbers(): the first so many devices. At least two devices, of one kind. Takes 0.5 s for each number,
    and 512 MiB on either side of each GPU. Also returns the bytes that were verified. WrongBytes: a byte is wrong."""
    steps = numbers(len(devices))
    with ExitStack() as stack:
        keys = mix(np.arange(PLACES, dtype=np.uint64) + np.uint64(1 << 32))
        links = [_Link(device, keys, stack) for device in devices]
        found = []
        for i, count in enumerate(steps):
            progress(i, len(steps), f"{count} links at once")
            found.append(_measure(links[:count]))
        return found, sum(link.check() for link in links)


def _measure(links: Sequence[_Link]) -> Together:
    d2h, h2d, both = _rates(links, ["d2h"]), _rates(links, ["h2d"]), _rates(links, DIRECTIONS)
    found = (sum(d2h), sum(h2d), sum(both), min(d2h), min(h2d))
    return Together(len(links), *(round(gbps, 3) for gbps in found))


def _rates(links: Sequence[_Link], directions: Sequence[Direction]) -> list[float]:
    """GB/s of each link: what has ended within the window. The rest is waited for."""
    window = WINDOW[links[0].device.kind]
    queues = [(link, direction, deque[_C.Transfer]()) for link in links for direction in directions]
    ended = dict.fromkeys(links, 0)
    begin = time.perf_counter()
    for _ in range(_QUEUED):  # in turns, so that all begin together
        for link, direction, queue in queues:
            queue.append(link.submit(direction))
    while (seconds := time.perf_counter() - begin) < window or not all(ended.values()):
        for link, direction, queue in queues:
            while queue[0].done():
                ended[link] += queue.popleft().nbytes
                queue.append(link.submit(direction))
        for _, _, queue in queues if seconds > WAIT_LIMIT else ():
            queue[0].wait(0)  # TimeoutError: it does not end
    for _, _, queue in queues:
        for transfer in queue:
            transfer.wait(WAIT_LIMIT)
    return [nbytes / seconds / 1e9 for nbytes in ended.values()]
