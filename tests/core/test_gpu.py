"""On a GPU, against others: copies that torch and cupy make, torch's streams, graphs and allocators, and the contexts
that there must not be. All of it is skipped, visibly, without ``--device cuda:0``."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import itertools
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
from conftest import PATHS, PATIENCE, Buffer, run_python, usable

import kvswap
from kvswap import testing
from kvswap.trtllm import Block, KVCacheBlockPool, KVCacheTransferManager

SIZES = (1, 7, 8, 12, 15, 16, 4095, 4096, 4097, 65536)
GPU_PATHS = [path for path in PATHS if path != "direct"]


@pytest.fixture(autouse=True)
def _needs_a_gpu(cuda: kvswap.Device) -> None:
    pass


@pytest.fixture
def torch(cuda: kvswap.Device) -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


@pytest.fixture
def cupy(cuda: kvswap.Device) -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(params=GPU_PATHS)
def gpu_path(request: pytest.FixtureRequest, cuda: kvswap.Device) -> str:
    return usable(cuda, str(request.param))


def ids(seed: int, blocks: int, count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.permutation(blocks)[:count], rng.permutation(blocks)[:count]


# -- copies against others' --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_against_torch(cuda: kvswap.Device, torch: Any, gpu_path: str, nbytes: int, offset: int) -> None:
    """Blocks of bytes at odd addresses in pinned memory, both ways, and the bytes around them."""
    blocks, count = 40, 30
    gpu = torch.randint(0, 256, (blocks * nbytes + 32,), dtype=torch.uint8, device="cuda")
    cpu = torch.randint(0, 256, (blocks * nbytes + 32,), dtype=torch.uint8).pin_memory()
    gpu_ids, cpu_ids = ids(nbytes + offset, blocks, count)
    for direction in (0, 1):
        expected_gpu, expected_cpu = gpu.clone(), cpu.clone()
        gpu_view = expected_gpu[offset : offset + blocks * nbytes].view(blocks, nbytes)
        cpu_view = expected_cpu[3 : 3 + blocks * nbytes].view(blocks, nbytes)
        if direction:
            gpu_view[torch.as_tensor(gpu_ids).cuda()] = cpu_view[torch.as_tensor(cpu_ids)].cuda()
        else:
            cpu_view[torch.as_tensor(cpu_ids)] = gpu_view[torch.as_tensor(gpu_ids).cuda()].cpu()
        torch.cuda.synchronize()
        kvswap.swap_cache_per_layer(
            gpu.data_ptr() + offset,
            cpu.data_ptr() + 3,
            nbytes,
            blocks,
            blocks,
            gpu_ids,
            cpu_ids,
            direction,
            path=gpu_path,
        )
        assert torch.equal(gpu, expected_gpu) and torch.equal(cpu, expected_cpu)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("shape", [(24, 16, 128), (24, 2, 16, 8), (24, 2, 8, 4, 16)])
def test_torch_tensors_as_they_are(
    cuda: kvswap.Device, torch: Any, gpu_path: str, dtype: str, shape: tuple[int, ...]
) -> None:
    """Caches of 3, 4 and 5 dimensions; several layers; the tensors themselves are passed."""
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    layers, kind = 3, getattr(torch, dtype)
    gpu = [torch.randn(shape, device="cuda").to(kind) for _ in range(layers)]
    cpu = [torch.randn(shape).to(kind).pin_memory() for _ in range(layers)]
    nbytes = gpu[0][0].numel() * gpu[0].element_size()
    gpu_ids, cpu_ids = ids(len(shape), shape[0], 17)

    def raw(tensor: Any) -> Any:
        return tensor.view(torch.uint8).reshape(shape[0], -1).cpu().clone()

    expected = [raw(tensor) for tensor in cpu]
    for after, before in zip(expected, gpu, strict=True):
        after[torch.as_tensor(cpu_ids)] = raw(before)[torch.as_tensor(gpu_ids)]
    torch.cuda.synchronize()
    kvswap.swap_cache_all_layers(
        gpu, cpu, nbytes, shape[0], shape[0], gpu_ids, cpu_ids, kvswap.Direction.D2H, path=gpu_path
    )
    assert all(torch.equal(raw(tensor), after) for tensor, after in zip(cpu, expected, strict=True))
    back = [torch.zeros_like(tensor) for tensor in gpu]
    torch.cuda.synchronize()
    kvswap.swap_cache_all_layers(
        back, cpu, nbytes, shape[0], shape[0], gpu_ids, cpu_ids, kvswap.Direction.H2D, path=gpu_path
    )
    for restored, original in zip(back, gpu, strict=True):
        index = torch.as_tensor(gpu_ids)
        assert torch.equal(raw(restored)[index], raw(original)[index])


def test_torch_ids(cuda: kvswap.Device, torch: Any) -> None:
    gpu, cpu = torch.arange(64, dtype=torch.int32, device="cuda"), torch.zeros(64, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize()
    for kind in (torch.int32, torch.int64):
        kvswap.swap_cache_per_layer(
            gpu, cpu, 4, 64, 64, torch.tensor([5, 9], dtype=kind), torch.tensor([1, 0], dtype=kind), 0
        )
        assert cpu[:2].tolist() == [9, 5]


@pytest.mark.parametrize("path", ["auto", "burst", "kernel"])
@pytest.mark.parametrize("kind, step", [("int64", 1), ("int32", 1), ("int64", 3)])
def test_torch_ids_on_the_gpu(cuda: kvswap.Device, torch: Any, path: str, kind: str, step: int) -> None:
    """Made on a stream of torch's, behind other work, and changed on that stream behind the transfer."""
    blocks, nbytes, producer = 200, 4096, torch.cuda.Stream()
    rows, columns = ids(step, blocks, 150)
    for direction, on_stream in itertools.product((0, 1), (False, True)):
        gpu = torch.randint(0, 256, (blocks, nbytes), dtype=torch.uint8, device="cuda")
        cpu = torch.randint(0, 256, (blocks, nbytes), dtype=torch.uint8).pin_memory()
        wide = torch.as_tensor(np.repeat(rows, step)).to(getattr(torch, kind)).pin_memory()
        there = torch.full_like(wide, -1, device="cuda")
        expected = (gpu if direction else cpu).cpu().clone()
        if direction:
            expected[torch.as_tensor(rows)] = cpu[torch.as_tensor(columns)]
        else:
            expected[torch.as_tensor(columns)] = gpu.cpu()[torch.as_tensor(rows)]
        torch.cuda.synchronize()
        options = {"stream": producer} if on_stream else {}
        with torch.cuda.stream(producer):
            torch.cuda._sleep(20_000_000)
            there.copy_(wide, non_blocking=True)
            transfer = kvswap.swap_cache_per_layer_async(
                gpu, cpu, nbytes, blocks, blocks, there[::step], columns, direction, path=path, **options
            )
            if on_stream:
                there.fill_(1 << 30)
        transfer.wait(PATIENCE)
        torch.cuda.synchronize()
        assert torch.equal((gpu if direction else cpu).cpu(), expected)


