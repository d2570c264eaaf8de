"""Memory that kvswap allocated, memory that the caller registered, and memory that somebody else owns."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Cache, Gate, random_bytes, seam

import kvswap


def view(memory: kvswap.Memory) -> np.ndarray[Any, Any]:
    return np.frombuffer(memory, np.uint8)


@pytest.fixture
def page(device: kvswap.Device) -> tuple[Buffer, int]:
    """Eight pages of plain memory and the address of the first whole one."""
    room = Buffer(device, 9 * mmap.PAGESIZE, "plain")
    return room, room.ptr + -room.ptr % mmap.PAGESIZE


# -- allocations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [False, True])
def test_memory(device: kvswap.Device, host: bool) -> None:
    memory = device.alloc(1000, host=host)
    assert memory.nbytes == 1000
    assert memory.host is host
    assert memory.device == device
    assert memory.ptr == memory.data_ptr() != 0
    assert memory.ptr % 256 == 0
    assert f"{memory.ptr:#x}" in repr(memory) and "1000 B" in repr(memory)
    if host or device.kind == "host":
        with pytest.raises(AttributeError):
            memory.__cuda_array_interface__  # noqa: B018
        array = view(memory)
        array[:] = 7
        assert array.size == 1000
        assert np.asarray(memory).shape == (1000,)
        assert memoryview(memory).nbytes == 1000
        with pytest.raises(BufferError, match="arrays or transfers of a FileStore still use this memory"):
            memory.free()
        assert array[999] == 7
        del array
        gc.collect()
    else:
        with pytest.raises((BufferError, TypeError)):
            memoryview(memory)
        interface = memory.__cuda_array_interface__
        assert interface["data"] == (memory.ptr, False)
        assert interface["shape"] == (1000,)
    memory.free()
    assert "freed" in repr(memory)
    for use in (lambda: memory.ptr, memory.data_ptr, memory.free):
        with pytest.raises(kvswap.Error, match="already freed"):
            use()
    if host or device.kind == "host":
        with pytest.raises(BufferError):
            memoryview(memory)


def test_memory_passed_as_it_is(device: kvswap.Device) -> None:
    gpu, cpu = device.alloc(640), device.alloc(640, host=True)
    data = random_bytes(1, 640)
    view(cpu)[:] = data
    kvswap.swap_cache_per_layer(gpu, cpu, 64, 10, 10, [1, 2], [8, 3], 1, device=device)
    view(cpu)[:] = 0
    kvswap.swap_cache_all_layers([gpu], [cpu], 64, 10, 10, [1, 2], [0, 1], 0, device=device)
    blocks = data.reshape(10, 64)
    np.testing.assert_array_equal(view(cpu)[:128], np.concatenate([blocks[8], blocks[3]]))


def test_freeing_waits_for_transfers(device: kvswap.Device) -> None:
    """The thread that frees waits until the queued copy has read its bytes."""
    cache = Cache(device, 16, 4096)
    with Gate(device) as gate:
        stream = kvswap.Stream(device)
        gate.hold(stream)
        transfer = cache.swap([1, 5], [2, 3], stream=stream)
        assert cache.gpu.memory is not None
        thread = threading.Thread(target=cache.gpu.memory.free)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        gate.open()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        transfer.wait(PATIENCE)
    np.testing.assert_array_equal(cache.cpu.get(), cache.expected([1, 5], [2, 3]))
    with pytest.raises(kvswap.Error):
        cache.gpu.memory.ptr  # noqa: B018


def test_dropping_memory_waits_for_transfers(device: kvswap.Device) -> None:
    cache = Cache(device, 16, 4096)
    expected = cache.expected([1, 5], [2, 3])
    gc.collect()
    with Gate(device) as gate:
        stream = kvswap.Stream(device)
        gate.hold(stream)
        transfer = kvswap.swap_cache_per_layer_async(
            cache.gpu.memory, cache.cpu.ptr, 4096, 16, 16, [1, 5], [2, 3], 0, stream=stream, device=device
        )
        cache.gpu.memory = None
        gc.collect()
        gate.open()
        transfer.wait(PATIENCE)
    np.testing.assert_array_equal(cache.cpu.get(), expected)


def test_an_address_that_is_used_again(device: kvswap.Device) -> None:
    """What is known of an address ends with its memory: a smaller allocation at the same place is a smaller region."""
    other = Buffer(device, 1 << 20, "cpu")
    for nbytes in (1 << 20, 4096, 100, 1 << 20, 64):
        memory = device.alloc(nbytes)
        options: Any = {"device": device}
        kvswap.swap_cache_per_layer(memory.ptr, other.ptr, 1, nbytes, nbytes, [nbytes - 1], [0], 1, **options)
        with pytest.raises(ValueError, match="gpu_ptr"):
            kvswap.swap_cache_per_layer(memory.ptr, other.ptr, 1, nbytes + 1, nbytes, [0], [0], 1, **options)
        memory.free()


def test_many_threads_allocate(device: kvswap.Device) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            nbytes = int(rng.integers(1, 1 << 16))
            memory = device.alloc(nbytes, host=True)
            array = view(memory)
            array[:] = seed
            if not (array == seed).all():
                wrong.append(seed)
            del array
            memory.free()

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []


# -- registrations ----------------------------------------------------------------------------------------------------


def memory_at(device: kvswap.Device, ptr: int) -> str:
    return str(seam(device, "pointer_query", ptr)["memory"])


def test_register(device: kvswap.Device, page: tuple[Buffer, int], path: str) -> None:
    room, base = page
    before = memory_at(device, base)
    assert before != "pinned host"
    device.register(base, 4 * mmap.PAGESIZE)
    assert memory_at(device, base + 3 * mmap.PAGESIZE) == "pinned host"
    gpu, data = Buffer(device, 4096), room.randomise(3)
    kvswap.swap_cache_per_layer(gpu.ptr, base, 100, 40, 160, [0, 3], [7, 159], 1, device=device, path=path)
    at = base - room.ptr
    np.testing.assert_array_equal(gpu.get()[:100], data[at + 700 : at + 800])
    np.testing.assert_array_equal(gpu.get()[300:400], data[at + 15900 : at + 16000])
    device.unregister(base)
    assert memory_at(device, base) == before


def test_register_an_array(device: kvswap.Device) -> None:
    array = np.zeros((4, 8192), np.int16)
    device.register(array)
    try:
        assert memory_at(device, array.ctypes.data) == "pinned host"
        assert seam(device, "pointer_query", array.ctypes.data)["nbytes"] >= array.nbytes
    finally:
        device.unregister(array)
    device.register(array, 4096)
    device.unregister(array.ctypes.data)


def test_register_twice(device: kvswap.Device, page: tuple[Buffer, int]) -> None:
    _, base = page
    device.register(base, 2 * mmap.PAGESIZE)
    try:
        for ptr, pages in ((base, 2), (base + mmap.PAGESIZE, 2), (base, 1)):
            with pytest.raises(ValueError, match=f"{ptr:#x}, .* overlaps .{base:#x}, .* registered already"):
                device.register(ptr, pages * mmap.PAGESIZE)
        device.register(base + 2 * mmap.PAGESIZE, mmap.PAGESIZE)
        device.unregister(base + 2 * mmap.PAGESIZE)
    finally:
        device.unregister(base)
    with pytest.raises(ValueError, match=f"{base:#x} was not registered"):
        device.unregister(base)


def test_unregister_is_not_free(device: kvswap.Device, page: tuple[Buffer, int]) -> None:
    """Neither takes what the other made."""
    memory = device.alloc(4096, host=True)
    with pytest.raises((ValueError, kvswap.DeviceError)):
        device.unregister(memory.ptr)
    view(memory)[:] = 1  # it is still there
    gpu = Buffer(device, 64)
    kvswap.swap_cache_per_layer(gpu.ptr, memory, 64, 1, 64, [0], [3], 1, device=device)
    assert (gpu.get() == 1).all()
    memory.free()


def test_register_where_nothing_is(device: kvswap.Device) -> None:
    if device.kind != "host":
        pytest.skip("drivers differ in what they say")
    with pytest.raises(kvswap.DeviceError, match="not mapped") as caught:
        device.register(0x10000, 4096)
    assert caught.value.code == 1


def test_unregistering_waits_for_transfers(device: kvswap.Device, page: tuple[Buffer, int]) -> None:
    room, base = page
    gpu, data = Buffer(device, 4096), room.randomise(2)
    with Gate(device) as gate:
        device.register(base, 8 * mmap.PAGESIZE)
        stream = kvswap.Stream(device)
        gate.hold(stream)
        transfer = kvswap.swap_cache_per_layer_async(
            gpu.ptr, base, 4096, 1, 8, [0], [5], 1, stream=stream, device=device
        )
        thread = threading.Thread(target=device.unregister, args=[base])
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        gate.open()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        transfer.wait(PATIENCE)
    at = base - room.ptr + 5 * 4096
    np.testing.assert_array_equal(gpu.get(), data[at : at + 4096])


def test_a_tensor_over_a_registered_and_a_plain_part(device: kvswap.Device, page: tuple[Buffer, int]) -> None:
    """Blocks on both sides of a seam, and one across it, arrive whole."""
    room, base = page
    device.register(base, 2 * mmap.PAGESIZE)
    try:
        gpu, data = Buffer(device, 12288), room.randomise(7)
        at, nbytes = base - room.ptr, 3000
        kvswap.swap_cache_per_layer(gpu.ptr, base, nbytes, 4, 5, [0, 1, 2], [1, 2, 4], 1, device=device)
        for gpu_id, cpu_id in zip([0, 1, 2], [1, 2, 4], strict=True):
            there = gpu.get()[gpu_id * nbytes : (gpu_id + 1) * nbytes]
            np.testing.assert_array_equal(there, data[at + cpu_id * nbytes : at + (cpu_id + 1) * nbytes])
    finally:
        device.unregister(base)


def test_every_kind_of_tensor(device: kvswap.Device) -> None:
    """What has a host address, however it says so."""
    data = random_bytes(3, 640)

    class DataPtr:
        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.array, self.nbytes = array, array.nbytes

        def data_ptr(self) -> int:
            return int(self.array.ctypes.data)

    class ArrayInterface:
        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.array, self.__array_interface__ = array, array.__array_interface__

    class DlPack:
        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[Any, Any]:
            return self.array.__dlpack_device__()

    kinds = (
        lambda a: a,
        DataPtr,
        ArrayInterface,
        DlPack,
        memoryview,
        lambda a: bytearray(a.tobytes()),
        lambda a: a.ctypes.data,
    )
    for kind in kinds:
        array, gpu = data.copy(), Buffer(device, 640)
        kvswap.swap_cache_per_layer(gpu.ptr, kind(array), 64, 10, 10, [4], [9], 1, device=device)
        np.testing.assert_array_equal(gpu.get()[256:320], data[576:640])
        kvswap.swap_blocks_batch([kind(array)], [gpu.ptr], 640, device=device).wait(PATIENCE)
        np.testing.assert_array_equal(gpu.get(), data)


# -- the same tensors again -------------------------------------------------------------------------------------------

TENSORS, BLOCKS, NBYTES = 12, 4, 4096  # so many that what they cover is kept for the next call


def swap_all(device: kvswap.Device, gpu: Any, cpu: Any, direction: int) -> None:
    kvswap.swap_cache_all_layers_async(
        np.array(gpu, np.uint64),
        np.array(cpu, np.uint64),
        *(NBYTES, BLOCKS, BLOCKS, [1, 2], [3, 0], direction),
        device=device,
    ).wait(PATIENCE)


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("whose", ["own", "another's"])
def test_freed_memory_is_noticed_although_the_tensors_are_the_same(
    device: kvswap.Device, whose: str, direction: int
) -> None:
    own = whose == "own"
    memory = [device.alloc(BLOCKS * NBYTES) for _ in range(TENSORS if own else 0)]
    gpu = [m.ptr for m in memory] if own else [seam(device, "alloc", BLOCKS * NBYTES) for _ in range(TENSORS)]
    cpu = Buffer(device, TENSORS * BLOCKS * NBYTES, "cpu")
    at = [cpu.ptr + i * BLOCKS * NBYTES for i in range(TENSORS)]
    for way in (1, direction, direction):  # first onto the device, where nothing has been written
        swap_all(device, gpu, at, way)
    gone = gpu[5]
    if own:
        memory[5].free()
    else:
        seam(device, "free", gone)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"gpu_ptrs\[5\] = {gone:#x}"):
            swap_all(device, gpu, at, direction)
    if own:
        return
    for ptr in gpu:
        if ptr != gone:
            seam(device, "free", ptr)


def test_memory_that_became_read_only_is_noticed_although_the_tensors_are_the_same(device: kvswap.Device) -> None:
    gpu = Buffer(device, TENSORS * BLOCKS * NBYTES)
    room = mmap.mmap(-1, TENSORS * BLOCKS * NBYTES)
    base = ctypes.addressof(ctypes.c_char.from_buffer(room))
    gpu_at, cpu_at = ([side + i * BLOCKS * NBYTES for i in range(TENSORS)] for side in (gpu.ptr, base))
    for _ in range(2):
        swap_all(device, gpu_at, cpu_at, 0)
        swap_all(device, gpu_at, cpu_at, 1)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(base + 3 * BLOCKS * NBYTES, NBYTES, mmap.PROT_READ) == 0
    with pytest.raises(ValueError, match=r"cpu_ptrs\[3\] = .* read-only"):
        swap_all(device, gpu_at, cpu_at, 0)
    swap_all(device, gpu_at, cpu_at, 1)
    assert protect(base, TENSORS * BLOCKS * NBYTES, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    swap_all(device, gpu_at, cpu_at, 0)


def test_what_is_registered_between_two_calls_is_noticed(device: kvswap.Device) -> None:
    """A copy must not cross the end of a registration, on a GPU."""
    gpu = Buffer(device, TENSORS * BLOCKS * NBYTES)
    plain = Buffer(device, TENSORS * BLOCKS * NBYTES + 4096, "plain")
    base = -(-plain.ptr // 4096) * 4096
    gpu_at, cpu_at = ([side + i * BLOCKS * NBYTES for i in range(TENSORS)] for side in (gpu.ptr, base))
    data = gpu.randomise(1).reshape(TENSORS, BLOCKS, NBYTES)
    swap_all(device, gpu_at, cpu_at, 0)
    device.register(base, BLOCKS * NBYTES // 2)
    try:
        for _ in range(2):
            plain.put(np.zeros(plain.nbytes, np.uint8))
            swap_all(device, gpu_at, cpu_at, 0)
            after = plain.get()[base - plain.ptr :][: data.size].reshape(data.shape)
            np.testing.assert_array_equal(after[:, [3, 0]], data[:, [1, 2]])
    finally:
        device.unregister(base)
    swap_all(device, gpu_at, cpu_at, 0)
