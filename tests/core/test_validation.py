"""Wrong input: the right exception, which names the list, the index, the value and the range; nothing has moved,
nothing was submitted, and the next call works."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATHS, PATIENCE, Buffer, Cache, bindings

import kvswap
from kvswap import memory

BLOCKS, NBYTES = 8, 64


@pytest.fixture(params=[0, 1], ids=["D2H", "H2D"])
def cache(request: pytest.FixtureRequest, device: kvswap.Device) -> Cache:
    return Cache(device, BLOCKS, NBYTES, int(request.param))


def refused(cache: Cache, error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    """`call` raises exactly that, and no byte and no counter has changed."""
    before = cache.device.stats()["submitted"]
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error
    assert cache.device.stats()["submitted"] == before
    np.testing.assert_array_equal(cache.gpu.get(), cache.gpu_bytes)
    np.testing.assert_array_equal(cache.cpu.get(), cache.cpu_bytes)
    cache.swap([1], [2]).wait(PATIENCE)
    cache.check([1], [2])
    cache.target.put(cache.target_before)


# -- ids --------------------------------------------------------------------------------------------------------------

LISTS = ("gpu_block_ids", "cpu_block_ids")


def with_ids(cache: Cache, name: str, ids: Any, count: int) -> Callable[[], Any]:
    """A swap where one list is as given and the other is right."""
    right = list(range(count))
    return (lambda: cache.swap(ids, right)) if name == LISTS[0] else (lambda: cache.swap(right, ids))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", LISTS)
def test_ids_without_tensors(name: str, path: str) -> None:
    """Nothing is moved, and a bad id is an error all the same, not a block that is done."""

    def swap(ids: Any, other: Any, counts: Any = 8) -> kvswap.Transfer:
        pair = (ids, other) if name == LISTS[0] else (other, ids)
        direction = int(name == LISTS[0])  # the list names destinations
        return kvswap.swap_cache_all_layers_async(
            [], [], 64, counts, counts, *pair, direction, device="host:0", path=path
        )

    for dtype in (list, np.int32, np.int64):
        convert: Any = list if dtype is list else lambda ids, dtype=dtype: np.array(ids, dtype)
        for ids, at in (([8, 1], 0), ([0, 1, 8], 2), ([-1], 0), ([0, 2**31 - 1], 1)):
            with pytest.raises(IndexError, match=rf"{name}\[{at}\] is {ids[at]}; that side has 8 blocks"):
                swap(convert(ids), convert(list(range(len(ids)))))
    with pytest.raises(ValueError, match=rf"{name}\[0\] and {name}\[2\] are both 1"):
        swap([1, 0, 1], [0, 1, 2])
    with pytest.raises(IndexError, match=rf"{name}\[1\] is -9223372036854775808; without tensors"):
        swap([0, -(2**63)], [0, 1], [])
    with pytest.raises(IndexError, match=r"gpu_block_ids\[0\] is 0; that side has 0 blocks"):
        swap([0], [0], 0)
    done = swap([7, 0, 3], [0, 1, 2])
    done.wait(PATIENCE)
    assert done.num_blocks == 3 and done.nbytes == 0


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, list])
@pytest.mark.parametrize(
    ("ids", "at"),
    [
        ([8, 1], 0),
        ([0, 1, 8], 2),
        ([-1], 0),
        ([0, -1], 1),
        ([2, 1000000], 1),
        ([-(1 << 31), 0], 0),
        ([(1 << 31) - 1], 0),
    ],
)
def test_ids_out_of_range(cache: Cache, name: str, dtype: Any, ids: list[int], at: int) -> None:
    given = ids if dtype is list else np.array(ids, dtype)
    message = rf"{name}\[{at}\] is {ids[at]}\b.* 8 blocks, 0 to 7"
    refused(cache, IndexError, message, with_ids(cache, name, given, len(ids)))


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("wrong", [1 << 32, -(1 << 63), (1 << 63) - 1, 1 << 58])
def test_ids_of_64_bits(cache: Cache, name: str, wrong: int) -> None:
    """Such ids times the block size overflow; cut to 32 bits they would be right."""
    refused(cache, IndexError, rf"{name}\[1\] is {wrong}\b", with_ids(cache, name, np.array([0, wrong]), 2))


@pytest.mark.parametrize("name", LISTS)
def test_an_int_that_is_no_int64(cache: Cache, name: str) -> None:
    refused(cache, ValueError, rf"{name}\[0\].*{1 << 64}", with_ids(cache, name, [1 << 64], 1))


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("wrong", [np.array([0.0, 1.0]), np.array([0, 1], np.complex64), np.array([True, False])])
def test_ids_of_other_types(cache: Cache, name: str, wrong: Any) -> None:
    refused(cache, TypeError, rf"{name}.*int32 or int64.*{wrong.dtype}", with_ids(cache, name, wrong, 2))


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("wrong", ["01", None, 5, [0.5, 1], ["0", 1], [True, 0]])
def test_ids_that_are_none(cache: Cache, name: str, wrong: Any) -> None:
    refused(cache, TypeError, name, with_ids(cache, name, wrong, 2))


@pytest.mark.parametrize("name", LISTS)
def test_ids_in_two_dimensions(cache: Cache, name: str) -> None:
    refused(cache, ValueError, rf"{name}.*one-dimensional.*2", with_ids(cache, name, np.zeros((2, 1), np.int64), 2))


def test_lists_of_different_length(cache: Cache) -> None:
    refused(cache, ValueError, r"cpu_block_ids has 2 .*gpu_block_ids has 3", lambda: cache.swap([0, 1, 2], [3, 4]))


def test_the_same_destination_twice(cache: Cache) -> None:
    name = LISTS[0] if cache.direction else LISTS[1]
    message = rf"{name}\[1\] and {name}\[3\] are both 5"
    refused(cache, ValueError, message, with_ids(cache, name, [0, 5, 1, 5], 4))
    refused(
        cache, ValueError, rf"{name}\[0\] and {name}\[2\] are both 7", with_ids(cache, name, np.array([7, 0, 7]), 3)
    )


def test_a_side_without_blocks(cache: Cache) -> None:
    def call(gpu: int, cpu: int) -> Callable[[], Any]:
        return lambda: kvswap.swap_cache_per_layer(
            cache.gpu.ptr, cache.cpu.ptr, NBYTES, gpu, cpu, [0], [0], cache.direction, device=cache.device
        )

    refused(cache, IndexError, r"gpu_block_ids\[0\] is 0.*no blocks", call(0, BLOCKS))
    refused(cache, IndexError, r"cpu_block_ids\[0\] is 0.*no blocks", call(BLOCKS, 0))


def test_ids_are_checked_against_the_smallest_tensor(cache: Cache) -> None:
    def call() -> None:
        gpus, cpus = [cache.gpu.ptr, cache.gpu.ptr + 256], [cache.cpu.ptr, cache.cpu.ptr + 256]
        kvswap.swap_cache_all_layers(
            gpus, cpus, NBYTES, [4, 3], [4, 4], [0, 3], [0, 1], cache.direction, device=cache.device
        )

    refused(cache, IndexError, r"gpu_block_ids\[1\] is 3.*tensor 1.* 3 blocks, 0 to 2", call)


# -- tensors ----------------------------------------------------------------------------------------------------------


def per_layer(cache: Cache, **changed: Any) -> Callable[[], Any]:
    arguments: dict[str, Any] = {
        "gpu_ptr": cache.gpu.ptr,
        "cpu_ptr": cache.cpu.ptr,
        "block_nbytes": NBYTES,
        "num_gpu_blocks": BLOCKS,
        "num_cpu_blocks": BLOCKS,
        "gpu_block_ids": [1, 2],
        "cpu_block_ids": [3, 5],
        "direction": cache.direction,
        "device": cache.device,
        **changed,
    }
    return lambda: kvswap.swap_cache_per_layer(**arguments)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"block_nbytes": 0}, ValueError, "block_nbytes.* 0"),
        ({"block_nbytes": -5}, ValueError, "block_nbytes.*-5"),
        ({"block_nbytes": 1.5}, TypeError, "block_nbytes.*float"),
        ({"block_nbytes": None}, TypeError, "block_nbytes"),
        ({"num_gpu_blocks": -1}, ValueError, "num_gpu_blocks.*-1"),
        ({"num_cpu_blocks": 1 << 64}, ValueError, "num_cpu_blocks"),
        ({"num_cpu_blocks": "8"}, TypeError, "num_cpu_blocks.*str"),
        ({"gpu_stride": 63}, ValueError, "gpu_stride.* 63.* 64"),
        ({"cpu_stride": 1}, ValueError, "cpu_stride.* 1.* 64"),
        ({"cpu_stride": -64}, ValueError, "cpu_stride.*-64"),
        ({"gpu_ptr": 0}, ValueError, "gpu_ptr.* 0"),
        ({"cpu_ptr": 0}, ValueError, "cpu_ptr.* 0"),
        ({"cpu_ptr": -4096}, ValueError, "cpu_ptr.*-4096"),
        ({"cpu_ptr": None}, TypeError, "cpu_ptr"),
        ({"gpu_ptr": "0x10"}, TypeError, "gpu_ptr"),
        ({"gpu_ptr": 0x10}, ValueError, "gpu_ptr.*0x10.*not mapped"),
        ({"cpu_ptr": 0x10}, ValueError, "cpu_ptr.*0x10.*not mapped"),
        ({"num_gpu_blocks": 1 << 62}, ValueError, "num_gpu_blocks"),
        ({"num_cpu_blocks": (1 << 64) - 1}, ValueError, "num_cpu_blocks"),
        ({"block_nbytes": (1 << 64) - 1}, ValueError, "block"),
        ({"gpu_stride": 1 << 61}, ValueError, "gpu_(ptr|stride)"),
        ({"direction": 2}, ValueError, "direction.* 2.*0.*1"),
        ({"direction": -1}, ValueError, "direction.*-1"),
        ({"direction": True}, ValueError, "direction.*True"),
        ({"direction": "D2D"}, ValueError, "direction.*D2D"),
        ({"direction": None}, ValueError, "direction.*None"),
        ({"path": "warp"}, ValueError, "path.*warp.*auto.*dma.*kernel.*direct"),
        ({"path": 1}, TypeError, "path"),
        ({"priority": "urgent"}, ValueError, "priority.*urgent.*normal.*high.*background"),
        ({"max_ctas": 0}, ValueError, "max_ctas.* 0"),
        ({"max_ctas": -1}, ValueError, "max_ctas.*-1"),
        ({"max_ctas": 1 << 40}, ValueError, "max_ctas"),
        ({"max_ctas": 2.0}, TypeError, "max_ctas"),
        ({"pace_gbps": 0}, ValueError, "pace_gbps.* 0"),
        ({"pace_gbps": -1.0}, ValueError, r"pace_gbps.*-1\.0"),
        ({"pace_gbps": float("nan")}, ValueError, "pace_gbps.*nan"),
        ({"pace_gbps": float("inf")}, ValueError, "pace_gbps.*inf"),
        ({"stream": "main"}, TypeError, "stream.*str"),
        ({"stream": -1}, ValueError, "stream.*-1"),
        ({"stream": object()}, TypeError, "stream.*object"),
        ({"after": 3.5}, TypeError, "after.*float"),
        ({"after": [None]}, TypeError, r"after\[0\].*None"),
        ({"after": "x"}, TypeError, "after.*str"),
        ({"device": 7.5}, TypeError, "device.*float"),
        ({"device": "tpu:0"}, ValueError, "device.*tpu:0.*cuda:0.*host:0"),
        ({"device": "host:x"}, ValueError, "host:x"),
        ({"colour": 1}, TypeError, "colour"),
    ],
)
def test_wrong_arguments(cache: Cache, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    refused(cache, error, message, per_layer(cache, **changed))


def test_more_blocks_than_the_region_has(cache: Cache) -> None:
    """One block too many is found for memory whose size is known."""
    needed = (BLOCKS + 1) * NBYTES
    message = rf"gpu_ptr.*{cache.gpu.ptr:#x}.*{needed} bytes.*only {BLOCKS * NBYTES}"
    refused(cache, ValueError, message, per_layer(cache, num_gpu_blocks=BLOCKS + 1))
    refused(cache, ValueError, "cpu_ptr", per_layer(cache, num_cpu_blocks=BLOCKS + 1))
    refused(cache, ValueError, "cpu_ptr", per_layer(cache, cpu_stride=NBYTES + 10))


@pytest.mark.parametrize("blocks", [1 << 36, 1 << 45, 1 << 55])
def test_far_more_blocks_than_memory(cache: Cache, blocks: int) -> None:
    """That is a wrong argument and not a lack of memory to check it."""
    refused(cache, ValueError, "gpu_ptr", per_layer(cache, num_gpu_blocks=blocks))
    refused(cache, ValueError, "cpu_ptr", per_layer(cache, num_cpu_blocks=blocks))


def test_more_blocks_than_an_array_has(cache: Cache) -> None:
    array = np.zeros((BLOCKS, NBYTES), np.uint8)
    call = per_layer(cache, cpu_ptr=array, num_cpu_blocks=BLOCKS + 1)
    refused(cache, ValueError, rf"cpu_ptr.* {BLOCKS * NBYTES} bytes.*{(BLOCKS + 1) * NBYTES}", call)


def test_an_array_with_gaps(cache: Cache) -> None:
    array = np.zeros((BLOCKS, 2 * NBYTES), np.uint8)[:, ::2]
    refused(cache, ValueError, "cpu_ptr.*contiguous", per_layer(cache, cpu_ptr=array))


def test_a_read_only_array(cache: Cache) -> None:
    array = np.zeros((BLOCKS, NBYTES), np.uint8)
    array.flags.writeable = False
    call = per_layer(cache, cpu_ptr=array)
    if cache.direction == kvswap.Direction.D2H:
        refused(cache, ValueError, "cpu_ptr.*read-only", call)
    else:
        call()  # a source may be read-only


@pytest.fixture
def read_only_page() -> Iterator[int]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    page = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    yield page
    libc.munmap(page, mmap.PAGESIZE)


def test_a_read_only_page(cache: Cache, read_only_page: int) -> None:
    call = per_layer(cache, cpu_ptr=read_only_page)
    if cache.direction == kvswap.Direction.D2H:
        refused(cache, ValueError, rf"cpu_ptr.*{read_only_page:#x}.*read-only", call)
    else:
        call()


# Far below where the kernel puts what is mapped without an address: another thread cannot map it in the meantime.
UNMAPPED = 0x2000_0000_0000


def test_an_unmapped_page(cache: Cache) -> None:
    refused(cache, ValueError, rf"cpu_ptr.*{UNMAPPED:#x}.*not mapped", per_layer(cache, cpu_ptr=UNMAPPED))
    refused(cache, ValueError, rf"gpu_ptr.*{UNMAPPED:#x}.*not mapped", per_layer(cache, gpu_ptr=UNMAPPED))


def test_the_wrong_kind_of_memory(cache: Cache) -> None:
    refused(cache, ValueError, "gpu_ptr.*host memory.*device", per_layer(cache, gpu_ptr=cache.cpu.ptr))
    refused(cache, ValueError, "cpu_ptr.*device memory.*host", per_layer(cache, cpu_ptr=cache.gpu.ptr))


def test_memory_that_was_freed(cache: Cache) -> None:
    memory = cache.device.alloc(BLOCKS * NBYTES)
    memory.free()
    refused(cache, kvswap.Error, "freed", per_layer(cache, gpu_ptr=memory))


def test_freeing_twice(device: kvswap.Device) -> None:
    memory = device.alloc(16)
    memory.free()
    with pytest.raises(kvswap.Error, match="already freed"):
        memory.free()


# -- many tensors -----------------------------------------------------------------------------------------------------


def all_layers(cache: Cache, **changed: Any) -> Callable[[], Any]:
    arguments: dict[str, Any] = {
        "gpu_ptrs": [cache.gpu.ptr, cache.gpu.ptr + 256],
        "cpu_ptrs": [cache.cpu.ptr, cache.cpu.ptr + 256],
        "block_nbytes": NBYTES,
        "num_gpu_blocks": 4,
        "num_cpu_blocks": 4,
        "gpu_block_ids": [1, 2],
        "cpu_block_ids": [3, 0],
        "direction": cache.direction,
        "device": cache.device,
        **changed,
    }
    return lambda: kvswap.swap_cache_all_layers(**arguments)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"gpu_ptrs": []}, ValueError, "cpu_ptrs has 2 .*gpu_ptrs has 0"),
        ({"cpu_ptrs": np.array([4096])}, ValueError, "cpu_ptrs has 1 .*gpu_ptrs has 2"),
        ({"cpu_ptrs": np.array([1.0, 2.0])}, TypeError, "cpu_ptrs.*float64"),
        ({"cpu_ptrs": np.array([1, 2], np.int32)}, TypeError, "cpu_ptrs.*int32"),
        ({"cpu_ptrs": np.array([[1, 2]])}, TypeError, "cpu_ptrs.*one-dimensional"),
        ({"cpu_ptrs": 5}, TypeError, "cpu_ptrs.*int"),
        ({"cpu_ptrs": "ab"}, TypeError, "cpu_ptrs.*str"),
        ({"cpu_ptrs": [4096, None]}, TypeError, r"cpu_ptrs\[1\].*None"),
        ({"cpu_ptrs": np.array([0x10, 0x20])}, ValueError, r"cpu_ptrs\[0\].*0x10.*not mapped"),
        ({"block_nbytes": [64]}, ValueError, "block_nbytes has 1 .* 2"),
        ({"block_nbytes": [64, 0]}, ValueError, "block_nbytes.*1.* 0"),
        ({"block_nbytes": [64, -1]}, ValueError, r"block_nbytes\[1\].*-1"),
        ({"block_nbytes": np.array([64, -1])}, ValueError, r"block_nbytes\[1\].*-1"),
        ({"block_nbytes": np.array([64.0, 1.0])}, TypeError, "block_nbytes.*float64"),
        ({"num_gpu_blocks": [4, 4, 4]}, ValueError, "num_gpu_blocks has 3 .* 2"),
        ({"num_cpu_blocks": [4, 1]}, IndexError, r"cpu_block_ids\[0\] is 3.*tensor 1"),
        ({"gpu_stride": [64, 63]}, ValueError, "gpu_stride.*1.* 63"),
        ({"cpu_stride": [64]}, ValueError, "cpu_stride has 1"),
        (
            {"gpu_ptrs": (), "cpu_ptrs": (), "gpu_block_ids": [1]},
            ValueError,
            "cpu_block_ids has 2 .*gpu_block_ids has 1",
        ),
    ],
)
def test_wrong_arguments_of_many_tensors(
    cache: Cache, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    refused(cache, error, message, all_layers(cache, **changed))


def test_destinations_of_two_tensors_overlap(cache: Cache) -> None:
    side, ptr = ("gpu_ptrs", cache.gpu.ptr) if cache.direction else ("cpu_ptrs", cache.cpu.ptr)
    refused(cache, ValueError, "destinations overlap", all_layers(cache, **{side: [ptr, ptr]}))
    refused(cache, ValueError, "destinations overlap", all_layers(cache, **{side: [ptr, ptr + 32]}))


def test_sources_may_overlap(cache: Cache) -> None:
    side, ptr = ("cpu_ptrs", cache.cpu.ptr) if cache.direction else ("gpu_ptrs", cache.gpu.ptr)
    all_layers(cache, **{side: [ptr, ptr + 32]})()


# -- lists of pointers ------------------------------------------------------------------------------------------------


def batch(cache: Cache, src: Any = (0, 64), dst: Any = (128, 64), sizes: Any = 64, **options: Any) -> Callable[[], Any]:
    """Offsets into the source and the destination; anything that is no int is passed as it is."""
    sides = (cache.cpu.ptr, cache.gpu.ptr) if cache.direction else (cache.gpu.ptr, cache.cpu.ptr)
    lists = [
        [base + item for item in offsets] if isinstance(offsets, tuple) else offsets
        for base, offsets in zip(sides, (src, dst), strict=True)
    ]
    return lambda: kvswap.swap_blocks_batch(*lists, sizes, **{"device": cache.device, **options}).wait(PATIENCE)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"src": (0,)}, ValueError, "dst_ptrs has 2 .*src_ptrs has 1"),
        ({"sizes": [64]}, ValueError, "sizes has 1 .*src_ptrs has 2"),
        ({"sizes": [64, 0]}, ValueError, r"sizes\[1\].* 0"),
        ({"sizes": 0}, ValueError, r"sizes.* 0"),
        ({"sizes": [64, -64]}, ValueError, r"sizes\[1\].*-64"),
        ({"sizes": -1}, ValueError, "sizes.*-1"),
        ({"sizes": np.array([1.0, 2.0])}, TypeError, "sizes.*float64"),
        ({"sizes": None}, TypeError, "sizes.*None"),
        ({"sizes": [64, (1 << 64) - 1]}, ValueError, r"src_ptrs\[1\].*beyond"),
        ({"dst": (0, 63)}, ValueError, "destinations overlap.*entry 0.*entry 1"),
        ({"dst": (64, 64)}, ValueError, "destinations overlap.*entry 0.*entry 1"),
        ({"dst": (100, 64)}, ValueError, "destinations overlap"),
        ({"src": [0, 0]}, ValueError, r"src_ptrs\[0\] is 0"),
        ({"dst": np.array([0x20, 0x10], np.uint64), "sizes": 8}, ValueError, r"dst_ptrs\[0\].*0x20.*not mapped"),
        ({"dst": (0, 449)}, ValueError, r"dst_ptrs\[1\].*64 bytes.*only 63"),
        ({"src": (0, 511)}, ValueError, r"src_ptrs\[1\].*64 bytes.*only 1"),
        ({"src": np.array([0.0, 1.0])}, TypeError, "src_ptrs.*float64"),
        ({"path": "fast"}, ValueError, "path.*fast"),
        ({"max_ctas": 0}, ValueError, "max_ctas"),
    ],
)
def test_wrong_pointer_lists(cache: Cache, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    refused(cache, error, message, batch(cache, **changed))


def test_unsigned_pointers(cache: Cache) -> None:
    """uint64 lists are taken, whatever their highest bit says."""
    high = np.array([0xFFFF800000000000, 0xFFFFFFFFFFFFFFC0], np.uint64)
    refused(cache, ValueError, r"dst_ptrs\[0\].*0xffff800000000000.*not mapped", batch(cache, dst=high, sizes=8))
    refused(cache, ValueError, r"dst_ptrs\[1\].*0xffffffffffffffc0.*beyond", batch(cache, dst=high, sizes=128))


def test_a_source_that_is_written(cache: Cache) -> None:
    """Copies of one call have no order, so none may read what another writes."""
    base = cache.gpu.ptr
    message = "entry 1 reads.*entry 0.*writes"
    refused(
        cache,
        ValueError,
        message,
        lambda: kvswap.swap_blocks_batch([base, base + 64], [base + 64, base + 128], 64, device=cache.device),
    )
    refused(
        cache,
        ValueError,
        "reads.*writes",
        lambda: kvswap.swap_blocks_batch([base], [base + 8], 64, device=cache.device),
    )


def test_two_ways_in_one_call(cache: Cache) -> None:
    gpu, cpu = cache.gpu.ptr, cache.cpu.ptr
    call = lambda: kvswap.swap_blocks_batch([gpu, cpu + 64], [cpu, gpu + 64], 64, device=cache.device)  # noqa: E731
    refused(cache, ValueError, "copy 1 goes host to device.*copy 0 device to host", call)


def test_an_entry_larger_than_its_array(cache: Cache) -> None:
    small = np.zeros(63, np.uint8)
    sides = (small, cache.gpu.ptr) if cache.direction else (cache.gpu.ptr, small)
    name = "src_ptrs" if cache.direction else "dst_ptrs"
    refused(
        cache,
        ValueError,
        rf"{name}\[0\].* 63 bytes.* 64",
        lambda: kvswap.swap_blocks_batch([sides[0]], [sides[1]], 64, device=cache.device),
    )


# -- streams, events and devices that do not belong together ----------------------------------------------------------


def test_things_of_another_device(cache: Cache) -> None:
    other, alone = kvswap.Device("host:3"), bindings.deterministic_device(3)
    stream, event = kvswap.Stream(other), kvswap.Event(other)
    refused(cache, ValueError, "stream.*host:3.*" + cache.device.name, per_layer(cache, stream=stream))
    refused(cache, ValueError, "after.*host:seed-3", per_layer(cache, after=kvswap.Event(alone)))
    refused(cache, ValueError, "after.*host:seed-3", per_layer(cache, after=[kvswap.Event(alone)]))
    for call in (
        lambda: cache.device.set_compute_stream(stream),
        lambda: kvswap.Event(cache.device).record(stream),
        lambda: kvswap.Event(cache.device).elapsed_time(event),
    ):
        with pytest.raises(ValueError, match="host:3"):
            call()


def test_memory_of_another_host_device(cache: Cache) -> None:
    """The other side of a swap, and not the device's own."""
    if cache.device.kind != "host":
        pytest.skip("a host device's memory is pageable memory to a GPU")
    memory = kvswap.Device("host:3").alloc(BLOCKS * NBYTES)
    refused(cache, ValueError, "memory of device 3; this call runs on", per_layer(cache, gpu_ptr=memory))
    per_layer(cache, cpu_ptr=memory, direction=0)()
    there = np.frombuffer(memory, np.uint8).reshape(BLOCKS, NBYTES)
    np.testing.assert_array_equal(there[[3, 5]], cache.gpu_bytes.reshape(BLOCKS, NBYTES)[[1, 2]])


