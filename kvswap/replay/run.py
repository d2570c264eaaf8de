"""Moves the blocks of a trace between the tiers while a compute stream produces and uses them.

A request, once its blocks are admitted (tiers.py):

    compute:  poison GPU slots given up | write computed blocks |                    | check leading blocks
    load:                          ... load host hits into their slots ..............^
    scrub:    check and poison host slots given up ..v
    store:                                   ... store computed blocks to the host tier

Loads and stores run on kvswap's own lanes and start after the work that the compute stream holds at submission. The
other orders are made here, on the device; the host waits for the oldest request only:
- a GPU slot is poisoned or written again after the store that reads it (compute waits for that store);
- a load starts after the store that fills its host slot (after=);
- a host slot is checked and poisoned after the loads that read it and the store that filled it (scrub waits for them),
  and filled again after that (after=scrub);
- blocks are checked after their load (compute waits for it);
- with a third tier, the host waits for a block's store there before its host slot is poisoned, and for its load from
  there before the compute stream checks it.
An order that the rules of admission already imply is made as well.
A GPU slot is given up only when the requests that use it have ended. A lane is first in, first out, so the last store
or load of a slot stands for all of them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap.files import FileTransfer

from . import pattern
from .check import Blocks, Check, Checker, WrongBytes
from .file_tier import FileTier
from .memory import GroupMemory, TierMemory
from .report import Moves, Report
from .settings import Settings, host_nbytes
from .tiers import Admission, Slots, Tiers
from .trace import Trace

_log = logging.getLogger("kvswap.replay")
_D2H, _H2D = 0, 1
_MAX_STORES = 64  # moves that may be unfinished: bounds memory, and stays far below a lane's depth
_LEGACY_STREAM = 0
_NONE = np.zeros(0, np.int64)

OnProgress = Callable[[Report, int], None]
OnMemory = Callable[[int, int], object]


@dataclass(frozen=True)
class _Move:
    """The transfers of one request in one direction, one a group."""

    number: int
    transfers: list[_C.Transfer]
    misfits: NDArray[np.int64]  # positions that are not stored, since the codec cannot hold the blocks

    def done(self) -> bool:
        return all(transfer.done() for transfer in self.transfers)


@dataclass(frozen=True)
class _Flight:
    """A request under way, and the work that must end before the request ends."""

    admission: Admission
    check: Check | None
    load: _Move | None
    jobs: list[_C._PatternJob]  # poisons and writes on the compute stream


@dataclass(frozen=True)
class _Scrub:
    """Host slots that blocks leave: checked, then poisoned."""

    checks: list[Check]
    loads: list[_C.Transfer]  # of coded blocks, which are checked on the GPU
    poison: _C._PatternJob


class _Lane:
    """Moves of one direction that may still run, oldest first."""

    def __init__(self, moves: Moves, ended: Callable[[_Move], None], wait_limit: float) -> None:
        self._unfinished: deque[_Move] = deque()
        self._moves = moves
        self._ended = ended
        self._wait_limit = wait_limit

    def __len__(self) -> int:
        return len(self._unfinished)

    def add(self, move: _Move) -> None:
        self._unfinished.append(move)

    def collect(self) -> None:
        """Count what has ended."""
        while self._unfinished and self._unfinished[0].done():
            self.wait_oldest()

    def wait_oldest(self) -> None:
        """Wait for the oldest move and count it; raises its error if it failed."""
        move = self._unfinished[0]
        for transfer in move.transfers:
            _wait(transfer, move.misfits, self._wait_limit)
        self._unfinished.popleft()
        for transfer in move.transfers:
            self._moves.add(transfer.nbytes, transfer.elapsed)
        self._ended(move)

    def wait_through(self, move: _Move) -> None:
        while self._unfinished and self._unfinished[0].number <= move.number:
            self.wait_oldest()

    def wait_all(self) -> None:
        while self._unfinished:
            self.wait_oldest()


def _wait(transfer: _C.Transfer, misfits: NDArray[np.int64], limit: float) -> None:
    """Raises the transfer's error, unless it is that exactly the misfits were not stored."""
    try:
        transfer.wait(limit)
    except _C.Error:
        if not len(misfits) or not np.array_equal(np.sort(transfer.failed_positions), misfits):
            raise
    else:
        if len(misfits):
            raise _C.Error(f"{len(misfits)} blocks do not fit their coded size, and a store of them did not fail")


