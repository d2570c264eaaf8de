"""Operations of whole processes: fork, SIGINT, exit, the loss of a device, a second device, memory in two processes."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import os
import select
import signal
import threading
import time
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
from conftest import PATIENCE, ROOT, run_python, seam

import kvswap
from differential.copies import carry, lists, touched
from differential.frame import Memory, World, check, operation
from kvswap import testing


@operation(0.08, alone=True)
def fork(world: World) -> None:
    """The child is told that it has no device, ends by itself, and changes nothing."""
    world.say("fork")
    running = [use.transfer for use in world.uses if isinstance(use.transfer, kvswap.Transfer)]
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads and fork
        child = os.fork()
    if child == 0:
        in_child(world, running, writer)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], PATIENCE)
    said = os.read(reader, 4000).decode() if ready else "nothing in time"
    os.close(reader)
    if not ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    check(said == "ok" and status == 0, f"the child of a fork said {said!r}, status {status}")


def in_child(world: World, running: list[Any], writer: int) -> None:
    said = "ok"
    try:
        for call in (
            lambda: kvswap.Stream(world.device),
            lambda: world.device.alloc(100),
            lambda: world.device.synchronize(1),
        ):
            try:
                call()
            except kvswap.Error:
                continue
            said = "a call on the parent's device was taken"
        for transfer in running:  # it has ended, or never will
            with suppress(kvswap.Error):
                transfer.wait(1)
        world.streams.clear()
        world.uses.clear()
        running.clear()
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    os.write(writer, said.encode())
    os._exit(0)


@operation(0.15, alone=True)
def interrupt(world: World) -> None:
    """Ctrl-C in a wait, which leaves the transfer running."""
    deterministic = world.device.name.startswith("host:seed")  # runs what it waits for, and nothing beside
    if deterministic or not len(world.words) or threading.current_thread() is not threading.main_thread():
        return
    world.say("interrupt")
    world.settle()
    gpu, cpu = world.area("gpu"), world.area("cpu")
    work = world.draw(gpu, cpu)
    stream = kvswap.Stream(world.device)
    word = world.next_word
    seam(world.device, "wait32", world.word_memory.ptr + 4 * word, 1, stream.handle)
    world.gates.append(word)
    world.next_word += 1
    transfer = kvswap.swap_cache_all_layers_async(**lists(world, work, gpu, cpu), stream=stream)
    waits = world.rng.choice(
        (
            lambda: transfer.wait(PATIENCE),
            lambda: stream.synchronize(PATIENCE),
            lambda: world.device.synchronize(PATIENCE),
        )
    )
    main, sent, go = threading.main_thread().ident, [], threading.Event()

    def send() -> None:
        go.wait()
        time.sleep(0.003)
        sent.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        try:
            go.set()
            waits()
            time.sleep(1)
            check(False, "a wait behind a closed gate returned")
        except KeyboardInterrupt:
            check(time.monotonic() - sent[0] < 5, "Ctrl-C took longer than five seconds")
    finally:
        sender.join()
        signal.signal(signal.SIGINT, before)
    check(not transfer.done(), "a transfer ended by Ctrl-C")
    world.open_gates()
    transfer.wait(PATIENCE)
    carry(work, gpu, cpu, False)
    world.settle()


@operation(0.25, "testing.fault", "testing.deterministic_device", "testing.step", "testing.trace", alone=True)
def lose_a_device(world: World) -> None:
    """A host device of this operation's own is lost at a random call. Every transfer ends, done or failed; those that
    are done have right bytes; further calls are refused."""
    seed, nth, code = world.rng.getrandbits(30) | 1, world.rng.randint(1, 60), world.rng.choice((700, 719))
    world.say(f"lose device {seed} at call {nth} with {code}")
    device = testing.deterministic_device(seed)
    inner = World(device, world.rng, world.totals, world.folder, alone=False)
    gpu, cpu = inner.area("gpu"), inner.area("cpu")
    taken: list[Any] = []
    stream = kvswap.Stream(device)
    with testing.fault(device, "call", "lose", nth=nth, code=code):
        try:
            for _ in range(6):
                work = inner.draw(gpu, cpu)
                transfer = kvswap.swap_cache_all_layers_async(**lists(inner, work, gpu, cpu), stream=stream)
                taken.append((work, transfer))
                testing.step(device, world.rng.randint(0, 5))
            device.synchronize(PATIENCE)
        except kvswap.DeviceError as error:
            check(device.lost and error.code == code, f"{error!r}, lost {device.lost}")
    check(testing.trace(device) >= 0, "trace()")
    for work, transfer in taken:
        try:
            transfer.wait(PATIENCE)
        except kvswap.DeviceError as error:
            check(device.lost and error.code == code, f"{error!r}")
            check(
                transfer.failed_positions.tolist() == list(range(work.count)),
                "a lost device, and not all blocks failed",
            )
    if not device.lost:
        for work, _ in taken:
            carry(work, gpu, cpu, False)
        for area in inner.areas:
            wrong = area.compare()
            check(not wrong, wrong)
        return
    for call in (lambda: kvswap.Stream(device), lambda: device.alloc(10), lambda: device.synchronize(1)):
        try:
            call()
        except kvswap.DeviceError as error:
            check(error.code == code, f"{error!r}")
        else:
            check(False, "a lost device took a call")


@operation(0.8, "testing.peer_access", alone=True)
def second_device(world: World) -> None:
    """Memory of another device in place of the host's, with and without access by kernels; and between pools of two."""
    if world.device.name != "host:0":
        return
    other, rng = kvswap.Device("host:1"), world.rng
    world.say("second device")
    world.settle()
    gpu = world.areas[0]  # in no pool
    peer = Memory(other, "peer", "peer", rng.randbytes(world.size))
    reached = rng.random() < 0.5
    paths = [path for path in world.paths if path != "borrow"] if reached else ["dma"]  # the other device has no lender
    with testing.peer_access(world.device, other, reached):
        for _ in range(rng.randint(1, 3)):
            work = world.draw(gpu, peer)
            transfer = kvswap.swap_cache_all_layers_async(
                **lists(world, work, gpu, peer), stream=world.streams[0], path=rng.choice(paths)
            )
            transfer.wait(PATIENCE)
            check(bool(touched(work, gpu, peer)), "touched")
            carry(work, gpu, peer, False)
        pools = [kvswap.Pool(device, area.ptr, 8, 500) for device, area in ((world.device, gpu), (other, peer))]
        for source, target in (pools, pools[::-1]):  # the second waits for the first
            ids = rng.sample(range(8), 3), rng.sample(range(8), 3)
            kvswap.move_blocks(source, target, *ids, path=rng.choice(paths))
            areas = (gpu, peer) if source is pools[0] else (peer, gpu)
            blocks = [area.model[: 8 * 500].reshape(8, 500) for area in areas]
            blocks[1][ids[1]] = blocks[0][ids[0]]
        world.device.synchronize(PATIENCE)
        other.synchronize(PATIENCE)
    wrong = peer.compare()
    check(not wrong, wrong)
    world.settle()


