"""What the tests share: the device under test (``pytest --device cuda:0``; the default is host:0), its memory as NumPy
sees it, and gates that hold a stream up until a test opens them."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args
from zlib import crc32

import numpy as np
import pytest
from numpy.typing import NDArray

# Streams beyond the number of hardware queues hold each other up. Read by the driver when the first context is made.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# In each process that tests start, NumPy would start a thread a core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What this machine was calibrated to is not what the tests are about.
os.environ["KVSWAP_CALIBRATION"] = str(Path(__file__).parent / "no-such-calibration")

import kvswap
from kvswap import _C, metrics
from kvswap._log import Limited
from kvswap.typing import Path as CopyPath

Bytes = NDArray[np.uint8]

ROOT = Path(__file__).resolve().parent.parent
# Folders whose modules tests and stand-ins of other folders import.
ROOMS = [str(ROOT / "tests" / room) for room in ("", "core", "engines", "files", "project", "remote", "stand_ins")]
sys.path[:0] = ROOMS
PATHS: tuple[str, ...] = tuple(path for path in get_args(CopyPath) if path != "borrow")  # that one needs a lender
PATIENCE = 60.0  # seconds until a wait that should end is given up: a hang becomes a failure
AT_ONCE = 20.0  # seconds: less than what a test holds up takes to go on, and more than a busy machine needs for a call
# Under a sanitizer what is freed stays resident for a while, and a limit on addresses leaves no room for its own.
SANITIZED = any(name in os.environ.get("LD_PRELOAD", "") for name in ("libasan", "libtsan"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="host:0", help="the device that the tests run on: host:0 (default), cuda:0")
    parser.addoption(
        "--serial",
        action="store_true",
        help="a tool lets the device do one thing at a time: leave out what holds a stream up until the test goes on",
    )
    parser.addoption("--limit", type=float, help="seconds that one test may take; beyond, all stacks are printed")
    parser.addini("limit", "the same", default="300")
    parser.addoption("--long-seconds", type=float, default=1.0, help="how long each test by the clock may go on")
    parser.addoption("--long-seed", type=int, default=1, help="the first seed of the tests in tests/random")
    parser.addoption(
        "--device-only", action="store_true", help="leave out tests that are the same whatever --device is"
    )
    parser.addoption("--once", action="store_true", help="each test function with one of its parametrisations")


def refuse_stale() -> None:
    """Tests of a checkout need its own code: an older build, or an installed copy, passes or fails for another state.
    KVSWAP_TEST_INSTALLED=1: test what is installed, a wheel say."""
    if os.environ.get("KVSWAP_TEST_INSTALLED", "0") != "0" or not (ROOT / "packaging" / "kvswap_build").exists():
        return  # the latter: no sources beside the tests
    sys.path.insert(0, str(ROOT / "packaging"))
    from kvswap_build import digest

    sys.path.remove(str(ROOT / "packaging"))
    if wrong := digest.stale(kvswap):
        raise pytest.UsageError(digest.message(kvswap, wrong))


def set_up_hypothesis() -> None:
    """Not with this module: processes that tests start import it, too."""
    from hypothesis import HealthCheck, settings

    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    settings.register_profile(
        "ci", derandomize=True, deadline=None, database=None, max_examples=30, suppress_health_check=checks
    )
    settings.register_profile("deep", parent=settings.get_profile("ci"), derandomize=False, max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    refuse_stale()
    set_up_hypothesis()
    take_ctrl_c()
    config.stash[STDERR] = os.dup(2)  # the real one, while none is captured
    Gate.serial = bool(config.getoption("--serial"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"kvswap {kvswap.__version__} from {Path(kvswap.__file__).parent}, device {config.getoption('--device')}"


def take_ctrl_c() -> None:
    """A shell ignores SIGINT for what it starts in the background (nohup pytest &), and processes inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For -n auto: more than there are cores, for a third of the time tests wait."""
    cores = len(os.sched_getaffinity(0))
    return cores + max(2, cores // 2)


def one_of_each(items: list[pytest.Item], takes: list[bool]) -> list[bool]:
    """Of each test function one that is taken. Its name draws which: over all functions each path, direction and size
    occurs, and the same tests run everywhere."""
    functions: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        if takes[i]:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(i)
    drawn = {which[crc32(name.encode()) % len(which)] for name, which in functions.items()}
    return [i in drawn for i in range(len(items))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """--device-only, the marker not_sanitized, and --once, of what these two leave."""
    takes = [True] * len(items)
    if config.getoption("--device-only"):
        used = [set(getattr(item, "fixturenames", ())) for item in items]  # by a test and its fixtures
        takes = [taken and "device_name" in names for taken, names in zip(takes, used, strict=True)]
        takes = [taken and not item.get_closest_marker("host_device") for item, taken in zip(items, takes, strict=True)]
    if SANITIZED:
        unfit = [item.get_closest_marker("not_sanitized") is not None for item in items]
        config.stash[NOT_SANITIZED] = sum(unfit)
        takes = [taken and not without for taken, without in zip(takes, unfit, strict=True)]
    if config.getoption("--once"):
        takes = one_of_each(items, takes)
    config.hook.pytest_deselected(items=[item for item, taken in zip(items, takes, strict=True) if not taken])
    items[:] = [item for item, taken in zip(items, takes, strict=True) if taken]


NOT_SANITIZED = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist says how many tests it has left out: all of them leave out the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_sanitized"] = session.config.stash.get(NOT_SANITIZED, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[NOT_SANITIZED] = getattr(node, "workeroutput", {}).get("not_sanitized", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash.get(NOT_SANITIZED, 0):
        terminalreporter.write_line(f"{left_out} tests left out under a sanitizer: marker not_sanitized")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """The first of pytest-xdist's processes compiles the test modules; the others wait, and read what it wrote. Without
    Python's collector, which finds nothing and takes two fifths of the time."""
    gc.disable()
    try:
        if not hasattr(session.config, "workerinput") or sys.dont_write_bytecode:
            return (yield)
        with Path(__file__).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)
            return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What the collected tests are made of stays until the end: no collection in a test need look at it again."""
    gc.collect()
    gc.freeze()


STDERR = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that hangs ends the process, with the stacks of all threads (under pytest-xdist: its worker)."""
    config = item.config
    limit = config.getoption("--limit") or float(config.getini("limit"))
    if (ROOT / "tests" / "random") in item.path.parents or "long_seconds" in getattr(item, "fixturenames", ()):
        limit += 2 * config.getoption("--long-seconds")
    faulthandler.dump_traceback_later(limit, exit=True, file=config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


WITHOUT_BINDINGS = "needs the test bindings, which wheels are built without"


class _Missing:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for these when it collects
            raise AttributeError(name)
        need_bindings()


bindings: Any = _Missing()  # kvswap._testing
with suppress(ModuleNotFoundError):
    bindings = importlib.import_module("kvswap._testing")


def need_bindings() -> None:
    if isinstance(bindings, _Missing):
        pytest.skip(WITHOUT_BINDINGS)


@contextmanager
def skip_without_bindings() -> Iterator[None]:
    """On a build without test bindings, as wheels are, what needs them is a visible skip. packaging/try.sh runs one."""
    try:
        yield
    except kvswap.Error as error:
        if "lacks its test bindings" not in str(error):
            raise
        pytest.skip(WITHOUT_BINDINGS)


SKIPPED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        with skip_without_bindings():
            return (yield)
    except pytest.skip.Exception:
        item.stash[SKIPPED] = True
        raise


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[None]:
    with skip_without_bindings():
        return (yield)


def registered() -> dict[str, int]:
    """Bytes that are registered, of each device of the process that has some; without host pools, which live as long as
    their memory."""
    found = metrics.snapshot()
    bytes_of = {row["device"]: row["registered_bytes"] for row in found["devices"]}
    for pool in found["host_pools"]:
        bytes_of[pool["device"]] = bytes_of.get(pool["device"], 0) - pool["populated_bytes"]
    return {name: nbytes for name, nbytes in bytes_of.items() if nbytes > 0}


@pytest.fixture(autouse=True)
def logs_anew() -> None:
    """What tests before have logged too often is logged again."""
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "kvswap"]:
        for each in logging.getLogger(name).filters:
            if isinstance(each, Limited):
                each._kinds.clear()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test no more is registered than before: later tests' arrays may come to lie there, and a registration
    counts for all devices of the process. What is dropped is unregistered by a thread, soon."""
    before, end = registered(), None
    yield
    if SKIPPED in request.node.stash:  # in the middle, maybe
        return
    while any(now > before.get(name, 0) for name, now in registered().items()):
        gc.collect()
        end = end or time.monotonic() + PATIENCE / 6
        assert time.monotonic() < end, f"the test leaves memory registered: {registered()} bytes, before {before}"
        time.sleep(0.01)


@pytest.fixture(scope="module", autouse=True)
def keeps_no_gpu_memory() -> Iterator[None]:
    """Free the memory that torch and CuPy cache: other processes of the suite use the same GPU."""
    yield
    torch, cupy = (sys.modules.get(name) for name in ("torch", "cupy"))
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()


MakeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MakeOnce:
    """made_once(name, make) is a folder that make(folder) has filled, once for all processes of pytest-xdist."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def made_once(name: str, make: Callable[[Path], None]) -> Path:
        folder = shared / name
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "made").exists():
                make(folder)
                (folder / "made").touch()
        return folder

    return made_once


