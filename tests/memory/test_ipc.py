"""Device memory in other processes: real ones, on the device under test."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from conftest import AT_ONCE, PATIENCE, SANITIZED, Buffer, Gate, bindings, comes_down, random_bytes, run_python
from processes import Failed, Process, no_more_files
from test_leaks import leaks

import kvswap
from kvswap import memory, testing

MIB = 1 << 20


OTHER = """
from conftest import Buffer, Gate, seam
device = kvswap.Device({device!r})
def bytes_at(ptr, nbytes):
    bounce, stream = device.alloc(nbytes, host=True), kvswap.Stream(device)
    seam(device, "copy", bounce.ptr, ptr, nbytes, stream.handle)
    stream.synchronize(60)
    return np.frombuffer(bounce, np.uint8).copy()
def put_at(ptr, data):
    bounce, stream = device.alloc(data.size, host=True), kvswap.Stream(device)
    np.frombuffer(bounce, np.uint8)[:] = data
    seam(device, "copy", ptr, bounce.ptr, data.size, stream.handle)
    stream.synchronize(60)
first = {{*globals(), "first", "name"}}
"""


@pytest.fixture(scope="module")
def kept() -> Iterator[list[Process]]:
    """The other process of the tests before."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.__exit__()


@pytest.fixture
def other(device_name: str, kept: list[Process]) -> Iterator[Process]:
    """Each test has its own on a host device. A GPU's driver takes seconds to come up in a process: there one serves
    all tests, each of which finds nothing of what the others named there."""
    if device_name.startswith("host"):
        with Process(OTHER.format(device=device_name)) as process:
            yield process
        return
    process = kept.pop() if kept else Process(OTHER.format(device=device_name))
    yield process
    process.do("for name in set(globals()) - first: del globals()[name]")
    assert process.do("gc.collect() * 0 + os.getpid()") == process.pid  # no answer to an earlier question
    kept.append(process)


@pytest.fixture
def owner(other: Process) -> Process:
    """It has memory that it can export."""
    other.do("shared = device.alloc(1 << 20)")
    return other


def cycles(device: kvswap.Device) -> int:
    """How often something is done that must not leak. Opening takes a GPU's driver a third of a second."""
    return 200 if device.kind == "host" else 40


@pytest.fixture
def buffer(device: kvswap.Device) -> Buffer:
    return Buffer(device, 4 * MIB)


def hex_of(export: memory.Export) -> str:
    return f"bytes.fromhex('{export.to_bytes().hex()}')"


def wrong(process: Process, code: str, kind: str) -> str:
    """What the other process is told raises such an exception; its text."""
    with pytest.raises(Failed) as failed:
        process.do(code)
    assert kind in failed.value.kinds, failed.value
    return failed.value.text


# -- the right bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset, nbytes", [(0, 4 * MIB), (0, 1), (1, 1), (4097, 70001), (4 * MIB - 3, 3)])
def test_interior_memory_opens_at_the_right_bytes(
    device: kvswap.Device, other: Process, buffer: Buffer, offset: int, nbytes: int
) -> None:
    data = buffer.randomise(7)
    export = memory.export(buffer.ptr + offset, device=device, nbytes=nbytes)
    assert (export.offset, export.nbytes, export.allocation_nbytes) == (offset, nbytes, 4 * MIB)
    assert export.owner == os.getpid() and export.device == device.name
    other.do(f"mapped = memory.open({hex_of(export)})")
    assert other.do("mapped.nbytes, mapped.owner, mapped.local, mapped.alive()") == [nbytes, os.getpid(), False, True]
    there = bytes.fromhex(other.do("bytes_at(mapped.ptr, mapped.nbytes).tobytes().hex()"))
    assert there == data[offset : offset + nbytes].tobytes()
    new = random_bytes(8, nbytes)
    other.do(f"put_at(mapped.ptr, np.frombuffer(bytes.fromhex('{new.tobytes().hex()}'), np.uint8))")
    data[offset : offset + nbytes] = new
    np.testing.assert_array_equal(buffer.get(), data)
    other.do("mapped.close()")


def test_exports_of_one_allocation_are_mapped_once(device: kvswap.Device, other: Process, buffer: Buffer) -> None:
    first = memory.export(buffer.ptr + 256, device=device, nbytes=100)
    second = memory.export(buffer.ptr + MIB, device=device, nbytes=100)
    other.do(f"one, two = memory.open({hex_of(first)}), memory.open({hex_of(second)})")
    assert other.do("two.ptr - one.ptr") == MIB - 256
    other.do("one.close()")
    other.do("bytes_at(two.ptr, 100)")  # the allocation is mapped still
    other.do("ptr = two.ptr; two.close()")
    assert wrong(other, "kvswap.swap_blocks_batch([ptr], [ptr + 50], 20, device=device)", "ValueError")


def test_a_pool_opens_as_a_pool(device: kvswap.Device, other: Process) -> None:
    rows, blocks, row, pitch = 3, 40, 1000, 50_000
    buffer = Buffer(device, rows * pitch)
    data = buffer.randomise(3)
    pool = kvswap.Pool(device, buffer.ptr, blocks, rows * row, stride=1100, rows=rows, pitch=pitch, name="layers")
    other.do(f"mapped = memory.open({hex_of(memory.export(pool, generation=9))}, generation=9)")
    other.do("pool = mapped.pool(name='theirs')")
    assert other.do(
        "[pool.num_blocks, pool.block_nbytes, pool.stride, pool.rows, pool.pitch, pool.name, mapped.generation]"
    ) == [blocks, rows * row, 1100, rows, pitch, "theirs", 9]
    other.do("host = device.alloc(40 * 3000, host=True); own = kvswap.Pool(device, host, 40, 3000)")
    other.do("kvswap.move_blocks(pool, own, [5, 39], [0, 1]).wait(60)")
    there = bytes.fromhex(other.do("bytes(memoryview(host)[:6000]).hex()"))
    block = [b"".join(data[r * pitch + b * 1100 :][:row].tobytes() for r in range(rows)) for b in (5, 39)]
    assert there == b"".join(block)
    other.do("mapped.close()")
    assert "closed" in wrong(other, "kvswap.move_blocks(pool, own, [5], [0])", "Error")
    assert "closed" in wrong(other, "mapped.pool()", "Error")


def test_what_travels_with_a_tensor(device: kvswap.Device, buffer: Buffer, other: Process) -> None:
    class Tensor:
        dtype, shape = "torch.bfloat16", (4, 8, 2)

        def data_ptr(self) -> int:
            return buffer.ptr + 512

        def nbytes(self) -> int:
            return 128

    export = memory.export(Tensor(), device=device)
    assert (export.dtype, export.shape, export.nbytes, export.offset) == ("bfloat16", (4, 8, 2), 128, 512)
    again = memory.Export.from_bytes(export.to_bytes())
    assert again.to_bytes() == export.to_bytes() and again.uuid == export.uuid and "128 bytes" in repr(again)
    other.do(f"mapped = memory.open({hex_of(export)})")
    assert other.do("[mapped.dtype, list(mapped.shape), mapped.device.name]") == ["bfloat16", [4, 8, 2], device.name]
    assert wrong(other, "mapped.pool()", "ValueError")