EXIT = """
import logging, os, random, sys
sys.path.insert(0, {tests!r})
import numpy as np
from differential.frame import Totals, World
import differential.table
from pathlib import Path
import kvswap
logging.getLogger("kvswap").addFilter(lambda record: "io_uring's speed" not in record.getMessage())  # it may be missing
device = kvswap.Device({device!r})
rng = random.Random({seed})
world = World(device, rng, Totals(), Path({folder!r}), alone=True)
table = differential.table
only = ("swap", "batch", "move_blocks", "kernel", "drop", "streams", "manager_copy", "file_call", "host_pool")
for _ in range(40):
    world.operations += 1
    table.draw(world, only)
world.open_gates()
print("end")
"""


@operation(0.004, "get_include", alone=True)
def leave_in_the_middle(world: World) -> None:
    """A process that ends while its transfers run: in time, in silence, with status 0."""
    seed = world.rng.getrandbits(30)
    world.say(f"exit of a process, seed {seed}")
    check(os.path.exists(os.path.join(kvswap.get_include(), "kvswap.h")), "get_include()")
    folder = world.folder / f"exit-{seed}"
    folder.mkdir()
    device = world.device.name if world.device.kind == "cuda" else "host:0"
    tests = str(ROOT / "tests" / "random")
    done = run_python(
        EXIT.format(tests=tests, device=device, seed=seed, folder=str(folder)), timeout=2 * PATIENCE, PYTHONWARNINGS=""
    )
    check((done.returncode, done.stdout, done.stderr) == (0, "end\n", ""), f"{done}")


