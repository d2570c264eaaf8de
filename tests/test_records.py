"""Records under benchmarks/results: all are in the index, and what is of older code is found."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "record.sh").exists(), reason="a source package has no records"
)


@pytest.fixture(scope="module")
def records() -> Any:
    spec = importlib.util.spec_from_file_location("kvswap_records", ROOT / "benchmarks" / "records.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_every_record_is_in_the_index_and_there(records: Any) -> None:
    found = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*") if path.is_file()}
    indexed = [record.file for record in records.load(ROOT)]
    assert len(indexed) == len(set(indexed))
    assert {name for name in found if Path(name).name != "README.md"} == {*indexed, "index.ini"}


def test_what_the_index_says_can_be_read(records: Any) -> None:
    for record in records.load(ROOT):
        assert re.fullmatch(r"[0-9a-f]{7,40}", record.commit), record
        assert record.what and record.command and record.machine, record
        assert re.fullmatch(r"[0-9a-f]{7,40}", record.since), record
        for source in record.sources:
            assert any(path.is_file() for path in ROOT.glob(source)), f"{record.file}: {source} names no file"


def test_a_part_that_the_index_names_is_one(records: Any) -> None:
    script = (ROOT / "benchmarks" / "record.sh").read_text()
    parts = re.search(r'^parts="(.*)"$', script, re.MULTILINE)[1].split()
    assert all(re.search(rf"^{part}\(\) {{$", script, re.MULTILINE) for part in parts)
    named = {name for record in records.load(ROOT) for name in re.findall(r"record\.sh OUT (\w+)", record.command)}
    assert named - {"PART"} == set(parts)
    for record in records.load(ROOT):
        if record.file.startswith(("h100/", "h200/")) and "OUT" in record.command:
            assert f"$out/{Path(record.file).name}" in script, record.file


def test_links_lead_to_records() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(((?:\.\./)?benchmarks/results/[^)#]*)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


INDEX = """\
# Kept as it is.
[groups]
both = src/a.c src/b/*.c

[gpu/first.txt]
what = one
command = run one
commit = {commit}
machine = here
sources = ${{groups:both}} src/only first/**/*

