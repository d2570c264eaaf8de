"""`await transfer`: ends and raises as wait() does, blocks no loop, and leaves nothing behind however the await, the
loop or the process ends."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Cache, Gate, bindings, run_python

import kvswap
from kvswap import _C, _await, testing
from kvswap.files import FileStore, Layout, MissingKey


@pytest.fixture
def cache(device: kvswap.Device) -> Cache:
    return Cache(device, 16, 96)


@pytest.fixture
def held(cache: Cache) -> Iterator[tuple[kvswap.Stream, Gate]]:
    with Gate(cache.device) as gate:
        gate.hold(stream := kvswap.Stream(cache.device))
        yield stream, gate


def threads() -> int:
    return sum(thread.name == "kvswap-await" for thread in threading.enumerate())


def run(coroutine: Any) -> Any:
    async def within() -> Any:
        return await asyncio.wait_for(coroutine, PATIENCE)

    return asyncio.run(within())


def test_the_loop_goes_on_while_a_transfer_is_awaited(cache: Cache, held: tuple[kvswap.Stream, Gate]) -> None:
    stream, gate = held
    steps: list[str] = []

    async def other() -> None:
        for _ in range(3):
            await asyncio.sleep(0.01)
            steps.append("other")
        gate.open()

    async def main() -> None:
        transfer = cache.swap([1, 2], [3, 4], stream=stream)
        task = asyncio.ensure_future(other())
        assert await transfer is None
        steps.append("ended")
        assert transfer.state == "done"
        await task
        assert await transfer is None  # again, and at once

    run(main())
    assert steps == ["other", "other", "other", "ended"]
    cache.check([1, 2], [3, 4])


def test_waiting_takes_no_processor(cache: Cache, held: tuple[kvswap.Stream, Gate]) -> None:
    stream, gate = held

    async def main() -> float:
        transfer = cache.swap([1], [2], stream=stream)
        waiting = asyncio.ensure_future(transfer)
        begin = time.process_time()
        await asyncio.sleep(0.5)
        spent = time.process_time() - begin
        assert not waiting.done()
        gate.open()
        await waiting
        return spent

    assert run(main()) < 0.35


def test_many_awaits_have_one_thread(cache: Cache) -> None:
    async def main() -> None:
        streams = [kvswap.Stream(cache.device) for _ in range(4)]
        for stream in streams:
            testing.delay(cache.device, 0.05, stream)
        transfers = [cache.swap([i % 16], [i % 16], stream=streams[i % 4]) for i in range(40)]
        await asyncio.gather(*transfers, *transfers)
        assert all(transfer.state == "done" for transfer in transfers)
        assert threads() == 1

    run(main())
    run(main())  # another loop


def test_several_loops_at_once(cache: Cache, held: tuple[kvswap.Stream, Gate]) -> None:
    stream, gate = held
    transfer = cache.swap([1], [3], stream=stream)
    ready = threading.Barrier(4)
    ended: list[int] = []

    async def main(number: int) -> None:
        task = asyncio.ensure_future(transfer)
        await asyncio.sleep(0)
        ready.wait(PATIENCE)
        await task
        ended.append(number)

    workers = [threading.Thread(target=lambda i=i: run(main(i))) for i in range(3)]
    for worker in workers:
        worker.start()
    ready.wait(PATIENCE)
    gate.open()
    for worker in workers:
        worker.join(PATIENCE)
    assert sorted(ended) == [0, 1, 2]


def test_a_failed_transfer_raises_in_the_await(cache: Cache, held: tuple[kvswap.Stream, Gate]) -> None:
    stream, gate = held

    async def main() -> None:
        with testing.fault(cache.device, "copy", "fail", code=77):
            transfer = cache.swap([1], [3], stream=stream, path="dma")
        asyncio.get_running_loop().call_later(0.02, gate.open)
        for _ in range(2):  # while it runs, and after its end
            with pytest.raises(kvswap.DeviceError) as caught:
                await transfer
            assert caught.value.code == 77

    run(main())


def test_a_cancelled_await_leaves_the_transfer_running(cache: Cache, held: tuple[kvswap.Stream, Gate]) -> None:
    stream, gate = held

    async def main() -> None:
        transfer = cache.swap([1], [3], stream=stream)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(transfer, 0.02)
        task = asyncio.ensure_future(transfer)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not transfer.done() and not _await._get_waker()._awaited
        gate.open()
        await transfer

    run(main())
    cache.check([1], [3])


def test_nothing_is_held_after_an_await(cache: Cache, held: tuple[kvswap.Stream, Gate]) -> None:
    """Neither by the thread, which sleeps on, nor by a cancelled await."""
    stream, gate = held

    class Array(np.ndarray):
        pass

    host = np.asarray(cache.device.alloc(96, host=True)).view(Array)  # pinned: no driver waits before it is copied
    dropped = weakref.ref(host)

    async def main(host: Any) -> None:
        transfer = kvswap.swap_blocks_batch([cache.gpu.ptr], [host], 96, stream=stream, device=cache.device)
        del host
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(transfer, 0.02)
        gate.open()
        await transfer

    coroutine = main(host)
    del host
    run(coroutine)
    del coroutine
    for _ in range(1000):
        cache.device.stats()
        gc.collect()
        if dropped() is None:
            break
    assert dropped() is None


def test_a_loop_that_is_closed_meanwhile(cache: Cache, held: tuple[kvswap.Stream, Gate]) -> None:
    stream, gate = held
    transfer = cache.swap([1], [3], stream=stream)

    async def wait() -> None:
        await transfer

    loop = asyncio.new_event_loop()
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0.02))
    task._log_destroy_pending = False
    loop.close()
    gate.open()  # the thread finds the loop closed
    transfer.wait(PATIENCE)
    run(asyncio.wait_for(cache.swap([2], [4]), PATIENCE))  # the thread is none the worse
    assert threads() == 1


def test_outside_a_loop(cache: Cache, held: tuple[kvswap.Stream, Gate]) -> None:
    stream, _ = held
    with pytest.raises(RuntimeError, match="no running event loop"):
        next(cache.swap([1], [3], stream=stream).__await__())


def test_file_transfers(tmp_path: Path) -> None:
    blocks = np.arange(4 * 4096, dtype=np.uint8).reshape(4, 4096)
    loaded = np.zeros_like(blocks)
    keys = [bytes([i]) for i in range(4)]

    async def main(store: FileStore) -> None:
        await asyncio.gather(*[store.store([key], [block]) for key, block in zip(keys, blocks, strict=True)])
        await store.load(keys, list(loaded))
        with pytest.raises(MissingKey):
            await store.load([b"none"], [loaded[0]])
        await store.delete(keys)
        assert store.keys() == []

    with FileStore(tmp_path, Layout(4096), capacity=1 << 20) as store:
        run(main(store))
    np.testing.assert_array_equal(loaded, blocks)


def test_a_file_transfer_that_takes_its_time(tmp_path: Path) -> None:
    block = np.ones((1, 4096), np.uint8)

    async def main(store: FileStore) -> None:
        bindings.file_set_fault(store, "write", "delay", 1, 0, 0, 0.1)
        transfer = store.store([b"a"], list(block))
        await transfer
        assert transfer.state == "done" and transfer.elapsed > 0.05

    with FileStore(tmp_path, Layout(4096), capacity=1 << 20) as store:
        run(main(store))


PROLOGUE = """
    import asyncio, os, sys, threading, warnings
    import numpy as np
    import kvswap
    from kvswap import testing
    warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork() in a process with threads
    device = kvswap.Device("host:90")
    gpu, cpu = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    stream = kvswap.Stream(device)
    def swap(seconds):
        testing.delay(device, seconds, stream)
        return kvswap.swap_cache_per_layer_async(gpu, cpu, 4096, 1, 1, [0], [0], 0, device=device, stream=stream)
    async def wait(seconds):
        await swap(seconds)
