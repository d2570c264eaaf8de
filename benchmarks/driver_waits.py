"""Which calls of the driver wait for the GPU: each is made many times behind a stream that is held up.

A stream waits for a word in pinned memory; a timer sets it, should a call not return. A call that returns with the word
set has waited. Plain driver calls, without kvswap. Needs a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

PATIENCE = 0.5  # seconds after which a call counts as one that waits
MOST = 8  # of such calls, then that is enough
KERNEL = b".version 6.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\n"

cu = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    code = getattr(cu, name)(*arguments)
    if code != 0:
        raise SystemExit(f"{name} gave {code}")


class Gate:
    def __init__(self) -> None:
        memory = c_void_p()
        call("cuMemHostAlloc", byref(memory), c_size_t(4096), c_uint(1))
        assert memory.value is not None
        self._address = memory.value
        self._word = c_uint32.from_address(memory.value)
        self.stream = new_stream(0)

    def close(self) -> None:
        self._word.value = 0
        call("cuStreamWaitValue32_v2", self.stream, c_uint64(self._address), c_uint32(1), c_uint(0))

    def open(self) -> None:
        self._word.value = 1
        call("cuStreamSynchronize", self.stream)

    def waits(self, one: Callable[[int], None], index: int) -> tuple[bool, float]:
        """Whether the call waited, and its seconds."""
        timer = threading.Timer(PATIENCE, setattr, (self._word, "value", 1))
        timer.start()
        began = time.perf_counter()
        one(index)
        took = time.perf_counter() - began
        timer.cancel()
        timer.join()
        return bool(self._word.value), took


def new_stream(priority: int) -> c_void_p:
    stream = c_void_p()
    call("cuStreamCreateWithPriority", byref(stream), c_uint(1), c_int(priority))
    return stream


def report(gate: Gate, name: str, times: int, one: Callable[[int], None]) -> None:
    waited, seconds = [], []
    gate.close()
    for index in range(times):
        held, took = gate.waits(one, index)
        if not held:
            seconds.append(took)
            continue
        waited.append(index)
        gate.open()
        if len(waited) == MOST:
            break
        gate.close()
    gate.open()
    usual = f"{statistics.median(seconds) * 1e6:.1f} us" if seconds else "all wait"
    which = ", ".join(map(str, waited)) or "none"
    print(f"{name:44} {index + 1:6} calls  {usual:>10}  waited: {which}", flush=True)


def main() -> None:
    context, module, kernel = c_void_p(), c_void_p(), c_void_p()
    low, high = c_int(), c_int()
    call("cuInit", c_uint(0))
    call("cuDevicePrimaryCtxRetain", byref(context), c_int(0))
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", byref(module), KERNEL)
    call("cuModuleGetFunction", byref(kernel), module, b"nothing")
    call("cuCtxGetStreamPriorityRange", byref(low), byref(high))
    gate = Gate()
    free, whole = [c_size_t(), c_size_t()], c_size_t()
    call("cuMemGetInfo_v2", byref(free[0]), byref(whole))
    began = time.perf_counter()
    streams = [new_stream(low.value) for _ in range(54)]
    took = time.perf_counter() - began
    call("cuMemGetInfo_v2", byref(free[1]), byref(whole))
    print(f"54 streams: {took * 1e3:.2f} ms, {(free[0].value - free[1].value) >> 10} KiB of the GPU's memory")
    report(gate, "make a stream, lowest priority", 300, lambda _: streams.append(new_stream(low.value)))
    report(gate, "make a stream, highest priority", 300, lambda _: streams.append(new_stream(high.value)))
    events = [c_void_p() for _ in range(20000)]
    report(gate, "make an event", len(events), lambda i: call("cuEventCreate", byref(events[i]), c_uint(2)))
    report(gate, "record it, on another stream", 4000, lambda i: call("cuEventRecord", events[i], streams[0]))
    report(gate, "destroy it", len(events), lambda i: call("cuEventDestroy_v2", events[i]))
    report(gate, "destroy a stream", 200, lambda i: call("cuStreamDestroy_v2", streams[-1 - i]))
    memory = [c_uint64() for _ in range(500)]
    report(gate, "GPU memory, 64 KiB", 500, lambda i: call("cuMemAlloc_v2", byref(memory[i]), c_size_t(1 << 16)))
    report(gate, "free it", 500, lambda i: call("cuMemFree_v2", memory[i]))
    pinned = [c_void_p() for _ in range(100)]
    size, portable = c_size_t(1 << 16), c_uint(3)
    report(gate, "pinned memory, 64 KiB", 100, lambda i: call("cuMemHostAlloc", byref(pinned[i]), size, portable))
    report(gate, "free it", 100, lambda i: call("cuMemFreeHost", pinned[i]))
    maps = [mmap.mmap(-1, 1 << 16) for _ in range(50)]
    places = [c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m))) for m in maps]
    report(gate, "pin memory, 64 KiB", 50, lambda i: call("cuMemHostRegister_v2", places[i], size, portable))
    report(gate, "unpin it", 50, lambda i: call("cuMemHostUnregister", places[i]))
    shape = (c_uint(1),) * 6
    report(
        gate,
        "launch a kernel on the stream that is held",
        3000,
        lambda _: call("cuLaunchKernel", kernel, *shape, c_uint(0), gate.stream, None, None),
    )


if __name__ == "__main__":
    main()
