"""The beginning and the end of things, in processes of their own: import, exit, fork, dropped devices, many threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from conftest import run_python

import kvswap

PRELUDE = """
import os, sys, gc, threading, signal
import numpy as np
import kvswap
from kvswap import _C, testing
from conftest import Cache, Gate, Buffer, seam
NAME = {name!r}
"""


def run(
    device_name: str,
    script: str,
    *,
    status: int = 0,
    prelude: bool = True,
    timeout: float = 120,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, which ends by itself, in time, with that status and in silence."""
    begin = PRELUDE.format(name=device_name) if prelude else ""
    done = run_python(begin + textwrap.dedent(script), timeout, **{"PYTHONWARNINGS": "", **(environment or {})})
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def silent(done: subprocess.CompletedProcess[str], text: str = "") -> None:
    assert (done.stdout, done.stderr) == (text, "")


# -- import -----------------------------------------------------------------------------------------------------------


def test_import_leaves_no_traces(device_name: str) -> None:
    script = """
    import os, sys
    import dataclasses, numpy  # which the first brings depends on Python's version and on the second's
    before, threads = set(sys.modules), len(os.listdir("/proc/self/task"))
    files = len(os.listdir("/proc/self/fd"))
    import kvswap
    assert len(os.listdir("/proc/self/task")) == threads, "the import started a thread"
    assert len(os.listdir("/proc/self/fd")) == files, "the import keeps a file open"
    maps = open("/proc/self/maps").read()
    assert "libcuda" not in maps and "libnv" not in maps, "the import loaded the driver"
    heavy = {"torch", "cupy", "matplotlib", "tqdm", "argparse", "asyncio", "multiprocessing", "subprocess", "logging",
             "hypothesis", "pytest", "unittest", "json", "gzip", "urllib", "email", "http"}
    assert not heavy & (set(sys.modules) - before), heavy & (set(sys.modules) - before)
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert len(new) < 12, new
    """
    silent(run(device_name, script, prelude=False))


def test_devices_opens_none(device_name: str) -> None:
    script = """
    import os
    import kvswap
    threads = len(os.listdir("/proc/self/task"))
    names = [info.name for info in kvswap.devices()]
    assert names[-1] == "host:0" and names == sorted(names, key=lambda name: name == "host:0"), names
    if names == ["host:0"]:
        assert len(os.listdir("/proc/self/task")) == threads
    print(len(names) > 0)
    """
    silent(run(device_name, script, prelude=False), "True\n")


def test_an_idle_device_has_no_threads() -> None:
    script = """
    threads = len(os.listdir("/proc/self/task"))
    device = kvswap.Device("host:0")
    assert len(os.listdir("/proc/self/task")) == threads
    """
    silent(run("host:0", script))


def test_the_default_device_is_said_once(device_name: str) -> None:
    script = """
    import logging
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("kvswap").addHandler(handler)
    logging.getLogger("kvswap").setLevel(logging.INFO)
    for _ in range(3):
        device = kvswap.Device()
    assert len([line for line in lines if line.startswith("using host:0")]) == (device.kind == "host"), lines
    assert len([line for line in lines if " opens " in line]) == 1, lines
    """
    silent(run(device_name, script))


