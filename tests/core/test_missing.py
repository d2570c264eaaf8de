"""What makes kvswap slow is said: a GPU without kernels or with an old driver, files without io_uring. And what a
driver does not put in order, kvswap does. GPUs are those of a driver that the tests make (fake_cuda.c)."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import run_python

from kvswap import _C, _devices

pytestmark = pytest.mark.not_sanitized("processes with a made-up driver")

CC = (os.environ.get("CC") or "cc").split()
Run = Callable[..., subprocess.CompletedProcess[str]]
BUILT = bool(_C._fatbin()["archs"])


@pytest.fixture
def run(fake_driver: Path) -> Run:
    def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        done = run_python(script, LD_LIBRARY_PATH=str(fake_driver), **environment)
        assert done.returncode == 0, done.stderr
        return done

    return run


OPEN = """
    import json, warnings
    import kvswap
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("cuda:0", "cuda:0", "cuda:1", "host:0"):
            kvswap.Device(name)
            kvswap.Stream(name)
    print(json.dumps([(w.category.__name__, str(w.message), w.filename) for w in caught]))
"""


def test_what_a_gpu_lacks_is_said_once_a_gpu(run: Run) -> None:
    said = json.loads(run(OPEN, FAKE_CUDA_LOAD="222").stdout)
    assert [(category, text.split()[0]) for category, text, _ in said] == [
        ("RuntimeWarning", "cuda:0"),
        ("RuntimeWarning", "cuda:1"),
    ]
    text = said[0][1]
    if BUILT:
        assert "has no kernels (cuModuleLoadData on sm_90: CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)" in text
        assert "Cure: update the driver, which is for CUDA 13.0, or build kvswap with an nvcc of CUDA 13.0" in text
    else:
        assert "has no kernels (built without nvcc)" in text and "Cure: build kvswap where the CUDA toolkit" in text
    assert "'dma' and 'strided' are left" in text and "a fifth to a third of the speed" in text
    assert "batched" not in text
    assert said[0][2] == "<string>"  # the user's own call


def test_an_old_driver_lacks_batched_copies(run: Run) -> None:
    said = json.loads(run(OPEN, FAKE_CUDA_VERSION="12020").stdout)
    assert len(said) == 2
    assert "no batched copies (its driver is for CUDA 12.2, they came with 12.8)" in said[0][1]
    assert "Cure: a driver of branch 570 or newer." in said[0][1]
    assert ("no kernels" in said[0][1]) is not BUILT


def test_the_warning_names_the_first_caller_outside_kvswap(run: Run) -> None:
    script = """
        import warnings
        from kvswap.fastdeploy import ops
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ops.current_device("cuda:0")
        assert [w.filename for w in caught] == ["<string>"], [str(w) for w in caught]
    """
    run(script, FAKE_CUDA_LOAD="222")


def test_filters_silence_it_and_make_it_an_error(run: Run) -> None:
    assert "RuntimeWarning" in run("import kvswap; kvswap.Device('cuda:0')", FAKE_CUDA_LOAD="222").stderr
    quiet = run("import kvswap; kvswap.Device('cuda:0')", FAKE_CUDA_LOAD="222", PYTHONWARNINGS="ignore::RuntimeWarning")
    assert quiet.stderr == ""
    script = """
        import warnings
        import kvswap
        warnings.simplefilter("error")
        try:
            kvswap.Device("cuda:0")
        except RuntimeWarning as warning:
            assert str(warning).startswith("cuda:0 has no kernels")
        else:
            raise AssertionError("not raised")
        kvswap.Device("cuda:0")  # said once
    """
    run(script, FAKE_CUDA_LOAD="222")


def test_a_driver_that_makes_few_streams(run: Run) -> None:
    """Enough for the first two lanes, and for uploads: the device opens. A call that needs another stream says so."""
    script = """
        import kvswap
        for name in ("cuda:0", "cuda:0"):  # not opened by halves
            try:
                kvswap.Device(name)
                print("opened")
                kvswap.Stream(name)
            except (kvswap.Error, MemoryError) as error:
                print(error)
    """

    def said(streams: int) -> list[str]:
        lines = run(script, FAKE_CUDA_STREAMS=str(streams)).stdout.splitlines()
        return [line.partition(" with")[0] for line in lines]

    few = "cuStreamCreateWithPriority failed"
    assert said(80) == ["opened"] * 2
    assert said(30) == ["opened", few] * 2
    assert said(3) == [few] * 2


def test_a_driver_that_is_too_old(run: Run) -> None:
    """Both versions and the cure; and the default device says why it is the host."""
    script = """
        import kvswap
        try:
            kvswap.Device("cuda:0")
        except kvswap.Error as error:
            print(error)
        print(kvswap.Device().name)
    """
    done = run(script, FAKE_CUDA_VERSION="11020", KVSWAP_LOG="info")
    old = "is for CUDA 11.2, and kvswap needs CUDA 11.4 or newer: update the driver to branch 470 or later"
    assert done.stdout.splitlines() == [f"the CUDA driver (libcuda.so.1) {old}", "host:0"]
    assert old in done.stderr
    run("import kvswap; kvswap.Device('cuda:0')", FAKE_CUDA_VERSION="11040")


@pytest.mark.parametrize("opened", [False, True])
def test_info_says_the_same(run: Run, fake_driver: Path, opened: bool) -> None:
    command = [sys.executable, "-m", "kvswap", "info", *(["--open"] if opened else [])]
    script = f"import subprocess; print(subprocess.run({command!r}, check=True, text=True, capture_output=True).stdout)"
    report = run(script, FAKE_CUDA_LOAD="222", FAKE_CUDA_VERSION="12020").stdout
    warned = json.loads(run(OPEN, FAKE_CUDA_LOAD="222", FAKE_CUDA_VERSION="12020").stdout)[0][1]
    for text in warned.removeprefix("cuda:0 has ").split(" It has "):
        assert report.count(text) == (2 if opened or not BUILT or "batched" in text else 0), text


@pytest.mark.parametrize(
    ("khz", "gbps", "pace"),
    [("2619000", 3352, 26), ("3201000", 4097, 42.6), ("-1", 0, 42.6)],
    ids=["h100", "faster", "unknown"],
)
def test_the_bandwidth_of_a_gpus_memory(run: Run, tmp_path: Path, khz: str, gbps: int, pace: float) -> None:
    """From its clock; and the built-in pace of path kernel that follows, where no calibration has one."""
    script = """
        import json
        import kvswap
        from kvswap import _C, _testing, cli
        device = kvswap.Device("cuda:0")
        def tuning():
            return [_C._costs_of(device)["tuning"][f"kernel_{name}"] for name in ("normal_d2h", "normal_h2d")]
        found = [tuning()]
        costs = _C._costs_read(None)
        costs["tuning"]["kernel_normal_d2h"] = (3, 40.0, 39.0)
        _testing.costs_use(device, costs)
        found.append(tuning())
        _testing.costs_use(device, None)
        found.append(tuning())
        facts = [[each.name, each.memory_gbps] for each in kvswap.devices()]
        print(json.dumps([found, device.info["memory_gbps"], kvswap.Device("host:0").info["memory_gbps"], facts]))
        cli.main(["info"])
        cli.main(["calibrate", "--show", "--device", "cuda:0"])
    """
    environment = {"FAKE_CUDA_MEMORY_KHZ": khz, "KVSWAP_CALIBRATION": str(tmp_path / "none")}
    first, report = run(script, PYTHONWARNINGS="ignore", **environment).stdout.split("\n", 1)
    built_in, calibrated = [[2, pace, 0], [2, 0, 0]], [[3, 40, 39], [2, 0, 0]]
    facts = [["cuda:0", gbps], ["cuda:1", gbps], ["host:0", 0]]
    assert json.loads(first) == [[built_in, calibrated, built_in], gbps, 0, facts]
    assert f"Fake GPU 0, 80 GiB{f' at {gbps} GB/s' if gbps else ''}, 1 SMs" in report
    assert f"normal     D2H 2 CTAs at {pace:.1f} GB/s, H2D 2 CTAs unpaced" in report


# -- memory that a driver reads at once -------------------------------------------------------------------------------

PAGEABLE = """
    import numpy as np
    import kvswap

    device = kvswap.Device("cuda:0")
    gpu, host = device.alloc(4096), np.zeros(4096, np.uint8)
    for pinned in (False, True):
        memory = device.alloc(4096, host=True)
        for direction in ("D2H", "H2D"):
            transfer = kvswap.swap_cache_all_layers_async(
                [gpu.ptr], [memory.ptr if pinned else host.ctypes.data], [512], 8, 8, [3], [4], direction,
                after=[kvswap.Event(device)], device=device, layer_events=LAYERS,
            )
            print(pinned, direction, transfer.path, transfer.error, flush=True)
