"""A folder of csrc/ is a layer: calls and includes point downward. docs/architecture.md draws the layers.

Calls are seen by the symbols of the objects, includes by the text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
from builds import CC, CORE, object_of
from conftest import ROOT

CSRC = ROOT / "csrc"
PYTHON = sysconfig.get_paths()["include"]

# From the top down. A folder may call and include itself and the folders of later rows. "": the public headers,
# private.h and status.c.
FOLDERS = [
    {"py"},
    {"share", "replicas"},
    {"offload", "files", "hostpool", "ipc", "remote"},
    {"engine"},
    {"calls"},
    {"paths"},
    {"memory"},
    {"lanes"},
    {"racecheck"},
    {"plan"},
    {"host", "cuda"},
    {"device"},
    {"base"},
    {"kernels"},
    {"codecs"},
    {""},
]
# Calls through pointers, which symbols do not show: where one may be kept, and what it is for.
POINTERS = {
    "base/wait.h": "a thread's interrupt callback: it looks for signals",
    "codecs/codec.h": "a codec's functions",
    "base/fork.h": "in_child: a file's own, of a forked child",
    "device/device.h": "a device's functions",
    "device/share.h": "the same, between processes and devices",
    "device/watch.h": "the race checker listens",
    "lanes/state.h": "destroy, free_imports: the end of an engine; release: the caller's own",
    "lanes/registry.c": "servers stop first when the process ends",
    "lanes/work.h": "plan, watch, settle: what submitting asks of the call that it is for",
    "files/engine.h": "threads or io_uring",
    "files/queue.h": "a request's begin and end",
    "files/item.h": "release: the caller's own",
    "host/ops.h": "a function that a stream calls",
    "offload/offload.h": "release: the caller's own",
    "paths/path.h": "a path's functions",
    "py/dicts.h": "of a struct's member, its Python object",
    "py/dlpack.c": "DLPack's own structs",
    "py/host_pool.c": "grow or shrink",
    "py/metrics.c": "get, row: one list of the core's, as dicts",
    "py/module.c": "make: an object of the module",
    "py/private_capi.h": "device_object, seam: for the tests' extension",
    "py/seam.h": "call: one function of the seam",
    "py/swap.c": "read, submit: one kind of call",
    "py/transfer.h": "Transfer or FileTransfer",
    "py/wait.c": "work, discard: of a call on a thread of its own",
}

Graph = dict[str, dict[str, set[str]]]


def compile_to(folder: Path, source: Path, name: str) -> Path:
    target = folder / (name.replace("/", "_") + ".o")
    command = [*CC, "-std=c11", "-D_GNU_SOURCE", "-O0", "-w", f"-I{CSRC}"]
    command += [f"-I{PYTHON}", f"-I{numpy.get_include()}", "-c", str(source), "-o", str(target)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return target


def symbols_of(objects: dict[str, Path]) -> list[tuple[str, str, str]]:
    """File, kind and name of each symbol that begins with kvs_."""
    names = {str(target): name for name, target in objects.items()}
    run = subprocess.run(["nm", "-A", *names], capture_output=True, text=True, check=True)
    found = re.findall(r"^([^:]+):\S*\s+(\w)\s+(kvs_\w+)$", run.stdout, re.MULTILINE)
    return [(names[target], kind, symbol) for target, kind, symbol in found]


def calls_between(objects: dict[str, Path]) -> Graph:
    """A file, the files that it calls, and what of them."""
    symbols = symbols_of(objects)
    owner = {symbol: name for name, kind, symbol in symbols if kind in "TDBRV"}
    graph: Graph = {name: {} for name in objects}
    for name, kind, symbol in symbols:
        if kind == "U":
            assert symbol in owner, f"{name} wants {symbol}, which no file has"
            graph[name].setdefault(owner[symbol], set()).add(symbol)
    return graph


def rank(name: str) -> int:
    folder = name.rpartition("/")[0]
    row = next((i for i, names in enumerate(FOLDERS) if folder in names), None)
    assert row is not None, f"{name}: its folder needs a row in FOLDERS"
    return row


def upward(graph: Graph) -> list[str]:
    def wrong(caller: str, called: str) -> bool:
        beside = rank(caller) == rank(called) and caller.rpartition("/")[0] != called.rpartition("/")[0]
        return beside or rank(called) < rank(caller)

    return [
        f"{caller} calls {called}: {', '.join(sorted(names))}"
        for caller, others in graph.items()
        for called, names in others.items()
        if wrong(caller, called)
    ]


def rings(graph: Graph) -> list[set[str]]:
    """Files that reach each other."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        seen, todo = set[str](), [name]
        while todo:
            for called in graph[todo.pop()]:
                if called not in seen:
                    seen.add(called)
                    todo.append(called)
        reached[name] = seen
    found: list[set[str]] = []
    for name in graph:
        ring = {other for other in reached[name] if name in reached[other]}
        if ring and ring not in found:
            found.append(ring)
    return found