def test_the_same_name_is_the_same_device(device_name: str) -> None:
    script = """
    first, second, other = kvswap.Device(NAME), kvswap.Device(NAME), kvswap.Device("host:11")
    assert first == second and hash(first) == hash(second) and first != other
    assert len({first, second, other}) == 2
    assert testing.deterministic_device(1) != testing.deterministic_device(1)
    assert kvswap.Device("host") == kvswap.Device("host:0")
    """
    silent(run(device_name, script))


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KVSWAP_PATH", "warp", "auto, dma, strided, borrow, burst, kernel, direct"),
        ("KVSWAP_MAX_CTAS", "0", "number"),
        ("KVSWAP_PACE_GBPS", "x", "positive"),
    ],
)
def test_wrong_environment(device_name: str, name: str, value: str, message: str) -> None:
    script = f"""
    try:
        kvswap.Device(NAME)
    except ValueError as error:
        assert {name!r} in str(error) and {value!r} in str(error) and {message!r} in str(error), error
    else:
        raise SystemExit("taken")
    """
    run(device_name, script, environment={name: value})


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
def test_environment(device_name: str) -> None:
    script = """
    cache = Cache(kvswap.Device(NAME), 64, 64)
    ids = np.arange(64)[::-1].copy()
    transfer = cache.swap(ids, np.arange(64))
    transfer.wait(60)
    cache.check(ids, np.arange(64))
    print(transfer.path)
    """
    assert run(device_name, script, environment={"KVSWAP_PATH": "dma"}).stdout == "dma\n"
    off = {"KVSWAP_DISABLE": "kernel,batch", "KVSWAP_PATH": "dma", "KVSWAP_MAX_CTAS": "3", "KVSWAP_PACE_GBPS": "1.5"}
    assert run(device_name, script, environment=off).stdout == "dma\n"
    refused = """
    try:
        Cache(kvswap.Device(NAME), 64, 64).swap([1], [2], path="kernel")
    except kvswap.Error as error:
        print("KVSWAP_DISABLE" in str(error))
    """
    assert run(device_name, refused, environment={"KVSWAP_DISABLE": "kernel"}).stdout == "True\n"


# -- exit -------------------------------------------------------------------------------------------------------------


def test_exit_with_transfers_in_flight(device_name: str) -> None:
    """They are drained: the process ends by itself, soon, with its own status."""
    script = """
    device = kvswap.Device(NAME)
    cache, stream = Cache(device, 64, 65536), kvswap.Stream(device)
    testing.delay(device, 0.2, stream)
    ids = np.random.default_rng(1).permutation(64)
    transfers = [cache.swap(ids, ids[::-1], stream=stream) for _ in range(20)]
    kvswap.swap_blocks_batch([np.ones(4096, np.uint8)], [cache.cpu.ptr], 4096, device=device, stream=stream)
    sys.exit(7)
    """
    silent(run(device_name, script, status=7))


def test_exit_behind_a_gate_that_never_opens() -> None:
    """What cannot end is given up after a few seconds. Nothing hangs."""
    script = """
    device = kvswap.Device("host:0")
    cache, stream, gate = Cache(device, 8, 64), kvswap.Stream(device), Gate(device)
    gate.hold(stream)
    transfer = cache.swap([1], [2], stream=stream)
    holder = [cache, stream, gate, transfer]
    """
    run("host:0", script, timeout=40)


def test_exit_after_dropping_everything(device_name: str) -> None:
    script = """
    device = kvswap.Device(NAME)
    cache = Cache(device, 64, 65536)
    ids = np.arange(64)
    cache.swap(ids, ids[::-1])
    device.synchronize(60)
    del cache, device
    gc.collect()
    print("dropped")
    """
    silent(run(device_name, script), "dropped\n")


def test_exit_while_another_thread_waits(device_name: str) -> None:
    script = """
    device = kvswap.Device(NAME)
    cache, stream = Cache(device, 8, 64), kvswap.Stream(device)
    testing.delay(device, 0.5, stream)
    transfer = cache.swap([1], [2], stream=stream)
    started = threading.Event()
    def wait():
        started.set()
        transfer.wait()
    threading.Thread(target=wait, daemon=True).start()
    started.wait()
    """
    silent(run(device_name, script))


def test_nothing_is_submitted_after_the_exit(device_name: str) -> None:
    script = """
    import atexit
    cache = Cache(kvswap.Device(NAME), 8, 64)
    cache.swap([1], [2]).wait(60)
    _C._shutdown(5.0)
    try:
        cache.swap([1], [2])
    except kvswap.Error as error:
        print("shut down" in str(error))
    """
    silent(run(device_name, script), "True\n")


def test_a_signal_ends_the_process_in_a_wait(device_name: str) -> None:
    script = """
    device = kvswap.Device(NAME)
    cache, stream, gate = Cache(device, 8, 64), kvswap.Stream(device), Gate(device)
    gate.hold(stream)
    transfer = cache.swap([1], [2], stream=stream)
    try:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        transfer.wait()
    except KeyboardInterrupt:
        print(transfer.state)
    gate.open()
    transfer.wait(60)
    cache.check([1], [2])
    """
    silent(run(device_name, script), "running\n")