def test_the_protocols_of_memory(device: kvswap.Device, buffer: Buffer, other: Process) -> None:
    other.do(f"mapped = memory.open({hex_of(memory.export(buffer.memory))})")
    interface = "__array_interface__" if device.kind == "host" else "__cuda_array_interface__"
    assert other.do(f"mapped.{interface}['data'][0] == mapped.ptr == mapped.data_ptr()")
    missing = "__cuda_array_interface__" if device.kind == "host" else "__array_interface__"
    wrong(other, f"mapped.{missing}", "AttributeError")
    if device.kind == "host":
        other.do("view = memoryview(mapped)")
        wrong(other, "mapped.close()", "BufferError")
        other.do("del view")
    else:
        wrong(other, "memoryview(mapped)", "BufferError")
    other.do("mapped.close()")
    other.do("mapped.close()")
    for use in ("mapped.ptr", "mapped.__enter__()"):
        assert "already closed" in wrong(other, use, "Error")
    wrong(other, "memoryview(mapped)", "BufferError")
    assert other.do("mapped.closed, 'closed' in repr(mapped)") == [True, True]


# -- the same process -------------------------------------------------------------------------------------------------


def test_the_same_process_gets_the_plain_memory(device: kvswap.Device, buffer: Buffer) -> None:
    with memory.open(memory.export(buffer.ptr + 7, device=device, nbytes=90), device=device) as mapped:
        assert mapped.local and mapped.ptr == buffer.ptr + 7 and mapped.alive() and mapped.owner == os.getpid()
    assert mapped.closed
    buffer.get()


def test_the_same_process_knows_itself_also_when_no_files_can_be_opened(device: kvswap.Device, buffer: Buffer) -> None:
    """When it started is read from one."""
    export = memory.export(buffer.memory)
    memory.open(export, device=device).close()
    with no_more_files(), memory.open(export, device=device) as mapped:
        assert mapped.local


def test_the_same_process_after_the_memory_was_freed(device: kvswap.Device) -> None:
    freed = device.alloc(4 * MIB)
    data = memory.export(freed).to_bytes()
    freed.free()
    kept = device.alloc(4 * MIB)  # perhaps at the same address
    with pytest.raises(ValueError, match="freed since"):
        memory.open(data, device=device)
    kept.free()


# -- what is refused --------------------------------------------------------------------------------------------------


def test_memory_that_is_not_the_devices(device: kvswap.Device) -> None:
    array, pinned = np.zeros(100, np.uint8), device.alloc(100, host=True)
    for source in (array, pinned):
        with pytest.raises(ValueError, match="not memory of"):
            memory.export(source, device=device)
    gpu = device.alloc(100)
    with pytest.raises(ValueError, match="nbytes"):
        memory.export(gpu.ptr, device=device)
    with pytest.raises(ValueError, match="200, but source has 100"):
        memory.export(gpu, nbytes=200)
    with pytest.raises(ValueError, match="ends after"):
        memory.export(gpu.ptr, device=device, nbytes=10_000_000)
    with pytest.raises(ValueError, match="0 bytes"):
        memory.export(gpu, nbytes=0)
    with pytest.raises(ValueError, match="wraps around"):
        memory.export(device.alloc(100, chunks=True).ptr, device=device, nbytes=2**64 - 1)
    with pytest.raises(ValueError, match="dimensions"):
        memory.export(gpu, shape=[1] * 9)
    with pytest.raises(ValueError, match="dtype"):
        memory.export(gpu, dtype="x" * 16)
    with pytest.raises(ValueError, match="generation"):
        memory.export(gpu, generation=-1)


