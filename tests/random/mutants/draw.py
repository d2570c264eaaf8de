"""Small changes of C sources, drawn by a seed: an operator, a constant, a condition, a call, a truth value. The text
is as clang-format leaves it: a binary operator has blanks on both sides, a statement begins its line or follows an
`if`."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SWAPS = {
    "<": ["<=", ">"],
    "<=": ["<", ">"],
    ">": [">=", "<"],
    ">=": [">", "<"],
    "==": ["!="],
    "!=": ["=="],
    "&&": ["||"],
    "||": ["&&"],
    "+": ["-"],
    "-": ["+"],
    "*": ["/"],
    "/": ["*"],
    "%": ["/"],
    "<<": [">>"],
    ">>": ["<<"],
    "&": ["|"],
    "|": ["&"],
    "+=": ["-="],
    "-=": ["+="],
}
OPERATOR = re.compile(r"(?<=\s)(" + "|".join(re.escape(op) for op in sorted(SWAPS, key=len, reverse=True)) + r")(?=\s)")
STEP = re.compile(r"\+\+|--")
CONSTANT = re.compile(r"(?<![\w.])(0|[1-9]\d*)(?=[uUlL]*(?![\w.]))")
TRUTH = re.compile(r"\b(true|false)\b")
CALL = re.compile(
    r"(?:^[ \t]+(?:\(void\))?|(?<=\) )|(?<=\belse ))(?!if\b|for\b|while\b|switch\b|return\b|sizeof\b)\w+\(", re.M
)
NOT_CODE = re.compile(
    r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:\\\n|[^\n])*|\bstatic_assert\([^;]*;',
    re.S | re.M,
)
KINDS = ("operator", "constant", "condition", "call", "truth")


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    kind: str
    begin: int  # where the text of the file changes, in characters
    end: int
    new: str
    before: str  # the line or lines as they were, and as they are then
    after: str

    def apply(self, text: str) -> str:
        return text[: self.begin] + self.new + text[self.end :]


def code_of(text: str) -> str:
    """The text with blanks for what is no code: each character stays where it is."""
    return NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def closing(code: str, at: int) -> int:
    """Of the parenthesis there."""
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i] == "(") - (code[i] == ")")
        if depth == 0:
            return i
    raise ValueError("a parenthesis is open")


def changes(code: str) -> Iterator[tuple[str, int, int, str]]:
    """All of them: the kind, where, and what stands there then."""
    for found in OPERATOR.finditer(code):
        for new in SWAPS[found[1]]:
            yield "operator", found.start(), found.end(), new
    for found in STEP.finditer(code):
        yield "operator", found.start(), found.end(), "--" if found[0] == "++" else "++"
    for found in CONSTANT.finditer(code):
        number = int(found[1])
        for new in {number + 1, abs(number - 1)}:
            yield "constant", found.start(1), found.end(1), str(new)
    for found in re.finditer(r"\bif \(", code):
        begin = found.end() - 1
        yield "condition", begin, begin + 1, "(!("
    for found in CALL.finditer(code):
        begin = found.start() + len(found[0]) - len(found[0].lstrip())
        end = closing(code, found.end() - 1) + 1
        if code[end : end + 1] == ";" and code[:begin].rstrip(" \n")[-1:] in tuple(";{})e"):
            yield "call", begin, end, "(void)0"
    for found in TRUTH.finditer(code):
        yield "truth", found.start(), found.end(), "false" if found[0] == "true" else "true"


def mutants_of(file: str, text: str) -> list[Mutant]:
    code, made = code_of(text), []
    for kind, begin, change_end, new in changes(code):
        end, put = change_end, new
        if kind == "condition":  # the closing parenthesis too
            end = closing(code, begin) + 1
            put = f"(!{text[begin:end]})"
        first = text.rfind("\n", 0, begin) + 1
        last = text.find("\n", end)
        before, after = text[first:last], text[first:begin] + put + text[end:last]
        made.append(Mutant(file, text.count("\n", 0, begin) + 1, kind, begin, end, put, tidy(before), tidy(after)))
    return made


def tidy(lines: str) -> str:
    return " ".join(lines.split())


def draw(root: Path, files: list[str], seed: int) -> Iterator[Mutant]:
    """Without end of kinds in turn at random, until none is left; each change once."""
    rng = random.Random(seed)
    pools: dict[str, list[Mutant]] = {kind: [] for kind in KINDS}
    for file in sorted(files):
        for mutant in mutants_of(file, (root / file).read_text(encoding="utf-8")):
            pools[mutant.kind].append(mutant)
    for pool in pools.values():
        rng.shuffle(pool)
    while any(pools.values()):
        kind = rng.choice([kind for kind in KINDS if pools[kind]])
        yield pools[kind].pop()