def test_an_unfinished_transfer_of_another_host_device(cache: Cache) -> None:
    if cache.device.kind != "host":
        pytest.skip("GPUs wait for each other's events")
    other = bindings.deterministic_device(3)
    blocked = Cache(other, 2, 64)
    stream = kvswap.Stream(other)
    flag = other.alloc(4, host=True)
    np.frombuffer(flag, np.uint32)[:] = 0
    bindings.seam(other, "wait32", flag.ptr, 1, stream.handle)
    transfer = blocked.swap([0], [1], stream=stream)
    refused(cache, ValueError, r"after\[0\] is a transfer of host:seed-3.*wait", per_layer(cache, after=transfer))
    np.frombuffer(flag, np.uint32)[:] = 1
    transfer.wait(PATIENCE)
    per_layer(cache, after=transfer)()


def test_a_handle_that_is_no_stream(cache: Cache) -> None:
    if cache.device.kind != "host":
        pytest.skip("the driver does not check handles")
    before = cache.device.stats()["submitted"]
    for options in ({"stream": 0xDEAD}, {"after": 0xDEAD}):
        with pytest.raises(kvswap.DeviceError, match="0xdead is no stream") as caught:
            per_layer(cache, **options)()
        assert caught.value.code == 400
    assert cache.device.stats()["submitted"] == before
    cache.check_untouched()