"""


def check(script: str) -> str:
    done = run_python(PROLOGUE + script)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_child_of_a_fork_has_a_thread_of_its_own() -> None:
    script = """
    asyncio.run(wait(0.05))
    pid = os.fork()
    if pid == 0:
        device = kvswap.Device("host:90")
        stream = kvswap.Stream(device)
        asyncio.run(wait(0.05))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    asyncio.run(wait(0.05))
"""
    check(script)


def test_what_the_parent_submitted_is_refused_in_the_child() -> None:
    script = """
    asyncio.run(wait(0.05))
    transfer = swap(0.5)
    async def refused():
        try:
            await transfer
        except kvswap.Error as error:
            assert "fork" in str(error), error
            os._exit(7)
    pid = os.fork()
    if pid == 0:
        asyncio.run(refused())
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
    check(script)


def test_an_await_of_the_parent_ends_quietly_in_the_child() -> None:
    """Cancelled there, it neither writes anywhere nor waits for a lock that the parent's thread held."""
    script = """
    async def fork():
        waiting = wait(4.0)
        task = asyncio.ensure_future(waiting)
        await asyncio.sleep(0.05)
        pid = os.fork()
        if pid:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            await task
            return
        names = [os.path.join(folder, str(i)) for i in range(20)]
        files = [open(name, "wb", buffering=0) for name in names]
        task.cancel()
        try:
            waiting.throw(asyncio.CancelledError())  # from 3.14 on the loop itself does not go on in a child
        except asyncio.CancelledError:
            os._exit(7 if all(os.path.getsize(name) == 0 for name in names) else 8)
        os._exit(9)
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(fork())
"""
    check(script)


