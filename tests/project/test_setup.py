"""The code that builds and releases the package: packaging/, without a compiler or a network."""

# mypy: disable-error-code="import-not-found,no-untyped-call"

from __future__ import annotations

import ctypes.util
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import ROOT, run_python

import kvswap
from kvswap import _C

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not run from a checkout")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    from kvswap_build import cuda

    return cuda


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    from kvswap_build import nvrtc

    return nvrtc


@pytest.fixture
def readme(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    from kvswap_build import readme

    return readme


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_an_index_without_its_packages_says_what_to_install(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    path, why = cuda.find_nvcc("index")
    assert path is None
    assert "pip install nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-nvfatbin-cu12==" in why


def test_half_of_the_packages_are_none(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Spec:
        submodule_search_locations = [str(tmp_path)]

    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: Spec)
    assert cuda.find_nvcc("index")[0] is None
    for library in cuda.LIBRARIES:
        assert cuda.find_nvcc("index")[0] is None
        (tmp_path / library).parent.mkdir(parents=True)
        (tmp_path / library).touch()
    assert cuda.find_nvcc("index") == ("index", "")
    assert cuda.include_dirs("index") == []


def test_the_index_is_of_one_release_of_cuda_12(cuda: ModuleType) -> None:
    """Drivers of CUDA 12 do not load what a compiler of CUDA 13 makes."""
    releases = {version.rsplit(".", 1)[0] for version in cuda.INDEX.values()}
    assert releases == {"12.9"}
    assert cuda.SASS[0] == min(cuda.SASS, key=int), "PTX is of the first, for all others"


def test_a_named_nvcc_that_is_not_there(cuda: ModuleType) -> None:
    assert cuda.find_nvcc("/no/such/nvcc") == (None, "KVSWAP_NVCC=/no/such/nvcc: no such program")


def test_a_function_that_fails_is_an_error(nvrtc: ModuleType) -> None:
    library = nvrtc.Library(ctypes.util.find_library("c"))
    library.abs(ctypes.c_int(0))
    with pytest.raises(OSError, match=r"abs\(\) of .*libc.* returned 7"):
        library.abs(ctypes.c_int(-7))


def test_architectures_that_are_asked_for(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_ARCHS", "90,80")
    assert cuda.architectures() == ("80", "90")
    monkeypatch.delenv("KVSWAP_ARCHS")
    assert cuda.architectures() == cuda.SASS
    for wrong in ("91", "80, 90", "sm_90", "80,"):
        monkeypatch.setenv("KVSWAP_ARCHS", wrong)
        with pytest.raises(SystemExit, match="some of 80,86,89,90,100,103,120, with commas between them"):
            cuda.architectures()


def test_what_is_compiled_again(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    target = tmp_path / "folder" / "kvswap.fatbin"
    assert cuda.is_stale(target, "as it is"), "not made yet"
    target.write_bytes(b"")
    target.with_suffix(".txt").write_text("as it is")
    assert not cuda.is_stale(target, "as it is")
    assert cuda.is_stale(target, "otherwise")
    tool = tmp_path / "newer"
    tool.touch()
    later = target.stat().st_mtime + 10
    os.utime(tool, (later, later))
    assert cuda.is_stale(target, "as it is", str(tool))


# -- the README on an index -------------------------------------------------------------------------------------------


def test_links_of_the_index(readme: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("[a](docs/a.md) ![b](docs/b.svg) [c](https://example.org/c) [d](#d)")
    there = readme.index_readme(path, "1.2", "https://example.org/kvswap")
    assert there == (
        "[a](https://example.org/kvswap/blob/v1.2/docs/a.md) ![b](https://example.org/kvswap/raw/v1.2/docs/b.svg)"
        " [c](https://example.org/c) [d](#d)"
    )
    assert readme.index_readme(path, "1.2", "") == "a  [c](https://example.org/c) [d](#d)"
    assert readme.urls("1.2", "") == {}
    assert readme.urls("1.2", "https://example.org/k")["Changelog"] == "https://example.org/k/blob/v1.2/CHANGELOG.md"


def test_no_link_of_the_readme_is_left_relative(readme: ModuleType) -> None:
    text = readme.index_readme(ROOT / "README.md", "1.2", "https://example.org/kvswap")
    assert "](docs/" not in text and "](https://example.org/kvswap/blob/v1.2/docs/guide.md)" in text
    missing = [target for _, _, target in readme.LINK.findall((ROOT / "README.md").read_text())]
    assert missing and [name for name in missing if not (ROOT / name.partition("#")[0]).exists()] == []


# -- the release ------------------------------------------------------------------------------------------------------


def release_problems(version: str, changelog: str, tags: list[str], changes: str) -> list[str]:
    """problems() of packaging/release.py."""
    script = (
        "import sys, json\n"
        f"sys.path.insert(0, {str(ROOT / 'packaging')!r})\n"
        "import release\n"
        f"print(json.dumps(list(release.problems({version!r}, {changelog!r}, {tags!r}, {changes!r}))))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    found: list[str] = json.loads(done.stdout)
    return [text for text in found if "REPOSITORY" not in text]


def test_what_keeps_a_checkout_from_being_released() -> None:
    dated = "## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n"
    assert release_problems("1.2.0", dated, ["v1.2.0"], "") == []
    assert "no heading [1.2.1]" in release_problems("1.2.1", dated, ["v1.2.1"], "")[0]
    assert "has no date" in release_problems("1.2.0", "## [1.2.0]\n", ["v1.2.0"], "")[0]
    assert "no tag v1.2.0 (its tags: v1.1.0)" in release_problems("1.2.0", dated, ["v1.1.0"], "")[0]
    assert "not clean" in release_problems("1.2.0", dated, ["v1.2.0"], " M setup.py")[0]


def test_a_record_of_another_commit_keeps_it_from_being_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    import release

    (tmp_path / "h200").mkdir()
    for name, commit in (("fresh", "aaaaaaa"), ("old", "bbbbbbb"), ("foreign", "ccccccc")):
        (tmp_path / "h200" / f"{name}.txt").write_text(f"# kvswap {commit}, h200: benchmarks/record.sh OUT {name}\n")
    (tmp_path / "h200" / "none.txt").write_text("numbers\n")
    since = {
        "aaaaaaa": ["docs/index.md", "README.md", "tests/core/test_swap.py", ".ci/run"],
        "bbbbbbb": ["docs/a.md", "csrc/x.c"],
    }
    found = list(release.stale_records(tmp_path, since.get))
    assert found == [
        "h200/foreign.txt was made by ccccccc, which this commit does not come from",
        "none.txt of h200 names no commit",
        "h200/old.txt was made by bbbbbbb; 1 files changed since: csrc/x.c, ...",
    ]
    assert list(release.problems("1", "## [1] - 2026-01-31", ["v1"], "", found))[:3] == found


@pytest.mark.parametrize("script", ["wheels", "release"])
def test_the_scripts_explain_themselves_without_their_tools(script: str) -> None:
    command = [sys.executable, str(ROOT / "packaging" / f"{script}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "--liburing" in done.stdout, done.stderr


def test_without_make_no_wheel_is_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    import wheels

    monkeypatch.setattr(wheels, "zig", lambda: Path("zig"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        sys, "argv", ["wheels.py", "x.tar.gz", "--liburing", "y.tar.gz", "--out", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit, match="apt-get install make"):
        wheels.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
@pytest.mark.parametrize("made", [".release/bin/python", "liburing_2.9.orig.tar.gz", "dist/x.whl", "wheelhouse/x.whl"])
def test_what_a_release_makes_leaves_the_checkout_clean(made: str) -> None:
    done = subprocess.run(["git", "check-ignore", "-q", made], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0


def test_headers_of_debians_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    import wheels

    machine, config_h = platform.machine(), tmp_path / "include/python3.13/pyconfig.h"
    assert wheels.debian_headers(config_h, "aarch64", tmp_path / "headers") == ""
    of_machine = tmp_path / f"include/{machine}-linux-gnu/python3.13"
    of_machine.mkdir(parents=True)
    (of_machine / "pyconfig.h").write_text("#define SIZEOF_LONG 8\n")
    for _ in range(2):  # another interpreter or a kept folder finds it made
        assert wheels.debian_headers(config_h, "aarch64", tmp_path / "headers") == f" -isystem{tmp_path}/headers"
    assert "SIZEOF_LONG" in (tmp_path / "headers/aarch64-linux-gnu/python3.13/pyconfig.h").read_text()


def test_the_changelog_has_this_version() -> None:
    assert f"## [{_C.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_modules_that_a_wheel_is_tried_with_exist() -> None:
    lines = (ROOT / "packaging/tests.txt").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert names and [name for name in names if not (ROOT / name).is_file()] == []


def test_what_a_fatbin_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("elftools", reason="packaging/check.py needs pyelftools; .ci/run's wheel step runs it")
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    import check

    def entry(kind: int, arch: int) -> bytes:
        return struct.pack("<HHIQ", kind, 0x101, 64, 8) + bytes(12) + struct.pack("<I", arch) + bytes(32) + b"contents"

    entries = entry(2, 80) + entry(2, 120) + entry(1, 80)
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    assert check.fatbin_archs(b"before" + fatbin + b"after") == {"sm_80", "sm_120", "compute_80"}
    assert check.fatbin_archs(b"nothing") == set()


# -- a build without test bindings ------------------------------------------------------------------------------------


def test_paths_of_the_build_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("elftools", reason="packaging/check.py needs pyelftools; .ci/run's wheel step runs it")
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    import check

    assert check.PATHS.findall(b"\0/build/x.c\0'/usr/src/x', /tmp/y") == [b"/build/x.c", b"/usr/src/x", b"/tmp/y"]
    assert check.PATHS.findall(b"'/proc/PID/root/dev/shm' is that of a container") == []  # a docstring's


def test_testing_says_what_a_wheel_lacks() -> None:
    done = run_python(
        """
        import sys
        import kvswap
        from kvswap import testing
        sys.modules["kvswap._testing"] = None
        device = kvswap.Device("host:91")
        calls = [lambda: testing.deterministic_device(1), testing.fault(device, "call", "fail").__enter__]
        for call in calls:
            try:
                call()
            except kvswap.Error as error:
                print(error)
        """
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all("lacks its test bindings" in line and "--force-reinstall" in line for line in lines)


def test_the_package_itself_needs_no_test_bindings() -> None:
    """Only kvswap/testing.py asks for them, and by name."""
    members = {"pointer_query", "copy", "fill", "copy_batch", "launch_copy"}  # MEMBERS of csrc/py/seam.c
    found = []
    for path in sorted(Path(kvswap.__file__).parent.rglob("*.py")):
        text = path.read_text()
        if path.name != "testing.py":
            found += [f"{path.name}: {name}" for name in re.findall(r"kvswap\._testing\b|import _testing\b", text)]
        called = re.findall(r"_C\._seam\([^\"]*\"(\w+)\"", text)
        found += [f"{path.name}: {name}" for name in called if name not in members]
    assert found == []


# -- the state of a build ----------------------------------------------------------------------------------------------


def test_a_stale_build_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the C sources by the stamp, of an installed copy by its files; what a build made does not count."""
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    from kvswap_build import digest

    for name in ("csrc/a.c", "csrc/py/sources.h", "kvswap/__init__.py", "kvswap/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    stamp = digest.of_sources(tmp_path)
    (tmp_path / "csrc/py/sources.h").write_text("made anew")
    assert digest.of_sources(tmp_path) == stamp
    editable = SimpleNamespace(__file__=str(tmp_path / "kvswap/__init__.py"), _C=SimpleNamespace(_sources=stamp))
    assert digest.stale(editable, tmp_path) == []
    copy = tmp_path / "site/kvswap"
    shutil.copytree(tmp_path / "kvswap", copy)
    installed = SimpleNamespace(__file__=str(copy / "__init__.py"), _C=SimpleNamespace(_sources=stamp))
    assert digest.stale(installed, tmp_path) == []
    (tmp_path / "kvswap/b.py").write_text("newer")
    (tmp_path / "kvswap/c.py").write_text("new")
    assert digest.stale(editable, tmp_path) == []
    assert digest.stale(installed, tmp_path) == ["kvswap/b.py", "kvswap/c.py"]
    (tmp_path / "csrc/a.c").write_text("newer")
    assert digest.stale(editable, tmp_path) == ["csrc/"]
    assert "setup.py -q build_ext --inplace" not in digest.message(installed, ["csrc/"])