CASES = {
    "short": (lambda data: data[:-1], "511 bytes instead of 512"),
    "long": (lambda data: data + b"x", "513 bytes instead of 512"),
    "empty": (lambda data: b"", "no export"),
    "other": (lambda data: b"x" * 512, "no export"),
    "damaged": (lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "checksum"),
    "newer": (lambda data: data[:8] + struct.pack("<I", 2) + data[12:], "form 2"),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_that_are_no_export(buffer: Buffer, case: str) -> None:
    change, text = CASES[case]
    data = change(memory.export(buffer.memory).to_bytes())
    for call in (memory.Export.from_bytes, memory.open):
        with pytest.raises(ValueError, match=text):
            call(data)


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


# Places in the form, as docs/ipc.md has them.
FIELDS = {"pid": 24, "start": 32, "generation": 40, "allocation_nbytes": 48, "offset": 56, "nbytes": 64, "nchunks": 128}
FIELDS |= {"uuid": 200, "token": 360, "socket": 376}


def changed(data: bytes, field: str, value: int) -> bytes:
    at = FIELDS[field]
    data = data[:at] + struct.pack("<Q", value) + data[at + 8 : 508]
    return data + struct.pack("<I", crc32c(data))


def named(data: bytes, path: str) -> bytes:
    """With another socket."""
    data = data[: FIELDS["socket"]] + path.encode().ljust(108, b"\0") + data[FIELDS["socket"] + 108 : 508]
    return changed(data + bytes(4), "generation", struct.unpack_from("<Q", data, FIELDS["generation"])[0])


def told(process: Process, data: bytes) -> str:
    return f"memory.open(bytes.fromhex('{data.hex()}'), device=device)"


def test_the_sum_is_crc_32c(buffer: Buffer) -> None:
    data = memory.export(buffer.memory).to_bytes()
    assert crc32c(b"123456789") == 0xE3069283
    assert struct.unpack("<I", data[508:])[0] == crc32c(data[:508])


def test_wrong_sizes(buffer: Buffer, other: Process) -> None:
    data = memory.export(buffer.memory).to_bytes()
    assert "at byte" in wrong(other, told(other, changed(data, "nbytes", 4 * MIB + 1)), "ValueError")
    assert "at byte" in wrong(other, told(other, changed(data, "offset", 1)), "ValueError")
    assert "at byte" in wrong(other, told(other, changed(data, "offset", (1 << 64) - 1)), "ValueError")
    text = wrong(other, told(other, changed(data, "allocation_nbytes", 1 << 40)), "DeviceError")
    assert f"has {4 * MIB} bytes" in text


def test_a_wrong_device(buffer: Buffer, other: Process) -> None:
    data = changed(memory.export(buffer.memory).to_bytes(), "uuid", 12345)
    assert "UUID" in wrong(other, told(other, data), "ValueError")


def test_a_wrong_generation(buffer: Buffer, other: Process) -> None:
    export = memory.export(buffer.memory, generation=3)
    text = wrong(other, f"memory.open({hex_of(export)}, generation=4)", "ValueError")
    assert "generation 3" in text and "4 is expected" in text
    other.do(f"memory.open({hex_of(export)}, generation=3).close()")
    with pytest.raises(ValueError, match="4 is expected"):
        memory.open(export, generation=4)


def test_memory_that_was_freed(device: kvswap.Device, other: Process) -> None:
    if device.kind != "host":
        pytest.skip("a GPU's driver may have given the same memory to a new allocation")
    freed = device.alloc(4 * MIB)
    export = memory.export(freed)
    export.close()
    freed.free()
    kept = device.alloc(4 * MIB)
    assert "freed since" in wrong(other, f"memory.open({hex_of(export)})", "DeviceError")
    kept.free()


@pytest.mark.parametrize(("chunks", "why"), [(False, "user"), (True, "Permission denied")])
def test_another_user_is_refused(session_device: kvswap.Device, chunks: bool, why: str) -> None:
    if session_device.kind != "host":
        pytest.skip("the driver's own to refuse")
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    export = memory.export(session_device.alloc(1 << 17, chunks=chunks))
    run = run_python(
        f"""
        import os, kvswap
        from kvswap import memory
        kvswap.Device("host:0")
        os.setuid(65534)
        try:
            memory.open(bytes.fromhex("{export.to_bytes().hex()}"))
        except kvswap.Error as error:
            print(type(error).__name__, "refused:", error)
        """
    )
    assert run.returncode == 0 and "refused:" in run.stdout and why in run.stdout, run
    assert chunks or run.stdout.startswith("DeviceError")


# -- an owner that ends -----------------------------------------------------------------------------------------------


def exporting(device_name: str) -> Process:
    return Process(f"device = kvswap.Device({device_name!r}); shared = device.alloc(1 << 20)")


def export_of(owner: Process) -> bytes:
    return bytes.fromhex(owner.do("memory.export(shared).to_bytes().hex()"))


def test_a_dead_owner_is_an_error(device: kvswap.Device, device_name: str) -> None:
    with exporting(device_name) as owner:
        data = export_of(owner)
        owner.kill()
        with pytest.raises(kvswap.Error, match="has ended"):
            memory.open(data, device=device)


def test_a_later_process_with_the_same_number_is_not_the_owner(device: kvswap.Device, owner: Process) -> None:
    data = export_of(owner)
    start = struct.unpack("<Q", data[32:40])[0]
    with pytest.raises(kvswap.Error, match="has ended"):
        memory.open(changed(data, "start", start - 1), device=device)
    memory.open(data, device=device).close()


def test_an_owner_lives_also_when_no_files_can_be_opened(device: kvswap.Device, owner: Process) -> None:
    """When it was born is read from a file."""
    mapped = memory.open(bytes.fromhex(owner.do("memory.export(shared).to_bytes().hex()")), device=device)
    with no_more_files():
        assert mapped.alive()
    mapped.close()


def test_an_owner_that_is_killed_while_its_memory_is_open(device: kvswap.Device, device_name: str) -> None:
    if device.kind != "host":
        pytest.skip("what a GPU's driver does with the memory of a dead process is its own")
    with exporting(device_name) as owner:
        owner.do("np.frombuffer(shared, np.uint8)[:] = 5")
        owner.do("pool = kvswap.Pool(device, shared, 16, 65536)")
        data = bytes.fromhex(owner.do("memory.export(pool).to_bytes().hex()"))
        mapped = memory.open(data, device=device)
        assert mapped.alive()
        os.kill(owner.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while mapped.alive() and time.monotonic() < deadline:  # also while it is a zombie
            time.sleep(0.01)
        assert not mapped.alive()
        with pytest.raises(kvswap.Error, match="has ended"):
            mapped.pool()
        assert (np.frombuffer(mapped, np.uint8) == 5).all()
        mapped.close()


# -- closing ----------------------------------------------------------------------------------------------------------


def test_closing_waits_for_copies(device: kvswap.Device, owner: Process) -> None:
    with Gate(device) as gate:
        mapped = memory.open(export_of(owner), device=device)
        host, stream = device.alloc(MIB, host=True), kvswap.Stream(device)
        gate.hold(stream)
        transfer = kvswap.swap_blocks_batch([mapped], [host], MIB, stream=stream, device=device)
        with pytest.raises(TimeoutError):
            mapped.close(timeout=0.2)
        assert not mapped.closed and mapped.ptr and not transfer.done()
        threading.Timer(0.3, gate.open).start()
        mapped.close()
        assert transfer.done() and mapped.closed
        transfer.wait(PATIENCE)


def test_closing_when_the_device_cannot_be_waited_for(device: kvswap.Device, owner: Process) -> None:
    mapped = memory.open(export_of(owner), device=device)
    ptr = mapped.ptr
    fault = testing.fault(device, "call", "fail", operation="synchronize")
    with fault, pytest.raises(kvswap.DeviceError, match="injected"):
        mapped.close()
    assert not mapped.closed and mapped.ptr == ptr
    mapped.close()
    assert not is_mapped(device, ptr)


def test_closing_when_no_thread_can_be_started(device: kvswap.Device, device_name: str) -> None:
    """The work is waited for in one. It stays open then, and can be closed."""
    if SANITIZED:
        pytest.skip("a sanitizer needs room of its own")
    export = memory.export(device.alloc(MIB))
    with Process(f"device = kvswap.Device({device_name!r}); mapped = memory.open({hex_of(export)})") as other:
        other.do(
            """
            import resource
            limits = resource.getrlimit(resource.RLIMIT_AS)
            room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
            """
        )
        assert "no thread" in wrong(other, "mapped.close()", "MemoryError")
        other.do("resource.setrlimit(resource.RLIMIT_AS, limits)")
        assert not other.do("mapped.closed")
        other.do("ptr = mapped.ptr; mapped.close()")
        assert wrong(other, "kvswap.swap_blocks_batch([ptr], [ptr + 50], 20, device=device)", "ValueError")


def close_behind_work(device: kvswap.Device, data: bytes) -> None:
    mapped, stream = memory.open(data, device=device), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)
        bindings.seam(device, "fill", mapped.ptr, 3, 10, stream.handle)
        with pytest.raises(TimeoutError):
            mapped.close(timeout=0.1)
        gate.open()
        mapped.close()


def test_closing_waits_for_other_work(device: kvswap.Device, owner: Process) -> None:
    """Kernels of the model, say: the device's, not ours."""
    close_behind_work(device, export_of(owner))


def test_closing_again_waits_for_what_came_meanwhile(device: kvswap.Device, owner: Process) -> None:
    """No longer than it is told: the memory was in use again after the first time."""
    mapped, stream = memory.open(export_of(owner), device=device), kvswap.Stream(device)
    gates = [Gate(device), Gate(device)]  # kept: freeing the first would wait for the second
    openers = [threading.Timer(PATIENCE, gate.open) for gate in gates]
    for gate, opener in zip(gates, openers, strict=True):
        with gate:
            gate.hold(stream)
            bindings.seam(device, "fill", mapped.ptr, 3, 10, stream.handle)
            opener.start()
            with pytest.raises(TimeoutError):
                mapped.close(timeout=0.1)
            opener.cancel()
    mapped.close()


def test_a_dropped_mapping_goes_when_it_can(device: kvswap.Device, owner: Process) -> None:
    with Gate(device) as gate:
        mapped = memory.open(export_of(owner), device=device)
        ptr, host, stream = mapped.ptr, device.alloc(MIB, host=True), kvswap.Stream(device)
        gate.hold(stream)
        transfer = kvswap.swap_blocks_batch(
            np.array([ptr]), np.array([host.ptr]), MIB, stream=stream, device=device
        )  # by address: nothing holds the mapping
        del mapped
        kept = device.alloc(64)  # would free what is not in use
        gate.open()
        transfer.wait(PATIENCE)
        device.synchronize(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while is_mapped(device, ptr) and time.monotonic() < deadline:
            kept = device.alloc(kept.nbytes)
        with pytest.raises(ValueError, match="not mapped"):
            kvswap.swap_blocks_batch(np.array([ptr]), np.array([host.ptr]), MIB, device=device)


def is_mapped(device: kvswap.Device, ptr: int) -> bool:
    """As the device sees it."""
    try:
        bindings.seam(device, "pointer_query", ptr)
    except ValueError:
        return False
    return True


def count_of(folder: str) -> int:
    return len(os.listdir(folder))


def open_files() -> int:
    return count_of("/proc/self/fd")


def test_cycles_leak_nothing(device: kvswap.Device, owner: Process) -> None:
    def cycle(data: bytes) -> None:
        with memory.open(data, device=device) as mapped:
            host = device.alloc(4096, host=True)
            kvswap.swap_blocks_batch([mapped], [host], 4096, device=device).wait(PATIENCE)
            host.free()
        with suppress(ValueError):
            memory.open(data, device=device, generation=7)

    data = export_of(owner)
    for _ in range(20):
        cycle(data)
    before = count_of("/proc/self/fd"), mappings_of_this_process(), kib_of_this_process()
    theirs = owner.do(f"len(os.listdir('/proc/{owner.pid}/fd'))")
    for _ in range(cycles(device)):
        cycle(data)
    assert comes_down(open_files, before[0]) and mappings_of_this_process() < before[1] + 20
    assert kib_of_this_process() < before[2] + 8 * 1024
    assert comes_down(lambda: owner.do(f"len(os.listdir('/proc/{owner.pid}/fd'))"), theirs)


def mappings_of_this_process() -> int:
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def kib_of_this_process() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def test_exporting_and_freeing_leaks_no_memory(device: kvswap.Device) -> None:
    if device.kind != "host":
        pytest.skip("the driver's own memory")

    def cycle() -> None:
        shared = device.alloc(MIB)
        np.frombuffer(shared, np.uint8)[:] = 1
        memory.export(shared)
        shared.free()

    def shared_kib() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))

    cycle()
    files, kib = count_of("/proc/self/fd"), shared_kib()
    blocks = [os.stat(f"/proc/self/fd/{fd}").st_blocks for fd in arenas()]
    for _ in range(200):
        cycle()
    assert comes_down(open_files, files) and shared_kib() <= kib + 64
    assert [os.stat(f"/proc/self/fd/{fd}").st_blocks for fd in arenas()] == blocks