def test_memory_is_no_stream(cache: Cache) -> None:
    """It has a ptr, as a stream of CuPy does."""
    allocated = cache.device.alloc(64)
    shared = memory.open(memory.export(allocated), device=cache.device)
    pool = memory.HostPool(1, 4096, device=cache.device)
    for what in (allocated, shared, pool, pool.pool()):
        name = type(what).__name__
        refused(cache, TypeError, f"stream must be a stream: .*not kvswap.*{name}", per_layer(cache, stream=what))
        refused(cache, TypeError, f"after .*kvswap.*{name}", per_layer(cache, after=what))


def test_path_direct_is_not_for_gpus(cache: Cache) -> None:
    if cache.device.kind == "host":
        pytest.skip("a host device has it")
    refused(cache, kvswap.Error, "path 'direct' is for host devices", per_layer(cache, path="direct"))


def test_path_kernel_needs_memory_that_it_reaches(cache: Cache) -> None:
    if cache.device.kind == "host":
        pytest.skip("a host device's kernels reach all memory")
    if not cache.device.info["kernels"]:
        pytest.skip(cache.device.info["kernels_note"])
    plain = Buffer(cache.device, BLOCKS * NBYTES, "plain")
    refused(cache, ValueError, "pageable.*register", per_layer(cache, cpu_ptr=plain.ptr, path="kernel"))


