"""Every wait ends, within its limit, and at Ctrl-C; and dropping an object waits for nothing.

WAITS are the functions of csrc/py that may wait for a device, a peer or a file; each names the calls below by which it
is tried with a stream, a process or a file that does not go on. QUICK are those that release the GIL for something
short, with what that is. A function that is in neither fails test_every_function_that_may_wait_is_listed."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import asyncio
import errno
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import AT_ONCE, PATIENCE, ROOT, SANITIZED, Cache, Gate, run_python, seam, second_device, write_pattern
from processes import Failed, Process

import kvswap
from kvswap import memory, share, testing
from kvswap.files import FileStore, Layout

WAITS = {
    "await.c:wait_for_first": ["await Transfer"],
    "device.c:device_set_slots": ["Device.set_slots", "Device.set_slots beside other work"],
    "device.c:device_lend": ["Device.lend"],
    "device.c:device_synchronize": ["Device.synchronize"],
    "device.c:device_unregister": ["Device.unregister"],
    "wait.c:kvs_py_apart": ["FileStore", "FileStore.close"],
    "file_store.c:use_store": ["FileStore.close"],
    "memory.c:give_back": ["host_free", "host_unregister"],
    "host_pool_base.c:close_core": ["HostPool.close", "SharedPool.close", "HostPool.close while it is registered"],
    "host_pool_base.c:kvs_py_host_pool_drain": ["HostPool.close", "HostPool.shrink", "HostPool.grow"],
    "host_pool_base.c:kvs_py_host_pool_wait": ["HostPool.wait"],
    "host_pool_base.c:wait_for_device": ["HostPool.close", "HostPool.shrink"],
    "host_pool.c:resize": ["HostPool.shrink", "HostPool.grow"],
    "ipc.c:ipc_open": ["memory.open"],
    "mapped.c:close_within": ["Mapped.close"],
    "memory.c:memory_free": ["Memory.free", "Memory.free of the host", "Memory.free of chunks"],
    "options.c:try_submit": ["swap_cache_per_layer in a full lane"],
    "pattern.c:pattern_result": ["_PatternJob.result"],
    "pool.c:open_pool": ["Pool in memory that is being freed"],
    "share.c:share_close": ["Member.close"],
    "share.c:share_wait_linked": ["Member.wait_peers"],
    "shared_pool.c:shared_wait_ready": ["SharedPool.wait_ready"],
    "transfer.c:wait_for_any": [
        "Transfer.wait",
        "swap_cache_per_layer",
        "FileTransfer.wait",
    ],
    "wait.c:kvs_py_alloc": ["Device.alloc", "host_alloc", "Device.alloc in the driver"],
    "wait.c:kvs_py_synchronize": ["Stream.synchronize", "Event.synchronize"],
    "wait.c:kvs_py_wait": ["Transfer.wait"],
    "wait.c:kvs_py_wait_collected": ["HostPool.close", "HostPool.shrink"],
}

QUEUES = "queues work, or asks the driver, and returns"
FILES = "reads or writes files of this process's own folder: waits for a disk only"
OPENS = "brings a device, a driver or a folder up"
HANDLES = "a handle less; what is left to do is handed on (test_dropping_waits_for_nothing)"
COUNTERS = "reads counters, under locks that are held over no wait (test_metrics.py)"
THREAD = "joins a thread, which wakes at once"
LOCK = "half a second at most, for a lock that a stopped process holds (test_replicas.py)"
QUICK = {
    "await.c:drop_items": HANDLES,
    "calibration.c:costs_read": FILES,
    "calibration.c:costs_write": FILES,
    "open.c:open_engine": OPENS,
    "open.c:cuda_count": OPENS,
    "device.c:device_set_compute_stream": QUEUES,
    "device.c:device_register": QUEUES,
    "device_facts.c:kvs_py_device_stats": QUEUES,
    "codec.c:code": "codes or decodes bytes in memory",
    "disk.c:disk_check": QUEUES,
    "disk.c:queue": QUEUES,
    "event.c:event_create": QUEUES,
    "event.c:kvs_py_event_of_transfer": QUEUES,
    "event.c:event_record": QUEUES,
    "event.c:event_wait": QUEUES,
    "event.c:event_elapsed_time": QUEUES,
    "replicas.c:index_create": OPENS,
    "replicas.c:index_dealloc": LOCK,
    "replicas.c:index_find": LOCK,
    "replicas.c:index_unpin": LOCK,
    "replicas.c:index_touch": LOCK,
    "replicas.c:index_take": LOCK,
    "replicas.c:index_settle": LOCK,
    "replicas.c:index_reset": LOCK,
    "replicas.c:index_info": LOCK,
    "replicas.c:index_close": LOCK,
    "replicas.c:index_hold": LOCK,
    "replicas.c:index_check": LOCK,
    "remote.c:run": "copies and sums the blocks of a call in memory",
    "file_calls.c:submit": QUEUES,
    "file_transfer.c:collect": HANDLES,
    "file_store.c:store_dealloc": HANDLES,
    "file_store.c:store_contains": QUEUES,
    "file_store.c:on_keys": QUEUES,
    "file_store.c:store_keys": QUEUES,
    "file_store.c:store_take_events": QUEUES,
    "file_store.c:facts": OPENS,
    "file_store.c:gds": OPENS,
    "memory.c:host_alloc": QUEUES,
    "memory.c:host_register": QUEUES,
    "host_pool.c:host_pool_create": OPENS,
    "ipc.c:drop_server": THREAD,
    "ipc.c:ipc_export": OPENS,
    "ipc.c:ipc_stop": THREAD,
    "ipc.c:engine_for": OPENS,
    "ipc.c:ipc_export_event": QUEUES,
    "ipc.c:ipc_open_event": OPENS,
    "metrics.c:device_row": COUNTERS,
    "metrics.c:rows_of": COUNTERS,
    "note.c:note_access": QUEUES,
    "note.c:note_order": QUEUES,
    "offload.c:open_map": QUEUES,
    "offload.c:map_dealloc": HANDLES,
    "offload.c:submit": QUEUES,
    "pattern.c:pattern_dealloc": HANDLES,
    "pattern.c:pattern_done": QUEUES,
    "pattern.c:pattern": QUEUES,
    "pool.c:await_dropped": "a second at most, for what another thread releases (test_pool.py)",
    "pool.c:pool_dealloc": HANDLES,
    "seam.c:make_call": "the seam itself: what the driver waits for, it waits for",
    "share.c:open_share": OPENS,
    "share.c:share_dealloc": HANDLES,
    "share.c:share_link": QUEUES,
    "share.c:share_linked": COUNTERS,
    "share.c:share_meet": OPENS,
    "share.c:share_stats": COUNTERS,
    "share.c:share_submit": QUEUES,
    "share.c:share_unmeet": QUEUES,
    "shared_pool.c:shared_pool_create": OPENS,  # and at most 0.8 s for another process that removes the same segment
    "shared_pool.c:change": QUEUES,
    "shared_pool.c:ask": QUEUES,
    "shared_pool.c:shared_unlink": FILES,
    "shared_pool.c:shared_clean": FILES,
    "stream.c:stream_create": QUEUES,
    "machine.c:delay": QUEUES,
    "machine.c:cuda_count": OPENS,
    "machine.c:cuda_info": OPENS,
    "machine.c:cuda_can_reach": OPENS,
    "machine.c:host_memory": "reads files of the kernel",
    "machine.c:shut_down": "the end of the process, which has a limit of its own",
    "transfer.c:kvs_py_any_transfer_new": HANDLES,
    "transfer.c:kvs_py_any_transfer_poll": QUEUES,
    "transfer.c:any_cancel": QUEUES,
    "transfer.c:any_dealloc": HANDLES,
    "transfer.c:transfer_make_wait": QUEUES,
    "transfer.c:transfer_make_wait_layer": QUEUES,
    "transfer.c:transfer_layer_done": QUEUES,
    "wait.c:kvs_py_collect": QUEUES,
    "wait.c:kvs_py_query": QUEUES,
}


def may_wait(path: Path) -> Iterator[str]:
    """The functions of a file that release the GIL, or wait in slices."""
    function = ""
    for line in path.read_text().splitlines():
        head = re.match(r"^[A-Za-z][^;#]*?(\w+)\((?:[^;]*|.*\{ .* \})$", line)
        if head and not line.startswith(("PyDoc", "X(")):
            function = head.group(1)
        if re.search(r"Py_BEGIN_ALLOW_THREADS|KVS_PY_(NO_GIL|WAITING)\(|kvs_py_wait(_collected)?\(", line):
            yield f"{path.name}:{function}"


def test_every_function_that_may_wait_is_listed() -> None:
    there = {name for path in sorted((ROOT / "csrc" / "py").glob("*.c")) for name in may_wait(path)}
    listed = set(WAITS) | set(QUICK)
    assert there - listed == set(), "new: can it wait? Then try it here, with what it waits for stopped"
    assert listed - there == set(), "no longer there"
    assert {call for calls in WAITS.values() for call in calls} <= set(CALLS), "a call that is not tried"


# -- calls that wait --------------------------------------------------------------------------------------------------


class Stuck:
    """A device with a stream that goes on when the gate is opened, and a transfer on it."""

    def __init__(self, device: kvswap.Device, folder: Path, name: str, stack: ExitStack) -> None:
        self.device, self.folder, self.stack, self.name = device, folder, stack, name
        self.before: list[Callable[[], None]] = []  # what lets the call end

    def hold(self) -> kvswap.Stream:
        gate = self.stack.enter_context(Gate(self.device))
        self.before.append(gate.open)
        stream = kvswap.Stream(self.device)
        gate.hold(stream)
        return stream

    def host(self) -> kvswap.Memory:
        """4096 bytes, pinned: before a copy of pageable memory a GPU's driver itself waits for what is before it."""
        return self.device.alloc(4096, host=True)

    def transfer(self, host: Any, stream: kvswap.Stream | None = None) -> kvswap.Transfer:
        gpu = self.device.alloc(4096)
        return kvswap.swap_blocks_batch(
            [gpu], [host], 4096, stream=stream or self.hold(), device=self.device, path="dma"
        )