# -- dropped devices --------------------------------------------------------------------------------------------------


def test_dropped_deterministic_devices(device_name: str) -> None:
    """Transfers keep their device. Without other references it ends after the last of them, and its memory with it."""
    script = """
    for seed in range(1, 60):
        device = testing.deterministic_device(seed)
        cache = Cache(device, 8, 64)
        transfer = cache.swap([1, 2], [4, 3])
        event = transfer.event
        del device
        if seed % 3 == 0:
            transfer.wait()
            cache.check([1, 2], [4, 3])
        elif seed % 3 == 1:
            del transfer
            event.synchronize()
        del cache
    gc.collect()
    """
    silent(run(device_name, script))


def test_things_outlive_the_device_object(device_name: str) -> None:
    script = """
    device = kvswap.Device(NAME)
    memory, stream, event = device.alloc(64, host=True), kvswap.Stream(device), kvswap.Event(device)
    transfer = Cache(device, 8, 64).swap([1], [2])
    del device
    gc.collect()
    event.record(stream)
    event.synchronize(60)
    transfer.wait(60)
    assert memory.device.name == stream.device.name == event.device.name == transfer.device.name == NAME
    del memory, stream, event, transfer
    """
    silent(run(device_name, script))


def test_a_lost_device_is_dropped_in_silence() -> None:
    """Dropping the last reference to a lost device prints nothing."""
    script = """
    device = testing.deterministic_device(1)
    cache, stream, event = Cache(device, 8, 64), kvswap.Stream(device), kvswap.Event(device)
    transfer = cache.swap([1], [2])
    with testing.fault(device, "call", "lose"):
        try:
            kvswap.Stream(device)
        except kvswap.DeviceError:
            pass
    assert device.lost and transfer.state == "failed"
    del cache, stream, event, transfer, device
    gc.collect()
    """
    silent(run("host:0", script))


# -- logging ----------------------------------------------------------------------------------------------------------


def test_logging_to_stderr(device_name: str) -> None:
    if kvswap.devices()[0].kind != "host":
        pytest.skip("with a GPU nothing is worth a word")
    done = run(device_name, "import kvswap; kvswap.Device()", prelude=False, environment={"KVSWAP_LOG": "info"})
    assert "kvswap: using host:0" in done.stderr
    silent(run(device_name, "import kvswap; kvswap.Device()", prelude=False))


def test_a_log_level_that_is_none(device_name: str) -> None:
    done = run(device_name, "import kvswap", prelude=False, environment={"KVSWAP_LOG": "loud"})
    assert "UserWarning: KVSWAP_LOG is 'loud'" in done.stderr


# -- fork -------------------------------------------------------------------------------------------------------------

FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of any fork beside threads
device = kvswap.Device(NAME)
cache, stream, event = Cache(device, 8, 64), kvswap.Stream(device), kvswap.Event(device)
ended, held = cache.swap([0], [7]), None
ended.wait(60)
testing.delay(device, 0.3, stream)
held = cache.swap([1], [2], stream=stream)
sys.stdout.flush()
child = os.fork()
if child == 0:
    signal.alarm(60)
    calls = dict(
        swap=lambda: cache.swap([1], [2]), alloc=lambda: device.alloc(16), stream=lambda: kvswap.Stream(device),
        event=lambda: kvswap.Event(device), record=lambda: event.record(stream), query=lambda: stream.query(),
        wait=lambda: held.wait(5), synchronize=lambda: device.synchronize(5), ended=lambda: ended.make_wait(stream),
        register=lambda: device.register(np.zeros(4096, np.uint8)), compute=lambda: device.set_compute_stream(stream),
        same=lambda: cache.gpu.memory.free(),
    )
    for name, call in calls.items():
        try:
            call()
        except kvswap.Error as error:
            assert "before fork()" in str(error) and "spawn" in str(error), (name, error)
        else:
            print(f"{name} worked in the child")
            os._exit(1)
    held.done(), held.state, ended.state, device.stats(), repr(device), repr(held)
    mine = kvswap.Device("host:0")
    assert mine != device or NAME != "host:0"
    own = Cache(mine, 8, 64)
    own.swap([1, 2], [3, 4]).wait(60)
    own.check([1, 2], [3, 4])
    threads = [threading.Thread(target=lambda: own.swap([1], [3]).wait(60)) for _ in range(4)]
    [thread.start() for thread in threads], [thread.join(60) for thread in threads]
    del own, mine, cache, stream, event, ended, held, device
    gc.collect()
    print("child well")
    sys.stdout.flush()
    END
