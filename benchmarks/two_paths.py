"""A scattered transfer by two paths at once, beside a decode step: does it pay?

The copy engine moves a share of the blocks, and a kernel of one or two CTAs the rest, on two lanes; the transfer ends
with the later one. Beside it: all blocks by what auto takes at `normal`, by the copy engine alone and by the kernel
alone, and one bare copy of as many bytes, in turns. The host's side is scattered block by block. Every byte of a
window's last transfer is checked. Needs a GPU and torch; on a host device it shows that it runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import kvswap
from kvswap import _C, Direction
from kvswap.bench import beside
from kvswap.bench.loads import load_for
from kvswap.bench.measure import Job, opened
from kvswap.bench.methods import METHODS, Method, Submit
from kvswap.bench.shapes import Place, Shape
from kvswap.bench.table import layouts

if TYPE_CHECKING:
    from kvswap.typing import Path

LAYOUTS = ("64x32k-layers", "80x16k-slab-layers", "1x64k")
SHARES, CTAS = (0.5, 0.6, 0.7, 0.8), (1, 2)


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


def by_paths(key: str, parts: Sequence[tuple[Path, float, int | None]]) -> Method:
    """parts: path, share of the blocks, CTAs. Each has a stream of its own, so that none waits for another one."""

    def bind(place: Place, direction: Direction, _: _C.Stream) -> Submit:
        streams = [_C.Stream(place.device) for _ in parts]

        def part_of(number: int) -> _C.Transfer:
            path, share, ctas = parts[number]
            before = sum(share for _, share, _ in parts[:number])
            first, last = (round(place.shape.blocks * at) for at in (before, before + share))
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
                path=path,
                max_ctas=ctas,
                stream=streams[number],
            )

        return lambda: Both([part_of(number) for number in range(len(parts))])

    return Method(key, "", bind)


def methods_of() -> dict[str, Method]:
    """The bare copy first."""
    alone = [by_paths(f"kernel, {ctas} CTAs", [("kernel", 1.0, ctas)]) for ctas in CTAS]
    shared = [
        by_paths(f"dma {share:.0%}, kernel of {ctas}", [("dma", share, None), ("kernel", 1 - share, ctas)])
        for ctas in CTAS
        for share in SHARES
    ]
    rest = [METHODS["auto"], by_paths("dma", [("dma", 1.0, None)]), *alone, *shared]
    return {"one bare copy": METHODS["loop"], **{method.key: method for method in rest}}


def main() -> None:
    """A line a layout, direction and method: the step's slow-down, and GB/s of the copies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--load", default="step")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a window")
    parser.add_argument("--turns", type=int, default=3, help="medians of so many")
    options = parser.parse_args()
    device = kvswap.Device(options.device)
    nbytes = (256 if device.kind == "cuda" else 4) << 20
    load = load_for(device, options.load)
    print(f"{device.name} ({device.info['name']}), beside {load.name}")

    def alone() -> float:
        return beside._run_alone(device, load, options.seconds)

    with opened(device, 1) as lab, ThreadPoolExecutor(1) as thread:
        for family, size in layouts(LAYOUTS, None, ()):
            (shape,) = family.of(size, nbytes)
            for way in Direction:
                places = lab.places((shape, Shape(1, nbytes)))
                jobs = {
                    key: Job(lab, method, [places[key == "one bare copy"]], [way])
                    for key, method in methods_of().items()
                }
                found: dict[str, list[tuple[float, float]]] = {key: [] for key in jobs}
                paths = {key: lab.warm_up(job)[1] for key, job in jobs.items()}
                before = alone()
                for _ in range(options.turns):
                    for key, job in jobs.items():
                        window = beside._run_both(lab, load, job, options.seconds, thread)
                        after = alone()
                        found[key].append((window.piece_seconds / statistics.mean((before, after)), window.gbps))
                        before = after
                for key, windows in found.items():
                    slowdown, gbps = (statistics.median(one) for one in zip(*windows, strict=True))
                    row = f"{family.key:18} {way.name} {key:22} {slowdown:.3f} at {gbps:5.1f} GB/s {paths[key]}"
                    print(row, flush=True)


if __name__ == "__main__":
    main()
