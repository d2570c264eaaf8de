"""A scattered transfer by two paths at once, beside a decode step: does it pay?

The copy engine moves a share of the blocks, and a kernel of one or two CTAs the rest, paced or not, on two lanes; the
transfer ends with the later one. Beside it: all blocks by what auto takes at `normal`, by the copy engine alone and by
the kernel alone, and one bare copy of as many bytes, in turns. The host's side is scattered block by block. Shown: the
step's slow-down, GB/s of the copies beside it, how long a call holds its caller and how long it takes until its bytes
are there, without the step. Every byte of a window's last transfer is checked. Needs a GPU and torch; on a host device
it shows that it runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import kvswap
from kvswap import _C, Direction
from kvswap.bench import beside
from kvswap.bench.loads import Load, load_for
from kvswap.bench.measure import Job, Lab, opened
from kvswap.bench.methods import METHODS, Method, Submit
from kvswap.bench.shapes import Place, Shape
from kvswap.bench.table import layouts

if TYPE_CHECKING:
    from kvswap.typing import Path

LAYOUTS = ("64x32k-layers", "80x16k-slab-layers", "1x64k")
SIZES_MIB = (256, 32)  # of a transfer
SHARES = (0.6, 0.7, 0.8)
KERNELS = ((1, None), (1, 16.0), (1, 10.0), (2, None))  # CTAs, and GB/s at most


@dataclass(frozen=True)
class Both:
    """Transfers that end as one."""

    parts: Sequence[_C.Transfer]

    @property
    def path(self) -> str:
        return "+".join(part.path for part in self.parts)

    @property
    def elapsed(self) -> float | None:
        known = [part.elapsed for part in self.parts]
        return None if None in known else max(seconds or 0.0 for seconds in known)

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def wait(self, timeout: float | None = None) -> None:
        for part in self.parts:
            part.wait(timeout)

    def make_wait(self, stream: _C.Stream, /) -> None:
        for part in self.parts:
            part.make_wait(stream)


@dataclass(frozen=True)
class Part:
    """What one path moves. ctas, pace_gbps: of a kernel."""

    path: Path
    share: float  # of the blocks
    ctas: int | None = None
    pace_gbps: float | None = None


def by_parts(key: str, *parts: Part) -> Method:
    """Each part has a stream of its own, so that none waits for another one."""

    def bind(place: Place, direction: Direction, _: _C.Stream) -> Submit:
        streams = [_C.Stream(place.device) for _ in parts]

        def submit_part(number: int) -> _C.Transfer:
            part, before = parts[number], sum(part.share for part in parts[:number])
            first, last = (round(place.shape.blocks * at) for at in (before, before + part.share))
            return _C.swap_cache_all_layers_async(
                place.gpu_ptrs,
                place.host_ptrs,
                place.shape.block_nbytes,
                place.gpu_slots,
                place.host_slots,
                place.gpu_ids[first:last],
                place.host_ids[first:last],
                direction,
                cpu_stride=place.host_stride,
                device=place.device,
                path=part.path,
                max_ctas=part.ctas,
                pace_gbps=part.pace_gbps,
                stream=streams[number],
            )

        return lambda: Both([submit_part(number) for number in range(len(parts))])

    return Method(key, "", bind)


def name_of(ctas: int, pace_gbps: float | None) -> str:
    return f"{ctas} CTA" + ("s" if ctas > 1 else "") + (f" at {pace_gbps:g}" if pace_gbps else "")


def methods_of() -> dict[str, Method]:
    alone = [by_parts(f"kernel, {name_of(ctas, None)}", Part("kernel", 1.0, ctas)) for ctas in (1, 2)]
    shared = [
        by_parts(f"dma {share:.0%}, kernel {name_of(*kernel)}", Part("dma", share), Part("kernel", 1 - share, *kernel))
        for kernel in KERNELS
        for share in SHARES
    ]
    rest = [METHODS["auto"], by_parts("dma", Part("dma", 1.0)), *alone, *shared]
    return {beside._ONE_COPY: METHODS["loop"], **{method.key: method for method in rest}}


def measure(lab: Lab, load: Load, shape: Shape, direction: Direction, options: argparse.Namespace) -> Iterator[str]:
    """A line a method, medians over the turns, which are those of kvswap bench --load."""
    places = lab.places((shape, Shape(1, shape.nbytes)))
    jobs = {
        key: Job(lab, method, [places[key == beside._ONE_COPY]], [direction]) for key, method in methods_of().items()
    }
    calls = {}
    for key, job in jobs.items():
        lab.warm_up(job)
        calls[key] = [lab.idle(job) for _ in range(options.turns)]
    samples = {key: beside._Samples() for key in jobs}
    plan = beside.Plan(
        lab.device, options.load, options.turns, options.seconds, shape.nbytes, (), (direction.name,), ()
    )
    with ThreadPoolExecutor(1) as thread:
        refused = beside._Turns(lab, load, plan, direction.name, thread)._pairs(jobs, samples)
    for key, found in samples.items():
        if key in refused:
            yield f"{key:28} {refused[key]}"
            continue
        slowdown, gbps = statistics.median(found.slowdowns), statistics.median(found.rates)
        whole, called = (statistics.median(one) * 1e3 for one in zip(*calls[key], strict=True))
        taken = " ".join(path for path, _ in found.paths.most_common())
        yield f"{key:28} {slowdown:.3f} at {gbps:5.1f} GB/s, held {called:6.3f} ms of {whole:6.3f} {taken}"


def main() -> None:
    """A line a layout, size, direction and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--load", default="step")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a window")
    parser.add_argument("--turns", type=int, default=3, help="medians of so many")
    parser.add_argument("--shape", action="append", choices=LAYOUTS, help="all three unless named")
    parser.add_argument("--mib", type=int, action="append", help=f"of a transfer; {SIZES_MIB} unless named")
    options = parser.parse_args()
    device = kvswap.Device(options.device)
    load = load_for(device, options.load)
    print(f"{device.name} ({device.info['name']}), beside {load.name}")
    with opened(device, 1) as lab:
        for family, size in layouts(options.shape or LAYOUTS, None, ()):
            for mib in options.mib or (SIZES_MIB if device.kind == "cuda" else (4,)):
                (shape,) = family.of(size, mib << 20)
                for direction in Direction:
                    print(f"\n{family.key} {shape} {direction.name}")
                    for line in measure(lab, load, shape, direction, options):
                        print(line, flush=True)


if __name__ == "__main__":
    main()
