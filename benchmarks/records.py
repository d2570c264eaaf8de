"""What the records under benchmarks/results are of: python3 benchmarks/records.py stale | stamp COMMIT FILE...

stale: lists the records whose sources differ from those of the commit that they were made with, by more than comments,
docstrings and line breaks; exit status 1 if any. A record whose figures a change cannot have moved may say so in the
index: `stands = COMMIT why`; then changes after that commit count, and it is listed as one that stands.
stamp: notes in the index that these files, relative to benchmarks/results, are of that commit.
"""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "benchmarks/results"
INDEX = f"{FOLDER}/index.ini"
_SHOWN = 4  # changed files a record
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_C = (".c", ".h", ".cu", ".cuh")
_STRING_OR_COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL)


class Wrong(Exception):
    """The index or a name in the command is not right; the message says how."""


@dataclass(frozen=True)
class Record:
    file: str
    what: str
    command: str
    commit: str
    machine: str
    sources: tuple[str, ...]
    stands: tuple[str, str] | None = None  # up to which commit they do, and why

    @property
    def since(self) -> str:
        return self.stands[0] if self.stands else self.commit


def _stands(file: str, text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    commit, _, why = text.partition(" ")
    if not why.strip():
        raise Wrong(f"{INDEX}: stands of {file} is '{text}'; it is a commit and why the figures stand")
    return commit, why.strip()


def load(root: Path) -> list[Record]:
    """All of the index. Every section but [groups] is a record and has all fields."""
    parser = configparser.ConfigParser(interpolation=configparser.ExtendedInterpolation())
    try:
        with (root / INDEX).open(encoding="utf-8") as index:
            parser.read_file(index)
        return [
            Record(
                file,
                parser[file]["what"],
                parser[file]["command"],
                parser[file]["commit"],
                parser[file]["machine"],
                tuple(parser[file]["sources"].split()),
                _stands(file, parser[file].get("stands")),
            )
            for file in parser.sections()
            if file != "groups"
        ]
    except KeyError as missing:
        raise Wrong(f"{INDEX}: a record has no {missing}") from None
    except configparser.Error as error:
        raise Wrong(f"{INDEX}: {error}") from None


def _git(root: Path, *args: str) -> str | None:
    """Its output, or None where it failed."""
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _code(name: str, text: str) -> str:
    """What the text of a file does: without comments, docstrings and line breaks."""
    if name.endswith(_C):
        return " ".join(_STRING_OR_COMMENT.sub(lambda found: found[1] or " ", text).split())
    if not name.endswith(".py"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.dump(tree)


def _does_the_same(root: Path, commit: str, name: str) -> bool:
    """Whether a file does now what it did at that commit; one that was not there, or is no longer, does not."""
    before, now = _git(root, "show", f"{commit}:{name}"), root / name
    try:
        return before is not None and _code(name, before) == _code(name, now.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False


def changed(root: Path, record: Record) -> list[str] | None:
    """Sources that do something else now than at the record's commit; None where git does not have that commit."""
    for commit in (record.commit, record.since):
        if _git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") is None:
            return None
    globs = [f":(top,glob){source}" for source in record.sources]
    names = _git(root, "diff", "--name-only", record.since, "--", *globs)
    if names is None:
        raise Wrong(f"git diff {record.since} failed for the sources of {record.file}")
    return [name for name in names.splitlines() if not _does_the_same(root, record.since, name)]


def stale(root: Path) -> int:
    records, found = load(root), 0
    for record in records:
        names = changed(root, record)
        if names is None:
            commits = " or ".join(dict.fromkeys((record.commit, record.since)))
            print(f"{record.file}: {commits} is not in this repository")
        elif names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            print(f"{record.file}: since {record.since} changed {' '.join(names[:_SHOWN])}{more}; {record.command}")
        else:
            if record.stands:
                print(f"{record.file}: of {record.commit}, stands: {record.stands[1]}")
            continue
        found += 1
    print(f"{found} of {len(records)} records are of older code", file=sys.stderr)
    return 1 if found else 0


def stamp(root: Path, commit: str, files: list[str]) -> int:
    """Line by line: comments, order and everything else stay as they are."""
    short = _git(root, "rev-parse", "--verify", "--quiet", "--short=9", f"{commit}^{{commit}}")
    if short is None:
        raise Wrong(f"{commit}: no such commit in this repository")
    wanted = {file.removeprefix(f"{FOLDER}/") for file in files}
    unknown = sorted(wanted - {record.file for record in load(root)})
    if unknown:
        raise Wrong(f"{INDEX} has no section {', '.join(f'[{file}]' for file in unknown)}")
    lines, section = [], ""
    for line in (root / INDEX).read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("["):
            section = line.strip()[1:-1]
        if section in wanted and line.startswith("stands ="):
            continue  # the new figures need no such reason
        lines.append(f"commit = {short.strip()}\n" if section in wanted and line.startswith("commit =") else line)
    (root / INDEX).write_text("".join(lines), encoding="utf-8")
    return 0


def main(argv: list[str], root: Path = ROOT) -> int:
    try:
        if argv == ["stale"]:
            return stale(root)
        if argv[:1] == ["stamp"] and len(argv) > 2:
            return stamp(root, argv[1], argv[2:])
    except (Wrong, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("it is one of: stale, stamp COMMIT FILE...", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
