"""The shape of the sources: who includes whom, how long things are, what has a docstring, where the version stands."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import get_args

from conftest import ROOT

import kvswap
from kvswap import _C, files, testing
from kvswap.typing import ForcedPath

CSRC = ROOT / "csrc"
WRITTEN = [CSRC / "kvswap_version.h", CSRC / "py/sources.h"]  # by a build
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".c", ".h", ".cu", ".cuh") and path not in WRITTEN)
CAPI = CSRC / "kvswap_capi.h"  # the surface for extensions of Python
BINDINGS = [path for path in SOURCES if path.parent.name == "py" or path == CAPI]
KERNELS = [path for path in SOURCES if path.parent.name == "kernels"]
CORE = [path for path in SOURCES if path not in BINDINGS + KERNELS]
SURFACE = {path.name for path in CSRC.glob("kvswap*.h")} - {WRITTEN[0].name, CAPI.name}
PYTHON = sorted(path for path in (ROOT / "kvswap").rglob("*.py"))

DEVICES = ("device", "host", "cuda")  # folders below the seam
PURE = (
    {"lanes/hazard.c", "racecheck/clock.c", "device/region.c"}
    | {f"files/{name}.c" for name in ("format", "index", "keys")}
    | {"remote/header.c"}
)


# What is above the seam includes of these folders: headers that open or describe a device, without types of its kind.
DOORS = {"host/device.h", "cuda/device.h", "cuda/info.h", "cuda/fatbin.h"}


def is_cuda(path: Path) -> bool:
    return path.parent.name in ("cuda", "kernels")


def includes(path: Path) -> list[str]:
    """As they are seen from csrc/."""
    found = []
    for quote, name in re.findall(r'^\s*#\s*include\s+(["<])([^">]+)[">]', path.read_text(), re.MULTILINE):
        beside = (path.parent / name).resolve()
        if quote == '"' and beside.exists():
            name = str(beside.relative_to(CSRC))
        found.append(name)
    return found


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_there_is_something_to_look_at() -> None:
    assert len(CORE) > 20 and len(BINDINGS) > 10 and len(KERNELS) > 3


def test_the_core_knows_no_python() -> None:
    assert (
        names([path for path in CORE + KERNELS if re.search(r"\bPy_?[A-Z]\w+\(|Python\.h|numpy/", path.read_text())])
        == []
    )


def test_the_bindings_know_no_cuda() -> None:
    def knows(path: Path) -> bool:
        own = [name for name in includes(path) if name.startswith("cuda") and name not in DOORS]
        text = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:[^"\\]|\\.)*"', "", path.read_text(), flags=re.DOTALL)
        return bool(own or re.search(r"\bcu[A-Z]\w+\(|\bCU(?:stream|event|deviceptr|result|DA_)\w*", text))

    assert names([path for path in BINDINGS if knows(path)]) == []


def test_only_cuda_files_know_cuda_types() -> None:
    def knows(path: Path) -> bool:
        text = re.sub(r'/\*.*?\*/|"(?:[^"\\]|\\.)*"', "", path.read_text(), flags=re.DOTALL)
        return bool(re.search(r"\bkvs_cu_\w+|\bKVS_CU_\w+|\bcu[A-Z]\w+\(|\bCU[a-z]\w+|<cuda", text))

    assert names([path for path in SOURCES if not is_cuda(path) and knows(path)]) == []
    headers = {f"cuda/{path.name}" for path in (CSRC / "cuda").glob("*.h")} - DOORS
    assert names([path for path in SOURCES if not is_cuda(path) and headers & set(includes(path))]) == []


def test_what_the_bindings_include_of_the_core_has_a_reason() -> None:
    """In private.h, one list: a C user lacks what is in it."""
    found = {name for path in BINDINGS for name in includes(path) if "/" in name and (CSRC / name).exists()}
    listed = re.findall(r"^ \*   ([a-z]+/\w+\.h) +\S.*$", (CSRC / "private.h").read_text(), re.MULTILINE)
    assert listed == sorted(name for name in found if not name.startswith("py/"))


def test_numpy_is_used_in_one_file() -> None:
    users = [path for path in SOURCES if re.search(r"numpy/|\bPyArray_|\bNPY_", path.read_text())]
    assert names(users) == ["csrc/py/arrays.c"]


def test_the_layers_of_sources() -> None:
    """Pure functions know no device's insides; devices know no lanes; what is above the seam knows none of them."""
    above = {"private.h", "lanes/state.h", "kvswap.h"}
    wrong = []
    for path in CORE:
        if path.suffix != ".c":
            continue
        seen, name = set(includes(path)), str(path.relative_to(CSRC))
        below = path.parent.name in DEVICES
        if (path.parent.name == "plan" or name in PURE) and seen & (above | {"host/device.h"}):
            wrong.append(name)
        if below and seen & (above | {"plan/plan.h"}):
            wrong.append(name)
        if not below and any(other.startswith(("host/", "cuda/")) and other not in DOORS for other in seen):
            wrong.append(name)
    assert wrong == []


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_length_of_files() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES}
    most = {path: 240 if path.suffix in (".h", ".cuh") else 1000 for path in SOURCES}
    assert names([path for path, lines in lengths.items() if lines > most[path]]) == []