def test_torch_ids_that_are_bad(cuda: kvswap.Device, torch: Any) -> None:
    gpu = torch.ones(64, 512, dtype=torch.uint8, device="cuda")
    cpu = torch.full((64, 512), 2, dtype=torch.uint8).pin_memory()
    there = torch.tensor([5, 64, 7, -1], device="cuda")
    torch.cuda.synchronize()
    transfer = kvswap.swap_cache_per_layer_async(gpu, cpu, 512, 64, 64, there, [0, 1, 2, 3], 0)
    with pytest.raises(kvswap.Error, match=r"gpu_block_ids\[1\] is 64, read on the device"):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [1, 3]
    assert cpu[:5, 0].tolist() == [1, 0, 1, 0, 2]
    for wrong in (there.float(), there.to(torch.int16), there.bool()):
        with pytest.raises(TypeError, match=r"gpu_block_ids is a GPU array of .*: on the device ids are int"):
            kvswap.swap_cache_per_layer(gpu, cpu, 512, 64, 64, wrong, [0, 1, 2, 3], 0)
    with pytest.raises(TypeError, match=r"cpu_block_ids is a GPU array \(Tensor\): only ids of the GPU's side"):
        kvswap.swap_cache_per_layer(gpu, cpu, 512, 64, 64, [0, 1, 2, 3], there, 0)


