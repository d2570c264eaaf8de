"""Times one method on one shape.

Every repeat copies twice, with new bytes each time. Every byte is checked before a time counts. The first copy runs on
an idle device, which gives the time from the call until the bytes are there and the time in the call. The second copy
is queued behind a kernel that only lasts longer than the call, so that all work is queued before the first byte moves.
This gives the device's own time, and the CPU time of the process for submitting and waiting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvswap import _C, Direction
from kvswap.replay.check import WrongBytes

from .methods import METHODS, Method, NotMeasured, Pending, Submit
from .shapes import WAIT_LIMIT, Place, Shape, host_nbytes

BOTH = "both"
_LONGEST_SPIN = 0.05  # seconds; a driver's queue is full before that
_CEILINGS = (("D2H",), ("H2D",), ("D2H", "H2D"))


@dataclass(frozen=True)
class Figures:
    """What a method reached, medians over the repeats."""

    gbps: float  # from the call until the bytes are there, the device being idle before
    device_gbps: float | None  # in the device's own time; None where that is not known
    blocked_ms: float  # in the call, on an idle device
    cpu_ms: float  # of all threads of the process, from the call until the end is known
    path: str  # taken by kvswap
    repeats: int
    queued: bool  # before the first byte moved; else the device's time includes some of the caller's


class Job:
    """A method bound to its places: one transfer, or one each way at once."""

    def __init__(self, lab: Lab, method: Method, places: Sequence[Place], directions: Sequence[Direction]) -> None:
        self._stream, self._what = lab.stream, method.key
        self._parts = list(zip(places, directions, strict=True))
        self._path = method.path
        self._submits: list[Submit] = [method.bind(place, way, lab.stream) for place, way in self._parts]
        self.nbytes = sum(place.shape.nbytes for place in places)

    def fill(self) -> None:
        for place, direction in self._parts:
            place.fill(direction, self._stream)

    def submit(self) -> list[Pending]:
        return [submit() for submit in self._submits]

    def check(self) -> None:
        for place, direction in self._parts:
            place.check(direction, self._stream, f"{self._what} {direction.name} {place.shape}")

    def path(self, pending: Sequence[Pending]) -> str:
        """The path taken. NotMeasured if kvswap took another path than the one asked for."""
        for one in pending:
            if self._path and one.path != self._path:
                raise NotMeasured(f"path {one.path} was taken")
        return pending[0].path


class Lab:
    """A device, the stream after which work starts, and host memory, which shapes use one after another."""

    def __init__(self, device: _C.Device, seed: int) -> None:
        self.device, self.stream = device, _C.Stream(device)
        self.bytes_verified = 0
        self._rng = np.random.default_rng(seed)
        self._shapes: tuple[Shape, ...] = ()
        self._places: list[Place] = []
        self._host: _C.Memory | None = None
        device.set_compute_stream(self.stream)

    def close(self) -> None:
        self.device.synchronize(WAIT_LIMIT)
        self.device.set_compute_stream(0)
        self._leave()
        if self._host is not None:
            self._host.free()

    def _leave(self) -> None:
        for place in self._places:
            place.close()
        self._places, self._shapes = [], ()

    def reserve(self, nbytes: int) -> int:
        """The address of at least nbytes of host memory. If the memory must grow, the places in it are dropped."""
        if self._host is None or self._host.nbytes < nbytes:
            self._leave()
            if self._host is not None:
                self._host.free()
            self._host = None  # before the next allocation, which may fail
            self._host = self.device.alloc(nbytes, host=True)
        return self._host.ptr

    def places(self, shapes: tuple[Shape, ...]) -> list[Place]:
        """The shapes in memory. The same shapes as in the last call are kept as they are."""
        if shapes != self._shapes:
            at = self.reserve(host_nbytes(shapes))
            self._leave()
            for shape in shapes:
                self._places.append(Place(self.device, shape, at, self._rng))
                at += host_nbytes([shape])
            self._shapes = shapes
        return self._places

    def job(self, method: Method, shapes: tuple[Shape, ...], direction: str) -> Job:
        ways = list(Direction) if direction == BOTH else [Direction[direction]]
        return Job(self, method, self.places(shapes), ways)

    # -- one copy of a job, verified ----------------------------------------------------------------------------------

    def warm_up(self, job: Job) -> tuple[float, str]:
        """One verified copy, which makes all that is made once. Returns seconds in the call, and the path taken."""
        job.fill()
        begin = time.perf_counter()
        pending = job.submit()
        called = time.perf_counter() - begin
        self._wait(pending)
        path = job.path(pending)
        self.check(job)
        return called, path

    def idle(self, job: Job) -> tuple[float, float]:
        """Seconds from the call until the bytes are there, and in the call, on an idle device."""
        job.fill()
        begin = time.perf_counter()
        pending = job.submit()
        called = time.perf_counter()
        for one in pending:
            while not one.done():
                pass
        end = time.perf_counter()
        self._wait(pending)
        self.check(job)
        return end - begin, called - begin

    def behind_spin(self, job: Job, called: float) -> tuple[float | None, float, bool]:
        """Seconds on the device, CPU seconds of the process, and whether the call was over before the spin was.

        called: how long the call is expected to take.
        """
        job.fill()
        spin = min(1.5 * called + 0.0005, _LONGEST_SPIN)
        begin, cpu = time.perf_counter(), time.process_time()
        _C._delay(self.device, spin, self.stream)
        pending = job.submit()
        queued = time.perf_counter() - begin < spin
        self._wait(pending)
        cpu = time.process_time() - cpu
        elapsed = [one.elapsed for one in pending]
        self.check(job)
        # Of two at once the longer counts, if they began together.
        known = all(elapsed) and (queued or len(elapsed) == 1)
        return (max(seconds or 0.0 for seconds in elapsed) if known else None), cpu, queued

    def _wait(self, pending: Sequence[Pending]) -> None:
        for one in pending:
            one.wait(WAIT_LIMIT)

    def check(self, job: Job) -> None:
        """Check every byte that the job's last copy wrote; raises WrongBytes."""
        job.check()
        self.bytes_verified += job.nbytes

    # -- medians ------------------------------------------------------------------------------------------------------

    def figures(self, job: Job, repeats: int, seconds: float) -> Figures:
        """Medians over the repeats. No repeat but the first begins after so many seconds."""
        called, path = self.warm_up(job)
        begin = time.perf_counter()
        walls: list[tuple[float, float]] = []
        spins: list[tuple[float | None, float, bool]] = []
        while len(walls) < repeats and not (walls and time.perf_counter() - begin > seconds):
            walls.append(self.idle(job))
            spins.append(self.behind_spin(job, min(called, walls[-1][1])))
        on_device = [seconds for seconds, _, _ in spins if seconds]
        return Figures(
            gbps=job.nbytes / statistics.median(wall for wall, _ in walls) / 1e9,
            device_gbps=job.nbytes / statistics.median(on_device) / 1e9 if len(on_device) == len(spins) else None,
            blocked_ms=statistics.median(blocked for _, blocked in walls) * 1e3,
            cpu_ms=statistics.median(cpu for _, cpu, _ in spins) * 1e3,
            path=path,
            repeats=len(walls),
            queued=all(queued for _, _, queued in spins),
        )

    def ceilings(self, nbytes: int, repeats: int) -> dict[str, float]:
        """GB/s of one bare copy of nbytes: in each direction, and in both at once with half of the bytes each."""
        found = self.bare_copies(nbytes, repeats)
        return {direction: figures.device_gbps or figures.gbps for direction, figures in found.items()}

    def bare_copies(self, nbytes: int, repeats: int) -> dict[str, Figures]:
        """All figures of these bare copies."""
        found = {}
        for ways in _CEILINGS:
            direction = ways[0] if len(ways) == 1 else BOTH
            shapes = (Shape(1, max(1, nbytes // len(ways))),) * len(ways)
            found[direction] = self.figures(self.job(METHODS["loop"], shapes, direction), repeats, WAIT_LIMIT)
        return found


@contextmanager
def opened(device: _C.Device, seed: int) -> Iterator[Lab]:
    lab = Lab(device, seed)
    try:
        yield lab
    finally:
        lab.close()


@contextmanager
def refusals(device: _C.Device) -> Iterator[None]:
    """A refusal becomes NotMeasured. WrongBytes and the errors of a lost device are raised as they are."""
    try:
        yield
    except WrongBytes:
        raise
    except (ValueError, RuntimeError, _C.Error) as error:  # RuntimeError: torch's
        if device.lost:
            raise
        raise NotMeasured(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
