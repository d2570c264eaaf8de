"""Which node holds a block, and the lists of nodes. Needs nothing but NumPy."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from kvswap.remote import Node, Placement, parse_nodes
from kvswap.remote._placement import NodeFile

KEYS = np.random.default_rng(3).bytes(16 * 20_000)
NAMES = [f"node-{i}" for i in range(12)]
KEY = "k" * 40


def test_each_node_gets_its_share() -> None:
    counts = np.bincount(Placement(NAMES).order(KEYS, 1)[:, 0], minlength=12)
    assert counts.sum() == 20_000 and abs(counts - 20_000 / 12).max() < 5 * np.sqrt(20_000 / 12)


def test_replicas_are_different_nodes_and_the_second_choice_is_spread() -> None:
    order = Placement(NAMES).order(KEYS, 3)
    assert order.shape == (20_000, 3)
    assert all((order[:, a] != order[:, b]).all() for a, b in ((0, 1), (0, 2), (1, 2)))
    of_first = order[order[:, 0] == 4, 1]  # what node 4 held goes to all others
    counts = np.delete(np.bincount(of_first, minlength=12), 4)
    assert (counts > len(of_first) / 11 / 2).all()


@pytest.mark.parametrize("gone", [0, 5, 11])
def test_nothing_else_moves_when_a_node_leaves(gone: int) -> None:
    left = [name for i, name in enumerate(NAMES) if i != gone]
    before, after = Placement(NAMES).order(KEYS, 2), Placement(left).order(KEYS, 2)
    first = np.array(NAMES)[before]
    now = np.array(left)[after]
    stayed = before[:, 0] != gone
    assert (first[stayed, 0] == now[stayed, 0]).all()
    assert (now[~stayed, 0] == first[~stayed, 1]).all()  # the next replica is the new first choice


def test_the_order_of_the_list_does_not_count() -> None:
    shuffled = NAMES[::-1]
    assert (
        np.array(NAMES)[Placement(NAMES).order(KEYS, 2)] == np.array(shuffled)[Placement(shuffled).order(KEYS, 2)]
    ).all()


def test_fewer_nodes_than_replicas() -> None:
    assert Placement([]).order(KEYS[:32], 3).shape == (2, 0)
    assert Placement(["one"]).order(KEYS[:32], 3).tolist() == [[0], [0]]
    assert sorted(Placement(["one", "two"]).order(KEYS[:16], 3)[0].tolist()) == [0, 1]


def test_the_placement_is_fixed() -> None:
    """Clients of different versions must agree: a change of these numbers loses every block."""
    keys = bytes(range(160))
    assert Placement(["a", "b", "c", "d", "e"]).order(keys, 2)[:, 0].tolist() == EXPECTED


EXPECTED = [4, 1, 4, 1, 0, 3, 0, 2, 2, 4]


def test_a_list_of_nodes() -> None:
    text = f"# rack 1\n\n10.0.0.1:7400 {KEY}\n  [::1]:7400   {KEY} second \n"
    assert parse_nodes(text) == [Node("10.0.0.1:7400", KEY), Node("[::1]:7400", KEY, "second")]
    assert [node.placed_by for node in parse_nodes(text)] == ["10.0.0.1:7400", "second"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10.0.0.1 " + KEY, "line 1: must be HOST:PORT PUBLIC-KEY"),
        (f"# x\na:1 {KEY[1:]}", "line 2"),
        (f"a:1 {KEY}\na:1 {KEY} other", "a:1 stands there twice"),
        (f"a:1 {KEY} same\nb:1 {KEY} same", "same stands there twice"),
    ],
)
def test_a_wrong_list_names_its_line(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_nodes(text)


def test_a_file_is_looked_at_again(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text(f"a:1 {KEY}\n")
    file = NodeFile(path)

    def changed() -> bool:
        file._next = 0.0
        return file.changed()

    assert len(file.nodes) == 1 and not changed()
    path.write_text(f"a:1 {KEY}\nb:1 {KEY}\n")
    begin = time.monotonic()
    assert changed() and len(file.nodes) == 2 and not changed()
    assert file._next > begin and not file.changed()
    path.unlink()
    assert not changed() and len(file.nodes) == 2 and "nodes" in file.problem
    path.write_text("x" * (2 << 20))
    assert not changed() and "more than" in file.problem
    path.write_text(f"c:1 {KEY}\n")
    assert changed() and [node.address for node in file.nodes] == ["c:1"] and file.problem == ""
