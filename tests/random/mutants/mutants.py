"""Does the suite notice a small change of csrc? Changes are drawn by a seed. For each one, the changed file is built
into a copy of this tree, and tests run until one fails: first those of the file's part, then all others. By hand,
overnight: a change that no test notices takes as long as the suite.

    python tests/random/mutants/mutants.py FOLDER --seed 1 --count 300
    python tests/random/mutants/mutants.py FOLDER --again        what was not noticed, by the C programs' sanitizers too
    python tests/random/mutants/mutants.py FOLDER --report

FOLDER keeps the trees and the results: a run that was ended goes on. A change that does not compile, or gives the same
object file, does not count. csrc/cuda is left out: it needs a GPU. A test has noticed a change if it fails twice, the
second time by itself. Where unshare is permitted, each run has processes and /dev/shm of its own.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeAlias

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE))
import draw  # noqa: E402

# Tests that run first, by the folder in csrc; of the others tests/core.
PARTS = dict.fromkeys(("hostpool", "ipc", "memory", "share"), "tests/memory")
PARTS |= {"files": "tests/files", "offload": "tests/engines", "remote": "tests/remote"}
OFF = ("tests/c/test_c.py", "tests/project")  # the first one compiles for minutes, the others read sources
ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
ALONE += ["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
MOST_SECONDS = 3600.0  # of one run of tests
Row: TypeAlias = dict[str, Any]


def run(command: list[str], cwd: Path, timeout: float | None = None, **environment: str) -> tuple[int, str]:
    """The status, 124: it took too long; and what it printed."""
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, cwd=cwd, env=os.environ | environment, timeout=timeout, check=False, **options)
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        return 124, out if isinstance(out, str) else out.decode(errors="replace")
    return done.returncode, done.stdout


class Tree:
    """A copy of the sources and tests with extensions of its own, and the commands that build them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        _, names = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file() and not name.startswith("benchmarks/results"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        shutil.rmtree(folder / "build", ignore_errors=True)
        build = [sys.executable, "setup.py", "build_ext", "--inplace", "--force"]
        status, log = run(build, folder, KVSWAP_CUDA="off", KVSWAP_WERROR="0")
        if status:
            raise SystemExit(f"{log}\nthe sources cannot be built")
        commands = [shlex.split(line) for line in log.splitlines() if re.search(r" -c csrc/| -shared .*/_C\.", line)]
        self.link = next(command for command in commands if "-shared" in command)
        self.link[self.link.index("-o") + 1] = str(next((folder / "kvswap").glob("_C.*.so")))  # it was copied there
        self.compile = {command[command.index("-c") + 1]: command for command in commands if "-c" in command}
        self.objects: dict[str, bytes] = {}  # of the unchanged sources, without debugging information
        self.alone = ALONE if run([*ALONE, "true"], folder)[0] == 0 else []
        if failed := self.pytest(["tests/core/test_validation.py"]):
            raise SystemExit(f"{failed} fails without a change")

    def object_of(self, source: str) -> bytes:
        """Compile it to where the build has its object file. Empty: it does not compile."""
        command = [*self.compile[source], "-g0"]
        target = self.root / command[command.index("-o") + 1]
        return target.read_bytes() if run(command, self.root)[0] == 0 else b""

    def pytest(self, tests: list[str]) -> str:
        """The first test that does not pass; empty: all pass."""
        scratch = self.root / "tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        options = ["-x", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "--limit", "60", "--long-seconds", "1"]
        environment = {"TMPDIR": str(scratch), "PYTHONPATH": str(self.root), "KVSWAP_TEST_INSTALLED": "1"}
        command = [*self.alone, sys.executable, "-P", "-m", "pytest", *options, *tests]
        status, log = run(command, self.root, MOST_SECONDS, **environment)
        if status in (0, 5):  # 5: no tests there
            return ""
        failed = re.search(r"^(tests/.+?::.+?) (?:FAILED|ERROR)\b", log, re.M)
        started = re.findall(
            r"^(tests/.+?::.+?)(?: (?:PASSED|SKIPPED|XFAIL|Fatal Python error|Timeout).*)?$", log, re.M
        )
        return failed[1] if failed else started[-1].rstrip() if started else "at import"

    def noticed_by(self, tests: list[str]) -> str:
        once: list[str] = []
        while test := self.pytest([*tests, *(f"--deselect={each}" for each in once)]):
            if test in once or "::" not in test or self.pytest([test]):
                return test
            print(f"  {test} failed once only", flush=True)
            once.append(test)
        return ""

    def outcome(self, mutant: draw.Mutant, again: bool) -> Row:
        if mutant.file not in self.objects:
            self.objects[mutant.file] = self.object_of(mutant.file)
        text = (self.root / mutant.file).read_text(encoding="utf-8")
        try:
            (self.root / mutant.file).write_text(mutant.apply(text), encoding="utf-8")
            changed = self.object_of(mutant.file)
            if not changed or run(self.link, self.root)[0]:
                return {"outcome": "does not compile"}
            if changed == self.objects[mutant.file]:
                return {"outcome": "the same code"}
            first = PARTS.get(mutant.file.split("/")[1], "tests/core")
            by = self.noticed_by([first])
            rest = [f"--ignore={name}" for name in (first, *OFF[again:])]
            by = by or self.noticed_by(["tests", *rest])
            return {"outcome": "noticed", "by": by} if by else {"outcome": "not noticed"}
        finally:
            (self.root / mutant.file).write_text(text, encoding="utf-8")
            self.object_of(mutant.file)


def results_of(folder: Path) -> dict[tuple[str, int, str], Row]:
    """The last one of each change."""
    path = folder / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["file"], row["begin"], row["new"]): row for row in rows}