def long_functions(path: Path) -> Iterator[str]:
    begin = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.match(r"^\w.*\) \{$|^\s{4,}.*\) \{$", line) and not line.startswith(" " * 8) and begin is None:
            begin = number
        if line == "}" and begin is not None:
            if number - begin > 75:
                yield f"{path.name}:{begin}"
            begin = None


def test_length_of_c_functions() -> None:
    assert [name for path in SOURCES if path.suffix == ".c" for name in long_functions(path)] == []


def test_length_of_python_functions() -> None:
    long = []
    for path in [*PYTHON, *ROOT.glob("setup*.py"), *ROOT.glob("packaging/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.end_lineno or 0) - node.lineno > 75:
                long.append(f"{path.name}: {node.name}")
    assert long == []


def test_every_header_and_every_c_file_of_weight_says_what_it_is() -> None:
    heavy = [path for path in SOURCES if path.suffix == ".h" or len(path.read_text().splitlines()) > 100]
    silent = [path for path in heavy if not path.read_text().lstrip().startswith(("/*", "//"))]
    assert names(silent) == []


# -- words ------------------------------------------------------------------------------------------------------------

# Put together from parts, so that this file does not hold what it looks for.
FORBIDDEN = [
    "/" + "work/",
    "/" + "root/",
    "/" + "home/",
    "co" + "pilot",
    "TO" + "DO",
    "FIX" + "ME",
    "XX" + "X ",
]
TEXTS = [
    path
    for folder in ("csrc", "kvswap", "tests", "benchmarks", "docs", "examples", "cmake", "packaging", ".ci")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix in (".c", ".h", ".cu", ".cuh", ".py", ".pyi", ".md", ".toml", ".sh", "")
]
TEXTS += [
    path
    for pattern in ("README.md", "CHANGELOG.md", "setup*.py", "pyproject.toml")
    for path in sorted(ROOT.glob(pattern))
]


def test_no_paths_of_a_machine_and_no_loose_ends() -> None:
    found = []
    for path in TEXTS:
        text = path.read_bytes().decode("utf-8", "replace")
        text = re.sub(r"/proc/[^/\s]+/roo[t]/", "", text)  # what another process sees
        found += [f"{path.relative_to(ROOT)}: {word}" for word in FORBIDDEN if word in text]
    assert found == []


def test_threads_are_started_in_one_place() -> None:
    """There signals are blocked: a handler of the program's must not run on a thread of ours."""
    calls = re.compile(r"\b(pthread_create|thrd_create|SIGEV_THREAD)\b")
    assert names([path for path in SOURCES if calls.search(path.read_text())]) == ["csrc/base/thread.c"]


def test_no_call_that_ends_the_process() -> None:
    """A library returns errors."""
    found = [path for path in CORE + BINDINGS if re.search(r"[^_\w](exit|abort|_Exit|quick_exit)\(", path.read_text())]
    assert names(found) == []


# -- names ------------------------------------------------------------------------------------------------------------


def public_types() -> list[type]:
    return [value for name in kvswap.__all__ if isinstance(value := getattr(kvswap, name), type)]


def test_public_names_exist_and_are_sorted() -> None:
    assert list(kvswap.__all__) == sorted(kvswap.__all__)
    assert list(testing.__all__) == sorted(testing.__all__)
    for module in (kvswap, testing):
        assert all(hasattr(module, name) for name in module.__all__)


def test_everything_public_has_a_docstring() -> None:
    silent = []
    for module in (kvswap, testing):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and not inspect.getdoc(value):
                silent.append(f"{module.__name__}.{name}")
    for public in public_types():
        if issubclass(public, (BaseException, tuple, int)):
            continue
        for name, value in vars(public).items():
            documented = isinstance(value, (types.MethodDescriptorType, types.GetSetDescriptorType, types.FunctionType))
            if documented and not name.startswith("_") and not value.__doc__:
                silent.append(f"{public.__name__}.{name}")
    assert silent == []


def test_everything_of_the_extension_has_a_docstring_and_a_signature() -> None:
    functions = {name: value for name, value in vars(_C).items() if isinstance(value, types.BuiltinFunctionType)}
    assert len(functions) > 15
    assert [name for name, value in functions.items() if not value.__doc__] == []
    assert [name for name, value in functions.items() if value.__text_signature__ is None] == []


def test_the_types_say_where_they_are_found() -> None:
    for public in public_types():
        if public.__module__ == "kvswap":
            assert getattr(kvswap, public.__name__) is public
    for name in (
        "Device",
        "Memory",
        "Stream",
        "Event",
        "Transfer",
        "Pool",
        "Error",
        "QueueFull",
        "DeviceError",
    ):
        assert getattr(kvswap, name).__module__ == "kvswap", name


def test_errors_have_one_base() -> None:
    assert files.MissingKey.__module__ == "kvswap.files"
    assert files.MissingKey.__bases__ == (kvswap.Error, KeyError)
    assert issubclass(kvswap.QueueFull, kvswap.Error) and issubclass(kvswap.DeviceError, kvswap.Error)
    assert kvswap.Error.__bases__ == (Exception,)
    assert (kvswap.DeviceError.code, kvswap.DeviceError.operation) == (0, None)


# -- the version ------------------------------------------------------------------------------------------------------


def test_the_version_stands_in_one_place() -> None:
    version = re.search(r'^version = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert kvswap.__version__ == _C.__version__ == version[1]
    try:
        assert metadata.version("kvswap") == version[1]
    except metadata.PackageNotFoundError:
        assert ROOT in Path(kvswap.__file__).parents, "neither installed nor run from the tree"
    elsewhere = [path for path in [*SOURCES, *PYTHON] if version[1] in path.read_text()]
    assert names(elsewhere) == []


def test_the_header_is_shipped() -> None:
    folder = Path(kvswap.get_include())
    for name in SURFACE | {CAPI.name}:
        assert (folder / name).read_text() == (CSRC / name).read_text()
    for name in includes(CSRC / "kvswap.h"):
        assert not (CSRC / name).exists() or (folder / name).exists(), name


# -- paths ------------------------------------------------------------------------------------------------------------


def test_paths_have_the_names_of_the_table() -> None:
    names = [path["name"] for path in _C._paths()]
    assert list(get_args(ForcedPath)) == names
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/paths.md").read_text().split("\n\n")[2], re.MULTILINE)
    assert rows == names
    assert [name for name in names if f"'{name}'" not in (_C.swap_blocks_batch.__doc__ or "")] == []