def test_calls_leak_nothing(device: kvswap.Device, owner: Process, buffer: Buffer) -> None:
    """As test_leaks looks at all other calls, right ones and wrong ones."""
    if SANITIZED:
        pytest.skip("a sanitizer keeps what is freed")

    def calls() -> None:
        export = memory.export(buffer.memory, dtype="bfloat16", shape=(2, 3))
        with memory.open(memory.Export.from_bytes(export.to_bytes()), device=device) as mapped:
            mapped.shape, mapped.dtype, mapped.device, repr(mapped), repr(export)
            with suppress(ValueError):
                mapped.pool()
        with memory.open(data, device=device) as mapped:
            mapped.pool()
        for wrong in (lambda: memory.open(b""), lambda: memory.open(data, generation=5)):
            with suppress(ValueError):
                wrong()
        for member in ("memory_open", "memory_share"):
            with testing.fault(device, "call", "fail", operation=member), suppress(kvswap.DeviceError):
                memory.export(buffer.memory)
                memory.open(data, device=device)

    owner.do("shared = kvswap.Pool(device, device.alloc(4096), 64, 64)")
    data = export_of(owner)
    assert leaks(device, calls, cycles(device)) == {}


def test_a_program_that_closes_all_descriptors(device_name: str) -> None:
    """Its own files, which then have the numbers of ours, are neither written to nor shared nor closed."""
    if not device_name.startswith("host"):
        pytest.skip("the driver's own descriptors")
    run = run_python(
        f"""
        import os, kvswap, numpy as np, tempfile
        from kvswap import memory
        device = kvswap.Device({device_name!r})
        old, chunks = device.alloc(1 << 20), device.alloc(1 << 18, chunks=True)
        np.frombuffer(old, np.uint8)[:] = 1
        served = memory.export(chunks)
        kinds = "memfd:kvswap", "socket:", "[eventfd]"
        ours = [int(fd) for fd in os.listdir("/proc/self/fd") if fd.isdigit() and int(fd) > 2
                and any(kind in os.path.realpath(f"/proc/self/fd/{{fd}}") for kind in kinds)]
        assert len(ours) >= 4
        files = []
        for fd in ours:
            files.append(open(tempfile.mkstemp()[1], "w+b"))
            os.dup2(files[-1].fileno(), fd)
            files[-1].write(b"mine" * 2000), files[-1].flush()
        for source in (old, chunks):
            try:
                memory.export(source)
                print("exported")
            except kvswap.DeviceError as error:
                assert "closed" in str(error), error
        served.close()
        new = device.alloc(1 << 20)
        np.frombuffer(new, np.uint8)[:] = 2
        memory.export(new)
        assert (np.frombuffer(old, np.uint8) == 1).all()
        old.free(), chunks.free(), new.free()
        for fd, file in zip(ours, files):
            assert os.fstat(fd).st_ino == os.fstat(file.fileno()).st_ino
            file.seek(0)
            assert file.read() == b"mine" * 2000
            os.unlink(file.name)
        print("fine")
        """
    )
    assert run.stdout == "fine\n", run


def arenas() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "memfd:kvswap" in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(fd)
    return sorted(found, key=int)