def report(rows: list[Row]) -> None:
    outcomes = Counter(row["outcome"] for row in rows)
    counted = outcomes["noticed"] + outcomes["not noticed"]
    print(
        f"noticed: {outcomes['noticed']} of {counted}; {outcomes['does not compile']} more did not compile, "
        f"{outcomes['the same code']} more made the same code"
    )
    kinds = Counter((row["kind"], row["outcome"]) for row in rows)
    for kind in draw.KINDS:
        noticed = kinds[kind, "noticed"]
        print(f"  {kind:<10}{noticed:4} of {noticed + kinds[kind, 'not noticed']}")
    for row in sorted(rows, key=lambda row: (row["file"], row["line"])):
        if row["outcome"] == "not noticed":
            print(f"\n{row['file']}:{row['line']}\n  - {row['before']}\n  + {row['after']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="changes that compile and make other code")
    parser.add_argument("--sources", default="*", help="only changes of such files: 'csrc/files/*'")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    done = results_of(folder)
    if arguments.report:
        return report(list(done.values()))
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.minutes * 60
    trees: SimpleQueue[Tree] = SimpleQueue()
    lock = Lock()
    for number in range(arguments.jobs):
        trees.put(Tree(folder / f"tree{number}"))
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.c") if path.parent.name != "cuda"]
    mutants = draw.draw(ROOT, fnmatch.filter(files, arguments.sources), arguments.seed)

    def enough() -> bool:
        counted = sum(row["outcome"] in ("noticed", "not noticed") for row in done.values())
        return time.monotonic() > end or (not arguments.again and counted >= arguments.count)

    def take() -> draw.Mutant | None:
        with lock:
            for mutant in mutants:
                row = done.get((mutant.file, mutant.begin, mutant.new), {})
                if row.get("outcome") == ("not noticed" if arguments.again else None):
                    return mutant
        return None

    def work() -> None:
        tree = trees.get()
        while not enough() and (mutant := take()):
            begin = time.monotonic()
            row = {name: getattr(mutant, name) for name in ("file", "line", "kind", "begin", "new", "before", "after")}
            row |= tree.outcome(mutant, arguments.again)
            with lock, open(folder / "results.jsonl", "a") as out:
                done[mutant.file, mutant.begin, mutant.new] = row
                out.write(json.dumps(row) + "\n")
            place = f"{mutant.file}:{mutant.line}"
            print(f"{row['outcome']:<17}{time.monotonic() - begin:5.0f} s  {place}  {row.get('by', '')}", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for future in [pool.submit(work) for _ in range(arguments.jobs)]:
            future.result()
    return report(list(done.values()))


if __name__ == "__main__":
    main()