def test_cupy_ids_on_the_gpu(cuda: kvswap.Device, cupy: Any) -> None:
    gpu = cupy.arange(64 * 512, dtype=cupy.uint8).reshape(64, 512)
    room = cupy.cuda.alloc_pinned_memory(64 * 512)
    cpu = np.frombuffer(room, np.uint8, 64 * 512).reshape(64, 512)
    rows, columns = ids(1, 64, 40)
    for kind in (cupy.int32, cupy.int64):
        cpu[:] = 0
        there = cupy.asarray(np.repeat(rows, 2), dtype=kind)[::2]
        kvswap.swap_cache_per_layer(gpu, cpu, 512, 64, 64, there, columns, 0)
        np.testing.assert_array_equal(cpu[columns], cupy.asnumpy(gpu)[rows])


def test_a_tensor_with_gaps(cuda: kvswap.Device, torch: Any) -> None:
    gpu, cpu = (
        torch.zeros(8, 64, dtype=torch.uint8, device="cuda")[:, ::2],
        torch.zeros(8, 32, dtype=torch.uint8).pin_memory(),
    )
    with pytest.raises(ValueError, match=r"gpu_ptr.*contiguous"):
        kvswap.swap_cache_per_layer(gpu, cpu, 32, 8, 8, [0], [0], 0)


@pytest.mark.parametrize("nbytes", SIZES)
def test_against_cupy(cuda: kvswap.Device, cupy: Any, gpu_path: str, nbytes: int) -> None:
    blocks = 24
    gpu = cupy.random.randint(0, 256, (blocks, nbytes), dtype=cupy.uint8)
    room = cupy.cuda.alloc_pinned_memory(blocks * nbytes)
    cpu = np.frombuffer(room, np.uint8, blocks * nbytes).reshape(blocks, nbytes)
    cpu[:] = 7
    gpu_ids, cpu_ids = ids(nbytes, blocks, 19)
    expected = cpu.copy()
    expected[cpu_ids] = cupy.asnumpy(gpu)[gpu_ids]
    kvswap.swap_cache_per_layer(gpu, cpu, nbytes, blocks, blocks, gpu_ids, cpu_ids, 0, path=gpu_path)
    np.testing.assert_array_equal(cpu, expected)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gpu.fill(0)
    kvswap.swap_cache_per_layer(gpu, cpu, nbytes, blocks, blocks, gpu_ids, cpu_ids, 1, path=gpu_path, stream=stream)
    np.testing.assert_array_equal(cupy.asnumpy(gpu)[gpu_ids], expected[cpu_ids])
    assert not cupy.asnumpy(gpu)[np.setdiff1d(np.arange(blocks), gpu_ids)].any()