@pytest.mark.not_sanitized("processes that are killed, for seconds: what they run, other tests run under sanitizers")
@pytest.mark.slow
def test_processes_that_are_killed_in_the_middle(device: kvswap.Device, buffer: Buffer, device_name: str) -> None:
    """Whenever an opener dies, its owner goes on, and the next one opens the right bytes."""
    data = buffer.randomise(5)
    export = memory.export(buffer.ptr + 100, device=device, nbytes=1000)
    for i in range(6 if device.kind == "host" else 2):
        with Process(f"device = kvswap.Device({device_name!r})") as victim:
            victim.tell(
                f"""
                while True:
                    with memory.open({hex_of(export)}) as mapped:
                        host = device.alloc(1000, host=True)
                        kvswap.swap_blocks_batch([mapped], [host], 1000, device=device).wait(60)
                """
            )
            time.sleep(0.05 + 0.03 * i)
            victim.kill()
        np.testing.assert_array_equal(buffer.get(), data)
    with Process(f"device = kvswap.Device({device_name!r})") as last:
        last.do(f"mapped = memory.open({hex_of(export)}); host = device.alloc(1000, host=True)")
        last.do("kvswap.swap_blocks_batch([mapped], [host], 1000, device=device).wait(60)")
        assert bytes.fromhex(last.do("bytes(memoryview(host)).hex()")) == data[100:1100].tobytes()


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_driver_that_refuses(device: kvswap.Device, owner: Process, buffer: Buffer) -> None:
    with testing.fault(device, "call", "fail", operation="memory_share"), pytest.raises(kvswap.DeviceError):
        memory.export(buffer.memory)
    data = export_of(owner)
    with testing.fault(device, "call", "fail", operation="memory_open"), pytest.raises(kvswap.DeviceError):
        memory.open(data, device=device)
    mapped = memory.open(data, device=device)
    mapped.close()


def test_a_forked_child_cannot_use_what_its_parent_opened(device_name: str) -> None:
    if not device_name.startswith("host"):
        pytest.skip("a GPU does not survive fork()")
    run = run_python(
        f"""
        import os, warnings
        warnings.simplefilter("ignore")
        import kvswap
        from processes import Process
        from kvswap import memory
        device = kvswap.Device({device_name!r})
        with Process("device = kvswap.Device({device_name!r}); shared = device.alloc(1 << 20)") as owner:
            data = bytes.fromhex(owner.do("memory.export(shared).to_bytes().hex()"))
            mapped, own = memory.open(data), device.alloc(64)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    for call in (mapped.close, lambda: memory.export(own)):
                        try:
                            call()
                        except kvswap.Error as error:
                            assert "fork" in str(error), error
                    with memory.open(data, device=kvswap.Device({device_name!r})) as again:
                        assert again.nbytes == 1 << 20
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            mapped.close()
            print("fine")
        """
    )
    assert run.stdout == "fine\n", run


# -- events -----------------------------------------------------------------------------------------------------------


def shared_event(device: kvswap.Device) -> tuple[kvswap.Event, str]:
    event = kvswap.Event(device, interprocess=True)
    return event, f"bytes.fromhex('{memory.export_event(event).hex()}')"


def test_a_stream_waits_for_another_process(device: kvswap.Device, other: Process, buffer: Buffer) -> None:
    """Written here behind a gate, read there behind the event: never the old bytes."""
    event, data = shared_event(device)
    other.do(f"mapped, event = memory.open({hex_of(memory.export(buffer.memory))}), memory.open_event({data})")
    other.do("host, stream = device.alloc(4096, host=True), kvswap.Stream(device)")
    stream = kvswap.Stream(device)
    for round in range(1, 4):
        with Gate(device) as gate:
            gate.hold(stream)
            bindings.seam(device, "fill", buffer.ptr, round, 1024, stream.handle)
            event.record(stream)
            other.do("event.wait(stream)")
            other.do("copied = kvswap.swap_blocks_batch([mapped], [host], 4096, stream=stream, device=device)")
            time.sleep(0.05)
            assert other.do("[event.query(), copied.done()]") == [False, False]
        other.do("copied.wait(60); event.synchronize(60)")
        assert other.do("np.frombuffer(host, np.uint32).tolist()") == [round] * 1024
        event.synchronize(PATIENCE)


def test_the_other_way_round(device: kvswap.Device, other: Process) -> None:
    """An opened event is recorded there and waited for here."""
    event, data = shared_event(device)
    other.do(f"event, stream = memory.open_event({data}), kvswap.Stream(device)")
    other.do("gate = Gate(device); gate.hold(stream); event.record(stream)")
    stream, after = kvswap.Stream(device), kvswap.Event(device)
    event.wait(stream)
    after.record(stream)
    time.sleep(0.05)
    assert not after.query() and not event.query()
    with pytest.raises(TimeoutError):
        event.synchronize(0.05)
    other.do("gate.open()")
    after.synchronize(PATIENCE)
    event.synchronize(PATIENCE)
    other.do("del gate")


def test_recording_again_moves_no_wait(device: kvswap.Device, other: Process) -> None:
    event, data = shared_event(device)
    assert event.query()  # never recorded
    other.do(f"event, stream, after = memory.open_event({data}), kvswap.Stream(device), kvswap.Event(device)")
    assert other.do("event.query()")
    fast, slow = kvswap.Stream(device), kvswap.Stream(device)
    event.record(fast)
    event.synchronize(PATIENCE)
    other.do("event.wait(stream); after.record(stream)")
    with Gate(device) as gate:
        gate.hold(slow)
        event.record(slow)
        other.do("after.synchronize(60)")
        assert not other.do("event.query()")
    other.do("event.synchronize(60)")


def test_a_wait_is_for_one_recording_and_not_for_a_later_one_that_is_reached_first(
    device: kvswap.Device, other: Process
) -> None:
    event, data = shared_event(device)
    other.do(f"event, stream, after = memory.open_event({data}), kvswap.Stream(device), kvswap.Event(device)")
    fast, slow = kvswap.Stream(device), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(slow)
        event.record(slow)
        other.do("event.wait(stream); after.record(stream)")
        event.record(fast)
        if device.kind == "host":  # an H200's driver has the later recording wait for the earlier one
            event.synchronize(PATIENCE)
            assert other.do("event.query()")
            time.sleep(0.03)
            assert not other.do("after.query()")
    other.do("after.synchronize(60)")


def test_a_recording_whose_process_is_killed_holds_nobody_up(device: kvswap.Device, device_name: str) -> None:
    if device.kind != "host":
        pytest.skip("what a GPU's driver does then is its own")
    event, data = shared_event(device)
    with Process("from conftest import Gate") as victim:
        victim.do(f"device = kvswap.Device({device_name!r}); stream = kvswap.Stream(device); gate = Gate(device)")
        victim.do(f"event = memory.open_event({data}); gate.hold(stream); event.record(stream)")
        stream, after = kvswap.Stream(device), kvswap.Event(device)
        event.wait(stream)
        after.record(stream)
        time.sleep(0.1)
        assert not after.query()
        victim.kill()
        after.synchronize(PATIENCE)
        event.synchronize(PATIENCE)


def test_a_recording_counts_also_when_no_files_can_be_opened(device: kvswap.Device, other: Process) -> None:
    """Whether its process lives is read from one."""
    event, data = shared_event(device)
    other.do(f"event, stream = memory.open_event({data}), kvswap.Stream(device)")
    other.do("gate = Gate(device); gate.hold(stream); event.record(stream)")
    with no_more_files():
        assert not event.query()
    other.do("gate.open()")
    event.synchronize(PATIENCE)
    other.do("del gate")


def test_at_most_64_unfinished_recordings(device: kvswap.Device) -> None:
    if device.kind != "host":
        pytest.skip("a limit of host devices")
    event, stream = kvswap.Event(device, interprocess=True), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)
        for _ in range(64):
            event.record(stream)
        with pytest.raises(kvswap.DeviceError, match="64 recordings"):
            event.record(stream)
    event.synchronize(PATIENCE)
    event.record(stream)
    event.synchronize(PATIENCE)


