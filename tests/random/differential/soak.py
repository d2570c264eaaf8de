"""What the process takes while it runs, and whether that stays flat."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from conftest import PATIENCE

import kvswap
from differential.frame import Totals

WARM_UP = 0.25  # of the samples: caches fill
# How much the last samples may be above the first ones after the warm-up, and what a line through all of them may rise
# over their whole time. A leak of 100 bytes an operation is 360 MiB in an hour.
BOUNDS = {"RSS, MiB": 16.0, "heap, MiB": 8.0, "descriptors": 2.0, "threads": 2.0, "GPU memory, MiB": 64.0}

M_ARENA_MAX = -8


class Mallinfo(ctypes.Structure):
    """As glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", *"abc", "hblkhd", *"de", "uordblks", *"fg")]


def one_heap() -> None:
    """Threads come and go with the rounds. Heaps of their own (glibc's arenas) hold on to memory that is free in them:
    on a GPU 30 MiB more in 8 minutes, of which next to nothing was in use."""
    getattr(ctypes.CDLL(None), "mallopt", lambda *arguments: 0)(M_ARENA_MAX, 1)


def heap() -> float:
    """What is in use of malloc's memory; 0 where the C library does not say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0.0
    ask.restype = Mallinfo
    found = ask()
    return (found.uordblks + found.hblkhd) / 2**20


def resident() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def gpu_memory(device: kvswap.Device) -> float:
    """Of the whole GPU, by the driver's own tool, which does not go by CUDA_VISIBLE_DEVICES."""
    command = ["nvidia-smi", f"--id={device.info['pci']}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout)


@dataclass
class Samples:
    """Taken between two rounds, when nothing of a round is left."""

    device: kvswap.Device
    every: float

    def __post_init__(self) -> None:
        one_heap()
        self.begin, self.last = time.monotonic(), 0.0
        self.times: list[float] = []
        self.operations: list[int] = []
        self.taken: dict[str, list[float]] = {}

    def tick(self, totals: Totals) -> None:
        now = time.monotonic()
        if now - self.last < self.every:
            return
        self.last = now
        gc.collect()
        self.device.synchronize(PATIENCE)
        self.device.stats()  # collects what ended
        found: dict[str, Any] = {
            "RSS, MiB": resident(),
            "heap, MiB": heap(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }
        if self.device.kind == "cuda":
            found["GPU memory, MiB"] = gpu_memory(self.device)
        self.times.append(now - self.begin)
        self.operations.append(totals.operations)
        for name, value in found.items():
            self.taken.setdefault(name, []).append(float(value))
        if len(self.times) % 10 == 1:
            values = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
            print(f"{self.times[-1]:8.0f} s  {totals.operations:9d} operations  {values}", flush=True)

    def verdict(self) -> tuple[str, bool]:
        """A line for each, and whether all are flat. Too few samples are not flat: nothing is known then."""
        skip = int(len(self.times) * WARM_UP)
        times = np.array(self.times[skip:])
        if times.size < 12:
            return f"only {times.size} samples after the warm-up: nothing can be said", False
        lines, flat = [f"{len(self.times)} samples in {self.times[-1]:.0f} s, the first {skip} are the warm-up"], True
        for name, taken in self.taken.items():
            values = np.array(taken[skip:])
            slope = float(np.polyfit(times - times[0], values, 1)[0])
            rise, third = slope * float(times[-1] - times[0]), max(1, values.size // 3)
            more = float(np.median(values[-third:]) - np.median(values[:third]))
            right = rise <= BOUNDS[name] and more <= BOUNDS[name]
            flat &= right
            lines.append(
                f"{name}: {values[0]:.1f} after the warm-up, least {values.min():.1f}, most {values.max():.1f}, last "
                f"{values[-1]:.1f}; slope {slope * 3600:+.2f} an hour, rise {rise:+.2f}, last third less first third "
                f"{more:+.2f}, bound {BOUNDS[name]:g}: {'flat' if right else 'GROWS'}"
            )
        return "\n".join(lines), flat