[gpu/second.txt]
what = two
command = run two
commit = {commit}
machine = here
sources = src/c.c
"""


class Repository:
    """Of git, with two records that are of its first commit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        for name in ("src/a.c", "src/b/x.c", "src/b/deep/y.c", "src/c.c", "first/z/w.c"):
            self.write(name, "1")
        self.commit()
        self.first = self.git("rev-parse", "--short", "HEAD").strip()
        (root / "benchmarks" / "results").mkdir(parents=True)
        self.index = root / "benchmarks" / "results" / "index.ini"
        self.index.write_text(INDEX.format(commit=self.first))

    def git(self, *args: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *args], cwd=self.root, check=True, capture_output=True, text=True
        ).stdout

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    return Repository(tmp_path)


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("src/a.c", ["gpu/first.txt"]),
        ("src/b/x.c", ["gpu/first.txt"]),
        ("src/b/new.c", ["gpu/first.txt"]),
        ("src/b/deep/y.c", []),  # a * stays within a folder
        ("first/z/w.c", ["gpu/first.txt"]),  # ** does not
        ("src/c.c", ["gpu/second.txt"]),
        ("README.md", []),
    ],
)
def test_a_record_is_stale_once_its_sources_changed(
    records: Any, repository: Repository, capsys: pytest.CaptureFixture[str], changed: str, stale: list[str]
) -> None:
    assert records.main(["stale"], repository.root) == 0
    assert capsys.readouterr().out == ""
    repository.write(changed, "2")
    repository.commit()
    assert records.main(["stale"], repository.root) == (1 if stale else 0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == stale
    assert all(changed in line and repository.first in line for line in lines)


@pytest.mark.parametrize(
    ("name", "before", "after", "stale"),
    [
        ("src/a.c", "int a = 1; /* one */", "/* it is\n one */\nint a\n  = 1; // 2", False),
        ("src/a.c", "int a = 1; /* one */", "int a = 2; /* one */", True),
        ("src/a.c", 'f("/* 1 */");', 'f("/* 2 */");', True),  # no comment
        ("src/a.c", "f('\"'); /* 1 */", "f('\"'); /* 2 */", False),
        ("src/b/x.c", "#define A 1", "#define A \\\n 2", True),
        ("first/z/w.py", 'def f():\n    """One."""\n    return 1  # a\n', "def f():\n    return 1\n", False),
        ("first/z/w.py", 'def f():\n    """One."""\n    return 1\n', 'def f():\n    """One."""\n    return 2\n', True),
        ("first/z/w.py", "def f(): pass", "def f(: pass", True),
        ("src/b/x.txt", "1 # a", "1 # b", True),
    ],
)
def test_comments_make_no_record_stale(
    records: Any, repository: Repository, name: str, before: str, after: str, stale: bool
) -> None:
    repository.write(name, before)
    repository.write("src/only", "1")
    repository.commit()
    index = repository.index.read_text().replace("src/b/*.c", "src/b/*")
    repository.index.write_text(index)
    assert records.main(["stamp", "HEAD", "gpu/first.txt"], repository.root) == 0
    repository.write(name, after)
    repository.commit()
    assert records.main(["stale"], repository.root) == (1 if stale else 0)


def test_stamping_takes_records_off_the_list(
    records: Any, repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.write("src/a.c", "2")
    repository.write("src/c.c", "2")
    repository.commit()
    before = repository.index.read_text()
    assert records.main(["stamp", "HEAD", "benchmarks/results/gpu/first.txt"], repository.root) == 0
    after = repository.index.read_text()
    head = repository.git("rev-parse", "--short=9", "HEAD").strip()
    assert after == before.replace(f"commit = {repository.first}", f"commit = {head}", 1)
    assert records.main(["stale"], repository.root) == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["gpu/second.txt"]


def test_a_record_stands_until_its_sources_change_again(
    records: Any, repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.write("src/a.c", "2")
    repository.commit()
    looked_at, before = repository.git("rev-parse", "--short", "HEAD").strip(), repository.index.read_text()
    stands = before.replace("machine = here", f"machine = here\nstands = {looked_at} it moves no bytes", 1)
    repository.index.write_text(stands)
    assert records.main(["stale"], repository.root) == 0
    assert capsys.readouterr().out == f"gpu/first.txt: of {repository.first}, stands: it moves no bytes\n"
    repository.write("src/a.c", "3")
    repository.commit()
    assert records.main(["stale"], repository.root) == 1
    assert capsys.readouterr().out.startswith(f"gpu/first.txt: since {looked_at} changed src/a.c")
    assert records.main(["stamp", "HEAD", "gpu/first.txt"], repository.root) == 0
    assert "stands" not in repository.index.read_text()
    assert records.main(["stale"], repository.root) == 0


def test_what_is_wrong_is_said(records: Any, repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    before = repository.index.read_text()
    for args, complaint in (
        (["stamp", "HEAD", "gpu/first.txt", "gpu/third.txt"], "no section [gpu/third.txt]"),
        (["stamp", "no-such-commit", "gpu/first.txt"], "no-such-commit: no such commit"),
        (["stamp", "HEAD"], "one of: stale, stamp"),
        ([], "one of: stale, stamp"),
    ):
        assert records.main(args, repository.root) == 2
        assert complaint in capsys.readouterr().err
    assert repository.index.read_text() == before
    repository.index.write_text(before.replace(repository.first, "0123456", 1))
    assert records.main(["stale"], repository.root) == 1
    assert "gpu/first.txt: 0123456 is not in this repository" in capsys.readouterr().out
    repository.index.write_text(before.replace("machine = here", "", 1))
    assert records.main(["stale"], repository.root) == 2
    assert "a record has no 'machine'" in capsys.readouterr().err
    repository.index.write_text(before.replace("machine = here", "machine = here\nstands = HEAD", 1))
    assert records.main(["stale"], repository.root) == 2
    assert "it is a commit and why the figures stand" in capsys.readouterr().err


def test_the_script_passes_them_on(repository: Repository) -> None:
    script = ["bash", str(ROOT / "benchmarks" / "record.sh")]
    for args, status in ((["--stamp", "HEAD"], 2), ([], 2), (["out", "no-such-part"], 2)):
        done = subprocess.run([*script, *args], capture_output=True, text=True, cwd=repository.root, check=False)
        assert done.returncode == status and "one of: " in done.stderr
    assert not (repository.root / "out").exists()