def test_events_that_cannot_be_shared(device: kvswap.Device, buffer: Buffer) -> None:
    plain, (event, _) = kvswap.Event(device), shared_event(device)
    with pytest.raises(kvswap.DeviceError):
        memory.export_event(plain)
    with pytest.raises(ValueError, match="the event itself"):
        memory.open_event(memory.export_event(event))
    with pytest.raises(ValueError, match="not of an event"):
        memory.open_event(memory.export(buffer.memory).to_bytes())
    with pytest.raises(ValueError, match="not of memory"):
        memory.open(memory.export_event(event))
    with pytest.raises(ValueError, match="timing"):
        kvswap.Event(device, timing=True, interprocess=True)
    with pytest.raises(TypeError, match=r"kvswap\.Event"):
        memory.export_event(3)
    with pytest.raises(TypeError, match="export must be an Export or its bytes, not str"):
        memory.open("abc")
    with pytest.raises(kvswap.DeviceError):
        event.elapsed_time(plain)


def test_an_event_of_a_dead_owner(device: kvswap.Device, device_name: str) -> None:
    with Process(f"event = kvswap.Event({device_name!r}, interprocess=True)") as owner:
        data = bytes.fromhex(owner.do("memory.export_event(event).hex()"))
        memory.open_event(data, device=device)
        owner.kill()
        with pytest.raises(kvswap.Error, match="has ended"):
            memory.open_event(data, device=device)


def test_events_leak_nothing(device: kvswap.Device, owner: Process) -> None:
    owner.do("event = kvswap.Event(device, interprocess=True)")
    data, stream = bytes.fromhex(owner.do("memory.export_event(event).hex()")), kvswap.Stream(device)

    def cycle() -> None:
        event = memory.open_event(data, device=device)
        event.record(stream)
        event.wait(stream)
        event.synchronize(PATIENCE)
        memory.export_event(kvswap.Event(device, interprocess=True))

    for _ in range(10):
        cycle()
    stream.synchronize(PATIENCE)
    before = count_of("/proc/self/fd"), mappings_of_this_process()
    for _ in range(cycles(device)):
        cycle()
    stream.synchronize(PATIENCE)
    assert comes_down(open_files, before[0]) and mappings_of_this_process() < before[1] + 20


# -- memory in chunks -------------------------------------------------------------------------------------------------


@pytest.fixture
def chunked(device: kvswap.Device) -> Buffer:
    """Several chunks, the last of them shorter."""
    granule = bindings.seam(device, "chunk_granularity")
    buffer = Buffer(device, 4096)
    nbytes = 35 * granule - 100
    buffer.memory = device.alloc(nbytes, chunks=True)
    buffer.ptr, buffer.nbytes = buffer.memory.ptr, nbytes
    if buffer.bounce is not None:
        buffer.bounce = device.alloc(nbytes, host=True)
    return buffer


def chunk_count(export: memory.Export) -> int:
    return int(struct.unpack("<Q", export.to_bytes()[FIELDS["nchunks"] :][:8])[0])


def test_chunks_open_at_the_right_bytes(device: kvswap.Device, other: Process, chunked: Buffer) -> None:
    data = chunked.randomise(11)
    granule = bindings.seam(device, "chunk_granularity")
    chunk = 16 * granule
    for offset, nbytes, chunks in [
        (0, chunked.nbytes, 3),
        (5, 100, 1),
        (chunk - 3, 6, 2),
        (chunk + 1, 2 * chunk - 50, 2) if 2 * chunk + 1 < chunked.nbytes - chunk else (chunk + 1, chunk, 2),
        (2 * chunk, 1, 1),
    ]:
        export = memory.export(chunked.ptr + offset, device=device, nbytes=nbytes)
        assert chunk_count(export) == chunks
        other.do(f"mapped = memory.open({hex_of(export)})")
        other.do("import hashlib")
        there = other.do("hashlib.sha256(bytes_at(mapped.ptr, mapped.nbytes).tobytes()).hexdigest()", 120)
        assert there == hashlib.sha256(data[offset : offset + nbytes].tobytes()).hexdigest()
        other.do("put_at(mapped.ptr, np.full(1, 7, np.uint8)); mapped.close()")
        data[offset] = 7
    np.testing.assert_array_equal(chunked.get(), data)


def test_a_pool_in_chunks(device: kvswap.Device, other: Process, chunked: Buffer) -> None:
    """Copies of rows go across chunks."""
    data = chunked.randomise(12)
    nbytes = chunked.nbytes // 50
    pool = kvswap.Pool(device, chunked.memory, 50, nbytes, stride=nbytes)
    export = memory.export(pool)
    other.do(f"mapped = memory.open({hex_of(export)}); pool = mapped.pool()")
    other.do(f"host = device.alloc(50 * {nbytes}, host=True); own = kvswap.Pool(device, host, 50, {nbytes})")
    for path in ("dma", "kernel", "auto"):
        if path == "kernel" and not device.info["kernels"]:
            continue
        other.do(f"kvswap.move_blocks(pool, own, np.arange(50), np.arange(50)[::-1], path={path!r}).wait(60)")
        sums = other.do("import zlib") or other.do(
            f"[zlib.crc32(memoryview(host)[i * {nbytes}:][:{nbytes}]) for i in range(50)]"
        )
        assert sums == [zlib.crc32(data[i * nbytes :][:nbytes].tobytes()) for i in range(50)][::-1]
    other.do("mapped.close()")


def test_the_same_process_gets_its_chunks_as_they_are(device: kvswap.Device, chunked: Buffer) -> None:
    export = memory.export(chunked.ptr + 10, device=device, nbytes=100)
    with memory.open(export, device=device) as mapped:
        assert mapped.local and mapped.ptr == chunked.ptr + 10
    export.close()
    export.close()


def test_pools_of_another_device_are_closed_with_the_mapping(device: kvswap.Device, other: Process) -> None:
    """No transfer copies to addresses that may belong to other memory by then."""
    if device.kind != "host":
        pytest.skip("needs two devices that reach each other's memory")
    second = kvswap.Device("host:1")
    other.do("shared = device.alloc(4096)")
    mapped = memory.open(bytes.fromhex(other.do("memory.export(shared).to_bytes().hex()")), device=device)
    pool, own = kvswap.Pool(second, mapped.ptr, 64, 64), kvswap.Pool(second, second.alloc(4096), 64, 64)
    kvswap.move_blocks(pool, own, [1], [2]).wait(PATIENCE)
    mapped.close()
    with pytest.raises(kvswap.Error, match="closed"):
        kvswap.move_blocks(pool, own, [1], [2])


def folder_of_sockets() -> str:
    run = os.environ.get("XDG_RUNTIME_DIR", "")
    return f"{run if run.startswith('/') and os.path.isdir(run) else '/tmp'}/kvswap-{os.geteuid()}"


