"""`kvbench handlers`: vLLM's job queue on kvswap and in vLLM's own ways, on caches of models.

A job is what vLLM's connector submits: scattered GPU blocks and scattered chunks of the host. For every method the
measured call contains the whole submission: from ids to addresses, and to work on a stream.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kvswap import _C, Direction
from kvswap.bench import with_torch
from kvswap.bench.beside import _run_alone, _run_both, _warm_up
from kvswap.bench.loads import Load, load_for
from kvswap.bench.measure import Figures, Job, Lab, opened, refusals
from kvswap.bench.methods import ByHand, NotMeasured, Pending, Submit
from kvswap.bench.report import Cell, Document, Rows, Table, document
from kvswap.bench.shapes import SPREAD, WAIT_LIMIT, Ids, Words
from kvswap.offload import CanonicalKVCacheRef, CPULoadStoreSpec, GPULoadStoreSpec, SingleDirectionOffloadingHandler
from kvswap.offload import Job as OffloadJob
from kvswap.replay.check import WrongBytes
from kvswap.replay.errors import UsageError
from kvswap.replay.units import format_size

_SEED = 1
_TRITON_BELOW = 28 << 10  # bytes of a page: vLLM's own limit
_GAIN = 1.02  # a smaller ratio counts as no gain


@dataclass(frozen=True)
class Cache:
    """A model's cache as vLLM hands it over. Host: chunks of `factor` blocks, in rows that hold all tensors (vLLM's
    shared region), or a tensor each."""

    key: str
    description: str
    tensors: int
    page: int
    blocks: int  # of a job, over all groups
    groups: int = 1  # each has all tensors; a block is of one group
    factor: int = 1
    slab: bool = False  # the tensors lie in one GPU allocation, else each in its own
    region: bool = True

    @property
    def nbytes(self) -> int:
        return self.tensors * self.page * self.blocks

    @property
    def shape(self) -> str:
        return f"{self.tensors} x {format_size(self.page)} x {self.blocks}"


_LLAMA = 64 << 10  # 16 tokens, K and V, 8 heads of 128, 2 bytes: a layer of Llama-3.1-8B
CACHES = (
    Cache("70b-tp8", "80 layers of 8 KiB, separate allocations", 80, 8 << 10, 512),
    Cache("70b-tp8-slab", "the same in one allocation", 80, 8 << 10, 512, slab=True),
    Cache("llama-8b", "Llama-3.1-8B: 32 layers, one allocation each, chunks of one block", 32, _LLAMA, 256),
    Cache("llama-8b-chunks", "the same, chunks of four blocks", 32, _LLAMA, 256, factor=4),
    Cache(
        "llama-8b-tensors", "the same, a host tensor a layer (vLLM to 0.26)", 32, _LLAMA, 256, factor=4, region=False
    ),
    Cache("llama-8b-cross", "the same, all layers of a block together (cross-layer)", 1, 32 * _LLAMA, 256),
    Cache("gpt-oss-20b", "gpt-oss-20b: 12 tensors that two groups share, 32 KiB", 12, 32 << 10, 512, groups=2),
    Cache("mla", "61 layers of 36 KiB, latent (MLA)", 61, 36 << 10, 128),
    Cache("kv-apart", "64 tensors of 32 KiB: K and V apart", 64, 32 << 10, 128),
)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    device: _C.Device
    repeats: int
    pairs: int  # of windows beside the decode-shaped product; 0: none
    seconds: float
    directions: tuple[str, ...]
    caches: tuple[Cache, ...]


def plan(
    device: _C.Device,
    *,
    quick: bool = False,
    repeats: int | None = None,
    pairs: int | None = None,
    seconds: float | None = None,
    directions: list[str] | None = None,
) -> Plan:
    """Fill in the device's defaults; a host device has an eighth of the blocks."""
    least = 8 if device.kind == "cuda" and not quick else 64
    share = 1 if device.kind == "cuda" and not quick else 8
    caches = tuple(replace(cache, blocks=max(least, cache.blocks // share)) for cache in CACHES)
    return Plan(
        device,
        repeats or (1 if quick else 3),
        pairs if pairs is not None else 0 if quick or device.kind == "host" else 3,
        seconds or 0.5,
        tuple(directions or [direction.name for direction in Direction]),
        caches[:3] if quick else caches,
    )


class _Raw(NamedTuple):
    """kvswap's memory as a tensor of bytes."""

    ptr: int
    blocks: int
    stride: int
    page: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape, strides = (self.blocks, self.page), (self.stride, 1)
        return {"data": (self.ptr, False), "shape": shape, "strides": strides, "typestr": "|i1", "version": 3}


class _Place:
    """A cache in memory, one job over it, and the bytes that it has to move."""

    def __init__(self, device: _C.Device, cache: Cache, rng: np.random.Generator) -> None:
        self.device, self.cache = device, cache
        sizes = [len(part) for part in np.array_split(np.arange(cache.blocks), cache.groups)]
        needed = [-(-size // cache.factor) for size in sizes]
        self.gpu_slots, self.chunks = SPREAD * cache.blocks, SPREAD * sum(needed)
        gpu = rng.permutation(self.gpu_slots)[: cache.blocks].astype(np.int32)
        chunks = rng.permutation(self.chunks)[: sum(needed)].astype(np.int32)
        self.gpu_spec = GPULoadStoreSpec(gpu, sizes, [0] * cache.groups)
        self.cpu_spec = CPULoadStoreSpec(chunks)
        self.refs = [[CanonicalKVCacheRef(t, cache.page) for t in range(cache.tensors)] for _ in range(cache.groups)]
        tensor = self.gpu_slots * cache.page
        self.memory = [device.alloc(tensor * cache.tensors if cache.slab else tensor)]
        self.memory += [device.alloc(tensor) for _ in range(1, 1 if cache.slab else cache.tensors)]
        ptrs = [self.memory[0].ptr + t * tensor if cache.slab else self.memory[t].ptr for t in range(cache.tensors)]
        self.gpu = [_Raw(ptr, self.gpu_slots, cache.page, cache.page) for ptr in ptrs]
        chunk = cache.factor * cache.page
        self.host = device.alloc(self.chunks * chunk * cache.tensors, host=True)
        step, stride = (chunk, chunk * cache.tensors) if cache.region else (self.chunks * chunk, chunk)
        self.cpu = [_Raw(self.host.ptr + t * step, self.chunks, stride, chunk) for t in range(cache.tensors)]
        gpus, hosts = self.addresses()
        self._ends = gpus, hosts
        self._keys = rng.integers(1, 1 << 62, len(gpus)).astype(np.uint64)
        self._sizes = np.full(len(gpus), cache.page, np.uint64)
        self._round = 0

    def close(self) -> None:
        for memory in [*self.memory, self.host]:
            memory.free()

    def addresses(self) -> tuple[Words, Words]:
        """Addresses of every page on both sides, by NumPy, as vLLM computes them in each call."""
        cache, gpus, hosts = self.cache, [], []
        blocks: Ids = self.gpu_spec.block_ids.astype(np.uint64)
        ids, subs = self.cpu_spec.block_ids.astype(np.uint64), np.arange(cache.factor, dtype=np.uint64)
        at = chunk_at = 0
        for size in self.gpu_spec.group_sizes:
            count = -(-size // cache.factor)
            group = ids[chunk_at : chunk_at + count, None]
            for gpu, cpu in zip(self.gpu, self.cpu, strict=True):
                gpus.append(np.uint64(gpu.ptr) + blocks[at : at + size] * np.uint64(gpu.stride))
                pages = np.uint64(cpu.ptr) + group * np.uint64(cpu.stride) + subs * np.uint64(cache.page)
                hosts.append(pages.ravel()[:size])
            at += size
            chunk_at += count
        return np.concatenate(gpus), np.concatenate(hosts)

    def ends(self, direction: Direction) -> tuple[Words, Words]:
        return self._ends if direction == Direction.D2H else self._ends[::-1]

    def pattern(self, check: bool, direction: Direction, stream: _C.Stream) -> None:
        """Write new bytes to the source, or check every byte of the destination."""
        self._round += not check
        keys = self._keys + np.uint64(self._round)
        job = _C._pattern(self.device, check, self.ends(direction)[check], self._sizes, keys, stream)
        wrong, item, offset = job.result(WAIT_LIMIT)
        if check and wrong:
            tensor = (item or 0) * self.cache.tensors // len(keys)
            where = f"page {item} of the job, offset {offset}; {wrong} in all"
            raise WrongBytes(
                f"WRONG BYTES: {self.cache.key} {direction.name}: {where}",
                wrong_bytes=wrong,
                block=item or 0,
                layer=tensor,
                offset=offset or 0,
            )


class _Handled:
    """A handler's job as pending work."""

    def __init__(self, handler: SingleDirectionOffloadingHandler, job: OffloadJob) -> None:
        self._handler, self._job = handler, job

    @property
    def path(self) -> str:
        return self._job.transfers[0].path

    @property
    def elapsed(self) -> float | None:
        return self._job.seconds() if self._job.ended() else None

    def done(self) -> bool:
        return self._job.ended()

    def wait(self, timeout: float | None = None) -> None:
        self._handler.wait({self._job.job_id}, timeout)
        for result in self._handler.get_finished():
            if result.error is not None:
                raise result.error

    def make_wait(self, stream: _C.Stream, /) -> None:
        for transfer in self._job.transfers:
            transfer.make_wait(stream)


def _ours(place: _Place, direction: Direction, _: _C.Stream) -> Submit:
    store = direction == Direction.D2H
    handler = SingleDirectionOffloadingHandler(
        place.gpu, place.cpu, place.cache.factor, place.refs, store, device=place.device
    )
    pair = (place.gpu_spec, place.cpu_spec) if store else (place.cpu_spec, place.gpu_spec)
    numbers = itertools.count()

    def submit() -> Pending:
        handler.transfer_async(next(numbers), pair)
        return _Handled(handler, handler._transfers[-1])

    return submit


def _batch(place: _Place, direction: Direction, compute: _C.Stream) -> Submit:
    """NumPy's pointer arrays and one batch call."""
    by_hand = ByHand(place.device, compute)

    def queue(stream: int) -> None:
        gpu, host = place.addresses()
        src, dst = (gpu, host) if direction == Direction.D2H else (host, gpu)
        sizes = np.full(len(src), place.cache.page, np.uint64)
        _C._seam(place.device, "copy_batch", dst, src, sizes, stream)

    return lambda: by_hand.submit(queue)


@dataclass(frozen=True)
class _Pages:
    """What the Triton kernel's launcher needs of a place."""

    device: _C.Device
    shape: Any
    ends: Callable[[Direction], tuple[Words, Words]]


@dataclass(frozen=True)
class _PagesShape:
    copies: int
    block_nbytes: int


def _triton(place: _Place, direction: Direction, compute: _C.Stream) -> Submit:
    """Pointers by NumPy, and a kernel like vLLM's over them, which vLLM takes for loads of small pages."""
    if direction != Direction.H2D or place.cache.page >= _TRITON_BELOW:
        raise NotMeasured("vLLM takes its kernel for loads of pages below 28 KiB")
    shape = _PagesShape(len(place.ends(direction)[0]), place.cache.page)
    launch = with_torch.by_triton(_Pages(place.device, shape, place.ends), direction, compute)  # type: ignore[arg-type]

    def submit() -> Pending:
        place.addresses()
        return launch()

    return submit


METHODS: dict[str, Callable[[_Place, Direction, _C.Stream], Submit]] = {
    "kvswap": _ours,
    "vllm-batch": _batch,
    "vllm-triton": _triton,
}


class _HandlerJob(Job):
    """A method bound to a place, for Lab."""

    def __init__(self, lab: Lab, method: str, place: _Place, direction: Direction) -> None:
        self._lab_stream, self._place, self._way = lab.stream, place, direction
        self._submit = METHODS[method](place, direction, lab.stream)
        self.nbytes = place.cache.nbytes

    def fill(self) -> None:
        self._place.pattern(False, self._way, self._lab_stream)

    def submit(self) -> list[Pending]:
        return [self._submit()]

    def check(self) -> None:
        self._place.pattern(True, self._way, self._lab_stream)

    def path(self, pending: Any) -> str:
        return str(pending[0].path)


@dataclass(frozen=True)
class Row:
    """A method on a cache. slowdown: of the decode-shaped product beside the copies, which ran at beside_gbps."""

    cache: str
    direction: str
    method: str
    figures: Figures | None = None
    slowdown: float | None = None
    beside_gbps: float | None = None
    note: str = ""


@dataclass
class Result(Document):
    """All rows, and one bare copy of 256 MiB each way."""

    caches: list[dict[str, Any]] = field(default_factory=list)
    ceilings_gbps: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"what": "handlers", **asdict(self)}


def _beside(lab: Lab, load: Load, plan: Plan, job: Job) -> tuple[float, float]:
    alone, slow, reached = [_run_alone(lab.device, load, plan.seconds)], [], []
    with ThreadPoolExecutor(1) as thread:
        for _ in range(plan.pairs):
            _warm_up(lab.device, load)
            found = _run_both(lab, load, job, plan.seconds, thread)
            alone.append(_run_alone(lab.device, load, plan.seconds))
            slow.append(found.piece_seconds / statistics.mean(alone[-2:]))
            reached.append(found.gbps)
    return statistics.median(slow), statistics.median(reached)


def _row(lab: Lab, load: Load | None, plan: Plan, place: _Place, direction: str, method: str) -> Row:
    row = Row(place.cache.key, direction, method)
    try:
        with refusals(lab.device):
            job = _HandlerJob(lab, method, place, Direction[direction])
            row = replace(row, figures=lab.figures(job, plan.repeats, 10.0))
            if load is not None:
                slowdown, gbps = _beside(lab, load, plan, job)
                row = replace(row, slowdown=slowdown, beside_gbps=gbps)
            return row
    except NotMeasured as why:
        return replace(row, note=str(why))


def _rows(lab: Lab, load: Load | None, plan: Plan, cache: Cache) -> Iterator[Row]:
    place = _Place(plan.device, cache, np.random.default_rng(_SEED))
    try:
        for direction in plan.directions:
            for method in METHODS:
                if method != "vllm-triton" or (direction == "H2D" and cache.page < _TRITON_BELOW):
                    yield _row(lab, load, plan, place, direction, method)
    finally:
        plan.device.synchronize(WAIT_LIMIT)
        place.close()


def run(plan: Plan, show: Callable[[str], None]) -> Result:
    """Measure all caches, showing each row as it ends. Raises WrongBytes for one wrong byte."""
    result = Result(**document(plan.device), caches=[asdict(cache) for cache in plan.caches])
    with opened(plan.device, _SEED) as lab:
        load = None
        try:
            load = load_for(plan.device, "decode") if plan.pairs else None
        except NotMeasured as why:
            raise UsageError(f"--pairs cannot run here: {why}") from None
        result.ceilings_gbps = lab.ceilings(256 << 20 if plan.device.kind == "cuda" else 16 << 20, plan.repeats)
        show(f"{result.title()}: vLLM's job queue, kvswap's and vLLM's ways")
        show("one bare copy, GB/s: " + ", ".join(f"{way} {gbps:.1f}" for way, gbps in result.ceilings_gbps.items()))
        if load is not None:
            show(f"slow-down of {load.name}, median of {plan.pairs} windows of {plan.seconds:g} s, at GB/s meanwhile")
        lines = Rows(_ROW, show)
        for cache in plan.caches:
            rows = []
            for row in _rows(lab, load, plan, cache):
                rows.append(row)
                _add(lines, cache, row)
            result.rows += rows
            for line in _gains(rows):
                show(line)
        result.bytes_verified = lab.bytes_verified
    show(f"{format_size(result.bytes_verified)} verified, 0 wrong bytes")
    return result


_ROW = Table(
    ("cache", "<17"),
    ("a job", "<20"),
    ("dir", "<4"),
    ("method", "<12"),
    ("GB/s", ">6.1f"),
    ("device", ">6.1f"),
    ("blocked ms", ">10.3f"),
    ("cpu ms", ">8.2f"),
    ("path", "<8"),
    ("slow-down", ">9.3f"),
    ("at", ">6.1f"),
    lead=3,
)


def _add(rows: Rows, cache: Cache, row: Row) -> None:
    cells: list[Cell] = [cache.key, cache.shape, row.direction, row.method]
    if row.figures is None:
        rows.add(cells, row.note)
        return
    figures = row.figures
    cells += [figures.gbps, figures.device_gbps, figures.blocked_ms, figures.cpu_ms, figures.path or "-"]
    rows.add([*cells, row.slowdown, row.beside_gbps])


def _gains(rows: list[Row]) -> Iterator[str]:
    """kvswap's GB/s over the faster of vLLM's ways, and whether that is a gain."""
    for direction in sorted({row.direction for row in rows}):
        reached = {row.method: row.figures.gbps for row in rows if row.direction == direction and row.figures}
        ours, theirs = reached.pop("kvswap", None), max(reached.values(), default=None)
        if ours is None or theirs is None:
            continue
        what = f"{ours / theirs:.2f} x vLLM's best"
        yield f"    {direction}: {what}{'' if ours / theirs >= _GAIN else ': NO GAIN'}"