def test_host_memory_of_every_kind(cuda: kvswap.Device, torch: Any) -> None:
    """Pageable tensors and arrays, pinned ones, registered ones, and kvswap's own."""
    blocks, nbytes = 16, 5000
    gpu = torch.randint(0, 256, (blocks, nbytes), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    there = gpu.cpu().numpy()
    registered = np.zeros((blocks, nbytes), np.uint8)
    cuda.register(registered)
    own = cuda.alloc(blocks * nbytes, host=True)
    kinds: list[tuple[Any, Any]] = [(tensor := torch.zeros(blocks, nbytes, dtype=torch.uint8), tensor.numpy())]
    kinds += [(tensor := torch.zeros(blocks, nbytes, dtype=torch.uint8).pin_memory(), tensor.numpy())]
    kinds += [(array := np.zeros((blocks, nbytes), np.uint8), array), (registered, registered)]
    kinds += [(own, np.frombuffer(own, np.uint8).reshape(blocks, nbytes))]
    for i, (cpu, view) in enumerate(kinds):
        gpu_ids, cpu_ids = ids(i, blocks, 11)
        kvswap.swap_cache_per_layer(gpu, cpu, nbytes, blocks, blocks, gpu_ids, cpu_ids, 0)
        np.testing.assert_array_equal(view[cpu_ids], there[gpu_ids])
        restored = torch.zeros_like(gpu)
        torch.cuda.synchronize()
        kvswap.swap_cache_per_layer(restored, cpu, nbytes, blocks, blocks, gpu_ids, cpu_ids, 1)
        np.testing.assert_array_equal(restored.cpu().numpy()[gpu_ids], there[gpu_ids])
    cuda.unregister(registered)


@pytest.mark.parametrize("layered", [False, True])
def test_a_load_from_pageable_memory_follows_the_store_to_it(cuda: kvswap.Device, layered: bool) -> None:
    """The driver reads such a source when it is asked to copy, and does not end such a store before it returns."""
    gpu, plain = Buffer(cuda, 8192), Buffer(cuda, 4096, "plain")
    storing, loading = kvswap.Stream(cuda), kvswap.Stream(cuda)
    for seed in range(20):
        data = gpu.randomise(seed)
        testing.delay(cuda, 5e-3, storing)
        store = kvswap.swap_cache_all_layers_async(
            [gpu.ptr], [plain.ptr], [64], 64, 64, [3, 5], [40, 1], "D2H", stream=storing, device=cuda
        )
        load = kvswap.swap_cache_all_layers_async(
            [gpu.ptr + 4096],
            [plain.ptr],
            [4096],
            *(1, 1, [0], [0], "H2D"),
            after=[store],
            stream=loading,
            device=cuda,
            layer_events=layered,
        )
        load.wait(PATIENCE)
        expected = plain.get()
        assert (expected[40 * 64 : 41 * 64] == data[3 * 64 : 4 * 64]).all()
        assert (gpu.get()[4096:] == expected).all()


def test_tensors_inside_a_larger_chunk(cuda: kvswap.Device, torch: Any, gpu_path: str) -> None:
    """torch cuts small tensors from chunks: what belongs to a tensor is less than what the driver knows."""
    tensors = [torch.full((64,), i, dtype=torch.uint8, device="cuda") for i in range(20)]
    cpu = torch.zeros(20, 64, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    order = np.random.default_rng(1).permutation(20)
    kvswap.swap_blocks_batch([tensors[i] for i in order], [cpu[i] for i in order], 64, path=gpu_path).wait(PATIENCE)
    assert all((cpu[i] == i).all() for i in range(20))


# -- order with torch's streams ----------------------------------------------------------------------------------------


def slow(torch: Any) -> None:
    torch.cuda._sleep(200_000_000)  # about a tenth of a second


@pytest.mark.parametrize("which", ["side", "default"])
def test_order_on_a_torch_stream(cuda: kvswap.Device, torch: Any, gpu_path: str, which: str) -> None:
    stream = torch.cuda.Stream() if which == "side" else torch.cuda.default_stream()
    gpu = torch.zeros(64, 4096, dtype=torch.uint8, device="cuda")
    cpu = torch.zeros(64, 4096, dtype=torch.uint8).pin_memory()
    gpu_ids, cpu_ids = ids(1, 64, 50)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        slow(torch)
        gpu.fill_(9)
        transfer = kvswap.swap_cache_per_layer_async(
            gpu, cpu, 4096, 64, 64, gpu_ids, cpu_ids, 0, stream=stream, path=gpu_path
        )
        gpu.fill_(77)
        back = kvswap.swap_cache_per_layer_async(
            gpu, cpu, 4096, 64, 64, gpu_ids, cpu_ids, 1, stream=stream, path=gpu_path
        )
        total = gpu.sum(dtype=torch.int64)
    transfer.wait(PATIENCE)
    back.wait(PATIENCE)
    assert (cpu[torch.as_tensor(cpu_ids)] == 9).all()
    stream.synchronize()
    assert int(total) == 4096 * (50 * 9 + 14 * 77)


def test_without_a_stream_after_the_compute_stream(cuda: kvswap.Device, torch: Any, gpu_path: str) -> None:
    stream = torch.cuda.Stream()
    cuda.set_compute_stream(stream)
    gpu = torch.zeros(64, 4096, dtype=torch.uint8, device="cuda")
    cpu = torch.zeros(64, 4096, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        slow(torch)
        gpu.fill_(5)
    transfer = kvswap.swap_cache_per_layer_async(
        gpu, cpu, 4096, 64, 64, np.arange(64), np.arange(64)[::-1], 0, path=gpu_path
    )
    transfer.wait(PATIENCE)
    assert (cpu == 5).all()


def test_after_a_torch_event(cuda: kvswap.Device, torch: Any, gpu_path: str) -> None:
    writer, other = torch.cuda.Stream(), torch.cuda.Stream()
    gpu = torch.zeros(64, 4096, dtype=torch.uint8, device="cuda")
    cpu = torch.zeros(64, 4096, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    with torch.cuda.stream(writer):
        slow(torch)
        gpu.fill_(6)
        event.record()
    for after in (event, [writer], torch.cuda.Event()):
        options: dict[str, Any] = {"after": after} if not isinstance(after, torch.cuda.Event) or after is event else {}
        if options:
            kvswap.swap_cache_per_layer(
                gpu, cpu, 4096, 64, 64, np.arange(64), np.arange(64), 0, stream=other, path=gpu_path, **options
            )
            assert (cpu == 6).all()
        cpu.zero_()
    kvswap.swap_cache_per_layer(gpu, cpu, 4096, 64, 64, [0], [0], 0, after=torch.cuda.Event())


def test_make_wait_of_a_torch_stream(cuda: kvswap.Device, torch: Any, gpu_path: str) -> None:
    slow_stream, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    gpu = torch.zeros(64, 4096, dtype=torch.uint8, device="cuda")
    cpu = torch.full((64, 4096), 3, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    with torch.cuda.stream(slow_stream):
        slow(torch)
    transfer = kvswap.swap_cache_per_layer_async(
        gpu, cpu, 4096, 64, 64, np.arange(64), np.arange(64), 1, after=slow_stream, path=gpu_path
    )
    transfer.make_wait(consumer)
    with torch.cuda.stream(consumer):
        total = gpu.sum(dtype=torch.int64)
    consumer.synchronize()
    assert int(total) == 3 * 64 * 4096


def race_rig(cuda: kvswap.Device, torch: Any) -> tuple[Any, Any, Any]:
    """A manager over torch's tensors, and both sides as tensors: 16 blocks of 4 layers of 16 KiB."""
    shape = (16, 4, 2, 2, 16, 128)
    gpu = torch.zeros(shape, dtype=torch.float16, device="cuda")
    cpu = torch.zeros(shape, dtype=torch.float16).pin_memory()
    pool = KVCacheBlockPool(
        gpu,
        cpu,
        16,
        16,
        num_layers=4,
        kv_factor=2,
        num_kv_heads=2,
        tokens_per_block=16,
        size_per_head=128,
        dtype="fp16",
    )
    torch.cuda.synchronize()
    return KVCacheTransferManager([pool], device=cuda), gpu, cpu


@pytest.mark.parametrize("synced", [False, True], ids=["no sync", "sync_with_compute"])
def test_the_store_race(cuda: kvswap.Device, torch: Any, synced: bool) -> None:
    """A kernel writes a block and the store follows: without sync_with_compute it stores what was there before, and the
    checker names both; with it, neither."""
    manager, gpu, cpu = race_rig(cuda, torch)
    stream = torch.cuda.Stream()
    stale = 0
    with testing.race_checker(raise_at_exit=False) as checker:
        for i in range(150):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # about 10 ms
                gpu[i % 16].fill_(i + 1)
            testing.note_access(stream, manager.primary_pools[0], [i % 16], True)
            if synced:
                manager.sync_with_compute(stream)
            manager.offload(i % 16, (5 * i) % 16).wait(PATIENCE)
            stale += bool((cpu[(5 * i) % 16] != i + 1).any())
            stream.synchronize()
            testing.note_order(stream, None)
        races = checker.races
    manager.close()
    if synced:
        assert (stale, races) == (0, [])
    else:
        assert stale > 100  # on a busy machine a store may come after the 10 ms, and is right by chance
        assert len(races) == 150 and all("test_gpu.py" in str(race) for race in races)


@pytest.mark.parametrize("tokens", [1, 5, 15, 16])
def test_partial_blocks_against_torch(cuda: kvswap.Device, torch: Any, gpu_path: str, tokens: int) -> None:
    manager, gpu, cpu = race_rig(cuda, torch)
    gpu.copy_(torch.randint(-1000, 1000, gpu.shape, device="cuda"))
    cpu.copy_(torch.randint(-1000, 1000, cpu.shape))
    torch.cuda.synchronize()
    expected_cpu, expected_gpu = cpu.clone(), gpu.clone()
    manager._options["path"] = gpu_path
    for source, target in ((3, 9), (4, 1), (15, 0)):
        expected_cpu[target][..., :tokens, :] = gpu[source][..., :tokens, :].cpu()
    manager.offload([3, 4, 15], [9, 1, 0], tokens).wait(PATIENCE)
    assert torch.equal(cpu, expected_cpu)
    expected_gpu[7][..., :tokens, :] = gpu[2][..., :tokens, :]
    manager.onboard(Block(2), 7, tokens).wait(PATIENCE)
    expected_gpu[5][..., :tokens, :] = cpu[1][..., :tokens, :].cuda()
    manager.onboard(1, 5, tokens).wait(PATIENCE)
    assert torch.equal(gpu, expected_gpu)
    manager.close()


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_is_not_disturbed(cuda: kvswap.Device, torch: Any, gpu_path: str, mode: str) -> None:
    """Transfers run in another thread, and before and after, while torch captures a graph: it replays right."""
    compute = kvswap.Stream(cuda)
    cuda.set_compute_stream(compute)  # the legacy stream may not be touched while another is captured
    gpu = torch.randint(0, 256, (256, 4096), dtype=torch.uint8, device="cuda")
    cpu = torch.zeros(256, 4096, dtype=torch.uint8).pin_memory()
    there = gpu.cpu()
    x = torch.zeros(1024, device="cuda")
    stop, running, wrong = threading.Event(), threading.Event(), []

    def swap(seed: int) -> None:
        gpu_ids, cpu_ids = ids(seed, 256, 200)
        transfer = kvswap.swap_cache_per_layer_async(gpu, cpu, 4096, 256, 256, gpu_ids, cpu_ids, 0, path=gpu_path)
        while not transfer.done():
            pass
        transfer.wait(PATIENCE)
        if not torch.equal(cpu[torch.as_tensor(cpu_ids)], there[torch.as_tensor(gpu_ids)]):
            wrong.append(seed)

    def loop() -> None:
        try:
            seed = 0
            while not stop.is_set():
                swap(seed)
                seed += 1
                running.set()
        except BaseException as error:
            wrong.append(error)
            running.set()

    torch.cuda.synchronize()
    swap(1000)
    thread = threading.Thread(target=loop)
    thread.start()
    running.wait(PATIENCE)
    try:
        graphs = []
        for i in range(5):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
                y = x * 2 + i
                for _ in range(50):
                    y = y + 1
            graphs.append((graph, y, i))
    finally:
        stop.set()
        thread.join(PATIENCE)
    assert wrong == []
    x.fill_(3)
    for graph, y, i in graphs:
        graph.replay()
        torch.cuda.synchronize()
        assert (y == 3 * 2 + i + 50).all()
    swap(2000)
    assert wrong == []


def test_a_capturing_stream_is_refused(cuda: kvswap.Device, torch: Any) -> None:
    cuda.set_compute_stream(kvswap.Stream(cuda))
    gpu = torch.zeros(8, 64, dtype=torch.uint8, device="cuda")
    cpu = torch.zeros(8, 64, dtype=torch.uint8).pin_memory()
    x = torch.zeros(16, device="cuda")
    graph, stream, messages = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        y = x + 1
        for options in ({"stream": stream}, {"after": stream}):
            with pytest.raises(kvswap.Error, match="captured") as caught:
                kvswap.swap_cache_per_layer_async(gpu, cpu, 64, 8, 8, [1], [2], 0, **options)
            messages.append(str(caught.value))
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 1).all() and len(messages) == 2


# -- contexts ----------------------------------------------------------------------------------------------------------

CONTEXT = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0

def active(ordinal=0):
    device, flags, state = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0
    assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(state)) == 0
    return bool(state.value)

def current():
    context = ctypes.c_void_p()
    assert cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value
"""


def process(script: str, **environment: str) -> str:
    run = run_python(script, 300, **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_no_context_by_accident() -> None:
    """Importing, listing and asking about pointers make none; opening uses the primary one and leaves none current."""
    script = CONTEXT + textwrap.dedent("""
    import kvswap
    assert not active() and current() is None
    kvswap.devices()
    assert not active() and current() is None
    kvswap.Device("host:0")
    assert not active() and current() is None
    import numpy as np
    try:
        kvswap.swap_cache_per_layer(np.zeros(64, np.uint8), np.zeros(64, np.uint8), 64, 1, 1, [0], [0], 0)
    except ValueError as error:
        assert "host memory" in str(error), error
    assert not active() and current() is None
    device = kvswap.Device("cuda:0")
    assert active() and current() is None
    device.alloc(64), kvswap.Stream(device), kvswap.Event(device)
    device.synchronize()
    assert current() is None
    """)
    process(script)


def test_no_context_on_other_gpus(cuda: kvswap.Device) -> None:
    if len(kvswap.devices()) < 3:
        pytest.skip("one GPU")
    script = CONTEXT + textwrap.dedent("""
    import kvswap
    device = kvswap.Device("cuda:1")
    device.alloc(64)
    assert active(1) and not active(0)
    """)
    process(script)


def test_the_current_context_is_left_alone(cuda: kvswap.Device, torch: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")

    def current() -> int | None:
        context = ctypes.c_void_p()
        assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value

    torch.zeros(1, device="cuda")
    before = current()
    assert before is not None
    memory = cuda.alloc(4096)
    kvswap.Stream(cuda).synchronize(PATIENCE)
    cuda.synchronize(PATIENCE)
    memory.free()
    assert current() == before


def test_any_thread_without_a_context(cuda: kvswap.Device) -> None:
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            gpu, cpu = cuda.alloc(4096), cuda.alloc(4096, host=True)
            np.frombuffer(cpu, np.uint8)[:] = 4
            kvswap.swap_cache_per_layer(gpu, cpu, 64, 64, 64, np.arange(64), np.arange(64), 1, device=cuda)
            np.frombuffer(cpu, np.uint8)[:] = 0
            kvswap.swap_cache_per_layer(gpu, cpu, 64, 64, 64, np.arange(64), np.arange(64), 0)
            assert (np.frombuffer(cpu, np.uint8) == 4).all()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []


# -- allocators and settings -------------------------------------------------------------------------------------------

SWAPS = """
import numpy as np
import torch
import kvswap

rng = np.random.default_rng(1)
for nbytes in (15, 4096, 65536):
    gpu = [torch.randint(0, 256, (300, nbytes), dtype=torch.uint8, device="cuda") for _ in range(4)]
    cpu = [torch.zeros(300, nbytes, dtype=torch.uint8).pin_memory() for _ in range(4)]
    torch.cuda.synchronize()
    for path in ("auto", "dma", "kernel", "burst"):
        info = kvswap.Device("cuda:0").info
        if path == "kernel" and not info["kernels"]:
            continue
        if path == "burst" and info["burst"] != "on":
            continue
        gpu_ids, cpu_ids = rng.permutation(300)[:250], rng.permutation(300)[:250]
        kvswap.swap_cache_all_layers(gpu, cpu, nbytes, 300, 300, gpu_ids, cpu_ids, 0, path=path)
        for g, c in zip(gpu, cpu):
            assert torch.equal(c[torch.as_tensor(cpu_ids)], g.cpu()[torch.as_tensor(gpu_ids)]), (nbytes, path)
print("right", kvswap.Device("cuda:0").stats()["second_attempts"], kvswap.Device("cuda:0").info["burst"])
"""

BUSY = """
import threading
import numpy as np
import torch
import kvswap

device, rng, stop = kvswap.Device("cuda:0"), np.random.default_rng(1), threading.Event()
LAYERS, BLOCKS, NBYTES = 40, 200, 8192
slab = torch.randint(0, 256, (LAYERS, BLOCKS, NBYTES), dtype=torch.uint8, device="cuda")
back = torch.zeros_like(slab)
host = torch.zeros(BLOCKS, LAYERS, NBYTES, dtype=torch.uint8).pin_memory()
streams = [torch.cuda.Stream() for _ in range(40)]
a = torch.randn(2048, 2048, device="cuda")
torch.cuda.synchronize()

def work():
    while not stop.is_set():
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.mm(a, a)
        for stream in streams[::7]:
            stream.synchronize()

def allocate():
    while not stop.is_set():
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(64 << 20))
        torch.cuda.empty_cache()

threads = [threading.Thread(target=work), threading.Thread(target=allocate)]
for thread in threads:
    thread.start()
try:
    for turn in range(40):
        gpu_ids, cpu_ids = rng.permutation(BLOCKS), rng.permutation(BLOCKS)
        streams_of = [kvswap.Stream(device), kvswap.Stream(device)]
        options = dict(cpu_stride=LAYERS * NBYTES, path="burst", device=device)
        halves = [slice(0, BLOCKS // 2), slice(BLOCKS // 2, BLOCKS)]
        hosts = [host[0, layer] for layer in range(LAYERS)]
        for tensors, direction in ((slab, 0), (back, 1)):  # two of one direction at once
            transfers = [
                kvswap.swap_cache_all_layers_async(
                    [t.data_ptr() for t in tensors], [h.data_ptr() for h in hosts], NBYTES, BLOCKS, BLOCKS,
                    gpu_ids[half], cpu_ids[half], direction, stream=stream, **options)
                for half, stream in zip(halves, streams_of)
            ]
            for transfer in transfers:
                transfer.wait(60)
                assert transfer.path == "burst", transfer.path
        assert torch.equal(slab, back), turn
        back.zero_()
        torch.cuda.synchronize()
finally:
    stop.set()
    for thread in threads:
        thread.join()
print("right", device.stats()["second_attempts"])
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        {"CUDA_MODULE_LOADING": "EAGER"},
        {"KVSWAP_DISABLE": "kernel"},
        {"KVSWAP_DISABLE": "batch"},
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_allocators_and_settings(torch: Any, environment: dict[str, str]) -> None:
    script = SWAPS
    if environment.get("KVSWAP_DISABLE") == "kernel":
        script = script.replace('("auto", "dma", "kernel", "burst")', '("auto", "dma")')
    answer, attempts, burst = process(script, **environment).split(maxsplit=2)
    assert (answer, attempts) == ("right", "0")  # nothing was refused on the way
    assert (burst.strip() == "on") == (environment.get("KVSWAP_DISABLE") != "kernel")


@pytest.mark.parametrize("connections", ["1", "32"])
def test_bursts_beside_a_busy_gpu(cuda: kvswap.Device, torch: Any, connections: str) -> None:
    """40 streams of products, a thread that allocates and frees, two bursts of a direction at once."""
    if cuda.info["burst"] != "on":
        pytest.skip(f"burst: {cuda.info['burst']}")
    assert process(BUSY, CUDA_DEVICE_MAX_CONNECTIONS=connections).startswith("right ")


def test_beside_attention(cuda: kvswap.Device, torch: Any, gpu_path: str) -> None:
    """A kernel that wants nearly all of an SM's shared memory runs beside the copies: it gives what it gives alone, and
    so do they."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        pytest.skip("this torch does not name its kind of attention")
    layers, blocks, nbytes = 20, 400, 16384
    query, key, value = (torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def attention() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    gpu = torch.randint(0, 256, (layers, blocks, nbytes), dtype=torch.uint8, device="cuda")
    back, host = torch.zeros_like(gpu), torch.zeros(blocks, layers, nbytes, dtype=torch.uint8).pin_memory()
    expected = attention()
    results = [attention() for _ in range(100)]
    del results  # torch keeps their memory: no turn has to ask the driver for it
    torch.cuda.synchronize()
    for turn in range(4):
        gpu_ids, cpu_ids = ids(turn, blocks, blocks)
        results = []
        stream = kvswap.Stream(cuda)  # not the model's: nothing of this waits for it
        for tensors, direction in ((gpu, 0), (back, 1)):
            results += [attention() for _ in range(50)]
            busy = torch.cuda.Event()
            busy.record()
            transfer = kvswap.swap_cache_all_layers_async(
                [t.data_ptr() for t in tensors],
                [host[0, layer].data_ptr() for layer in range(layers)],
                nbytes,
                blocks,
                blocks,
                gpu_ids,
                cpu_ids,
                direction,
                cpu_stride=layers * nbytes,
                stream=stream,
                path=gpu_path,
                device=cuda,
            )
            assert not busy.query(), "the copies were queued when attention was over: nothing was tested"
            transfer.wait(PATIENCE)
        assert torch.equal(back, gpu), turn
        assert all(torch.equal(result, expected) for result in results), turn
        del results
        back.zero_()
        torch.cuda.synchronize()


def test_many_descriptors(cuda: kvswap.Device, torch: Any, gpu_path: str) -> None:
    """More copies than one call of the driver takes in good health."""
    blocks = 120_000
    gpu = torch.randint(0, 256, (blocks, 48), dtype=torch.uint8, device="cuda")
    cpu = torch.zeros(blocks, 48, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    gpu_ids, cpu_ids = ids(1, blocks, blocks)
    kvswap.swap_cache_per_layer(gpu, cpu, 48, blocks, blocks, gpu_ids, cpu_ids, 0, path=gpu_path)
    assert torch.equal(cpu[torch.as_tensor(cpu_ids)], gpu.cpu()[torch.as_tensor(gpu_ids)])