def test_an_export_serves_as_long_as_it_lives(device: kvswap.Device, other: Process, chunked: Buffer) -> None:
    export = memory.export(chunked.memory)
    folder = folder_of_sockets()
    sockets = [name for name in os.listdir(folder) if name.startswith(f"{os.getpid()}-")]
    assert len(sockets) == 1
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert os.stat(f"{folder}/{sockets[0]}").st_mode & 0o777 == 0o600
    code = f"memory.open({hex_of(export)})"
    other.do(f"mapped = {code}")
    export.close()
    assert not os.path.exists(f"{folder}/{sockets[0]}")
    assert "does not serve" in wrong(other, f"mapped.close() or {code}", "Error")


def test_who_does_not_know_the_token_gets_nothing(device: kvswap.Device, other: Process, chunked: Buffer) -> None:
    export = memory.export(chunked.memory)
    data = changed(export.to_bytes(), "token", 1)
    assert "does not answer" in wrong(other, told(other, data), "Error")
    assert other.do(f"memory.open({hex_of(export)}).close()") is None  # the server goes on


def test_every_byte_of_a_token_is_random(device: kvswap.Device, chunked: Buffer) -> None:
    exports = [memory.export(chunked.memory) for _ in range(40)]
    tokens = [export.to_bytes()[FIELDS["token"] :][:16] for export in exports]
    assert all(len({token[i] for token in tokens}) > 10 for i in range(16))


def socket_of(export: memory.Export) -> str:
    return export.to_bytes()[FIELDS["socket"] :][:108].split(b"\0")[0].decode()


def test_clients_that_misbehave(device: kvswap.Device, other: Process, chunked: Buffer) -> None:
    """Silence, nonsense, half a request, and no interest in the answer: the next one is served."""
    export = memory.export(chunked.memory)
    files = count_of("/proc/self/fd")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(socket_of(export))
        token = export.to_bytes()[FIELDS["token"] :][:16]
        for data in (b"x" * 100, export.to_bytes()[:10], b"kvswapQ1" + token):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(socket_of(export))
                client.send(data)
        start = time.monotonic()
        other.do(f"memory.open({hex_of(export)}).close()")
        assert time.monotonic() - start < AT_ONCE
    export.close()
    assert comes_down(open_files, files - 1)


SERVER = """
import fcntl, socket, struct, threading
def sealed(nbytes, seals=fcntl.F_SEAL_SHRINK):
    fd = os.memfd_create("fake", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
def chunk(index, nbytes, status=0, why=b""):
    return struct.pack("<QQi100s", index, nbytes, status, why)
def serve(path, answer, message, fd):
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    def talk():
        client, _ = listening.accept()
        client.recv(24, socket.MSG_WAITALL)
        client.send(answer)
        if message and fd is not None:
            socket.send_fds(client, [message], [fd, fd])
            os.close(fd)
        elif message:
            client.send(message)
        client.close()
        listening.close()
    threading.Thread(target=talk).start()
"""
ANSWER = 'struct.pack("<8sQ", b"kvswapA1", 1)'
# What a server sends: its answer, its message of the one chunk, a descriptor with it; and what the client says.
SERVERS = {
    "nothing": ("b''", "b''", None, "does not answer"),
    "half an answer": (f"{ANSWER}[:9]", "b''", None, "does not answer"),
    "no answer": ("b'kvswapA2' + bytes(8)", "b''", None, "is no answer to it"),
    "another count": ('struct.pack("<8sQ", b"kvswapA1", 2)', "b''", None, "is no answer to it"),
    "half a chunk": (ANSWER, "chunk(0, n)[:60]", None, "stopped half-way"),
    "another chunk": (ANSWER, "chunk(1, n)", "sealed(n)", "is no chunk 0"),
    "no descriptor": (ANSWER, "chunk(0, n)", None, "is no chunk 0"),
    "a chunk of nothing": (ANSWER, "chunk(0, 0)", "sealed(n)", "a chunk of 0 bytes does not fit"),
    "more than there is": (ANSWER, "chunk(0, 2 * n)", "sealed(2 * n)", "does not fit"),
    "a refusal": (ANSWER, "chunk(0, n, 1, b'y' * 100)", None, "cannot share chunk 0: " + "y" * 50),
}
HOST_SERVERS = {
    "less than there is": (ANSWER, "chunk(0, n // 2)", "sealed(n // 2)", "bytes instead of"),
    "a shorter file": (ANSWER, "chunk(0, n)", "sealed(n // 2)", "chunk of another size"),
    "a file that can be cut off": (ANSWER, "chunk(0, n)", "sealed(n, fcntl.F_SEAL_GROW)", "can be cut off"),
    "another kind of file": (ANSWER, "chunk(0, n)", "os.open('/dev/null', os.O_RDWR)", "can be cut off"),
}


def test_servers_that_misbehave(device: kvswap.Device, other: Process, tmp_path: Path) -> None:
    """The client says what was wrong, and keeps nothing of it. Which files are chunks is a GPU's driver's to say."""
    other.do(SERVER)
    other.do("n = 2 * testing._binding('seam')(device, 'chunk_granularity'); shared = device.alloc(n, chunks=True)")
    other.do("export = memory.export(shared)")
    real, path = bytes.fromhex(other.do("export.to_bytes().hex()")), str(tmp_path / "s")
    memory.open(real, device=device).close()
    files = count_of("/proc/self/fd"), mappings_of_this_process()
    for answer, message, fd, text in (SERVERS | (HOST_SERVERS if device.kind == "host" else {})).values():
        other.do(f"serve({path!r}, {answer}, {message}, {fd})")
        with pytest.raises((kvswap.Error, ValueError), match=text):
            memory.open(named(real, path), device=device)
        os.unlink(path)
    assert comes_down(open_files, files[0]) and comes_down(mappings_of_this_process, files[1] + 2)
    memory.open(real, device=device).close()


def test_a_server_that_is_another_process(device: kvswap.Device, other: Process, tmp_path: Path) -> None:
    other.do(SERVER)
    other.do("shared = device.alloc(1 << 20, chunks=True); export = memory.export(shared)")
    data = named(bytes.fromhex(other.do("export.to_bytes().hex()")), str(tmp_path / "s"))
    data = changed(changed(data, "pid", os.getppid()), "start", 0)
    other.do(f"serve({str(tmp_path / 's')!r}, b'', b'', None)")
    with pytest.raises(ValueError, match="belongs to another user or process"):
        memory.open(data, device=device)


def test_descriptors_that_clients_send_do_not_stay_open(device: kvswap.Device, chunked: Buffer) -> None:
    export = memory.export(chunked.memory)
    files = count_of("/proc/self/fd")
    request = b"kvswapQ1" + b"?" * 16
    for count in (1, 2, 3) * 10:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(socket_of(export))
            socket.send_fds(client, [request], [0] * count)
            client.settimeout(PATIENCE)
            assert client.recv(1) == b""  # it has looked at it
    assert comes_down(open_files, files)
    export.close()