class Replay:
    """One replay. run() once; `report` holds what happened, whole or partial, even if run() raised."""

    def __init__(self, trace: Trace, settings: Settings, device: _C.Device) -> None:
        self._trace = trace
        self._settings = settings
        self._device = device
        self._kind: pattern.Kind = "bytes" if settings.codec is None else "window" if settings.lossless else "coarse"
        sizes = settings.sizes
        self._tiers = Tiers(sizes.gpu_blocks, sizes.host_blocks, sizes.file_blocks, self._misfits)
        self._files: FileTier | None = None  # the third tier
        self.report = _new_report(trace, settings, device)
        self._moves: dict[int, _Move] = {}  # unfinished, by number
        self._next_move = 0
        self._loads = _Lane(self.report.loads, self._forget, settings.wait_limit)
        self._stores = _Lane(self.report.stores, self._forget, settings.wait_limit)
        self._flights: deque[_Flight] = deque()
        self._scrubs: deque[_Scrub] = deque()
        # Number of the last move that reads or fills each slot. A move that has ended is no longer in _moves.
        self._gpu_read_by = np.full(settings.sizes.gpu_blocks, -1, np.int64)
        self._host_read_by = np.full(settings.sizes.host_blocks, -1, np.int64)
        self._host_filled_by = np.full(settings.sizes.host_blocks, -1, np.int64)

    def run(self, on_progress: OnProgress | None = None, on_memory: OnMemory | None = None) -> Report:
        """Replay the trace. Raises WrongBytes for a wrong byte, kvswap.Error or TimeoutError if the device fails."""
        self._progress = on_progress or (lambda report, total: None)
        self._compute = _C.Stream(self._device)
        self._scrub = _C.Stream(self._device, priority="background")
        settings = self._settings
        self._memory = TierMemory(
            self._device, settings.geometry, settings.sizes, settings.seed, settings.codec,
            settings.file_tier is not None, on_memory,
        )  # fmt: skip
        self._checker = Checker(self._device, self._memory, settings.seed, self._kind)
        self._start = time.monotonic()
        try:
            self._open_third()
            self._device.set_compute_stream(self._compute)
            self._poison_all()
            self._start = time.monotonic()
            self._all_requests()
            self._final_sweep()
            if self.report.ended == "running":
                self.report.ended = "complete"
        except KeyboardInterrupt:
            self.report.ended = "interrupted"
        except WrongBytes as error:
            self._note_end("wrong bytes", error)
            self.report.wrong_bytes += error.wrong_bytes
            raise
        except (_C.Error, TimeoutError) as error:
            self._note_end("failed", error)
            raise
        finally:
            self.report.seconds = time.monotonic() - self._start
            self._close()
        return self.report

    def _misfits(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        return pattern.misfits(hashes, self._settings.seed, self._kind)

    def _open_third(self) -> None:
        settings = self._settings
        if settings.file_tier is not None:
            self._files = FileTier(self._device, self._memory, settings)
        if self._files is not None:
            self.report.file_tier = self._files.describe()

    def _poison_all(self) -> None:
        """Fresh memory may hold an earlier run's bytes, which would hide a skipped copy."""
        for tier, count in (("gpu", self._tiers.gpu.num_blocks), ("host", self._tiers.host.num_blocks)):
            for part in self._checker.parts(Blocks(tier, np.zeros(count, np.uint64), np.arange(count))):
                self._checker.poison(tier, part.slots, self._compute).result(self._settings.wait_limit)

    def _note_end(self, ended: str, error: Exception) -> None:
        self.report.ended = ended
        self.report.error = str(error)

    def _all_requests(self) -> None:
        limit = self._settings.seconds
        for number in range(len(self._trace)):
            if limit is not None and time.monotonic() - self._start > limit:
                self.report.ended = "seconds"
                break
            self._admit(number)
            self._progress(self.report, len(self._trace))
        while self._flights:
            self._retire()
        self._stores.wait_all()
        while self._scrubs:
            self._end_scrub()

    def _admit(self, number: int) -> None:
        """Queue all of a request; waits only for the requests that must end first."""
        self._collect()
        admission = self._tiers.admit(self._trace.blocks(number))
        while self._flights and (
            len(self._flights) >= self._settings.in_flight
            or self._flights[0].admission.request <= admission.gpu_given_up.last_user
        ):
            self._retire()
        jobs: list[_C._PatternJob] = []
        self._poison_gpu(admission, jobs)
        load = self._load(admission)
        from_files = self._load_from_files(admission)
        self._compute_misses(admission, jobs)
        self._store(admission)
        self._end_files(from_files, self.report.file_loads)
        check = self._use(admission, load)
        self._flights.append(_Flight(admission, check, load, jobs))

    def _poison_gpu(self, admission: Admission, jobs: list[_C._PatternJob]) -> None:
        slots = admission.gpu_given_up.slots
        if len(slots):
            self._stream_waits(self._compute, self._unfinished(self._gpu_read_by, slots))
            jobs.append(self._checker.poison("gpu", slots, self._compute))
            self.report.poisoned["gpu"] += len(slots)

    def _load(self, admission: Admission) -> _Move | None:
        if not len(admission.loads):
            return None
        after = self._after(self._host_filled_by, admission.load_from)
        move = self._submit(_H2D, admission.slots[admission.loads], admission.load_from, after)
        self._host_read_by[admission.load_from] = move.number
        return move

    def _compute_misses(self, admission: Admission, jobs: list[_C._PatternJob]) -> None:
        """As prefill does: write the blocks that are in no tier."""
        if not admission.misses:
            return
        slots = admission.slots[admission.leading :]
        self._stream_waits(self._compute, self._unfinished(self._gpu_read_by, slots))
        blocks = Blocks("gpu", admission.hashes[admission.leading :], slots)
        jobs.append(self._checker.write(blocks, self._compute))

    def _store(self, admission: Admission) -> None:
        """Write computed blocks through to the host tier."""
        self.report.not_stored += self._unstored(admission)
        if not len(admission.stores):
            return
        after: list[_C.Stream] = []
        if len(admission.host_given_up.slots):
            self._give_up_host(admission)
            after.append(self._scrub)
        while len(self._stores) >= _MAX_STORES:
            self._stores.wait_oldest()
        slots = admission.slots[admission.stores]
        misfits = self._misfits(admission.hashes[admission.stores])
        self.report.offered += len(slots)
        self.report.misfits += len(misfits)
        move = self._submit(_D2H, slots, admission.store_to, after, misfits)
        self._gpu_read_by[slots] = move.number
        self._host_filled_by[admission.store_to] = move.number

    def _unstored(self, admission: Admission) -> int:
        """How many computed blocks the host tier has no room for; 0 without a host tier."""
        if not self._settings.sizes.host_blocks:
            return 0
        computed = admission.hashes[admission.leading :]
        misfits = set(computed[self._misfits(computed)].tolist())
        return sum(block not in self._tiers.host and block not in misfits for block in computed.tolist())

    def _give_up_host(self, admission: Admission) -> None:
        """Check the blocks in place, then poison their slots. So stores are checked that no load follows."""
        slots = admission.host_given_up.slots
        self._store_to_files(admission)
        self._stream_waits(self._scrub, self._unfinished(self._host_read_by, slots))
        self._stream_waits(self._scrub, self._unfinished(self._host_filled_by, slots))
        blocks = Blocks("host", admission.host_given_up.hashes, slots)
        what = f"request {admission.request}, which took the slot over"
        loads: list[_C.Transfer] = []
        checks = [self._check(part, self._scrub, what, loads) for part in self._parts(blocks)]
        self._scrubs.append(_Scrub(checks, loads, self._checker.poison("host", slots, self._scrub)))
        self.report.poisoned["host"] += len(slots)

    def _parts(self, blocks: Blocks) -> list[Blocks]:
        """What can be checked at once: coded blocks are decoded into scratch slots."""
        step = self._memory.scratch
        if blocks.tier == "gpu" or not step:
            return self._checker.parts(blocks)
        return [blocks.part(start, start + step) for start in range(0, len(blocks.slots), step)]

    def _check(self, blocks: Blocks, stream: _C.Stream, what: str, loads: list[_C.Transfer]) -> Check:
        """Check blocks in place, or where they are coded in scratch slots of the GPU: behind `loads`."""
        if blocks.tier == "gpu" or not self._memory.scratch:
            return self._checker.check(blocks, stream, what)
        scratch = self._settings.sizes.gpu_blocks + np.arange(len(blocks.slots))
        for memory in self._memory.groups:
            loads.append(self._swap(memory, _H2D, scratch, blocks.slots, [stream], self._loads))
            loads[-1].make_wait(stream)
        return self._checker.check(
            Blocks("gpu", blocks.hashes, scratch), stream, f"{what}, decoded from host slots {blocks.slots.tolist()}"
        )

    def _load_from_files(self, admission: Admission) -> Sequence[FileTransfer]:
        """The loads start after the compute stream, which poisons the slots."""
        if self._files is None or not len(admission.file_loads):
            return []
        slots = admission.slots[admission.file_loads]
        reading = self._after(self._gpu_read_by, slots)
        return self._files.load(admission.hashes[admission.file_loads], slots, reading)

    def _store_to_files(self, admission: Admission) -> None:
        """Store the blocks that leave the host tier. The host waits, since their slots are poisoned next."""
        if self._files is None:
            return
        given_up = admission.host_given_up
        if len(admission.file_given_up):
            for transfer in self._files.drop(admission.file_given_up):
                transfer.wait(self._settings.wait_limit)
        if len(admission.file_stores):
            slots = given_up.slots[admission.file_stores]
            filling = self._after(self._host_filled_by, slots)
            stores = self._files.store(given_up.hashes[admission.file_stores], slots, filling)
            self._end_files(stores, self.report.file_stores)

    def _end_files(self, transfers: Sequence[FileTransfer], moves: Moves) -> None:
        """Wait for file transfers; raises the error of a failed one."""
        for transfer in transfers:
            transfer.wait(self._settings.wait_limit)
            moves.add(transfer.nbytes, transfer.elapsed)

    def _use(self, admission: Admission, load: _Move | None) -> Check | None:
        """As decode does: read the blocks that were hits."""
        if load is not None:
            self._stream_waits(self._compute, [load])
        if not admission.leading:
            return None
        blocks = Blocks("gpu", admission.hashes[: admission.leading], admission.slots[: admission.leading])
        return self._checker.check(blocks, self._compute, f"request {admission.request} where it used them")

    def _retire(self) -> None:
        """Wait for the oldest request to end, and count it."""
        flight = self._flights[0]
        limit = self._settings.wait_limit
        if flight.load is not None:
            self._loads.wait_through(flight.load)  # first: a failed load explains wrong bytes
        if flight.check is not None:
            self._end_check(flight.check, flight.admission)
        for job in flight.jobs:
            job.result(limit)
        self._flights.popleft()
        self._count(flight.admission)

    def _end_check(self, check: Check, admission: Admission) -> None:
        """Raises WrongBytes with the tier that the block came from."""
        try:
            self._checker.result(check, self._settings.wait_limit)
        except WrongBytes as error:
            position = int(np.flatnonzero(admission.hashes == error.block)[0])
            loaded = np.flatnonzero(admission.loads == position)
            from_file = position in admission.file_loads
            way = "it was in the GPU tier already"
            if len(loaded):
                way = f"it was loaded from host slot {int(admission.load_from[loaded[0]])}"
            elif from_file:
                way = "it was loaded from the file tier"
            raise error.told(way) from None

    def _count(self, admission: Admission) -> None:
        report = self.report
        report.requests += 1
        report.gpu_hits += admission.gpu_hits
        report.host_hits += admission.host_hits
        report.file_hits += admission.file_hits
        report.misses += admission.misses
        report.verified_where_used += admission.leading
        report.truncated_requests += admission.cut > 0
        report.truncated_blocks += admission.cut
        tokens = int(self._trace.input_tokens[admission.request])
        report.tokens_total += tokens
        report.tokens_saved += min(tokens, admission.leading * self._settings.geometry.block_tokens)
        at = time.monotonic() - self._start
        report.history.append((at, admission.gpu_hits, admission.host_hits, admission.file_hits, admission.misses))

    def _final_sweep(self) -> None:
        """Check every block that any tier holds, in place."""
        for tier, table in (("gpu", self._tiers.gpu), ("host", self._tiers.host)):
            blocks = Blocks(tier, *table.residents())
            for part in self._parts(blocks):
                loads: list[_C.Transfer] = []
                check = self._check(part, self._compute, f"the final sweep of the {tier} tier", loads)
                for load in loads:  # first: a failed load explains wrong bytes
                    load.wait(self._settings.wait_limit)
                self._checker.result(check, self._settings.wait_limit)
                self.report.verified_at_end[tier] += len(part.slots)
                self._progress(self.report, len(self._trace))
        self._sweep_files()

    def _sweep_files(self) -> None:
        """Load every block of the file tier once more, into slots of the GPU tier, and check it there."""
        hashes, _ = self._tiers.file.residents()
        step = min(256, self._tiers.gpu.num_blocks)
        for begin in range(0, len(hashes) if self._files is not None else 0, step):
            some = hashes[begin : begin + step]
            slots = np.arange(len(some))
            self._checker.poison("gpu", slots, self._compute).result(self._settings.wait_limit)
            assert self._files is not None
            self._end_files(self._files.load(some, slots, ()), self.report.file_loads)
            check = self._checker.check(Blocks("gpu", some, slots), self._compute, "the final sweep of the file tier")
            self._checker.result(check, self._settings.wait_limit)
            self.report.verified_in_files += len(some)
            self._progress(self.report, len(self._trace))

    def _submit(
        self,
        direction: int,
        slots: Slots,
        host_slots: Slots,
        after: Sequence[_C.Transfer | _C.Stream],
        misfits: NDArray[np.int64] = _NONE,
    ) -> _Move:
        lane = self._loads if direction == _H2D else self._stores
        transfers = [self._swap(memory, direction, slots, host_slots, after, lane) for memory in self._memory.groups]
        move = _Move(self._next_move, transfers, misfits)
        self._next_move += 1
        self._moves[move.number] = move
        lane.add(move)
        return move

    def _swap(
        self,
        memory: GroupMemory,
        direction: int,
        slots: Slots,
        host_slots: Slots,
        after: Sequence[_C.Transfer | _C.Stream],
        lane: _Lane,
    ) -> _C.Transfer:
        """All layers of a group in one call. On a full lane, wait for the oldest transfer first."""
        while True:
            try:
                if memory.coding is not None:
                    pools = memory.gpu_pools, memory.host_pools
                    ids = memory.gpu_ids[slots], memory.host_ids[host_slots]
                    source, target = (1, 0) if direction == _H2D else (0, 1)
                    return _C.move_blocks(
                        pools[source], pools[target], ids[source], ids[target], after=after, path=self._settings.path
                    )
                return _C.swap_cache_all_layers_async(
                    memory.gpu_ptrs,
                    memory.host_ptrs,
                    memory.group.layer_nbytes,
                    self._settings.sizes.gpu_blocks,
                    self._settings.sizes.host_blocks,
                    memory.gpu_ids[slots],
                    memory.host_ids[host_slots],
                    direction,
                    cpu_stride=memory.group.block_nbytes,
                    after=after,
                    device=self._device,
                    path=self._settings.path,
                )
            except _C.QueueFull:
                if not len(lane):
                    raise
                lane.wait_oldest()

    def _after(self, table: NDArray[np.int64], slots: Slots) -> list[_C.Transfer]:
        """What work on these slots starts after. Moves with misfits are waited for: nothing starts after a failure."""
        moves = self._unfinished(table, slots)
        for move in moves:
            if len(move.misfits):
                self._stores.wait_through(move)
        return [transfer for move in moves if not len(move.misfits) for transfer in move.transfers]

    def _unfinished(self, table: NDArray[np.int64], slots: Slots) -> list[_Move]:
        """The moves that use these slots and are not known to have ended."""
        return [self._moves[number] for number in np.unique(table[slots]).tolist() if number in self._moves]

    def _stream_waits(self, stream: _C.Stream, moves: Sequence[_Move]) -> None:
        for move in moves:
            for transfer in move.transfers:
                try:
                    transfer.make_wait(stream)
                except _C.Error:
                    if not len(move.misfits):  # otherwise it has ended, and wait_oldest() says how
                        raise

    def _collect(self) -> None:
        self._loads.collect()
        self._stores.collect()
        while self._scrubs and self._scrubs[0].poison.done():
            self._end_scrub()

    def _end_scrub(self) -> None:
        scrub = self._scrubs.popleft()
        limit = self._settings.wait_limit
        for load in scrub.loads:
            load.wait(limit)
        for check in scrub.checks:
            self._checker.result(check, limit)
            self.report.verified_given_up += len(check.blocks.slots)
        scrub.poison.result(limit)

    def _forget(self, move: _Move) -> None:
        del self._moves[move.number]

    def _close(self) -> None:
        """Wait for queued work, then free memory. If the wait fails, work may still write to it: nothing is freed."""
        try:
            self._device.synchronize(self._settings.wait_limit)
            self._device.set_compute_stream(_LEGACY_STREAM)
            self._flights.clear()
            self._scrubs.clear()
            if self._files is not None:
                self._files.close()
            self._memory.close()
        except (_C.Error, TimeoutError) as error:
            _log.warning("memory of the replay is not freed before exit: %s", error)


def _new_report(trace: Trace, settings: Settings, device: _C.Device) -> Report:
    return Report(
        trace=trace.name,
        device=device.name,
        device_name=str(device.info.get("name") or device.name),
        geometry=settings.geometry.name,
        bytes_per_block=settings.geometry.block_nbytes,
        full_bytes_per_block=settings.geometry.full_nbytes,
        gpu_blocks=settings.sizes.gpu_blocks,
        host_blocks=settings.sizes.host_blocks,
        file_blocks=settings.sizes.file_blocks,
        in_flight=settings.in_flight,
        seed=settings.seed,
        path=settings.path,
        codec=settings.codec or "",
        coded_bytes_per_block=host_nbytes(settings.geometry, settings.codec),
        trace_requests=len(trace),
    )