Call = Callable[..., Any]  # call(timeout=...)


def call_memory_free(stuck: Stuck) -> Call:
    """Other memory than what the transfer uses: the driver's free waits for the device."""
    held = stuck.device.alloc(4096)
    stuck.hold()
    return held.free


def call_memory_free_host(stuck: Stuck) -> Call:
    held = stuck.device.alloc(4096, host=True)
    stuck.transfer(held.ptr)
    return held.free


def call_memory_free_chunks(stuck: Stuck) -> Call:
    held = stuck.device.alloc(1 << 20, chunks=True)
    stuck.hold()
    return held.free


def call_unregister(stuck: Stuck) -> Call:
    array = np.zeros(1 << 16, np.uint8)
    stuck.device.register(array)
    stuck.transfer(array)
    return lambda timeout=60.0: stuck.device.unregister(array, timeout)


def call_set_slots(stuck: Stuck) -> Call:
    host, info = stuck.device.alloc(4096, host=True), stuck.device.info
    transfer = kvswap.swap_blocks_batch(
        [stuck.device.alloc(4096)], [host], 4096, stream=stuck.hold(), device=stuck.device, path="burst"
    )
    assert transfer.path == "burst"
    return lambda timeout=60.0: stuck.device.set_slots(info["slots_nbytes"] // 8, timeout=timeout)


def call_lend(stuck: Stuck) -> Call:
    """The link carries what waits; it is lent with other slots."""
    lender = second_device(stuck.device, "host:58")
    lender.lend(stuck.device, 128 << 10, timeout=PATIENCE)
    stuck.stack.callback(lender.lend, stuck.device, 0, timeout=PATIENCE)
    gpu, host = stuck.device.alloc(1 << 20), stuck.device.alloc(1 << 20, host=True)
    transfer = kvswap.swap_blocks_batch([gpu], [host], 1 << 20, stream=stuck.hold(), device=stuck.device, path="borrow")
    assert transfer.path == "borrow"
    return lambda timeout=60.0: lender.lend(stuck.device, 256 << 10, timeout=timeout)


def call_set_slots_beside_other_work(stuck: Stuck) -> Call:
    """No transfer uses them, and the driver's free waits for the device all the same."""
    info = stuck.device.info
    stuck.hold()
    return lambda timeout=60.0: stuck.device.set_slots(info["slots_nbytes"] // 8, timeout=timeout)


def call_host_free(stuck: Stuck) -> Call:
    ptr = memory.host_alloc(4096, device=stuck.device)
    stuck.transfer(ptr)
    return lambda timeout=60.0: memory.host_free(ptr, timeout=timeout)


def call_host_unregister(stuck: Stuck) -> Call:
    array = np.zeros(1 << 16, np.uint8)
    memory.host_register(array, array.nbytes, device=stuck.device)
    stuck.transfer(array)
    return lambda timeout=60.0: memory.host_unregister(array, timeout=timeout)


def out_of_memory(stuck: Stuck, operation: str) -> None:
    """What is being given back may make room: so it is waited for. (A driver that has no memory waits for the device
    itself: here it is refused before it is asked.)"""
    held = stuck.device.alloc(4096)
    stuck.hold()
    del held
    stuck.stack.enter_context(testing.fault(stuck.device, "call", "fail", operation=operation, every=1, code=2))


def call_alloc(stuck: Stuck) -> Call:
    out_of_memory(stuck, "alloc")
    return lambda: stuck.device.alloc(4096)


def call_host_alloc(stuck: Stuck) -> Call:
    out_of_memory(stuck, "host_alloc")
    return lambda: memory.host_alloc(4096, device=stuck.device)


def delay(stuck: Stuck, operation: str) -> None:
    """The driver does not return from this call."""
    faults = stuck.stack.enter_context(ExitStack())
    faults.enter_context(testing.fault(stuck.device, "call", "delay", operation=operation, every=1, delay=PATIENCE))
    stuck.before.append(faults.close)


def call_alloc_in_the_driver(stuck: Stuck) -> Call:
    """With little memory left it waits for the device."""
    delay(stuck, "alloc")
    return lambda: stuck.device.alloc(4096)


def call_pool_close_while_registered(stuck: Stuck) -> Call:
    delay(stuck, "host_register")
    pool = host_pool(stuck, wait=False)
    time.sleep(0.1)
    return pool.close


def call_pool_in_freed_memory(stuck: Stuck) -> Call:
    held = stuck.device.alloc(4096)
    ptr = held.ptr
    delay(stuck, "free")
    with suppress(TimeoutError):
        held.free(timeout=0.2)

    def call() -> None:
        if stuck.before:
            kvswap.Pool(stuck.device, ptr, 1, 4096)

    return call


def call_transfer_wait(stuck: Stuck) -> Call:
    return stuck.transfer(stuck.host()).wait


def call_swap(stuck: Stuck) -> Call:
    gpu, host, stream = stuck.device.alloc(4096), stuck.host(), stuck.hold()
    return lambda: kvswap.swap_cache_per_layer(
        gpu, host, 4096, 1, 1, [0], [0], kvswap.Direction.D2H, stream=stream, device=stuck.device
    )


def call_await(stuck: Stuck) -> Call:
    gpu, host = stuck.device.alloc(4096), stuck.host()
    transfer = kvswap.swap_cache_per_layer_async(
        gpu, host, 4096, 1, 1, [0], [0], 0, stream=stuck.hold(), device=stuck.device
    )

    async def wait() -> None:
        await transfer

    return lambda: asyncio.run(wait())


def call_swap_in_a_full_lane(stuck: Stuck) -> Call:
    gpu, host, stream = stuck.device.alloc(4096), stuck.host(), stuck.hold()
    arguments = (gpu, host, 4096, 1, 1, [0], [0], kvswap.Direction.D2H)
    with pytest.raises(kvswap.QueueFull):
        for _ in range(129):
            kvswap.swap_cache_per_layer_async(*arguments, stream=stream, device=stuck.device)
    return lambda: kvswap.swap_cache_per_layer(*arguments, stream=stream, device=stuck.device)


def call_device_synchronize(stuck: Stuck) -> Call:
    stuck.hold()
    return stuck.device.synchronize


def call_stream_synchronize(stuck: Stuck) -> Call:
    return stuck.hold().synchronize


def call_event_synchronize(stuck: Stuck) -> Call:
    event = kvswap.Event(stuck.device)
    event.record(stuck.hold())
    return event.synchronize


def pattern(stuck: Stuck) -> Any:
    gpu = stuck.device.alloc(4096)
    stuck.stack.callback(gpu.free)  # after the gate has been opened
    return write_pattern(stuck.device, [gpu.ptr], 4096, [1], stuck.hold())


def call_pattern(stuck: Stuck) -> Call:
    return pattern(stuck).result


def host_pool(stuck: Stuck, **options: Any) -> memory.HostPool:
    return memory.HostPool(8, 4096, device=stuck.device, **options)


def call_pool_close(stuck: Stuck) -> Call:
    pool = host_pool(stuck)
    stuck.hold()
    return pool.close


def call_pool_shrink(stuck: Stuck) -> Call:
    pool = host_pool(stuck, max_blocks=8)
    stuck.hold()
    return lambda timeout=60.0: pool.shrink(4, timeout=timeout)


def call_pool_grow(stuck: Stuck) -> Call:
    pool = memory.HostPool(3, 1000, device=stuck.device, max_blocks=64)  # its last page has room
    stuck.hold()
    return lambda timeout=60.0: pool.grow(64, timeout=timeout)


def call_pool_wait(stuck: Stuck) -> Call:
    faults = stuck.stack.enter_context(ExitStack())
    fault = testing.fault(stuck.device, "call", "delay", operation="host_register", every=1, delay=PATIENCE)
    faults.enter_context(fault)
    stuck.before.append(faults.close)
    return host_pool(stuck, wait=False).wait


def shared_pool(stuck: Stuck) -> memory.SharedPool:
    pool = memory.SharedPool(f"waits-{os.getpid()}", 8, 4096, device=stuck.device)
    stuck.stack.callback(pool.close)
    return pool


def call_shared_close(stuck: Stuck) -> Call:
    pool = memory.SharedPool(f"waits-{os.getpid()}", 8, 4096, device=stuck.device)
    stuck.hold()
    return pool.close


def call_wait_ready(stuck: Stuck) -> Call:
    pool = shared_pool(stuck)
    pool.claim([3])
    stuck.before.append(lambda: pool.publish([3]))
    return lambda timeout=None: pool.wait_ready([3], timeout)


def join(stuck: Stuck, rank: int, name: str) -> share.Member:
    """A member of a group in this process."""
    pool = stuck.stack.enter_context(memory.SharedPool(name, 8, 4096, create=rank == 0, device=stuck.device))
    gpu = kvswap.Pool(stuck.device, stuck.device.alloc(8 * 4096), 8, 4096)
    return stuck.stack.enter_context(share.join(name, rank, pool, gpu))


def call_member_close(stuck: Stuck) -> Call:
    """Its load waits for the compute stream."""
    member = join(stuck, 0, f"waits-{os.getpid()}-close")
    stuck.device.set_compute_stream(stuck.hold())
    stuck.stack.callback(stuck.device.set_compute_stream, 0)
    member.load([0, 1], [2, 3])
    return member.close


def call_wait_peers(stuck: Stuck) -> Call:
    """The other one joins later."""
    name = f"waits-{os.getpid()}-peers"
    member = join(stuck, 0, name)
    stuck.before.append(lambda: (join(stuck, 1, name), None)[1])
    return lambda timeout=60.0: member.wait_peers([1], timeout)


def file_put(stuck: Stuck) -> tuple[FileStore, Any]:
    store = FileStore(stuck.folder / "store", Layout(4096), capacity=1 << 20, device=stuck.device)
    block = stuck.device.alloc(4096)
    pool = kvswap.Pool(stuck.device, block, 1, 4096)
    return store, store.store([b"k" * 16], pool, [0], after=[stuck.hold()])


def call_file_wait(stuck: Stuck) -> Call:
    store, transfer = file_put(stuck)
    stuck.stack.callback(store.close)
    return transfer.wait


def call_file_close(stuck: Stuck) -> Call:
    store, transfer = file_put(stuck)
    stuck.stack.callback(store.close)
    stuck.stack.callback(lambda: transfer)
    return store.close


def stop(process: Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def call_file_open(stuck: Stuck) -> Call:
    """Of a directory whose store was dropped, and goes on."""
    file_put(stuck)

    def call() -> None:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                FileStore(stuck.folder / "store", Layout(4096), capacity=1 << 20, device=stuck.device).close()
                return
            except (
                kvswap.Error
            ) as error:  # an opening that was interrupted ends by itself, and has the store until then
                assert "open twice in this one" in str(error) and time.monotonic() < until
                time.sleep(0.05)

    return call


@contextmanager
def exporter(device_name: str) -> Iterator[Process]:
    with Process(f"device = kvswap.Device({device_name!r}); shared = device.alloc(1 << 20, chunks=True)") as process:
        yield process


def exported(process: Process) -> bytes:
    return bytes.fromhex(process.do("export = memory.export(shared)") or process.do("export.to_bytes().hex()"))


def call_mapped_close(stuck: Stuck) -> Call:
    mapped = memory.open(exported(stuck.stack.enter_context(exporter(stuck.name))), device=stuck.device)
    stuck.hold()
    return mapped.close


def call_open(stuck: Stuck) -> Call:
    """Its exporter is stopped: the kernel accepts the connection, and no answer comes."""
    process = stuck.stack.enter_context(exporter(stuck.name))
    data = exported(process)
    stop(process)
    stuck.stack.callback(os.kill, process.pid, signal.SIGCONT)
    stuck.before.append(lambda: os.kill(process.pid, signal.SIGCONT))
    return lambda: memory.open(data, device=stuck.device)


CALLS: dict[str, Callable[[Stuck], Call]] = {
    "Device.alloc": call_alloc,
    "Device.set_slots": call_set_slots,
    "Device.lend": call_lend,
    "Device.alloc in the driver": call_alloc_in_the_driver,
    "Device.set_slots beside other work": call_set_slots_beside_other_work,
    "Device.synchronize": call_device_synchronize,
    "Device.unregister": call_unregister,
    "Event.synchronize": call_event_synchronize,
    "FileStore": call_file_open,
    "FileStore.close": call_file_close,
    "FileTransfer.wait": call_file_wait,
    "HostPool.close": call_pool_close,
    "HostPool.close while it is registered": call_pool_close_while_registered,
    "HostPool.grow": call_pool_grow,
    "HostPool.shrink": call_pool_shrink,
    "HostPool.wait": call_pool_wait,
    "Mapped.close": call_mapped_close,
    "Member.close": call_member_close,
    "Member.wait_peers": call_wait_peers,
    "Memory.free": call_memory_free,
    "Memory.free of chunks": call_memory_free_chunks,
    "Memory.free of the host": call_memory_free_host,
    "Pool in memory that is being freed": call_pool_in_freed_memory,
    "SharedPool.close": call_shared_close,
    "SharedPool.wait_ready": call_wait_ready,
    "Stream.synchronize": call_stream_synchronize,
    "Transfer.wait": call_transfer_wait,
    "_PatternJob.result": call_pattern,
    "host_alloc": call_host_alloc,
    "host_free": call_host_free,
    "host_unregister": call_host_unregister,
    "memory.open": call_open,
    "await Transfer": call_await,
    "swap_cache_per_layer": call_swap,
    "swap_cache_per_layer in a full lane": call_swap_in_a_full_lane,
}


NO_TIMEOUT = {
    "await Transfer",
    "Device.alloc",
    "Device.alloc in the driver",
    "FileStore",
    "Pool in memory that is being freed",
    "host_alloc",
    "memory.open",
    "swap_cache_per_layer",
    "swap_cache_per_layer in a full lane",
}  # or none that a caller gives
CANCELS = {"FileStore.close"}  # after its timeout it waits on, for what is under way
REFUSED = {"Device.alloc", "host_alloc"}


@pytest.fixture
def stuck(device: kvswap.Device, device_name: str, tmp_path: Path) -> Iterator[Stuck]:
    with ExitStack() as stack:
        made = Stuck(device, tmp_path, device_name, stack)
        yield made
        for end in made.before:
            end()


def seconds_of(action: Callable[[], Any]) -> float:
    start = time.monotonic()
    action()
    return time.monotonic() - start


@pytest.mark.parametrize("name", sorted(CALLS))
def test_ctrl_c_breaks_it_and_it_can_be_called_again(stuck: Stuck, name: str) -> None:
    call = CALLS[name](stuck)
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, press)
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            call()
            time.sleep(0.1)
    finally:
        timer.cancel()
    assert time.monotonic() - pressed[0] < AT_ONCE
    timer.join()
    for end in stuck.before:
        end()
    stuck.before.clear()
    if name in REFUSED:
        with pytest.raises(MemoryError):
            call()
    else:
        call()


@pytest.mark.parametrize("name", sorted(set(CALLS) - NO_TIMEOUT - CANCELS))
def test_its_limit_holds_and_it_can_be_called_again(stuck: Stuck, name: str) -> None:
    call = CALLS[name](stuck)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        call(timeout=0.1)
    assert 0.09 < time.monotonic() - start < AT_ONCE
    for end in stuck.before:
        end()
    stuck.before.clear()
    call(timeout=PATIENCE)


def test_a_gate_that_is_waited_for_opens_and_says_so(device: kvswap.Device) -> None:
    """The tests' own: a call that waits in the driver for what a gate holds up would end the process of the tests."""
    stream = kvswap.Stream(device)
    opened = pytest.raises(AssertionError, match=r"something waited for the gate, which was opened after 0.2 s: \w")
    with opened, Gate(device, limit=0.2) as gate:
        gate.hold(stream)
        stream.synchronize(PATIENCE)
    assert gc.isenabled()


def test_memory_that_could_not_be_freed_is_as_before(device: kvswap.Device) -> None:
    held, other = device.alloc(4096), device.alloc(4096)
    with Gate(device) as gate:
        stream = kvswap.Stream(device)
        gate.hold(stream)
        with pytest.raises(TimeoutError, match="nothing was given back"):
            held.free(timeout=0.05)
        assert held.ptr and "freed" not in repr(held)
        transfer = kvswap.swap_blocks_batch([held], [other], 4096, device=device, path="dma")
    transfer.wait(PATIENCE)
    held.free(PATIENCE)
    with pytest.raises(kvswap.Error, match="already freed"):
        held.free()


def until_done(call: Callable[..., Any], limits: Iterator[float]) -> None:
    for limit in limits:
        with suppress(TimeoutError):
            call(timeout=limit)
            break


def test_slots_that_the_driver_is_freeing(device: kvswap.Device) -> None:
    """It does not come back: the caller does, transfers go on by other ways, and the slots are there in the end."""
    before = device.info["slots_nbytes"]
    host, gpu = device.alloc(4096, host=True), device.alloc(4096)
    with testing.fault(device, "call", "delay", operation="free", delay=PATIENCE):
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises(TimeoutError):
                device.set_slots(0, timeout=0.2)
            assert time.monotonic() - begin < AT_ONCE
        kvswap.swap_blocks_batch([gpu], [host], 4096, device=device).wait(PATIENCE)
        assert device.info and device.stats()
    device.set_slots(before // 8, timeout=PATIENCE)
    assert device.info["slots_nbytes"] == before
    kvswap.swap_blocks_batch([gpu], [host], 4096, device=device, path="burst").wait(PATIENCE)


def test_a_full_gpu_and_ctrl_c(device: kvswap.Device) -> None:
    """Its driver waits for the device before it says that there is no memory: in a thread."""
    if device.kind == "host":
        pytest.skip("a host device has no driver that waits")
    held, size = [], 1 << 30
    while size >= 1 << 24:
        try:
            held.append(device.alloc(size))
        except MemoryError:
            size //= 2
    with Gate(device) as gate:
        gate.hold(kvswap.Stream(device))
        begin = time.monotonic()
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises((KeyboardInterrupt, MemoryError)):
            timer.start()
            device.alloc(1 << 30)
            pytest.fail("there was memory")
        timer.cancel()
        assert time.monotonic() - begin < 2
        with pytest.raises(TimeoutError):
            device.set_slots(0, timeout=0.2)
        assert time.monotonic() - begin < 4
    for one in held:
        one.free(PATIENCE)


def test_no_thread_to_give_memory_back() -> None:
    """Near the limit of addresses: what was dropped cannot be given back, and is not waited for."""
    if SANITIZED:
        pytest.skip("a sanitizer needs room of its own")
    run = run_python(
        """
        import resource, time
        import kvswap
        from kvswap import memory
        device = kvswap.Device("host:0")
        device.alloc(4096).free()
        pools = [memory.HostPool(64, 65536, device=device, threads=1) for _ in range(24)]
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        worst = 0.0
        for extra in range(0, 24 << 20, 1 << 20):
            resource.setrlimit(resource.RLIMIT_AS, (used + extra, resource.RLIM_INFINITY))
            pools.pop()
            begin = time.monotonic()
            try:
                device.alloc(64 << 20)
            except MemoryError:
                pass
            worst = max(worst, time.monotonic() - begin)
        print(worst < 5)
        """,
        timeout=100,
    )
    assert run.returncode == 0 and run.stdout == "True\n", (run.stdout, run.stderr)


def test_threads_that_give_back_with_short_limits(device: kvswap.Device) -> None:
    """What raised TimeoutError has changed nothing, or is told when it is called again."""
    failed: list[BaseException] = []
    end = time.monotonic() + 2

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        limits = iter(lambda: float(random.choice([0, 0.0001, 0.001, 0.01])), None)
        try:
            while time.monotonic() < end:
                array, ptr = np.zeros(8192, np.uint8), memory.host_alloc(4096, device=device)
                device.register(array)
                testing.delay(device, float(random.random()) * 0.002, kvswap.Stream(device))
                until_done(lambda timeout, array=array: device.unregister(array, timeout), limits)
                until_done(lambda timeout, ptr=ptr: memory.host_free(ptr, timeout=timeout), limits)
                until_done(device.alloc(4096).free, limits)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failed


# -- dropping ---------------------------------------------------------------------------------------------------------


def is_known(device: kvswap.Device, ptr: int) -> bool:
    """As an allocation: once it is freed, the process may map something else there."""
    try:
        found = seam(device, "pointer_query", ptr)
    except ValueError:
        return False
    return found["base"] == ptr and found["buffer_id"] != 0


def await_freed(device: kvswap.Device, ptr: int) -> None:
    end = time.monotonic() + PATIENCE
    while is_known(device, ptr):
        assert time.monotonic() < end, "what was dropped was never freed"
        time.sleep(0.005)


class Cycle:
    """Only the collector can free it."""

    def __init__(self, held: Any) -> None:
        self.held, self.itself = held, self


@pytest.mark.parametrize("where", ["here", "in another thread"])
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_the_collector_drops_memory_at_a_closed_gate(device: kvswap.Device, where: str, host: bool) -> None:
    """As Python 3.13 does, at any allocation."""
    gc.collect()
    with Gate(device) as gate:
        stream = kvswap.Stream(device)
        gate.hold(stream)
        memory_of = device.alloc(4096, host=host)
        ptr, cycle = memory_of.ptr, Cycle(memory_of)
        kvswap.swap_blocks_batch([device.alloc(4096)], [ptr], 4096, stream=stream, device=device, path="dma")
        del memory_of, cycle
        thread = threading.Thread(target=gc.collect)
        start = time.monotonic()
        if where == "here":
            gc.collect()
        else:
            thread.start()
            thread.join(PATIENCE)
        assert time.monotonic() - start < AT_ONCE
        assert is_known(device, ptr), "freed although a transfer was to use it"
    await_freed(device, ptr)


DROPS: dict[str, Callable[[Stuck], Any]] = {
    "Memory": lambda stuck: stuck.device.alloc(4096),
    "Memory of the host": lambda stuck: stuck.device.alloc(4096, host=True),
    "Memory of chunks": lambda stuck: stuck.device.alloc(1 << 20, chunks=True),
    "HostPool": host_pool,
    "HostPool that is populated": lambda stuck: host_pool(stuck, wait=False),
    "SharedPool": lambda stuck: memory.SharedPool(f"waits-{os.getpid()}", 8, 4096, device=stuck.device),
    "Mapped": lambda stuck: memory.open(exported(stuck.stack.enter_context(exporter(stuck.name))), device=stuck.device),
    "Pool": lambda stuck: kvswap.Pool(stuck.device, stuck.device.alloc(4096), 1, 4096),
    "Stream": lambda stuck: kvswap.Stream(stuck.device),
    "Event": lambda stuck: kvswap.Event(stuck.device),
    "FileStore": lambda stuck: FileStore(stuck.folder / "s", Layout(4096), capacity=1 << 20, device=stuck.device),
    "Device": lambda stuck: kvswap.Device(stuck.name),
}
DROPPED_IN_USE: dict[str, Callable[[Stuck], Any]] = {
    "Transfer": lambda stuck: stuck.transfer(stuck.host()),
    "_PatternJob": pattern,
    "FileTransfer": lambda stuck: file_put(stuck)[1],
    "FileStore": lambda stuck: file_put(stuck)[0],
    "Event": lambda stuck: [event := kvswap.Event(stuck.device), event.record(stuck.hold())],
    "Stream": lambda stuck: stuck.hold(),
}


@pytest.mark.parametrize("name", sorted(DROPS))
def test_dropping_waits_for_nothing(stuck: Stuck, name: str) -> None:
    held = [DROPS[name](stuck)]
    stuck.hold()
    assert seconds_of(held.clear) < AT_ONCE
    gc.collect()


@pytest.mark.parametrize("name", sorted(DROPPED_IN_USE))
def test_dropping_what_is_in_use_waits_for_nothing(stuck: Stuck, name: str) -> None:
    held = [DROPPED_IN_USE[name](stuck)]
    assert seconds_of(held.clear) < AT_ONCE
    gc.collect()


def test_what_was_dropped_is_freed_when_the_work_has_ended(device: kvswap.Device) -> None:
    with Gate(device) as gate:
        gate.hold(stream := kvswap.Stream(device))
        held = [device.alloc(4096, host=i % 2 == 1) for i in range(20)] + [device.alloc(1 << 20, chunks=True)]
        ptrs = [one.ptr for one in held]
        held.clear()
        time.sleep(0.05)
        assert all(is_known(device, ptr) for ptr in ptrs)
    del stream
    for ptr in ptrs:
        await_freed(device, ptr)


def test_pools_that_were_dropped_give_their_memory_back(device: kvswap.Device) -> None:
    with Gate(device) as gate:
        gate.hold(stream := kvswap.Stream(device))
        pools = [memory.HostPool(8, 4096, device=device) for _ in range(3)]
        ptrs = [pool.ptr for pool in pools]
        pools.clear()
        gc.collect()
        assert all(is_known(device, ptr) for ptr in ptrs)
    del stream
    for ptr in ptrs:
        await_freed(device, ptr)


def test_a_device_that_runs_step_by_step_frees_what_is_dropped() -> None:
    device = testing.deterministic_device(7)
    host, gpu = np.zeros(4096, np.uint8), device.alloc(4096)
    ptr, transfer = gpu.ptr, kvswap.swap_blocks_batch([gpu], [host], 4096, device=device)
    del gpu
    transfer.wait(PATIENCE)
    del transfer
    device.alloc(1).free()
    assert not is_known(device, ptr)


def test_a_deterministic_device_that_cannot_go_on_is_dropped() -> None:
    device = testing.deterministic_device(11)
    word = np.zeros(4096, np.uint8)
    device.register(word)
    stream = kvswap.Stream(device)
    seam(device, "wait32", word.ctypes.data, 1, stream.handle)
    gpu = device.alloc(4096)
    held = [kvswap.swap_blocks_batch([gpu], [np.zeros(4096, np.uint8)], 4096, stream=stream, device=device)]
    del gpu, stream
    held.append(device)
    del device
    assert seconds_of(held.clear) < AT_ONCE


def test_leaving_with_memory_that_waits(device_name: str) -> None:
    """The exit has a limit, whatever a stream waits for."""
    run = run_python(
        f"""
        import kvswap
        from conftest import Gate, seam
        device = kvswap.Device({device_name!r})
        gate, stream = Gate(device), kvswap.Stream(device)
        gate.hold(stream)
        held = [device.alloc(4096) for _ in range(4)]
        del held
        late = device.alloc(4096)
        print("leaves", flush=True)
        """,
        timeout=60,
    )
    assert run.returncode == 0 and run.stdout == "leaves\n", run.stderr


# -- peers ------------------------------------------------------------------------------------------------------------


def test_a_stopped_process_holds_up_no_free(device: kvswap.Device, device_name: str) -> None:
    """A stream here waits for its event: freeing other memory is not held up for longer than it may take."""
    make = f"device = kvswap.Device({device_name!r}); stream = kvswap.Stream(device)"
    with Process(make) as other:
        other.do("event = kvswap.Event(device, timing=False, interprocess=True)")
        other.do(
            "import sys; sys.path.insert(0, '.'); from conftest import Gate; gate = Gate(device); gate.hold(stream)"
        )
        data = bytes.fromhex(other.do("event.record(stream)") or other.do("memory.export_event(event).hex()"))
        event = memory.open_event(data, device=device)
        stop(other)
        try:
            stream = kvswap.Stream(device)
            event.wait(stream)
            held = [device.alloc(4096), device.alloc(4096)]
            ptr = held[1].ptr
            with pytest.raises(TimeoutError):
                held[0].free(timeout=0.1)
            assert seconds_of(held.pop) < AT_ONCE
        finally:
            os.kill(other.pid, signal.SIGCONT)
        other.do("gate.open()")
        held[0].free(PATIENCE)
        await_freed(device, ptr)


def send_slowly(connection: socket.socket, data: bytes, every: float, enough: threading.Event) -> None:
    try:
        for byte in data:
            connection.send(bytes([byte]))
            if enough.wait(every):
                break
    except OSError:
        pass
    connection.close()


def test_slow_clients_delay_themselves_alone(device: kvswap.Device, device_name: str) -> None:
    """The server leaves a client after a second: one after the other, six would take six. Of five attempts the best
    counts, since other work on the machine delays all."""
    seconds = []
    with exporter(device_name) as process:
        data = exported(process)
        path, token = data[376:484].rstrip(b"\0").decode(), data[360:376]
        while len(seconds) < 5 and min(seconds, default=9) >= 3:
            with ExitStack() as stack:
                enough = threading.Event()
                for i in range(6):
                    client = stack.enter_context(socket.socket(socket.AF_UNIX))
                    client.connect(path)
                    if i % 2:  # asks, and never reads
                        client.send(b"kvswapQ1" + token)
                    else:
                        thread = threading.Thread(target=send_slowly, args=(client, b"kvswapQ1" + token, 0.3, enough))
                        thread.start()
                        stack.callback(thread.join)
                stack.callback(enough.set)
                seconds.append(seconds_of(lambda: memory.open(data, device=device).close()))
    assert min(seconds) < 3, seconds


def test_a_client_that_says_nothing_is_left_after_a_second(device_name: str) -> None:
    with exporter(device_name) as process:
        path = exported(process)[376:484].rstrip(b"\0").decode()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.settimeout(PATIENCE)
            start = time.monotonic()
            client.send(b"kvswapQ1")
            assert client.recv(1) == b"" and 0.8 < time.monotonic() - start < AT_ONCE


def test_many_clients_at_once(device: kvswap.Device, device_name: str) -> None:
    """More than a server looks after at once, all silent: the next one is served when they have been left."""
    with exporter(device_name) as process, ExitStack() as stack:
        data = exported(process)
        path = data[376:484].rstrip(b"\0").decode()
        for _ in range(40):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(path)
        assert seconds_of(lambda: memory.open(data, device=device).close()) < AT_ONCE


def test_one_that_is_opened_holds_up_no_other(device: kvswap.Device, device_name: str) -> None:
    """While a thread opens memory of a process that is stopped, other memory is opened and closed."""
    failed: list[Exception] = []

    def open_it(data: bytes) -> None:
        try:
            memory.open(data, device=device).close()
        except Exception as error:
            failed.append(error)

    with exporter(device_name) as good, exporter(device_name) as bad:
        data, other = exported(good), exported(bad)
        mapped = memory.open(data, device=device)
        stop(bad)
        try:
            thread = threading.Thread(target=open_it, args=[other])
            thread.start()
            time.sleep(0.2)
            mapped.close(timeout=PATIENCE)
            memory.open(data, device=device).close(timeout=PATIENCE)
            assert thread.is_alive()
        finally:
            os.kill(bad.pid, signal.SIGCONT)
        thread.join(PATIENCE)
        assert not failed


def test_two_threads_open_the_same_chunks(device: kvswap.Device, device_name: str) -> None:
    """Each fetches them; what is mapped is mapped once."""
    with exporter(device_name) as process:
        data = exported(process)
        opened: list[memory.Mapped] = []
        for _ in range(20):
            barrier = threading.Barrier(4)

            def open_it(barrier: threading.Barrier = barrier) -> None:
                barrier.wait(PATIENCE)
                opened.append(memory.open(data, device=device))

            threads = [threading.Thread(target=open_it) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
            assert len(opened) == 4 and len({mapped.ptr for mapped in opened}) == 1
            for mapped in opened:
                mapped.close()
            opened.clear()


def test_a_lock_of_a_stopped_process(device_name: str) -> None:
    """It is about to remove a segment that a dead one left: the limit is below a second."""
    name, setup = f"waits-lock-{os.getpid()}", f"device = kvswap.Device({device_name!r})"
    path = Path(f"/dev/shm/kvswap.{name}")
    try:
        with Process("import fcntl") as holder, Process(setup) as dead, Process(setup) as other:
            dead.do(f"pool = memory.SharedPool({name!r}, 2, 4096, device=device)")
            # Before it dies: after that any process of this machine that opens a pool removes the segment.
            holder.do(f"file = open({str(path)!r})")
            holder.do("fcntl.flock(file, fcntl.LOCK_EX)")
            dead.kill()
            other.do("import time; start = time.monotonic()")
            with pytest.raises(Failed, match="does not go on"):
                other.do(f"memory.SharedPool({name!r}, 2, 4096, device=device)")
            assert other.do("time.monotonic() - start") < AT_ONCE
    finally:
        path.unlink(missing_ok=True)


# -- the suite itself -------------------------------------------------------------------------------------------------


def run_pytest(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    package = Path(kvswap.__file__).resolve().parent.parent
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            str(ROOT / "pyproject.toml"),
            "-p",
            "no:cacheprovider",
            *arguments,
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(package), str(ROOT / "tests")]),
            "PYTEST_ADDOPTS": "",  # which are meant for the outer one
        },
        cwd=ROOT / "tests",  # not where kvswap's sources may lie without what is compiled
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,
    )


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
def test_the_suite_runs_with_sigint_ignored() -> None:
    """As it is for what a shell starts in the background: nohup pytest &."""
    run = run_pytest(
        str(ROOT / "tests" / "core" / "test_transfer.py"),
        *("-k", "test_ctrl_c_in_a_synchronous_call", "--limit", "120"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
def test_a_test_that_hangs_ends_with_its_stacks(tmp_path: Path) -> None:
    test = tmp_path / "test_one.py"
    test.write_text("import time\n\ndef test_that_hangs():\n    time.sleep(1000)\n")
    run = run_pytest("-p", "conftest", "--limit", "1", str(test))
    assert run.returncode == 1 and "Timeout" in run.stderr and "in test_that_hangs" in run.stderr, run.stderr


# -- queries that the driver refuses ----------------------------------------------------------------------------------


def test_a_refused_query_is_no_end(device: kvswap.Device) -> None:
    host, gpu = device.alloc(4096, host=True), device.alloc(4096)
    for nth in (1, 2, 5):
        with Gate(device) as gate:
            gate.hold(stream := kvswap.Stream(device))
            with testing.fault(device, "call", "fail", operation="event_query", nth=nth):
                transfer = kvswap.swap_blocks_batch([gpu], [host], 4096, stream=stream, device=device, path="dma")
                with pytest.raises(TimeoutError):
                    transfer.wait(0.1)
                assert transfer.state == "running" and not transfer.done()
        transfer.wait(PATIENCE)
        assert transfer.state == "done" and transfer.error is None


def test_a_synchronous_call_outlasts_a_refused_query(device: kvswap.Device) -> None:
    host, gpu, stream = device.alloc(4 * 4096, host=True), device.alloc(4 * 4096), kvswap.Stream(device)
    testing.delay(device, 0.2, stream)
    with testing.fault(device, "call", "fail", operation="event_query", nth=1):
        start = time.monotonic()
        kvswap.swap_cache_per_layer(
            gpu, host, 4096, 4, 4, [0, 1], [0, 1], kvswap.Direction.D2H, stream=stream, device=device
        )
    assert time.monotonic() - start > 0.15 and device.stats()["unfinished"] == 0


def test_a_refused_query_ends_no_pattern_and_no_layer(device: kvswap.Device) -> None:
    gpu, host = device.alloc(4096), device.alloc(4096, host=True)
    with Gate(device) as gate:
        gate.hold(stream := kvswap.Stream(device))
        job = write_pattern(device, [gpu.ptr], 4096, [1], stream)
        transfer = kvswap.swap_cache_all_layers_async(
            [gpu], [host], 4096, 1, 1, [0], [0], kvswap.Direction.D2H, stream=stream, device=device, layer_events=True
        )
        with testing.fault(device, "call", "fail", operation="event_query", every=1):
            assert not job.done() and not transfer.layer_done(0) and not transfer.done()
            with pytest.raises(TimeoutError):
                job.result(0.05)
    assert job.result(PATIENCE)[0] == 0
    transfer.wait(PATIENCE)
    assert transfer.layer_done(0)


@pytest.mark.parametrize("name", ["host_free", "host_unregister", "Memory.free of the host", "Device.unregister"])
def test_memory_of_a_deterministic_device_that_another_device_uses(
    device: kvswap.Device, device_name: str, tmp_path: Path, name: str
) -> None:
    """The other device's transfer ends while a call waits for it; nothing signals that to the deterministic device."""
    if device.kind != "host":
        pytest.skip("a GPU does not reach a deterministic device's memory")
    transfers: list[kvswap.Transfer] = []
    with ExitStack() as stack:
        user = Stuck(device, tmp_path, device_name, stack)
        owner = Stuck(testing.deterministic_device(5), tmp_path, "", stack)
        owner.transfer = lambda host: transfers.append(user.transfer(host))  # type: ignore[method-assign]
        call = CALLS[name](owner)
        with pytest.raises(TimeoutError):
            call(timeout=0.05)
        opened = threading.Timer(0.2, user.before[0])
        opened.start()
        call(timeout=PATIENCE)
        assert transfers[0].done()
        opened.join()


# -- files that are cut off -------------------------------------------------------------------------------------------


CUT_ALL_OFF = """
def cut_all_off():
    answers = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            held = os.dup(int(fd))  # the thread that serves others closes some of them
        except OSError:
            continue
        try:
            if "memfd:kvswap" in os.readlink(f"/proc/self/fd/{held}"):
                os.truncate(held, 0)
                answers.append("cut off")
        except OSError as error:
            answers.append(error.errno)
        finally:
            os.close(held)
    return answers
"""


def test_no_process_can_cut_memory_of_a_host_device_off(device: kvswap.Device, device_name: str) -> None:
    """A process with a descriptor of the memory cannot shrink the file: access beyond its end would be a SIGBUS."""
    if device.kind != "host":
        pytest.skip("a GPU's memory lies in no file")
    with exporter(device_name) as process:
        mapped = memory.open(exported(process), device=device)
        process.do("plain = device.alloc(1 << 16); handle = memory.export(plain)")
        process.do(CUT_ALL_OFF)
        answers = process.do("cut_all_off()")
        assert set(answers) == {errno.EPERM}
        assert np.frombuffer(mapped, np.uint8).sum() >= 0
        mapped.close()


def test_waiting_takes_no_processor(device: kvswap.Device) -> None:
    """Whatever is waited for, the thread sleeps. But for a GPU as a whole: the driver's own wait for it spins."""
    cache, stream, event = Cache(device, 4, 64), kvswap.Stream(device), kvswap.Event(device)
    with Gate(device) as gate:
        gate.hold(stream)
        event.record(stream)
        transfer = cache.swap([1], [2], stream=stream)
        waits = [stream.synchronize, event.synchronize, transfer.wait]
        for wait in waits + [device.synchronize] * (device.kind == "host"):
            begin = time.process_time()
            with pytest.raises(TimeoutError):
                wait(0.5)
            assert time.process_time() - begin < 0.25, wait
