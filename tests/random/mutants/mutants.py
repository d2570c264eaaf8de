"""Does the suite notice a small change of csrc? Changes are drawn by a seed. For each, the one file is built into a
copy of this tree, and the tests that reach the line are run, the quick ones first, until one fails. By hand; some
seconds a change:

    python tests/random/mutants/mutants.py FOLDER --seed 1 --count 300
    python tests/random/mutants/mutants.py FOLDER --again --also TEST...            what went by, and these tests too
    python tests/random/mutants/mutants.py FOLDER --report                          the record of what is in FOLDER

FOLDER keeps the builds, the results, and which tests reach which line, which is found once, by running the suite
(cover.py): a run that was ended goes on. A change that does not compile or makes the same object file is not counted.
csrc/cuda is left out: it needs a GPU. A test has noticed if it fails twice, the second time alone.
"""

from __future__ import annotations

import argparse
import base64
import bisect
import ctypes
import fcntl
import fnmatch
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / "packaging"), str(HERE)]
import draw  # noqa: E402
from kvswap_build import uring  # noqa: E402

CC = shutil.which("gcc") or "gcc"
COMPILE = [
    *(["ccache"] if shutil.which("ccache") else []),
    CC,
    "-std=c11",
    "-D_GNU_SOURCE",
    "-pthread",
    "-I",
    "csrc",
    "-w",
]
PYTHON = ["-fPIC", "-fvisibility=hidden", "-DNDEBUG", f"-I{sysconfig.get_path('include')}", f"-I{np.get_include()}"]
URING = uring.find_uring([CC])
VERSION = re.search(r'^version = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
PYTHON += [f'-DKVSWAP_VERSION="{VERSION}"', *(["-DKVSWAP_URING=1"] if URING else [])]
KINDS = {
    "module": ["-O2", *PYTHON],
    "module-cover": ["-O0", "-g1", "-fsanitize-coverage=trace-pc", *PYTHON],
    "plain": ["-O2", "-g1"],
    "cover": ["-O0", "-g1", "-fsanitize-coverage=trace-pc"],
    "address": ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
}
EXTENSION = "kvswap/_C" + sysconfig.get_config_var("EXT_SUFFIX")
FIRST = (4.0, 15)  # seconds and tests before the rest is tried
REST = (6.0, 20)
ALL = (150.0, 1000)  # once more, of what went by
OFF = (
    "tests/c/test_c.py",
    "tests/project/test_structure.py",
    "tests/project/test_readme.py",
    "tests/project/test_records.py",
    "tests/project/test_mutants.py",
)


def run(command: list[str], cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace", check=False, **options)


def must(command: list[str], cwd: Path) -> str:
    done = run(command, cwd)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


# -- building ----------------------------------------------------------------------------------------------------------


class Builds:
    """The objects of the unchanged sources, of each kind, and what is linked of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.c"))
        self.programs = sorted(path.stem for path in (ROOT / "tests" / "c").glob("test_*.c"))

    def object_of(self, kind: str, source: str) -> Path:
        return self.folder / kind / (source.replace("/", "_")[:-2] + ".o")

    def sources_of(self, kind: str) -> list[str]:
        return [s for s in self.sources if kind.startswith("module") or not s.startswith("csrc/py/")]

    def compile(self, tree: Path, kind: str, source: str, target: Path) -> bool:
        target.parent.mkdir(parents=True, exist_ok=True)
        return run([*COMPILE, *KINDS[kind], "-c", source, "-o", str(target)], tree).returncode == 0

    def all_of(self, kind: str, tree: Path) -> None:
        """Once: the objects of the unchanged sources; to find what they reach, the programs of tests/c too."""
        done = self.folder / kind / "done"
        if done.exists():
            return
        todo = [(source, self.object_of(kind, source)) for source in self.sources_of(kind)]
        if kind == "cover":
            todo += [(f"tests/c/{name}.c", self.object_of(kind, f"tests/c/{name}.c")) for name in self.programs]
        with ThreadPoolExecutor(2) as pool:
            if not all(pool.map(lambda job: self.compile(tree, kind, *job), todo)):
                raise SystemExit(f"the sources cannot be built as {kind}")
        done.touch()

    def link(self, kind: str, objects: list[Path], target: Path, tree: Path) -> bool:
        flags = [flag for flag in KINDS[kind] if flag.startswith("-fsanitize=")]
        end = ["-shared", *URING] if kind.startswith("module") else ["-lm"]
        if "cover" in kind:
            cover = self.folder / "cover.o"
            must([CC, "-O2", "-fPIC", "-c", str(HERE / "cover.c"), "-o", str(cover)], tree)
            end.append(str(cover))
        return run([CC, "-pthread", *flags, *map(str, objects), "-o", str(target), "-ldl", *end], tree).returncode == 0

    def extension(self, kind: str, tree: Path, source: str = "", changed: Path | None = None) -> bool:
        objects = [changed if changed and s == source else self.object_of(kind, s) for s in self.sources]
        target = tree / EXTENSION
        target.unlink(missing_ok=True)
        return self.link(kind, objects, target, tree)

    def program(self, kind: str, main: Path, target: Path, source: str = "", changed: Path | None = None) -> bool:
        objects = [changed if changed and s == source else self.object_of(kind, s) for s in self.sources_of(kind)]
        return self.link(kind, [main, *objects], target, ROOT)


def copy_tree(target: Path) -> None:
    names = must(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")
    for name in filter(None, names):
        source = ROOT / name
        if source.is_file() and not name.startswith("benchmarks/results"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


# -- which tests reach a line ------------------------------------------------------------------------------------------


def sites_of(binary: Path) -> list[tuple[int, str, int]]:
    """Each basic block: where its call returns to, the file and the line."""
    calls, places, after = must(["objdump", "-d", "--no-show-raw-insn", str(binary)], ROOT), [], False
    for line in calls.splitlines():
        found = re.match(r"\s+([0-9a-f]+):", line)
        if found and after:
            places.append(int(found[1], 16))
        after = bool(found) and "call" in line and "<__sanitizer_cov_trace_pc" in line
    text = "".join(f"{place - 1:#x}\n" for place in places)
    lines = subprocess.run(["addr2line", "-e", str(binary)], input=text, capture_output=True, text=True, check=True)
    sites = []
    for place, line in zip(places, lines.stdout.splitlines(), strict=True):
        found = re.search(r"(csrc/\S+):(\d+)", line)
        sites.append((place, found[1] if found else "", int(found[2]) if found else 0))
    return sites


class Cover:
    """Which tests, and which programs of tests/c, reach which block, and how long they take."""

    def __init__(self, folder: Path, builds: Builds) -> None:
        self.folder, self.builds = folder / "reached", builds
        self.folder.mkdir(exist_ok=True)
        self.file, self.names = self.folder / "all.json", self.folder / "names"

    def find(self, tree: Path, jobs: int, pytest_arguments: list[str]) -> None:
        if self.file.exists():
            return
        rows: list[dict[str, Any]] = []
        self.builds.all_of("cover", tree)
        for name in self.builds.programs:
            rows += self.of_program(name)
        self.builds.all_of("module-cover", tree)
        self.builds.extension("module-cover", tree)
        sites = sites_of(tree / EXTENSION)
        np.save(self.folder / "sites.npy", np.array([site[0] for site in sites]))
        environment = os.environ | {"KVSWAP_COVER_DIR": str(self.folder), "PYTHONPATH": f"{tree}:{HERE}"}
        options = [
            "-q",
            "-p",
            "cover",
            "-p",
            "no:cacheprovider",
            "-n",
            str(jobs),
            "--long-seconds",
            "1",
            *pytest_arguments,
        ]
        ignored = [f"--ignore={name}" for name in OFF]
        with open(self.folder / "log", "w") as log:
            subprocess.run([sys.executable, "-P", "-m", "pytest", *options, *ignored], cwd=tree, env=environment,
                           stdout=log, stderr=log, check=False)  # fmt: skip
        for file in sorted(self.folder.glob("*.jsonl")):
            for line in file.read_text().splitlines():
                row = json.loads(line)
                bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(row["hits"])), np.uint8))
                rows.append(row | {"hits": named(sites, np.flatnonzero(bits[: len(sites)]))})
        collect = [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
        self.names.write_text(run(collect, tree, env=os.environ | {"PYTHONPATH": str(tree)}).stdout)
        blocks = named(sites, range(len(sites)))
        self.file.write_text(json.dumps({"blocks": blocks, "rows": rows}))

    def of_program(self, name: str) -> list[dict[str, Any]]:
        target, marks = self.folder / name, self.folder / "program.map"
        if not self.builds.program("cover", self.builds.object_of("cover", f"tests/c/{name}.c"), target):
            raise SystemExit(f"{name} cannot be linked")
        marks.write_bytes(b"")
        os.truncate(marks, 8 << 20)
        begin = time.monotonic()
        done = run([str(target)], ROOT, env=os.environ | {"KVSWAP_COVER": str(marks)})
        if done.returncode:
            return []
        seconds, sites = time.monotonic() - begin, sites_of(target)
        hits = np.fromfile(marks, np.uint8)
        base = 0 if not sites or hits[[site[0] for site in sites]].any() else None
        if base is None:
            raise SystemExit(f"{name} marked nothing")
        reached = named(sites, [i for i, site in enumerate(sites) if hits[site[0]]])
        return [{"test": f"tests/c/{name}.c", "seconds": seconds, "hits": reached}]

    @cached_property
    def table(self) -> tuple[dict[str, list[int]], dict[str, dict[int, list[str]]], dict[str, float]]:
        data = json.loads(self.file.read_text())
        blocks = {file: sorted(set(lines)) for file, lines in data["blocks"].items()}
        reached: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for row in data["rows"]:
            for file, lines in row["hits"].items():
                for line in set(lines):
                    reached[file][line].append(row["test"])
        return blocks, reached, self.seconds_of_all({row["test"]: row["seconds"] for row in data["rows"]})

    def seconds_of_all(self, seconds: dict[str, float]) -> dict[str, float]:
        """And of each parametrized test with all its cases, of which some were run."""
        cases = Counter(line.partition("[")[0] for line in self.names.read_text().splitlines())
        ran: dict[str, list[float]] = defaultdict(list)
        for test, time_of_it in seconds.items():
            ran[test.partition("[")[0]].append(time_of_it)
        return {whole: cases[whole] * sum(ran[whole]) / len(ran[whole]) for whole in ran if cases[whole] > 1} | seconds

    def tests_of(self, file: str, line: int) -> list[str]:
        """Those that reach the block that this line is in. A line may begin in the block before its own first one:
        `if (failed) return;`. First come files of which most tests reach it, four at a time, since reading a file of
        tests takes longer than most of its tests; of those the quick ones, of each parametrized test one at a time."""
        blocks, reached, seconds = self.table
        at = bisect.bisect_right(blocks.get(file, []), line)
        found = {test for block in blocks.get(file, [])[max(0, at - 2) : at] for test in reached[file][block]}
        of_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(found, key=lambda test: seconds[test]):
            of_file[test.partition("::")[0]].append(test)
        files = sorted(
            of_file, key=lambda name: (-round(len(of_file[name]) / self.tests_in[name], 1), seconds[of_file[name][0]])
        )
        ordered: list[str] = []
        for first in range(0, len(files), 4):
            cases: dict[str, list[str]] = defaultdict(list)
            for test in sorted(
                (t for name in files[first : first + 4] for t in of_file[name]), key=lambda test: seconds[test]
            ):
                cases[test.partition("[")[0]].append(test)
            rounds = range(max(map(len, cases.values())))
            ordered += [test for case in rounds for tests in cases.values() for test in tests[case : case + 1]]
        return ordered

    @cached_property
    def tests_in(self) -> Counter[str]:
        """How many tests that were run are in each file."""
        return Counter(row["test"].partition("::")[0] for row in json.loads(self.file.read_text())["rows"])

    def seconds_of(self, test: str) -> float:
        return self.table[2].get(test, 1.0)


def named(sites: list[tuple[int, str, int]], which: Any) -> dict[str, list[int]]:
    lines: dict[str, set[int]] = defaultdict(set)
    for i in which:
        lines[sites[i][1]].add(sites[i][2])
    return {file: sorted(found) for file, found in lines.items()}


# -- trying one --------------------------------------------------------------------------------------------------------


class Tree:
    """A copy of the sources and tests with an extension of its own; its processes end with each run."""

    def __init__(self, folder: Path, builds: Builds, cover: Cover) -> None:
        self.root, self.builds, self.cover = folder, builds, cover
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what a test leaves behind comes here
        import hypothesis  # noqa: F401  (what each run would load again)
        import pytest  # noqa: F401

    def child(self, call: Any, limit: float) -> tuple[int, str]:
        """The status of a process that makes this call (124: it took too long), and what it printed."""
        log = self.root / "log"
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.chdir(self.root)
                status = call()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(99)
        end, status = time.monotonic() + limit, None
        while time.monotonic() < end:
            ended, raw = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(raw)
                break
            time.sleep(0.02)
        self.end_children()
        return status if status is not None else 124, log.read_text(errors="replace")

    def end_children(self) -> None:
        """All that this process still has below it: it is nobody else's."""
        for _ in range(20):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for child in map(int, children):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            if not children:
                return

    def pytest(self, tests: list[str]) -> tuple[int, str]:
        """The status, and which test did not pass."""
        if not tests:
            return 0, ""

        def call() -> int:
            import pytest

            scratch = self.root / "tmp"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            os.environ.update(TMPDIR=str(scratch), PYTHONPATH=str(self.root))
            sys.path[:] = [str(self.root), *(path for path in sys.path if path not in (str(ROOT), str(HERE), ""))]
            sys.argv = ["pytest"]
            longest = 12 + 4 * max(map(self.cover.seconds_of, tests))
            options = ["-x", "-v", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", "--limit", str(longest)]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was imported before
            return int(pytest.main([*options, "--long-seconds", "1", *tests]))

        limit = 60 + 5 * sum(map(self.cover.seconds_of, tests))
        status, log = self.child(call, limit)
        failed = re.search(r"^(tests/.+?::.+?) (?:FAILED|ERROR)\b", log, re.M)
        started = re.findall(r"^(tests/.+?::.+?)(?: (?:PASSED|SKIPPED|XFAIL|Timeout)\b.*)?$", log, re.M)
        test = failed[1] if failed else started[-1].rstrip() if started else "at import"
        if gone := set(
            re.findall(r"^ERROR: not found: .*?/(tests/.*)$", log, re.M)
        ):  # since it was found what they reach
            return self.pytest([test for test in tests if test not in gone])
        if status in (0, 5):
            return 0, ""
        return status, test

    def check(self) -> None:
        """Without a change, tests pass."""
        quick = sorted(self.cover.table[2].items(), key=lambda item: item[1])
        tests = [test for test, _ in quick if not test.startswith("tests/c/")][:10]
        if not self.builds.extension("module", self.root) or self.pytest(tests)[0]:
            raise SystemExit(f"tests fail without a change: {self.root / 'log'}")

    def noticed_by_tests(self, tests: list[str]) -> str:
        """The test that fails, twice; what fails once only is left out."""
        while tests:
            status, test = self.pytest(tests)
            if status == 0:
                return ""
            at = [i for i, named in enumerate(tests) if test == named or test.startswith(named + "[")]
            if not at:
                return test
            again, _ = self.pytest([test])
            if again:
                return test + {124: ": takes too long"}.get(status, f": signal {-status}" if status < 0 else "")
            print(f"  {test} failed once only", flush=True)
            tests = tests[at[0] + 1 :]
        return ""

    def noticed_by_program(self, kind: str, source: str, name: str) -> str:
        changed, target = self.root / f"{kind}.o", self.root / f"{kind}-{name}"
        main = self.root / f"{kind}-{name}.o"
        if not self.builds.compile(self.root, kind, source, changed):
            return ""
        if not self.builds.compile(self.root, kind, f"tests/c/{name}.c", main):
            raise SystemExit(f"tests/c/{name}.c cannot be compiled")
        self.builds.program(kind, main, target, source, changed)
        command = ["setarch", os.uname().machine, "-R", str(target)] if kind == "thread" else [str(target)]

        def call() -> int:
            os.environ.update(CC=CC, ASAN_OPTIONS="detect_leaks=1", TSAN_OPTIONS="exitcode=66")
            os.execvp(command[0], command)

        status, _ = self.child(call, 60 + 20 * self.cover.seconds_of(f"tests/c/{name}.c"))
        return f"tests/c/{name}.c" + (f" ({kind})" if kind != "plain" else "") if status else ""

    def try_one(self, mutant: draw.Mutant, also: list[str], kinds: list[str]) -> dict[str, Any]:
        source = self.root / mutant.file
        text = source.read_text(encoding="utf-8")
        result = {key: getattr(mutant, key) for key in ("file", "line", "kind", "begin", "new", "before", "after")}
        begin = time.monotonic()
        try:
            source.write_text(mutant.apply(text), encoding="utf-8")
            result |= self.outcome(mutant, also, kinds)
        finally:
            source.write_text(text, encoding="utf-8")
        return result | {"seconds": round(time.monotonic() - begin, 1)}

    def take(self, todo: list[str], seconds: float, count: int) -> list[str]:
        """The first ones off the list, of so many seconds and so many at most."""
        taken: list[str] = []
        while todo and len(taken) < count and seconds > 0:
            seconds -= self.cover.seconds_of(todo[0])
            taken.append(todo.pop(0))
        return taken

    def whole(self, tests: list[str]) -> list[str]:
        """With all cases of quick tests: a few alone were run to find what they reach."""
        whole = (name if self.cover.seconds_of(name := test.partition("[")[0]) < 3 else test for test in tests)
        return [test for test in dict.fromkeys(whole) if not test.startswith("tests/c/")]

    def outcome(self, mutant: draw.Mutant, also: list[str], kinds: list[str]) -> dict[str, Any]:
        changed = self.root / "changed.o"
        if not self.builds.compile(self.root, "module", mutant.file, changed):
            return {"outcome": "does not compile"}
        if changed.read_bytes() == self.builds.object_of("module", mutant.file).read_bytes():
            return {"outcome": "the same code"}
        tests = self.cover.tests_of(mutant.file, mutant.line)
        if not self.builds.extension("module", self.root, mutant.file, changed):
            return {"outcome": "does not compile"}
        programs = [Path(test).stem for test in tests if test.startswith("tests/c/")]
        todo = [test for test in tests if not test.startswith("tests/c/")]
        by = self.noticed_by_tests(also) if also else ""
        by = by or self.noticed_by_tests(self.take(todo, *FIRST))
        for kind, name in itertools.product(kinds, programs):
            by = by or self.noticed_by_program(kind, mutant.file, name)
        if not by:
            todo = self.whole(tests)
            by = self.noticed_by_tests(self.take(todo, *(REST if kinds == ["plain"] else ALL)))
        if by:
            return {"outcome": "noticed", "by": by}
        return {"outcome": "not noticed", "reached": len(tests), "left": len(todo)}


# -- all of them -------------------------------------------------------------------------------------------------------


def results_of(folder: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """The last one of each change."""
    found = {}
    for file in sorted(folder.glob("results*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found[row["file"], row["begin"], row["new"]] = row
    return found


def counted(rows: Any) -> int:
    return sum(row["outcome"] in ("noticed", "not noticed") for row in rows)


def work(folder: Path, arguments: argparse.Namespace) -> None:
    """What one of the processes does: takes the changes that no other took, until there are enough results."""
    builds = Builds(folder)
    cover = Cover(folder, builds)
    tree = Tree(folder / f"tree{arguments.worker}", builds, cover)
    tree.check()
    files = [source for source in builds.sources if not source.startswith("csrc/cuda/")]
    files = fnmatch.filter(files, arguments.sources)
    done = results_of(folder)
    again = {key for key, row in done.items() if row["outcome"] == "not noticed"} if arguments.again else None
    end = time.monotonic() + arguments.minutes * 60
    for mutant in draw.draw(tree.root, files, arguments.seed):
        key = (mutant.file, mutant.begin, mutant.new)
        if key in again if again is not None else key not in done:
            if time.monotonic() > end or (again is None and counted(results_of(folder).values()) >= arguments.count):
                return
            claim = folder / "claims" / hashlib.sha256(repr((arguments.round, key)).encode()).hexdigest()
            try:
                claim.touch(exist_ok=False)
            except FileExistsError:
                continue
            kinds = ["plain", "address", "thread"] if arguments.again else ["plain"]
            row = tree.try_one(mutant, arguments.also, kinds)
            with open(folder / f"results{arguments.round}.jsonl", "a") as out:
                fcntl.flock(out, fcntl.LOCK_EX)
                out.write(json.dumps(row) + "\n")
            print(
                f"{row['outcome']:<17}{row['seconds']:5.0f} s  {mutant.file}:{mutant.line}  {row.get('by', '')}",
                flush=True,
            )
            if row["outcome"] == "not noticed":
                print(f"    - {mutant.before}\n    + {mutant.after}", flush=True)
        if again is not None and not again:
            return


def report(folder: Path, seed: int) -> None:
    first = [json.loads(line) for line in (folder / "results0.jsonl").read_text().splitlines()]
    last = results_of(folder)
    outcomes = Counter(row["outcome"] for row in first)
    number = counted(first)
    print(f"seed {seed}: {number} changes counted; {outcomes['does not compile']} more did not compile, "
          f"{outcomes['the same code']} more made the same code")  # fmt: skip
    print(f"noticed: {outcomes['noticed']} of {number}, {100 * outcomes['noticed'] / number:.1f} %")
    kinds = Counter((row["kind"], row["outcome"]) for row in first)
    for kind in draw.KINDS:
        of_kind = kinds[kind, "noticed"] + kinds[kind, "not noticed"]
        print(f"  {kind:<10}{kinds[kind, 'noticed']:4} of {of_kind}")
    by = Counter(row.get("by", "").partition(":")[0] for row in first if row["outcome"] == "noticed")
    print("by: " + ", ".join(f"{name} {count}" for name, count in by.most_common()))
    for row in sorted((row for row in first if row["outcome"] == "not noticed"), key=lambda r: (r["file"], r["line"])):
        now = last[row["file"], row["begin"], row["new"]]
        print(f"\n{row['file']}:{row['line']}\n  - {row['before']}\n  + {row['after']}")
        if now["outcome"] == "noticed":
            print(f"  since then: {now['by']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="changes that compile and make other code")
    parser.add_argument("--sources", default="*", help="only changes of such files: 'csrc/files/*'")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--again", action="store_true", help="those that went by, the sanitizers' builds too")
    parser.add_argument("--also", nargs="*", default=[], help="tests for all of them, before others")
    parser.add_argument("--report", action="store_true")
    parser.add_argument(
        "--reach", type=shlex.split, default=[], help="what else pytest is told when it finds what tests reach"
    )
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.report:
        return report(folder, arguments.seed)
    if arguments.worker >= 0:
        return work(folder, arguments)
    os.nice(max(0, 10 - os.nice(0)))
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115  (until the end)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"{folder} is in use by another run") from None
    print(f"process {os.getpid()}", flush=True)
    shutil.rmtree(folder / "claims", ignore_errors=True)
    (folder / "claims").mkdir()
    builds = Builds(folder)
    trees = [folder / f"tree{number}" for number in range(arguments.jobs)]
    for tree in trees:
        copy_tree(tree)
    Cover(folder, builds).find(trees[0], arguments.jobs, arguments.reach)
    for kind in ("module", "plain", *(("address", "thread") if arguments.again else ())):
        builds.all_of(kind, trees[0])
    rounds = len(list(folder.glob("results*.jsonl"))) if arguments.again else 0
    private = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm; exec "$@"', "sh"]  # /dev/shm of its own
    if subprocess.run([*private, "true"], capture_output=True, check=False).returncode:
        private = []
    command = [*private, sys.executable, *sys.argv, "--round", str(rounds), "--worker"]
    workers = [subprocess.Popen([*command, str(number)]) for number in range(arguments.jobs)]
    for worker in workers:
        worker.wait()
    return None


if __name__ == "__main__":
    main()
