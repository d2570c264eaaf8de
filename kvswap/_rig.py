"""Transfers for kvswap calibrate: between places that are drawn anew, timed, every byte verified."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap.replay.check import WrongBytes
from kvswap.replay.pattern import POISON_KEY, mix
from kvswap.replay.units import format_size
from kvswap.typing import ForcedPath

Direction: TypeAlias = Literal["d2h", "h2d"]
Words: TypeAlias = NDArray[np.uint64]

DIRECTIONS: tuple[Direction, ...] = ("d2h", "h2d")
PATHS: tuple[ForcedPath, ...] = tuple(path for path in get_args(ForcedPath) if path != "borrow")  # which a burst tells
UNPACED = 1e4  # GB/s, as a caller asks for it: above any link
WAIT_LIMIT = 60.0

# On each side; the link is measured by one copy of all of it. Blocks are spread over as much as there is for them: the
# copy engine is slower where they are far apart, as those of a real pool are.
AREA = {"cuda": 1 << 30, "host": 64 << 20}
_SPREAD = 16  # at most so many times the room that they need
MOVED = {"cuda": 64 << 20, "host": 8 << 20}  # most bytes of a transfer of blocks
_SKEW = 16  # bytes by which the host's blocks lie off the lines, where they are to
_LINK_REPEATS = 3


@dataclass(frozen=True)
class Shape:
    """A transfer: so many blocks of each of so many tensors, which lie one after the other on the GPU's side and
    block-first on the host's, or there too one after the other: `apart`. No two blocks of a side touch, unless the
    host's are to be `together`: one run. skew: the host's blocks lie off the lines of its memory."""

    tensors: int
    row_nbytes: int
    blocks: int
    together: bool = False
    apart: bool = False
    skew: bool = False

    @property
    def rows(self) -> int:
        return self.tensors * self.blocks

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_nbytes


class Unavailable(Exception):
    """The device does not have the path, or not for such a transfer."""


class Rig:
    """Memory on both sides, and transfers that are timed and verified."""

    def __init__(self, device: _C.Device, stream: _C.Stream) -> None:
        self.device = device
        self.area = AREA[device.kind]
        self.moved = MOVED[device.kind]
        self.kernel_runs: dict[Direction, tuple[int, float]] = {}  # CTAs and pace of path kernel, if none are named
        self.bytes_verified = 0
        self._stream = stream
        self._rng = np.random.default_rng(1)
        self._round = 0
        self._gpu = device.alloc(self.area)
        try:
            self._cpu = device.alloc(self.area, host=True)
        except BaseException:
            self._gpu.free()
            raise

    def close(self) -> None:
        self._gpu.free()
        self._cpu.free()

    def measure_link(self, direction: Direction) -> float:
        """Seconds of one copy of a whole side."""
        gpu, cpu = np.array([self._gpu.ptr], np.uint64), np.array([self._cpu.ptr], np.uint64)
        source, target = (gpu, cpu) if direction == "d2h" else (cpu, gpu)

        def submit() -> _C.Transfer:
            return _C.swap_blocks_batch(source, target, self.area, device=self.device, path="dma")

        return Job(self, submit, "dma", direction, source, target, self.area).median(_LINK_REPEATS)

    def measure(
        self,
        path: ForcedPath,
        direction: Direction,
        shape: Shape,
        repeats: int,
        max_ctas: int | None = None,
        pace_gbps: float | None = None,
    ) -> float:
        """Median seconds of a transfer between places that are drawn anew. The kernel runs as is said, else as
        kernel_runs has it; pace 0: unpaced. Unavailable: the path does not take it."""
        row, blocks = shape.row_nbytes, shape.blocks
        slots = min(_SPREAD * blocks, self.area // (shape.tensors * row) - 1)  # less one, for what is askew
        gpu_ids = 2 * self._rng.permutation(slots // 2)[:blocks]  # every other slot at most: nothing is merged
        cpu_ids = np.arange(blocks) if shape.together else 2 * self._rng.permutation(slots // 2)[:blocks]
        cpu_stride = row if shape.apart else shape.tensors * row
        cpu_base = self._cpu.ptr + (_SKEW if shape.skew else 0)
        tensors = np.arange(shape.tensors)[:, None]
        gpu_ptrs = self._gpu.ptr + tensors * (slots * row)
        cpu_ptrs = cpu_base + tensors * (slots * row if shape.apart else row)
        gpu = (gpu_ptrs + gpu_ids * row).reshape(-1).astype(np.uint64)
        cpu = (cpu_ptrs + cpu_ids * cpu_stride).reshape(-1).astype(np.uint64)
        source, target = (gpu, cpu) if direction == "d2h" else (cpu, gpu)
        ctas, pace = max_ctas, pace_gbps or UNPACED
        if max_ctas is None and direction in self.kernel_runs:
            ctas, pace = self.kernel_runs[direction]
        gpu_list, cpu_list = gpu_ptrs.reshape(-1).astype(np.uint64), cpu_ptrs.reshape(-1).astype(np.uint64)

        def submit() -> _C.Transfer:
            return _C.swap_cache_all_layers_async(
                gpu_list,
                cpu_list,
                row,
                slots,
                slots,
                gpu_ids,
                cpu_ids,
                DIRECTIONS.index(direction),
                cpu_stride=cpu_stride,
                device=self.device,
                path=path,
                max_ctas=ctas if path == "kernel" else None,
                pace_gbps=pace or UNPACED if path == "kernel" else None,
            )

        return Job(self, submit, path, direction, source, target, row).median(repeats)

    def new_keys(self, count: int) -> Words:
        self._round += 1
        return mix(np.arange(count, dtype=np.uint64) + np.uint64(self._round << 32))

    def pattern(self, check: bool, ptrs: Words, nbytes: int, keys: Words) -> tuple[int, int | None, int | None]:
        """Waits for its end, so that the device is idle when a measurement begins."""
        sizes = np.full(len(ptrs), nbytes, np.uint64)
        return _C._pattern(self.device, check, ptrs, sizes, keys, self._stream).result(WAIT_LIMIT)


class Job:
    """A transfer that can be made again and again."""

    def __init__(
        self,
        rig: Rig,
        submit: Callable[[], _C.Transfer],
        path: ForcedPath,
        direction: Direction,
        source: Words,
        target: Words,
        row_nbytes: int,
    ) -> None:
        self._rig, self._path, self._direction = rig, path, direction
        self._source, self._target, self._row_nbytes = source, target, row_nbytes
        self._keys = rig.new_keys(len(source))
        self._poison = np.full(len(target), POISON_KEY)
        self._submit = submit
        self._nbytes = len(target) * row_nbytes

    def _fill(self) -> None:
        """New bytes in the source, poison in the target."""
        self._keys = self._rig.new_keys(len(self._source))
        self._rig.pattern(False, self._source, self._row_nbytes, self._keys)
        self._poison_target()

    def _poison_target(self) -> None:
        self._rig.pattern(False, self._target, self._row_nbytes, self._poison)

    def _check(self) -> None:
        wrong, item, offset = self._rig.pattern(True, self._target, self._row_nbytes, self._keys)
        if wrong:
            message = f"WRONG BYTES: {self._path} {self._direction}, {format_size(self._row_nbytes)} a block: block "
            message += f"{item} of the list, offset {offset}; {wrong} wrong bytes in all; nothing is stored"
            raise WrongBytes(message, wrong_bytes=wrong, block=item or 0, layer=0, offset=offset or 0)
        self._rig.bytes_verified += self._nbytes

    def median(self, repeats: int) -> float:
        """Seconds. The first transfer, which may have to set things up, does not count."""
        took = []
        self._fill()
        for i in range(1 + repeats):
            if i > 0:
                self._poison_target()
            took.append(self._timed())
            self._check()
        return statistics.median(took[1:])

    def _timed(self) -> float:
        """Seconds. By polling: wait() sleeps between its looks, for longer the longer it has waited."""
        begin = time.perf_counter()
        try:
            transfer = self._submit()
        except (ValueError, _C.Error) as error:
            if isinstance(error, _C.DeviceError):
                raise
            raise Unavailable(str(error)) from None
        while not transfer.done() and time.perf_counter() - begin < WAIT_LIMIT:
            pass
        seconds = time.perf_counter() - begin
        transfer.wait(WAIT_LIMIT)
        if transfer.path != self._path:
            raise Unavailable(f"runs as {transfer.path}")
        return seconds
