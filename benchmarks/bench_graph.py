"""What kernels on other streams cost a CUDA graph that runs after them: the gaps between the graph's kernels.

A graph of 400 small kernels is replayed on a stream; its time is taken before and after each piece of work on another
stream, with the GPU idle between. Copies between GPU and pinned memory change nothing, on any number of streams. A few
kernels, fills or copies within the GPU do, even on one stream: each of the graph's kernels then begins 0.2 us later.
That lasts when the work has ended, until the GPU has worked for another process. Needs torch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

PAIRS, REPLAYS, STREAMS, NBYTES = 200, 41, 6, 1 << 22
_OTHER = (
    "import torch; x = torch.ones(1 << 26, device='cuda'); [x.add_(1) for _ in range(500)]; torch.cuda.synchronize()"
)


class Graph:
    """On a stream of its own, or on the legacy default stream."""

    def __init__(self, on_default: bool) -> None:
        self._stream = torch.cuda.default_stream() if on_default else torch.cuda.Stream()
        capturing = torch.cuda.Stream() if on_default else self._stream
        vector = torch.ones(4096, device="cuda")
        weights = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        inputs = torch.randn(32, 4096, device="cuda", dtype=torch.bfloat16)

        def body() -> None:
            for _ in range(PAIRS):
                vector.add_(1.0)
                inputs @ weights

        torch.cuda.synchronize()
        with torch.cuda.stream(capturing):
            body()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=capturing):
                body()
        self.milliseconds()

    def milliseconds(self) -> float:
        """Of a replay, the median."""
        with torch.cuda.stream(self._stream):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS)]
            events[0].record()
            for event in events[1:]:
                self._graph.replay()
                event.record()
            torch.cuda.synchronize()
        return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(events)))


def works() -> dict[str, Callable[[], Any]]:
    """By name: queues a piece of work on the current stream."""
    there, elsewhere = (torch.ones(NBYTES // 4, device="cuda") for _ in range(2))
    host = torch.ones(NBYTES // 4, pin_memory=True)
    return {
        "copies to the host": lambda: host.copy_(there, non_blocking=True),
        "copies from the host": lambda: there.copy_(host, non_blocking=True),
        "copies within the GPU": lambda: there.copy_(elsewhere),
        "fills": there.zero_,
        "kernels": lambda: there.add_(1.0),
    }


def measure(name: str, work: Callable[[], Any], streams: Sequence[torch.cuda.Stream], on_default: bool) -> None:
    """Prints a line: before, and after each piece of work."""
    graph = Graph(on_default)
    found = [graph.milliseconds()]
    for stream in streams:
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        found.append(graph.milliseconds())
    where = "one stream" if len(set(streams)) == 1 else f"{len(streams)} streams"
    line = f"{name + ', ' + where:<36}" + "".join(f"{ms:8.3f}" for ms in found)
    subprocess.run([sys.executable, "-c", _OTHER], check=True, timeout=60)
    graph.milliseconds()
    print(f"{line}{graph.milliseconds():14.3f}", flush=True)


def main() -> None:
    """A process a line, since what is measured stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--default-stream", action="store_true", help="replay on the legacy default stream")
    parser.add_argument("--one", nargs=2, metavar=("WORK", "STREAMS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        streams = [torch.cuda.Stream() for _ in range(int(options.one[1]))]
        measure(options.one[0], works()[options.one[0]], (streams * STREAMS)[:STREAMS], options.default_stream)
        return
    print(f"{torch.cuda.get_device_name()}: ms of a replay of {2 * PAIRS} kernels, before other work and after each")
    print(f"piece of it; last: after another process has used the GPU\n{'':<36}{'before':>8}")
    flags = ["--default-stream"] if options.default_stream else []
    for name in works():
        for count in ("1", str(STREAMS)):
            subprocess.run([sys.executable, __file__, *flags, "--one", name, count], check=True, timeout=120)


if __name__ == "__main__":
    main()