_, status = os.waitpid(child, 0)
assert status == 0, status
held.wait(60)
cache.check([1, 0], [2, 7])
cache.swap([3], [4]).wait(60)
print("parent well")
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_fork(device_name: str, end: str) -> None:
    """The child gets a clear error from what the parent opened, and can open a host device; the parent goes on."""
    silent(run(device_name, FORK.replace("END", end)), "child well\nparent well\n")


def test_fork_before_a_device_is_open(device_name: str) -> None:
    script = """
    child = os.fork()
    cache = Cache(kvswap.Device(NAME), 8, 64)
    cache.swap([1], [2]).wait(60)
    cache.check([1], [2])
    if child:
        assert os.waitpid(child, 0)[1] == 0
    """
    silent(run(device_name, script))


def test_multiprocessing_by_spawn(device_name: str) -> None:
    script = """
    if __name__ == "__main__":
        import subprocess
        device = kvswap.Device(NAME)
        code = "import kvswap; d = kvswap.Device('host:0'); d.alloc(16).free(); print('spawned')"
        print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout, end="")
    """
    silent(run(device_name, script), "spawned\n")


# -- threads ----------------------------------------------------------------------------------------------------------


def test_many_threads_use_one_device(device_name: str) -> None:
    """Each thread has blocks and a stream of its own; opening the device is part of it."""
    script = """
    wrong, barrier = [], threading.Barrier(8)

    def work(seed):
        try:
            barrier.wait()
            device, rng = kvswap.Device(NAME), np.random.default_rng(seed)
            cache, stream = Cache(device, 32, 200, seed % 2, seed=seed), kvswap.Stream(device)
            for i in range(40):
                gpu_ids, cpu_ids = rng.permutation(32)[:9], rng.permutation(32)[:9]
                options = {"stream": stream} if i % 3 else {}
                cache.target.put(cache.target_before)
                transfer = cache.swap(gpu_ids, cpu_ids, **options)
                event = transfer.event if i % 4 == 0 else None
                transfer.wait(60)
                cache.check(gpu_ids, cpu_ids)
                device.stats()
                if i % 10 == 0:
                    device.alloc(100).free()
                    device.synchronize(60)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not wrong, wrong
    assert kvswap.Device(NAME).stats()["unfinished"] == 0
    """
    silent(run(device_name, script))


def test_a_subinterpreter_is_refused(device_name: str) -> None:
    if sys.version_info < (3, 12):
        pytest.skip("before Python 3.12 a module cannot say that it does not support them")
    script = """
    try:
        import _interpreters as interpreters  # 3.13
    except ImportError:
        import _xxsubinterpreters as interpreters
    identity = interpreters.create()
    try:
        told = interpreters.run_string(identity, "import kvswap._C")  # 3.13 returns what it raised
    except Exception as error:
        told = error
    print(told)
    """
    assert "_C does not support loading in subinterpreters" in run(device_name, script).stdout


def test_a_limit_of_file_sizes_is_none_of_memory(device_name: str) -> None:
    """A host device's memory is a file, which may not grow then: the signal that comes of it ends a process."""
    script = """
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    import kvswap
    memory = kvswap.Device({name!r}).alloc(1 << 20)
    print(memory.nbytes)
    """.replace("{name!r}", repr(device_name))
    silent(run(device_name, script, prelude=False), "1048576\n")