OPEN = """
import sys
import numpy as np
import kvswap
from kvswap import memory
data, nbytes, key = bytes.fromhex({data!r}), {nbytes}, {key}
with memory.open(data) as mapped:
    device = mapped.device
    host = device.alloc(nbytes, host=True)
    kvswap.swap_cache_per_layer(mapped.ptr, host.ptr, nbytes, 1, 1, [0], [0], 0, device=device)
    array = np.frombuffer(host, np.uint8)
    print(int(array.astype(np.int64).sum()), mapped.local, mapped.alive())
    array ^= key
    kvswap.swap_cache_per_layer(mapped.ptr, host.ptr, nbytes, 1, 1, [0], [0], 1, device=device)
    if {event!r}:
        memory.open_event(bytes.fromhex({event!r})).record(kvswap.Stream(device))
"""


@operation(0.004, "memory.export", alone=True)
def another_process(world: World) -> None:
    """It opens this one's device memory, reads it and changes it."""
    from kvswap import memory

    if not world.device.name.startswith(("host:0", "cuda")):
        return
    world.say("another process opens memory")
    world.settle()
    area, key = world.areas[0], world.rng.randrange(1, 256)
    export = memory.export(area.buffer.memory)
    event = kvswap.Event(world.device, timing=False, interprocess=True)
    data = memory.export_event(event).hex()
    script = OPEN.format(data=export.to_bytes().hex(), nbytes=area.nbytes, key=key, event=data)
    done = run_python(script, timeout=2 * PATIENCE, PYTHONWARNINGS="")
    total = int(area.model.astype(np.int64).sum())
    check((done.returncode, done.stdout) == (0, f"{total} False True\n"), f"{done}, total {total}")
    with suppress(kvswap.Error):  # its process has ended
        event.synchronize(PATIENCE)
    area.model ^= np.uint8(key)
    export.close()
    world.settle()


@operation(0.003, alone=True)
def another_interrupt(world: World) -> None:
    """SIGINT to a process in a synchronous swap behind a closed gate: it ends by KeyboardInterrupt."""
    world.say("SIGINT to a process")
    script = f"""
    import os, signal, threading, time
    import numpy as np
    from conftest import Cache, Gate
    import kvswap
    signal.signal(signal.SIGINT, signal.default_int_handler)
    device = kvswap.Device({world.device.name if world.device.kind == "cuda" else "host:0"!r})
    cache, stream, gate = Cache(device, 8, 64), kvswap.Stream(device), Gate(device)
    gate.hold(stream)
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        kvswap.swap_cache_per_layer(cache.gpu.ptr, cache.cpu.ptr, 64, 8, 8, [1], [2], 0, device=device, stream=stream)
    except KeyboardInterrupt:
        gate.open()
        device.synchronize(60)
        cache.check([1], [2])
        print("interrupted")
    """
    done = run_python(script, timeout=2 * PATIENCE, PYTHONWARNINGS="")
    check((done.returncode, done.stdout) == (0, "interrupted\n"), f"{done}")