def test_host_memory_where_gpu_memory_belongs(cache: Cache) -> None:
    if cache.device.kind == "host":
        pytest.skip("on a host device any memory is the device's")
    plain = Buffer(cache.device, BLOCKS * NBYTES, "plain")
    refused(cache, ValueError, "gpu_ptr.*host memory", per_layer(cache, gpu_ptr=plain.ptr))
    refused(cache, ValueError, "host memory.*host:0", per_layer(cache, gpu_ptr=plain.ptr, device=None))


# -- the rest of the surface ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d: d.alloc(0), ValueError, "nbytes.* 0"),
        (lambda d: d.alloc(-1), ValueError, "nbytes.*-1"),
        (lambda d: d.alloc("x"), TypeError, "nbytes.*str"),
        (lambda d: d.alloc(1 << 62), MemoryError, "."),
        (lambda d: d.register(0x1000), ValueError, "nbytes.*plain address"),
        (lambda d: d.register(np.zeros(16, np.uint8), 17), ValueError, "nbytes is 17.* 16"),
        (lambda d: d.register(np.zeros(16, np.uint8), 0), ValueError, "nbytes.* 0"),
        (lambda d: d.register((1 << 64) - 4096, 8192), ValueError, "wraps"),
        (lambda d: d.unregister(0x1000), ValueError, "0x1000.*not registered"),
        (lambda d: d.unregister(None), TypeError, "ptr"),
        (lambda d: d.synchronize(-1), ValueError, "timeout.*-1"),
        (lambda d: d.synchronize("1"), TypeError, "timeout.*str"),
        (lambda d: d.synchronize(float("nan")), ValueError, "timeout.*nan"),
        (lambda d: d.set_compute_stream(None), TypeError, "stream.*None"),
        (lambda d: kvswap.Stream(d, priority="top"), ValueError, "priority.*top"),
        (lambda d: kvswap.Event(d).record(None), TypeError, "stream.*None"),
        (lambda d: kvswap.Event(d).elapsed_time(3), TypeError, "other.*int"),
        (lambda d: kvswap.Device(3.0), TypeError, "device.*float"),
        (lambda d: kvswap.Device("host:99999"), ValueError, "host:99999"),
        (lambda d: kvswap.Device(""), ValueError, "device ''"),
        (lambda d: kvswap.Device("cuda:4000"), kvswap.Error, "."),
        (lambda d: bindings.set_lane_depth(d, 0), ValueError, "depth"),
        (lambda d: bindings.set_lane_depth(d, 65537), ValueError, "depth"),
        (lambda d: d.set_slots(1), ValueError, "3 slots of 1 bytes: 2 to 8 of a multiple of 128 KiB"),
        (lambda d: d.set_slots(None), TypeError, "slot_nbytes.*None"),
    ],
)
def test_wrong_calls(
    device: kvswap.Device, call: Callable[[kvswap.Device], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(device)


def test_one_tensor_given_twice(cache: Cache) -> None:
    """The message tells which of the tensors, not only which blocks."""
    gpu, cpu = [cache.gpu.ptr] * 2, [cache.cpu.ptr] * 2

    def swap() -> None:
        kvswap.swap_cache_all_layers(gpu, cpu, 64, 8, 8, [1], [2], cache.direction, device=cache.device)

    refused(cache, ValueError, "overlap: block 0 of tensor 0 writes.*block 0 of tensor 1 writes", swap)