@pytest.fixture(scope="module")
def objects(core: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not shutil.which("nm"):
        pytest.skip("no nm")
    if not Path(PYTHON, "Python.h").exists():
        pytest.skip("no headers of Python")
    folder = tmp_path_factory.mktemp("objects")
    found = {str(path.relative_to(CSRC)): object_of(core("thread"), path) for path in CORE}
    bindings = {str(path.relative_to(CSRC)): path for path in sorted(CSRC.glob("py/*.c"))}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        targets = threads.map(lambda item: compile_to(folder, item[1], item[0]), bindings.items())
        return found | dict(zip(bindings, targets, strict=True))


def test_no_file_calls_one_above_it(objects: dict[str, Path], tmp_path: Path) -> None:
    graph = calls_between(objects)
    assert upward(graph) == []
    assert rings(graph) == []
    planted = tmp_path / "planted.c"
    planted.write_text(
        "int kvs_submit(void);\nint kvs_planted(void);\nint kvs_planted(void) { return kvs_submit(); }\n"
    )
    with_planted = {**objects, "plan/planted.c": compile_to(tmp_path, planted, "planted")}
    assert upward(calls_between(with_planted)) == ["plan/planted.c calls paths/submit.c: kvs_submit"]


def includes(path: Path) -> list[str]:
    """The headers of csrc/ that a file includes, as they are seen from there."""
    found = []
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
        beside = (path.parent / name).resolve()
        inside = str(beside.relative_to(CSRC)) if beside.exists() else name
        if (CSRC / inside).exists():
            found.append(inside)
    return found


def upward_includes(included: dict[str, list[str]]) -> list[str]:
    return [
        f"{name} includes {other}"
        for name, others in included.items()
        for other in others
        if rank(other) < rank(name)
        or (rank(other) == rank(name) and other.rpartition("/")[0] != name.rpartition("/")[0])
    ]


def test_includes_point_downward() -> None:
    files = sorted(path for path in CSRC.rglob("*") if path.suffix in (".c", ".h"))
    included = {str(path.relative_to(CSRC)): includes(path) for path in files}
    assert len(included) > 200
    assert upward_includes(included) == []
    headers = [name for name in included if "/" in name and name.endswith(".h")]
    assert rings({name: {other: {name} for other in included[name] if other in headers} for name in headers}) == []
    assert upward_includes({"lanes/lane.h": ["paths/path.h"]}) == ["lanes/lane.h includes paths/path.h"]


def reached(names: list[str]) -> set[str]:
    """The headers that these files include, directly or not."""
    seen, todo = set[str](), list(names)
    while todo:
        for name in includes(CSRC / todo.pop()):
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return seen


def test_the_bindings_see_no_structs_of_the_core() -> None:
    seen = reached([str(path.relative_to(CSRC)) for path in (CSRC / "py").glob("*.[ch]")])
    assert "private.h" in seen and "lanes/state.h" not in seen


LABEL = r"/\* -- ([\w/]+\.c)\b"  # in private.h, which several files define
PROTOTYPE = r"^\w[\w *]*?\b(kvs_\w+)\("


def declared(header: str, text: str) -> dict[str, str]:
    """The functions of a header, and the file that must define each: the one of the header's name, or of the label."""
    file, found = header[:-2] + ".c", {}
    for label, name in re.findall(rf"^{LABEL}|{PROTOTYPE}", text, re.MULTILINE):
        if label and header == "private.h":
            file = label
        elif name:
            found[name] = file
    return found


def test_headers_declare_what_their_file_defines(objects: dict[str, Path]) -> None:
    """All of it that is not public, and nothing else; and the file includes its header."""
    owner = {symbol: name for name, kind, symbol in symbols_of(objects) if kind == "T"}
    public = {path.name for path in CSRC.glob("kvswap*.h")}
    headers = [path for path in sorted(CSRC.rglob("*.h")) if path.name not in public]
    wrong, known = [], set[str]()
    for path in headers:
        header = str(path.relative_to(CSRC))
        names = declared(header, path.read_text())
        known |= names.keys()
        wrong += [
            f"{header} declares {name} for {file}; {owner[name]} defines it"
            for name, file in names.items()
            if owner.get(name, file) != file
        ]
    for name in public:
        known |= set(re.findall(r"\b(kvs_\w+)\(", (CSRC / name).read_text()))
    assert wrong == []
    assert sorted(owner.keys() - known) == []
    silent = [
        name for name in objects if (CSRC / f"{name[:-2]}.h").exists() and f"{name[:-2]}.h" not in reached([name])
    ]
    assert silent == []
    assert declared("lanes/a.h", "/* -- b.c */\nint kvs_c(void);") == {"kvs_c": "lanes/a.c"}
    assert declared("private.h", "/* -- b/c.c -- */\nint kvs_c(void);") == {"kvs_c": "b/c.c"}


def test_a_ring_is_found() -> None:
    graph: Graph = {
        "lanes/lane.c": {"lanes/transfer.c": {"a"}},
        "lanes/transfer.c": {"lanes/lane.c": {"b"}},
        "paths/copies.c": {},
    }
    assert rings(graph) == [{"lanes/lane.c", "lanes/transfer.c"}]
    assert upward({"lanes/lane.c": {"paths/submit.c": {"a"}}, "files/sys.c": {"ipc/ipc.c": {"b"}}}) == [
        "lanes/lane.c calls paths/submit.c: a",
        "files/sys.c calls ipc/ipc.c: b",
    ]


def test_where_pointers_to_functions_are_kept() -> None:
    """In a struct or a variable; those of a call's own parameters end with the call."""
    kept = re.compile(
        r"^(?:static | {2,6}(?! ))[\w\s*]*\(\*\s*(?:_Atomic )?(\w+)\)(?:\([^;{]*\))(?:;| =)", re.MULTILINE
    )
    public = {path.name for path in CSRC.glob("kvswap*.h")}
    found = set()
    for path in CSRC.rglob("*.[ch]"):
        name = str(path.relative_to(CSRC))
        if name in public or name.startswith("cuda/"):
            continue  # the driver's own, and the surface
        text = (
            re.sub(r"^[^\n]*\) \{\n.*?^\}$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
            if path.suffix == ".c"
            else path.read_text()
        )
        if kept.search(text):
            found.add(name)
    assert found == set(POINTERS)
