"""What a mark behind each transfer costs the transfers, beside a decode step.

An engine may let a stream of its own wait for a transfer, and record an event behind it: to know when it ended, or how
long it took. Transfers of 64 tensors x 32 KiB, block-first, follow each other, and another stream waits for each: it
does nothing else, or records an event without timing, or one with timing. A bare copy of as many bytes is treated
likewise. Every byte of a window's last transfer is checked. Needs a GPU and torch; on a host device it shows that it
runs.

Copies are slower while a kernel waits for them in a hardware channel whose number is odd or even as the model's is.
Streams that work first take channels, so that kvswap gets others: with CUDA_DEVICE_MAX_CONNECTIONS=32 in the
environment, some rows are fast with --streams 0 and slow with --streams 1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import kvswap
from kvswap import _C, Direction
from kvswap.bench import beside
from kvswap.bench.loads import load_for
from kvswap.bench.measure import Job, opened
from kvswap.bench.methods import METHODS, Method, Pending, Submit
from kvswap.bench.shapes import Place, Shape

METHOD_SHAPES = (("loop", 1), ("auto", 0), ("high", 0))  # a method, and which shape it moves


def marks_on(stream: _C.Stream) -> dict[str, Callable[[Pending], None]]:
    """What the stream does behind each transfer."""

    def marked(timing: bool) -> Callable[[Pending], None]:
        def mark(pending: Pending) -> None:
            pending.make_wait(stream)
            _C.Event(stream.device, timing=timing).record(stream)

        return mark

    return {
        "nothing": lambda _: None,
        "waits": lambda pending: pending.make_wait(stream),
        "waits, and an event": marked(False),
        "waits, and an event with timing": marked(True),
    }


def marking(method: Method, mark: Callable[[Pending], None]) -> Method:
    """The method, with this mark behind each transfer."""

    def bind(place: Place, direction: Direction, compute: _C.Stream) -> Submit:
        submit = method.bind(place, direction, compute)

        def marked() -> Pending:
            pending = submit()
            mark(pending)
            return pending

        return marked

    return replace(method, bind=bind)


def main() -> None:
    """A line a direction, method and mark: GB/s of the copies beside the step, and the step's time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--load", default="step")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a window")
    parser.add_argument("--windows", type=int, default=3, help="of each, in turns; medians")
    parser.add_argument("--streams", type=int, default=0, help="so many other streams work before the copies")
    options = parser.parse_args()
    device = kvswap.Device(options.device)
    block, blocks = (32 << 10, 128) if device.kind == "cuda" else (4 << 10, 16)
    load, marks = load_for(device, options.load), marks_on(_C.Stream(device))
    others = [_C.Stream(device) for _ in range(options.streams)]
    for stream in others:
        _C._delay(device, 1e-6, stream)
    shapes = (Shape(64, block, blocks), Shape(1, 64 * block * blocks))
    print(f"{device.name} ({device.info['name']}), beside {load.name}; {len(others)} other streams")
    with opened(device, 1) as lab, ThreadPoolExecutor(1) as thread:
        for way in Direction:
            for method, which in METHOD_SHAPES:
                place = lab.places(shapes)[which]
                jobs = {name: Job(lab, marking(METHODS[method], mark), [place], [way]) for name, mark in marks.items()}
                for job in jobs.values():
                    lab.warm_up(job)
                found: dict[str, list[beside.Beside]] = {name: [] for name in marks}
                for _ in range(options.windows):
                    for name, job in jobs.items():
                        beside._warm_up(device, load)
                        found[name].append(beside._run_both(lab, load, job, options.seconds, thread))
                for name, windows in found.items():
                    gbps = statistics.median(window.gbps for window in windows)
                    step = statistics.median(window.piece_seconds for window in windows)
                    print(f"{way.name} {method:5} {name:32} {gbps:5.1f} GB/s, {1e3 * step:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