"""


@pytest.mark.parametrize("layers", ["False", "True"])
def test_a_load_from_pageable_memory_begins_when_its_turn_has_come(run: Run, layers: str) -> None:
    """The driver reads the source at once, whatever the stream waits for."""
    lines = run(PAGEABLE.replace("LAYERS", layers), FAKE_CUDA_BUSY="7", KVSWAP_DISABLE="kernel").stdout.splitlines()
    assert lines == [
        *("512 bytes copied early", "False D2H dma None"),
        *("512 bytes copied in their turn", "False H2D dma None"),
        *("512 bytes copied early", "True D2H dma None"),
        *("512 bytes copied early", "True H2D dma None"),
    ]


# -- shared memory of a kernel -----------------------------------------------------------------------------------------

ROWS = """
    import kvswap

    device = kvswap.Device("cuda:0")
    print("opened", flush=True)
    gpu, host = device.alloc(1 << 20), device.alloc(1 << 20, host=True)
    for nbytes in (8192, 1500, 500, 8192):
        kvswap.swap_cache_all_layers_async(
            [gpu.ptr], [host.ptr], [nbytes], 8, 8, [3], [4], "H2D", device=device, path="kernel"
        ).wait(10)
"""


@pytest.mark.skipif(not BUILT, reason="built without kernels")
def test_launches_share_one_permission(run: Run) -> None:
    """It is a setting of the kernel: one that a launch makes is taken away by the next one, of another thread too."""
    lines = [line for line in run(ROWS, FAKE_CUDA_SHARED="1").stdout.splitlines() if "copied" not in line]
    launched = [f"launched with {nbytes << 10}" for nbytes in (128, 64, 32, 128)]
    assert lines == ["131072 bytes of shared memory allowed", "opened", *launched]


# -- gaps for a model's own copies -------------------------------------------------------------------------------------

GAPS = """
    import numpy as np
    import kvswap

    device = kvswap.Device("cuda:0")
    print("opened", flush=True)
    mib = 1 << 20
    gpu, pinned, pageable = device.alloc(112 * mib), device.alloc(56 * mib, host=True), np.zeros(56 * mib, np.uint8)
    for host in (pinned.ptr, pageable.ctypes.data, gpu.ptr + 56 * mib):
        for source, target in ((gpu.ptr, host), (host, gpu.ptr)):
            kvswap.swap_blocks_batch([source], [target], 56 * mib, device=device, path="dma").wait(10)
