"""kvswap bench: every call, direction, block size and path; every byte verified; each against one big copy.

A case moves blocks between scattered places of pools twice as large. Before each repeat the source holds a pattern
that no other block or repeat has, and the destination is poisoned; after it every destination block is checked, and
only then does the time count. Times run from the call to the end of the wait.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap.replay.check import WrongBytes
from kvswap.replay.pattern import POISON_KEY, mix
from kvswap.replay.settings import Path
from kvswap.replay.units import format_size

_D2H, _H2D = 0, 1
_DIRECTIONS = {_D2H: "D2H", _H2D: "H2D"}
_SIZES = tuple(1024 * kib for kib in (4, 16, 64, 256, 1024, 2048))
_TENSORS = 8  # of swap_cache_all_layers
_MAX_BLOCKS = 8192
_SPREAD = 2  # slots a block moved
_NBYTES = {"cuda": 256 << 20, "host": 32 << 20}
_QUICK_NBYTES = {"cuda": 64 << 20, "host": 8 << 20}
_WAIT_LIMIT = 60.0

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    device: _C.Device
    nbytes: int
    repeats: int
    sizes: tuple[int, ...]
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Row:
    """One case measured, or why it was not."""

    call: str
    direction: str
    path: str
    block_nbytes: int
    blocks: int
    gbps: float | None = None
    share: float | None = None  # of one big copy in the same direction
    cpu_us_per_block: float | None = None  # inside the call
    note: str = ""


@dataclass
class Result:
    """All rows."""

    device: str
    device_name: str
    bytes_per_case: int
    repeats: int
    one_copy_gbps: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    bytes_verified: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "wrong_bytes": 0}


def plan(
    device: _C.Device,
    *,
    quick: bool = False,
    nbytes: int | None = None,
    repeats: int | None = None,
    paths: Sequence[Path] | None = None,
) -> Plan:
    """Fill in what suits the device: a host device moves fewer bytes."""
    default = (_QUICK_NBYTES if quick else _NBYTES)[device.kind]
    sizes = _SIZES[::2] if quick else _SIZES
    available: tuple[Path, ...] = ("dma", "kernel", "direct") if device.kind == "host" else ("dma", "kernel")
    total = max(nbytes if nbytes is not None else default, sizes[-1])
    return Plan(device, total, repeats or (3 if quick else 5), sizes, tuple(paths) if paths else available)


def run(plan: Plan, show: Callable[[str], None]) -> Result:
    """Measure all cases, showing each as it ends. Raises WrongBytes for one wrong byte."""
    name = str(plan.device.info.get("name") or plan.device.name)
    result = Result(plan.device.name, name, plan.nbytes, plan.repeats)
    show(f"kvswap bench on {result.device} ({name}): at most {format_size(plan.nbytes)} a case, {plan.repeats} repeats")
    stream = _C.Stream(plan.device)
    plan.device.set_compute_stream(stream)
    bench = _Bench(plan, stream, result)
    try:
        bench.one_copies(show)
        show(_HEADER)
        for row in bench.rows():
            result.rows.append(row)
            show(_format(row))
    finally:
        plan.device.synchronize(_WAIT_LIMIT)
        plan.device.set_compute_stream(0)
        bench.close()
    show(f"{format_size(result.bytes_verified)} verified, 0 wrong bytes")
    return result


@dataclass(frozen=True)
class _Case:
    """Blocks to move and the call that moves them. Pointers are those of each single copy."""

    call: str
    direction: int
    path: Path
    block_nbytes: int
    gpu: Words
    cpu: Words
    submit: Callable[[], _C.Transfer]

    @property
    def nbytes(self) -> int:
        return len(self.gpu) * self.block_nbytes


class _Bench:
    def __init__(self, plan: Plan, stream: _C.Stream, result: Result) -> None:
        self._plan = plan
        self._stream = stream
        self._result = result
        self._rng = np.random.default_rng(1)
        self._round = 0
        self._gpu = plan.device.alloc(plan.nbytes * _SPREAD)
        self._cpu = plan.device.alloc(plan.nbytes * _SPREAD, host=True)

    def close(self) -> None:
        self._gpu.free()
        self._cpu.free()

    def one_copies(self, show: Callable[[str], None]) -> None:
        """What the link gives one copy of all the bytes."""
        for direction, name in _DIRECTIONS.items():
            gpu, cpu = np.array([self._gpu.ptr], np.uint64), np.array([self._cpu.ptr], np.uint64)
            gbps, _ = self._measure(self._batch(direction, "dma", self._plan.nbytes, gpu, cpu))
            self._result.one_copy_gbps[name] = gbps
            show(f"  one copy of {format_size(self._plan.nbytes)} {name}: {gbps:.2f} GB/s")

    def rows(self) -> Iterator[Row]:
        for make in (self._batch_case, self._per_layer_case, self._all_layers_case):
            for direction in _DIRECTIONS:
                for path in self._plan.paths:
                    for size in self._plan.sizes:
                        yield self._row(make(direction, path, size))

    def _row(self, case: _Case) -> Row:
        direction, count = _DIRECTIONS[case.direction], len(case.gpu)
        row = Row(case.call, direction, case.path, case.block_nbytes, count)
        try:
            gbps, cpu = self._measure(case)
        except WrongBytes:
            raise
        except (ValueError, _C.Error) as error:
            if self._plan.device.lost:
                raise
            return Row(**{**asdict(row), "note": str(error)})
        share = gbps / self._result.one_copy_gbps[direction]
        return Row(**{**asdict(row), "gbps": gbps, "share": share, "cpu_us_per_block": cpu / count * 1e6})

    def _measure(self, case: _Case) -> tuple[float, float]:
        """Median GB/s, and median seconds inside the call."""
        walls, cpus = [], []
        for _ in range(self._plan.repeats):
            keys = self._prepare(case)
            start = time.perf_counter()
            transfer = case.submit()
            called = time.perf_counter()
            transfer.wait(_WAIT_LIMIT)
            walls.append(time.perf_counter() - start)
            cpus.append(called - start)
            self._verify(case, keys)
        return case.nbytes / statistics.median(walls) / 1e9, statistics.median(cpus)

    def _prepare(self, case: _Case) -> Words:
        """Source: a pattern that no other repeat has. Destination: poison."""
        self._round += 1
        source, target = (case.gpu, case.cpu) if case.direction == _D2H else (case.cpu, case.gpu)
        keys = mix(np.arange(len(source), dtype=np.uint64) + np.uint64(self._round << 32))
        self._pattern(False, source, case.block_nbytes, keys)
        self._pattern(False, target, case.block_nbytes, np.full(len(target), POISON_KEY))
        return keys

    def _verify(self, case: _Case, keys: Words) -> None:
        target = case.cpu if case.direction == _D2H else case.gpu
        wrong, item, offset = self._pattern(True, target, case.block_nbytes, keys)
        if wrong:
            where = f"{case.call} {_DIRECTIONS[case.direction]} path {case.path}, {case.block_nbytes} bytes a block"
            message = f"WRONG BYTES: {where}: block {item} of the list, offset {offset}; {wrong} wrong bytes in all"
            raise WrongBytes(message, wrong_bytes=wrong, block=item or 0, layer=0, offset=offset or 0)
        self._result.bytes_verified += case.nbytes

    def _pattern(self, check: bool, ptrs: Words, nbytes: int, keys: Words) -> tuple[int, int | None, int | None]:
        """Waits for its end, so that the device is idle when a measurement begins."""
        sizes = np.full(len(ptrs), nbytes, np.uint64)
        return _C._pattern(self._plan.device, check, ptrs, sizes, keys, self._stream).result(_WAIT_LIMIT)

    def _count(self, size: int) -> int:
        return max(1, min(_MAX_BLOCKS, self._plan.nbytes // size))

    def _ids(self, count: int, slots: int) -> Ids:
        return self._rng.permutation(slots)[:count].astype(np.int64)

    def _batch(self, direction: int, path: Path, size: int, gpu: Words, cpu: Words) -> _Case:
        source, target = (gpu, cpu) if direction == _D2H else (cpu, gpu)
        device = self._plan.device
        return _Case(
            "swap_blocks_batch",
            direction,
            path,
            size,
            gpu,
            cpu,
            lambda: _C.swap_blocks_batch(source, target, size, device=device, path=path),
        )

    def _batch_case(self, direction: int, path: Path, size: int) -> _Case:
        count = self._count(size)
        gpu = np.uint64(self._gpu.ptr) + self._ids(count, count * _SPREAD).astype(np.uint64) * np.uint64(size)
        cpu = np.uint64(self._cpu.ptr) + self._ids(count, count * _SPREAD).astype(np.uint64) * np.uint64(size)
        return self._batch(direction, path, size, gpu, cpu)

    def _per_layer_case(self, direction: int, path: Path, size: int) -> _Case:
        count = self._count(size)
        slots = count * _SPREAD
        gpu_ids, cpu_ids = self._ids(count, slots), self._ids(count, slots)
        gpu, cpu, device = self._gpu.ptr, self._cpu.ptr, self._plan.device

        def submit() -> _C.Transfer:
            return _C.swap_cache_per_layer_async(
                gpu, cpu, size, slots, slots, gpu_ids, cpu_ids, direction, device=device, path=path
            )

        call = "swap_cache_per_layer"
        return _Case(
            call, direction, path, size, _addresses(gpu, gpu_ids, size), _addresses(cpu, cpu_ids, size), submit
        )

    def _all_layers_case(self, direction: int, path: Path, size: int) -> _Case:
        """Layer-first on the GPU, block-first on the host."""
        tensors = min(_TENSORS, self._count(size))
        count = self._count(size) // tensors
        slots = count * _SPREAD
        gpu_ids, cpu_ids = self._ids(count, slots), self._ids(count, slots)
        layers = np.arange(tensors, dtype=np.uint64)
        gpu_ptrs = np.uint64(self._gpu.ptr) + layers * np.uint64(slots * size)
        cpu_ptrs = np.uint64(self._cpu.ptr) + layers * np.uint64(size)
        stride, device = tensors * size, self._plan.device

        def submit() -> _C.Transfer:
            return _C.swap_cache_all_layers_async(
                gpu_ptrs,
                cpu_ptrs,
                size,
                slots,
                slots,
                gpu_ids,
                cpu_ids,
                direction,
                cpu_stride=stride,
                device=device,
                path=path,
            )

        gpu = np.concatenate([_addresses(int(base), gpu_ids, size) for base in gpu_ptrs])
        cpu = np.concatenate([_addresses(int(base), cpu_ids, stride) for base in cpu_ptrs])
        return _Case("swap_cache_all_layers", direction, path, size, gpu, cpu, submit)


def _addresses(base: int, ids: Ids, stride: int) -> Words:
    addresses: Words = np.uint64(base) + ids.astype(np.uint64) * np.uint64(stride)
    return addresses


_HEADER = (
    f"{'call':<22} {'dir':<4} {'path':<7} {'block':>8} {'blocks':>7} {'GB/s':>8} {'share':>6} {'CPU us/block':>13}"
)


def _format(row: Row) -> str:
    text = f"{row.call:<22} {row.direction:<4} {row.path:<7} {format_size(row.block_nbytes):>8} {row.blocks:>7,}"
    if row.gbps is None or row.share is None or row.cpu_us_per_block is None:
        return f"{text}  not measured: {row.note}"
    return f"{text} {row.gbps:>8.2f} {row.share:>6.2f} {row.cpu_us_per_block:>13.3f}"