def test_a_folder_that_others_can_use_is_not_taken(device_name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvs", dir="/tmp") as run:  # a socket's path is short
        folder = Path(run, f"kvswap-{os.geteuid()}")
        folder.mkdir()
        folder.chmod(0o777)
        with Process(f"device = kvswap.Device({device_name!r})", XDG_RUNTIME_DIR=run) as process:
            text = wrong(process, "memory.export(device.alloc(1 << 17, chunks=True))", "Error")
            assert "only this user" in text
            folder.rmdir()
            folder.symlink_to("/tmp")
            text = wrong(process, "memory.export(device.alloc(1 << 17, chunks=True))", "Error")
            assert "only this user" in text
            folder.unlink()
            process.do("memory.export(device.alloc(1 << 17, chunks=True))")
            assert folder.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_server_leaves_is_removed_by_the_next(device: kvswap.Device, device_name: str) -> None:
    with Process(f"device = kvswap.Device({device_name!r})") as victim:
        victim.do("export = memory.export(device.alloc(1 << 17, chunks=True))")
        data = bytes.fromhex(victim.do("export.to_bytes().hex()"))
        mapped = memory.open(data, device=device)
        pid = victim.pid
        victim.kill()
    left = [name for name in os.listdir(folder_of_sockets()) if name.startswith(f"{pid}-")]
    assert len(left) <= 1 and not mapped.alive()  # none: another suite's process came first
    with pytest.raises(kvswap.Error, match="has ended"):
        memory.open(data, device=device)
    mapped.close()
    del mapped
    before = len(os.listdir("/proc/self/fd"))
    memory.export(device.alloc(1 << 17, chunks=True)).close()
    assert not any(os.path.exists(f"{folder_of_sockets()}/{name}") for name in left)
    assert comes_down(lambda: len(os.listdir("/proc/self/fd")), before)


def test_a_server_in_another_pid_namespace_is_left_alone(session_device: kvswap.Device) -> None:
    """Of a container with the same /tmp, say: its process is not to be seen, and lives."""
    if session_device.kind != "host":
        pytest.skip("needs no GPU")
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, and leave to make a pid namespace")
    export = memory.export(session_device.alloc(1 << 17, chunks=True))
    code = "import kvswap.memory; kvswap.memory.export(kvswap.Device('host:0').alloc(1 << 17, chunks=True))"
    places = {**os.environ, "PYTHONPATH": str(Path(kvswap.__file__).parent.parent)}
    run = subprocess.run([*apart, sys.executable, "-c", code], env=places, cwd="/", capture_output=True, check=False)
    assert run.returncode == 0, run
    assert os.path.exists(socket_of(export))


def test_a_server_does_not_hold_up_the_exit(device_name: str) -> None:
    start = time.monotonic()
    run = run_python(
        f"""
        import kvswap, socket, os
        from kvswap import memory
        device = kvswap.Device({device_name!r})
        export = memory.export(device.alloc(1 << 17, chunks=True))
        name = export.to_bytes()[{FIELDS["socket"]}:][:108].split(b"\\0")[0].decode()
        client = socket.socket(socket.AF_UNIX)
        client.connect(name)  # and says nothing
        print(name)
        """
    )
    assert run.returncode == 0, run
    assert time.monotonic() - start < PATIENCE and not os.path.exists(run.stdout.strip())


def test_a_client_that_is_killed_half_way(device: kvswap.Device, device_name: str, chunked: Buffer) -> None:
    export = memory.export(chunked.memory)
    for i in range(4 if device.kind == "host" else 2):
        with Process(f"device = kvswap.Device({device_name!r})") as victim:
            victim.tell(f"while True: memory.open({hex_of(export)}).close()")
            time.sleep(0.02 + 0.02 * i)
            victim.kill()
    with Process(f"device = kvswap.Device({device_name!r})") as last:
        last.do(f"memory.open({hex_of(export)}).close()")


def test_cycles_of_chunks_leak_nothing(device: kvswap.Device, owner: Process) -> None:
    owner.do("shared = device.alloc(3 << 20, chunks=True); export = memory.export(shared)")
    data = bytes.fromhex(owner.do("export.to_bytes().hex()"))

    def cycle() -> None:
        memory.open(data, device=device).close()
        own = device.alloc(1 << 18, chunks=True)
        memory.export(own).close()
        own.free()

    for _ in range(10):
        cycle()
    before = count_of("/proc/self/fd"), mappings_of_this_process(), threads_of_this_process()
    theirs = owner.do("len(os.listdir('/proc/self/fd'))")
    for _ in range(cycles(device)):
        cycle()
    assert comes_down(open_files, before[0]) and comes_down(threads_of_this_process, before[2] + 1)
    assert mappings_of_this_process() < before[1] + 20
    assert comes_down(lambda: owner.do("len(os.listdir('/proc/self/fd'))"), theirs)


def threads_of_this_process() -> int:
    return count_of("/proc/self/task")


def test_closing_chunks_waits_for_work(device: kvswap.Device, owner: Process) -> None:
    owner.do("shared = device.alloc(3 << 20, chunks=True); export = memory.export(shared)")
    close_behind_work(device, bytes.fromhex(owner.do("export.to_bytes().hex()")))


def test_freeing_chunks_waits_for_work(device: kvswap.Device) -> None:
    own, stream = device.alloc(3 << 20, chunks=True), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)
        bindings.seam(device, "fill", own.ptr, 3, 10, stream.handle)
        thread = threading.Thread(target=own.free)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        gate.open()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("member", ["range_reserve", "chunk_map", "chunk_granularity"])
def test_chunks_that_are_not_to_be_had(device: kvswap.Device, member: str) -> None:
    files, nbytes = count_of("/proc/self/fd"), 40 * bindings.seam(device, "chunk_granularity")
    fault = testing.fault(device, "call", "fail", operation=member, nth=2 if member == "chunk_map" else 1)
    with fault, pytest.raises(kvswap.DeviceError):
        device.alloc(nbytes, chunks=True)
    assert comes_down(open_files, files)
    with pytest.raises((MemoryError, kvswap.DeviceError)):
        device.alloc(1 << 60, chunks=True)
    with pytest.raises(ValueError, match="not of the host"):
        device.alloc(100, host=True, chunks=True)
    device.alloc(100, chunks=True).free()


def test_a_chunk_that_cannot_be_shared_any_more(device: kvswap.Device, owner: Process) -> None:
    owner.do("shared = device.alloc(3 << 20, chunks=True); export = memory.export(shared)")
    data = bytes.fromhex(owner.do("export.to_bytes().hex()"))
    owner.do("fault = testing.fault(device, 'call', 'fail', operation='chunk_share'); fault.__enter__()")
    with pytest.raises(kvswap.Error, match=r"cannot share chunk 0.*injected fault"):
        memory.open(data, device=device)
    owner.do("fault.__exit__(None, None, None)")
    memory.open(data, device=device).close()
    owner.do("del export._source; shared.free()")
    with pytest.raises(kvswap.Error, match="cannot share chunk 0"):
        memory.open(data, device=device)
