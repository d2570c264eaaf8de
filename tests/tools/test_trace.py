"""The trace parser: what it takes, and that every line it refuses is named by number."""

from __future__ import annotations

import gzip
import json
import runpy
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvswap.replay import trace
from kvswap.replay.errors import TraceError
from kvswap.replay.trace import read_trace

pytestmark = pytest.mark.not_sanitized("Python only")

GOOD = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_reads_every_field(tmp_path: Path) -> None:
    second = {**GOOD, "timestamp": 30000.5, "hash_ids": []}
    found = read_trace(write(tmp_path / "t.jsonl", GOOD, second))
    assert found.name == "t.jsonl"
    assert len(found) == 2
    assert found.timestamps.tolist() == [27482, 30000.5]
    assert found.input_tokens.tolist() == [6955, 6955]
    assert found.output_tokens.tolist() == [52, 52]
    assert found.blocks(0).tolist() == [46, 47, 2353]
    assert found.blocks(1).tolist() == []


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.gz", GOOD, GOOD)  # the name lies
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain).hashes.tolist() == read_trace(packed).hashes.tolist() == [46, 47, 2353] * 2


def test_harmless_variations(tmp_path: Path) -> None:
    extra = {**GOOD, "model": "x", "nested": {"a": [1]}}
    text = "\ufeff" + json.dumps(GOOD) + "\r\n\n   \n" + json.dumps(extra)  # BOM, CRLF, blank lines, no last newline
    path = tmp_path / "t.jsonl"
    path.write_text(text, encoding="utf-8")
    assert len(read_trace(path)) == 2


def test_ids_of_64_bits(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path / "t", {**GOOD, "hash_ids": [2**64 - 1, 0]}))
    assert found.blocks(0).tolist() == [2**64 - 1, 0]


def test_a_block_named_twice_by_one_request_counts_once(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path / "t", {**GOOD, "hash_ids": [5, 6, 5, 7, 6]}, GOOD))
    assert found.blocks(0).tolist() == [5, 6, 7]
    assert found.repeated == 2


def test_head(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path / "t", GOOD, {**GOOD, "hash_ids": [1]}, GOOD))
    assert len(found.head(2)) == 2
    assert found.head(2).hashes.tolist() == [46, 47, 2353, 1]
    assert len(found.head(9)) == 3


def without(key: str) -> dict[str, object]:
    return {name: value for name, value in GOOD.items() if name != key}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ('{"timestamp": 1} x', "not JSON"),
        ("[1, 2]", "must be an object, not a list"),
        ("7", "must be an object"),
        ("null", "must be an object, not null"),
        ("[" * 200_000, "not JSON"),
        ('{"timestamp": ' + "9" * 6000 + "}", "not JSON"),
        (without("timestamp"), "'timestamp' is missing"),
        (without("input_length"), "'input_length' is missing"),
        (without("output_length"), "'output_length' is missing"),
        (without("hash_ids"), "'hash_ids' is missing"),
        ({**GOOD, "timestamp": "27482"}, "'timestamp' must be a number of milliseconds, not text"),
        ({**GOOD, "timestamp": True}, "not true or false"),
        ({**GOOD, "timestamp": -1}, "not negative"),
        ({**GOOD, "timestamp": float("nan")}, "finite"),
        ({**GOOD, "timestamp": float("inf")}, "finite"),
        ({**GOOD, "timestamp": 10**400}, "finite"),
        ({**GOOD, "input_length": 1.5}, "'input_length' must be a whole number"),
        ({**GOOD, "input_length": None}, "not null"),
        ({**GOOD, "input_length": False}, "not true or false"),
        ({**GOOD, "input_length": 2**70}, "'input_length' must be 0 to"),
        ({**GOOD, "output_length": -3}, "'output_length' must be 0 to"),
        ({**GOOD, "hash_ids": 5}, "'hash_ids' must be a list"),
        ({**GOOD, "hash_ids": {"a": 1}}, "not an object"),
        ({**GOOD, "hash_ids": [1, "2"]}, "'hash_ids[1]' must be a whole number, not text"),
        ({**GOOD, "hash_ids": [1.0]}, "'hash_ids[0]' must be a whole number"),
        ({**GOOD, "hash_ids": [True]}, "'hash_ids[0]' must be a whole number"),
        ({**GOOD, "hash_ids": [1, 2, -3]}, "'hash_ids[2]' must be 0 to 2^64 - 1, not -3"),
        ({**GOOD, "hash_ids": [2**64]}, "'hash_ids[0]' must be 0 to 2^64 - 1"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object, complaint: str) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, "", GOOD, line, GOOD)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:4: ")
    assert complaint in str(caught.value)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"timestamp": "\xff\xfe\xfa"}\n')
    with pytest.raises(TraceError, match=r"t\.jsonl:2: "):
        read_trace(path)


def test_a_damaged_gzip_stream_names_the_line(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(json.dumps({**GOOD, "hash_ids": [i]}).encode() + b"\n" for i in range(5000)))
    path = tmp_path / "t.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"t\.gz:\d+: the gzip stream is damaged"):
        read_trace(path)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", gzip.compress(b"", mtime=0)])
def test_a_trace_without_requests(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="t: holds no requests"):
        read_trace(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_LINE_NBYTES", 1 << 16)
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() + b"\n" + b" " * (64 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=r"t\.gz:2: longer than 65536 bytes"):
            read_trace(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300))
def test_any_bytes_give_a_trace_or_a_named_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "t"
    path.write_bytes(content)
    try:
        assert len(read_trace(path)) > 0
    except TraceError as error:
        assert str(error).startswith(f"{path}:")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab1", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1", max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(GOOD, _JSON)))
def test_any_values_give_a_trace_or_a_named_line(tmp_path_factory: pytest.TempPathFactory, changed: object) -> None:
    assert isinstance(changed, dict)
    path = write(tmp_path_factory.mktemp("any") / "t", {**GOOD, **changed})
    try:
        assert len(read_trace(path)) == 1
    except TraceError as error:
        assert str(error).startswith(f"{path}:1: ")


def test_the_demo_trace_is_what_its_script_makes(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    script, shipped = root / "benchmarks" / "make_demo_trace.py", root / "kvswap" / "data" / "demo_trace.jsonl.gz"
    if not script.exists():
        pytest.skip("not run from a checkout")
    runpy.run_path(str(script))["write"](tmp_path / "again.gz")
    assert gzip.decompress((tmp_path / "again.gz").read_bytes()) == gzip.decompress(shipped.read_bytes())
    assert shipped.stat().st_size < 60_000
    found = read_trace(shipped)
    assert 300 <= len(found) <= 700
    assert found.repeated == 0
    assert np.all(np.diff(found.timestamps) >= 0)