"""


def test_a_gap_is_a_wait_for_what_is_there(run: Run) -> None:
    """Between pinned memory and the GPU, after each 24 MiB; pageable memory a driver copies in parts of its own."""
    lines = run(GAPS, FAKE_CUDA_WORDS="1", KVSWAP_DISABLE="kernel").stdout.splitlines()
    part, gap, rest = "25165824 bytes copied in their turn", "wait until 1 >= 0", "8388608 bytes copied in their turn"
    whole = "58720256 bytes copied in their turn"
    assert lines[lines.index("opened") + 1 :] == [*[part, gap, part, gap, rest] * 2, *[whole] * 4]


# -- the text ---------------------------------------------------------------------------------------------------------

GPU: Any = {"kernels": False, "kernels_note": "", "batch": True, "driver": 12080, "cc_major": 9, "cc_minor": 0}


@pytest.mark.parametrize(
    ("note", "cure"),
    [
        ("cuModuleLoadData on sm_90: CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)", "update the driver, .* CUDA 12.8, or"),
        ("cuModuleLoadData on sm_90: CUDA_ERROR_NO_BINARY_FOR_GPU (209)", "with an nvcc that compiles for sm_90"),
    ],
)
def test_the_cure_of_kernels_that_do_not_load(monkeypatch: pytest.MonkeyPatch, note: str, cure: str) -> None:
    monkeypatch.setattr(_C, "_fatbin", lambda: {"nbytes": 1, "archs": "sm_80 compute_80"})
    (text,) = _devices.missing({**GPU, "kernels_note": note}, opened=True)
    assert text.startswith(f"no kernels ({note}): ")
    assert re.search(f"Cure: .*{cure}", text)


def test_a_gpu_that_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _devices.missing({**GPU, "kernels": True}, opened=True) == []
    monkeypatch.setattr(_C, "_fatbin", lambda: {"nbytes": 1, "archs": "sm_80 compute_80"})
    assert _devices.missing(GPU, opened=False) == []
    (text,) = _devices.missing({**GPU, "cc_major": 7}, opened=False)
    assert "no kernels (built for sm_80 compute_80, and this GPU is sm_70)" in text and "compiles for sm_70" in text
    monkeypatch.setenv("KVSWAP_DISABLE", "kernel")
    assert _devices.missing(GPU, opened=False) == []  # it was asked for


# -- on import --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("archs", ["", "sm_80 compute_80"])
def test_an_engines_module_logs_a_build_without_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu: bool, archs: str
) -> None:
    monkeypatch.setattr(_C, "_fatbin", lambda: {"nbytes": 0, "archs": archs})
    monkeypatch.setattr(_devices.glob, "glob", lambda pattern: ["/dev/nvidia0"] if gpu else [])
    monkeypatch.setattr(_devices.os.path, "exists", lambda path: False)
    monkeypatch.setattr(_devices, "_build_logged", False)
    with caplog.at_level(logging.WARNING, "kvswap"):
        _devices.log_build()
        _devices.log_build()
    expected = ["this machine has a GPU, and kvswap was built without nvcc"] if gpu and not archs else []
    assert [record.getMessage().split(":")[0] for record in caplog.records] == expected


@pytest.mark.parametrize(
    "use", ["import kvswap.trtllm", "import kvswap.fastdeploy", "import kvswap.vllm; kvswap.vllm.register"]
)
def test_engines_modules_ask(use: str) -> None:
    script = f"""
        from kvswap import _devices
        asked = []
        _devices.log_build = lambda: asked.append(1)
        {use}
        try:
            kvswap.vllm.KVSwapOffloadingSpec
        except (AttributeError, ImportError):  # there is no vLLM here
            pass
        assert asked
    """
    done = run_python(script)
    assert done.returncode == 0, done.stderr


# -- files ------------------------------------------------------------------------------------------------------------

WITHOUT_URING = """
    import ctypes, logging, struct, sys, tempfile
    from kvswap.files import FileStore, Layout

    # A filter of the process: io_uring_setup (425) is refused, as container runtimes do.
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    filter = Program(len(code), ctypes.addressof(program))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(filter), 0, 0):
        sys.exit(77)
    logging.basicConfig(format="%(levelname)s %(message)s")
    for nbytes, engine in STORES:
        with tempfile.TemporaryDirectory() as folder, FileStore(
            folder, Layout(nbytes), capacity=64 << 20, engine=engine
        ) as store:
            assert store.info["engine"] == "threads"
"""


@pytest.mark.parametrize(
    ("stores", "said"),
    [
        ([(256 << 10, "auto"), (4096, "auto")], 1),
        ([(2 << 20, "auto")], 0),
        ([(4096, "threads")], 0),
    ],
    ids=["small blocks", "large blocks", "asked for"],
)
def test_files_without_io_uring_say_it_where_it_costs(stores: list[tuple[int, str]], said: int) -> None:
    done = run_python(WITHOUT_URING.replace("STORES", repr(stores)))
    if done.returncode == 77:
        pytest.skip("the kernel takes no filter from a process")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "io_uring" in line]
    assert len(lines) == said, done.stderr
    assert all(line.startswith("WARNING threads read and write the files") for line in lines)


def test_files_stat_gives_no_hint() -> None:
    script = (
        WITHOUT_URING.replace("STORES", "[(4096, 'threads')]")
        + """
            store.close()
            from kvswap import cli
            assert cli.main(["files", "stat", folder]) == 0
    """
    )
    done = run_python(script)
    if done.returncode == 77:
        pytest.skip("the kernel takes no filter from a process")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(
        r"^engine +threads \((the kernel refuses io_uring: .*|built without liburing)\)$", done.stdout, re.M
    )