def test_descriptors_that_a_program_closes_are_no_ones_business() -> None:
    """As a daemon does when it starts: nothing of an await is among them."""
    script = """
    asyncio.run(wait(0.02))
    os.closerange(3, 256)
    reader, writer = os.pipe()
    os.write(writer, b"0123456789abcdef")
    asyncio.run(wait(0.02))
    assert os.read(reader, 100) == b"0123456789abcdef"
"""
    check(script)


@pytest.mark.parametrize("how", ["", "sys.exit(0)", "os._exit(0)"])
def test_the_process_ends_while_something_is_awaited(how: str) -> None:
    script = f"""
    async def leave():
        task = asyncio.ensure_future(swap(0.3))
        await asyncio.sleep(0.02)
        print("left", flush=True)
        {how or "pass"}
    def in_a_thread():
        try:
            asyncio.run(wait(0.3))
        except RuntimeError as error:  # it may come to its await only when the process ends
            assert "nothing can be awaited" in str(error)
    threading.Thread(target=in_a_thread, daemon=True).start()
    asyncio.run(leave())
"""
    assert check(script) == "left\n"


def test_a_thread_that_fails_leaves_no_await_behind() -> None:
    script = """
    from kvswap import _await, _C
    def fails(transfers, news):
        raise MemoryError("no memory")
    _C._wait_first = fails
    seen = []
    threading.excepthook = seen.append
    async def main():
        for _ in range(2):
            try:
                await swap(0.2)
            except RuntimeError as error:
                assert "the thread that waits for transfers has" in str(error), error
            else:
                raise AssertionError("not raised")
    asyncio.run(asyncio.wait_for(main(), 60))
    assert [each.exc_type for each in seen] == [MemoryError]
"""
    check(script)


def test_all_threads_that_wait_are_told() -> None:
    """A signal to one of them would be lost: another may be the one that has something new to wait for."""
    seen = _C._await_news()
    waiting = [threading.Thread(target=_C._wait_first, args=([], seen), daemon=True) for _ in range(3)]
    for each in waiting:
        each.start()
    time.sleep(0.2)  # they sleep, or come later and see the news
    _C._await_tell()
    for each in waiting:
        each.join(PATIENCE)
    assert not any(each.is_alive() for each in waiting)


def test_awaiting_without_anything_else_imports_no_asyncio() -> None:
    done = run_python("import sys, kvswap; assert 'asyncio' not in sys.modules and 'kvswap._await' not in sys.modules")
    assert done.returncode == 0, done.stderr
