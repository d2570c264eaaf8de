"""What tests/random/mutants draws: small changes of code, not of comments and texts, the same for the same seed."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

SOURCE = """\
/* a comment: 1 < 2, true */
#define LIMIT 10
static_assert(LIMIT > 9, "too small");
static const char text[] = "if (3 < 4) call();"; // 5 + 6
int f(int a, int b) {
  if (a < b &&
      g(a))
    return 7;
  run(a, "(");
  if (b) stop();
  for (int i = 0; i < a; i++) b -= 2;
  bool x = true;
  char c = '8';
  return a - b;
}
"""


@pytest.fixture(scope="module")
def draw() -> Any:
    spec = importlib.util.spec_from_file_location("kvswap_draw", ROOT / "tests" / "random" / "mutants" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_every_change_is_one_of_code(draw: Any) -> None:
    found = {(mutant.line, mutant.kind, mutant.after) for mutant in draw.mutants_of("x.c", SOURCE)}
    assert found == {
        (6, "condition", "if (!(a < b && g(a)))"),
        (6, "operator", "if (a <= b &&"),
        (6, "operator", "if (a > b &&"),
        (6, "operator", "if (a < b ||"),
        (8, "constant", "return 8;"),
        (8, "constant", "return 6;"),
        (9, "call", "(void)0;"),
        (10, "condition", "if (!(b)) stop();"),
        (10, "call", "if (b) (void)0;"),
        (11, "constant", "for (int i = 1; i < a; i++) b -= 2;"),
        (11, "operator", "for (int i = 0; i <= a; i++) b -= 2;"),
        (11, "operator", "for (int i = 0; i > a; i++) b -= 2;"),
        (11, "operator", "for (int i = 0; i < a; i--) b -= 2;"),
        (11, "operator", "for (int i = 0; i < a; i++) b += 2;"),
        (11, "constant", "for (int i = 0; i < a; i++) b -= 3;"),
        (11, "constant", "for (int i = 0; i < a; i++) b -= 1;"),
        (12, "truth", "bool x = false;"),
        (14, "operator", "return a + b;"),
    }


def test_a_change_is_where_it_says(draw: Any) -> None:
    for mutant in draw.mutants_of("x.c", SOURCE):
        changed = mutant.apply(SOURCE)
        assert changed[: mutant.begin] == SOURCE[: mutant.begin] and changed != SOURCE
        assert changed[len(changed) - len(SOURCE) + mutant.end :] == SOURCE[mutant.end :]
        assert SOURCE[: mutant.begin].count("\n") == mutant.line - 1


def test_a_seed_decides(draw: Any, tmp_path: Path) -> None:
    (tmp_path / "x.c").write_text(SOURCE)
    (tmp_path / "y.c").write_text(SOURCE.replace("int f", "int h"))
    drawn = [list(draw.draw(tmp_path, ["y.c", "x.c"], seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == set(drawn[2]) and len(drawn[0]) == len(set(drawn[0])) == 36


def test_all_of_the_sources_can_be_drawn_from(draw: Any) -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.c")]
    assert {mutant.kind for mutant in itertools.islice(draw.draw(ROOT, files, 1), 50)} == set(draw.KINDS)