@pytest.fixture(scope="session")
def prefix(made_once: MakeOnce) -> Path:
    """Where libkvswap is installed; the folder it was built in is beside it."""
    from builds import build_library

    return made_once("libkvswap", build_library) / "prefix"


@pytest.fixture(scope="session")
def fake_driver(made_once: MakeOnce) -> Path:
    """The folder of a libcuda.so.1 without a GPU."""
    from builds import CC, need, succeed

    need(CC[0])
    source = str(ROOT / "tests" / "stand_ins" / "fake_cuda.c")

    def make(folder: Path) -> None:
        succeed([*CC, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), source])

    return made_once("driver", make)


@pytest.fixture(scope="session")
def core(made_once: MakeOnce) -> Callable[[str], Path]:
    """core(kind): the folder of libcore.a, and of the object files in it, under these sanitizers."""
    from builds import compile_core

    def core(kind: str) -> Path:
        folder = made_once(f"core-{kind.replace(',', '-')}", lambda folder: compile_core(kind, folder))
        if (folder / "lacks").exists():
            pytest.skip((folder / "lacks").read_text())
        return folder

    return core


@pytest.fixture(scope="session")
def long_seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--long-seconds"))


@pytest.fixture(scope="session")
def device_name(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def session_device(device_name: str) -> kvswap.Device:
    with warnings.catch_warnings():  # a GPU may lack something: test_missing.py
        warnings.simplefilter("ignore", RuntimeWarning)
        return kvswap.Device(device_name)


@pytest.fixture
def device(session_device: kvswap.Device) -> Iterator[kvswap.Device]:
    """The device under test. After a test nothing may be queued on it any more and no fault may be left."""
    yield session_device
    if not isinstance(bindings, _Missing):
        bindings.set_fault(session_device, "call", "none")
        bindings.set_fault(session_device, "copy", "none")
    session_device.set_compute_stream(0)
    session_device.synchronize(PATIENCE)


@pytest.fixture(scope="session")
def cuda(session_device: kvswap.Device) -> kvswap.Device:
    if session_device.kind != "cuda":
        pytest.skip("needs a GPU: run with --device cuda:0")
    return session_device


@pytest.fixture(params=[0, 1], ids=["D2H", "H2D"])
def direction(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, session_device: kvswap.Device) -> str:
    return usable(session_device, str(request.param))


def second_device(device: kvswap.Device, host: str) -> kvswap.Device:
    """Another GPU beside a GPU, or else the host device of that name."""
    if device.kind != "cuda":
        return kvswap.Device(host)
    count = sum(1 for other in kvswap.devices() if other.kind == "cuda")
    if count < 2:
        pytest.skip(f"needs two GPUs, and there {'is one' if count else 'are none'}")
    return kvswap.Device("cuda:1")


def usable(device: kvswap.Device, path: str) -> str:
    """The path, or a visible skip where the device does not have it."""
    if path == "direct" and device.kind != "host":
        pytest.skip("path direct is for host devices")
    if path == "kernel" and not device.info["kernels"]:
        pytest.skip(f"no kernels: {device.info['kernels_note']}")
    return path


def elsewhere(**environment: str) -> dict[str, Any]:
    """Folder and environment of a process that finds the package that is being tested, and these tests' helpers."""
    package = Path(kvswap.__file__).resolve().parent.parent
    before = os.environ.get("PYTHONPATH")
    places = os.pathsep.join([str(package), *ROOMS, *([before] if before else [])])
    # not the root: its kvswap/ may be built otherwise
    return {"cwd": ROOT / "tests", "env": {**os.environ, "PYTHONPATH": places, **environment}}


def run_python(script: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, elsewhere()."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(script)],
        **elsewhere(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def seam(device: kvswap.Device, operation: str, *args: Any) -> Any:
    return bindings.seam(device, operation, *args)


def comes_down(count: Callable[[], int], most: int) -> bool:
    """Whether a count of this process's files, say, is at most so much: threads of earlier tests may still end, and a
    thread has a file open for a moment."""
    end = time.monotonic() + AT_ONCE
    while count() > most and time.monotonic() < end:
        time.sleep(0.01)
    return count() <= most


def until(condition: Callable[[], Any], what: str = "what has to come", timeout: float = PATIENCE) -> Any:
    """What condition() returns as soon as that is true; a test fails that waits too long."""
    end = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < end, f"not after {timeout:g} s: {what}"
        time.sleep(0.002)
    return found


def random_bytes(seed: int, nbytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def address_of(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


MEMCMP = ctypes.CDLL(None).memcmp  # of NumPy's comparisons each makes an array
MEMCMP.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Buffer:
    """Memory that a test fills and reads as NumPy arrays, wherever it lies.

    side "gpu": device memory; "cpu": pinned host memory; "plain": memory of NumPy's (on a GPU that is pageable).
    """

    def __init__(self, device: kvswap.Device, nbytes: int, side: str = "gpu") -> None:
        self.device, self.nbytes, self.side = device, nbytes, side
        self.memory: kvswap.Memory | None = None
        self.bounce: kvswap.Memory | None = None
        self.array: Bytes | None = None
        if side == "plain":
            room = np.empty(nbytes + 256, np.uint8)
            start = -address_of(room) % 256
            self.array = room[start : start + nbytes]
            self.ptr = address_of(self.array)
        else:
            self.memory = device.alloc(nbytes, host=side == "cpu")
            self.ptr = self.memory.ptr
            if side == "gpu" and device.kind == "cuda":
                self.bounce = device.alloc(nbytes, host=True)
        self.put(np.zeros(nbytes, np.uint8))

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        """By the driver's plain copy, on a stream of its own; other streams go on."""
        stream = kvswap.Stream(self.device)
        seam(self.device, "copy", dst, src, nbytes, stream.handle)
        stream.synchronize(PATIENCE)

    def _view(self) -> Bytes:
        if self.array is not None:
            return self.array
        return np.frombuffer(self.bounce if self.bounce is not None else self.memory, np.uint8)

    def put(self, data: Bytes, at: int = 0) -> None:
        """Write these bytes at once; nothing that uses the memory may be queued."""
        self._view()[at : at + data.size] = data
        if self.bounce is not None:
            self._copy(self.ptr + at, self.bounce.ptr + at, data.size)

    def get(self, nbytes: int | None = None) -> Bytes:
        """The first bytes of it, a copy."""
        nbytes = self.nbytes if nbytes is None else nbytes
        if self.bounce is not None:
            self._copy(self.bounce.ptr, self.ptr, nbytes)
        return self._view()[:nbytes].copy()

    def holds(self, data: Bytes) -> bool:
        """Whether these are its first bytes, without a copy of them where the memory is the host's."""
        if self.bounce is not None:
            self._copy(self.bounce.ptr, self.ptr, data.size)
        return MEMCMP(address_of(self._view()), address_of(data), data.size) == 0

    def randomise(self, seed: int) -> Bytes:
        data = random_bytes(seed, self.nbytes)
        self.put(data)
        return data


class Cache:
    """One tensor of blocks on both sides of a device, filled with random bytes; `direction` says which side is read."""

    def __init__(self, device: kvswap.Device, blocks: int, nbytes: int, direction: int = 0, *, seed: int = 1) -> None:
        self.device, self.blocks, self.nbytes, self.direction = device, blocks, nbytes, direction
        self.gpu = Buffer(device, blocks * nbytes, "gpu")
        self.cpu = Buffer(device, blocks * nbytes, "cpu")
        self.gpu_bytes = self.gpu.randomise(seed)
        self.cpu_bytes = self.cpu.randomise(seed + 1000)

    @property
    def target(self) -> Buffer:
        return self.gpu if self.direction else self.cpu

    @property
    def target_before(self) -> Bytes:
        return self.gpu_bytes if self.direction else self.cpu_bytes

    @property
    def source_bytes(self) -> Bytes:
        return self.cpu_bytes if self.direction else self.gpu_bytes

    def swap(self, gpu_ids: Any, cpu_ids: Any, **options: Any) -> kvswap.Transfer:
        options.setdefault("device", self.device)
        return kvswap.swap_cache_per_layer_async(
            self.gpu.ptr,
            self.cpu.ptr,
            self.nbytes,
            self.blocks,
            self.blocks,
            gpu_ids,
            cpu_ids,
            self.direction,
            **options,
        )

    def expected(self, gpu_ids: Any, cpu_ids: Any) -> Bytes:
        """The destination as it has to be after that swap."""
        after = self.target_before.copy().reshape(self.blocks, self.nbytes)
        source = self.source_bytes.reshape(self.blocks, self.nbytes)
        sources, targets = (cpu_ids, gpu_ids) if self.direction else (gpu_ids, cpu_ids)
        after[np.asarray(targets)] = source[np.asarray(sources)]
        return after.reshape(-1)

    def check(self, gpu_ids: Any, cpu_ids: Any) -> None:
        np.testing.assert_array_equal(self.target.get(), self.expected(gpu_ids, cpu_ids))

    def check_untouched(self) -> None:
        np.testing.assert_array_equal(self.target.get(), self.target_before)


def of_threads(*files: str) -> list[list[str]]:
    """What these files of /proc say of each thread of the process, those of C too."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended, or the kernel does not tell
            found.append([(task / name).read_text().strip() for name in files])
    return found


def names_of_threads() -> list[str]:
    return [name for (name,) in of_threads("comm")]


def where_threads_wait() -> str:
    """Each thread, and the kernel's function that it sleeps in."""
    return ", ".join(f"{name}: {place or '?'}" for name, place in of_threads("comm", "wchan"))


@contextmanager
def sums(device: kvswap.Device, **links: float) -> Iterator[None]:
    """As if the host reached so many times one link with all links at once: d2h, h2d, both."""
    before = _C._costs_of(device)
    tuning = {**before["tuning"], "link_gbps_d2h": 50.0, "link_gbps_h2d": 50.0, "host_links": 2}
    tuning |= {f"host_gbps_{name}": 50.0 * times for name, times in links.items()}
    bindings.costs_use(device, {**before, "tuning": tuning})
    try:
        yield
    finally:
        bindings.costs_use(device, before)


class Gate:
    """Holds streams up, until opened, by a word in pinned memory that they wait for: no time is involved.

    A call that waits for what the gate holds up would never return. On a GPU the gate opens after `limit` seconds, and
    the test fails, with what each thread waited for.
    """

    serial = False  # a launch behind a closed gate would not return

    def __init__(self, device: kvswap.Device, limit: float | None = None) -> None:
        need_bindings()
        if self.serial:
            pytest.skip("--serial: a gate would never open")
        if not device.info["memops"]:
            pytest.skip("no stream memory operations")
        self.device = device
        self.limit = 2 * PATIENCE if limit is None and device.kind == "cuda" else limit
        self._timer: threading.Timer | None = None
        self._stuck = ""
        self.memory = device.alloc(4, host=True)
        self._word().value = 0
        # A driver that has no room for another stream waits for all that is queued: what a test makes finds room now.
        room = [kvswap.Stream(device) for _ in range(8)]
        del room

    def _word(self) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self.memory.ptr)

    def hold(self, stream: Any) -> None:
        """Not while what was dropped before is being freed: a GPU's driver frees with its locks held, and waits for all
        that is queued."""
        if self.device.kind == "cuda":
            end = time.monotonic() + PATIENCE
            while "kvswap-reclaim" in names_of_threads():
                assert time.monotonic() < end, "what was dropped is not freed"
                time.sleep(0.001)
        handle = stream if isinstance(stream, int) else stream.handle
        seam(self.device, "wait32", self.memory.ptr, 1, handle)

    def open(self) -> None:
        self._word().value = 1

    def close(self) -> None:
        """For streams that are held from now on; nothing may wait at it."""
        self._word().value = 0

    def __enter__(self) -> Gate:
        if self.limit is not None:
            gc.collect()  # it would free what earlier tests have left, and hold() says what that does
            gc.disable()
            self._timer = threading.Timer(self.limit, self._give_up)
            self._timer.daemon = True
            self._timer.start()
        return self

    def _give_up(self) -> None:
        self._stuck = where_threads_wait()
        self.open()

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            gc.enable()
        self.open()
        self.device.synchronize(PATIENCE)
        assert not self._stuck, f"something waited for the gate, which was opened after {self.limit} s: {self._stuck}"


def write_pattern(device: kvswap.Device, ptrs: Any, nbytes: int, keys: Any, stream: Any) -> _C._PatternJob:
    return _pattern(device, False, ptrs, nbytes, keys, stream)


def check_pattern(device: kvswap.Device, ptrs: Any, nbytes: int, keys: Any, stream: Any) -> _C._PatternJob:
    return _pattern(device, True, ptrs, nbytes, keys, stream)


def _pattern(device: kvswap.Device, check: bool, ptrs: Any, nbytes: int, keys: Any, stream: Any) -> _C._PatternJob:
    where = np.asarray(ptrs, np.uint64)
    return _C._pattern(
        device, check, where, np.full(where.size, nbytes, np.uint64), np.asarray(keys, np.uint64), stream
    )


def pattern_bytes(key: int, nbytes: int) -> Bytes:
    """The pattern as the definition has it, computed here."""
    words = np.array([bindings.pattern_word(key, i) for i in range(-(-nbytes // 8))], np.uint64)
    return words.view(np.uint8)[:nbytes].copy()
