"""Reads serving traces in the Mooncake format: one JSON object a line, plain or gzip.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

Times are milliseconds and lengths tokens; an id names a prefix block, so equal ids are equal blocks with equal blocks
before them. The whole file is validated before a caller sees any of it. It is read as a stream, and what is kept is a
few compact arrays: 8 bytes a block reference and 32 a request.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from .errors import TraceError

MAX_LINE_NBYTES = 16 << 20  # half a million block references: bounds memory, and real lines are far shorter
_MAX_ID = 2**64 - 1
_MAX_LENGTH = 2**40  # tokens; sums over any trace stay far inside 64 bits


@dataclass(frozen=True)
class Trace:
    """A validated trace. Blocks of request i are hashes[offsets[i]:offsets[i + 1]], none twice."""

    name: str
    timestamps: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    repeated: int  # references left out because their request already named the block

    def __len__(self) -> int:
        return len(self.input_tokens)

    def blocks(self, request: int) -> NDArray[np.uint64]:
        return self.hashes[self.offsets[request] : self.offsets[request + 1]]

    def head(self, requests: int) -> Trace:
        """The first requests alone."""
        n = min(requests, len(self))
        return Trace(
            self.name,
            self.timestamps[:n],
            self.input_tokens[:n],
            self.output_tokens[:n],
            self.offsets[: n + 1],
            self.hashes[: self.offsets[n]],
            self.repeated,
        )


@dataclass(frozen=True)
class _Request:
    timestamp: float
    input_tokens: int
    output_tokens: int
    hashes: list[int]


def read_trace(path: str | Path) -> Trace:
    """Read and validate a trace; '-' is the standard input. Raises TraceError, which names the malformed line."""
    where = "standard input" if str(path) == "-" else str(path)
    timestamps, inputs, outputs = array("d"), array("q"), array("q")
    offsets, hashes = array("q", [0]), array("Q")
    repeated = 0
    try:
        with _open(path) as file:
            for number, line in _lines(file, where):
                request = _parse(line, f"{where}:{number}")
                unique = dict.fromkeys(request.hashes)
                repeated += len(request.hashes) - len(unique)
                timestamps.append(request.timestamp)
                inputs.append(request.input_tokens)
                outputs.append(request.output_tokens)
                hashes.extend(unique)
                offsets.append(len(hashes))
    except OSError as error:
        raise TraceError(f"{where} cannot be read: {error.strerror or error}") from None
    if not inputs:
        raise TraceError(f"{where}: holds no requests")
    return Trace(
        Path(where).name,
        np.frombuffer(timestamps, np.float64),
        np.frombuffer(inputs, np.int64),
        np.frombuffer(outputs, np.int64),
        np.frombuffer(offsets, np.int64),
        np.frombuffer(hashes, np.uint64) if hashes else np.empty(0, np.uint64),
        repeated,
    )


@contextmanager
def _open(path: str | Path) -> Iterator[IO[bytes]]:
    """Opens a plain or gzip file, told apart by its first bytes."""
    with open(0, "rb", closefd=False) if str(path) == "-" else open(path, "rb") as file:
        if file.peek(2)[:2] != b"\x1f\x8b":
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield cast(IO[bytes], unpacked)


def _lines(file: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers. A line that is too long is refused before it is read whole."""
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_LINE_NBYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{name}:{number}: the gzip stream is damaged ({error})") from None
        if not line:
            return
        if len(line) > MAX_LINE_NBYTES:
            raise TraceError(f"{name}:{number}: longer than {MAX_LINE_NBYTES} bytes")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.isspace():
            yield number, line


def _parse(line: bytes, where: str) -> _Request:
    try:
        record = json.loads(line.rstrip())
    except UnicodeDecodeError:
        raise TraceError(f"{where}: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{where}: not JSON: {error.msg} (column {error.colno}); a trace has one JSON object a line"
        ) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets without end
        raise TraceError(f"{where}: not JSON that can be read: {error}") from None
    if type(record) is not dict:
        raise TraceError(f"{where}: a request must be an object, not {_kind(record)}")
    return _Request(
        _timestamp(record, where),
        _length(record, "input_length", where),
        _length(record, "output_length", where),
        _hashes(record, where),
    )


def _get(record: dict[str, Any], key: str, where: str) -> Any:
    try:
        return record[key]
    except KeyError:
        raise TraceError(f"{where}: {key!r} is missing") from None


def _timestamp(record: dict[str, Any], where: str) -> float:
    value = _get(record, "timestamp", where)
    if type(value) not in (int, float):
        raise TraceError(f"{where}: 'timestamp' must be a number of milliseconds, not {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise TraceError(f"{where}: 'timestamp' must be finite and not negative, not {_short(value)}")
    return number


def _length(record: dict[str, Any], key: str, where: str) -> int:
    value = _get(record, key, where)
    if type(value) is not int:
        raise TraceError(f"{where}: {key!r} must be a whole number of tokens, not {_kind(value)}")
    if not 0 <= value <= _MAX_LENGTH:
        raise TraceError(f"{where}: {key!r} must be 0 to {_MAX_LENGTH}, not {_short(value)}")
    return value


def _hashes(record: dict[str, Any], where: str) -> list[int]:
    value = _get(record, "hash_ids", where)
    if type(value) is not list:
        raise TraceError(f"{where}: 'hash_ids' must be a list, not {_kind(value)}")
    for index, item in enumerate(value):
        if type(item) is not int:
            raise TraceError(f"{where}: 'hash_ids[{index}]' must be a whole number, not {_kind(item)}")
        if not 0 <= item <= _MAX_ID:
            raise TraceError(f"{where}: 'hash_ids[{index}]' must be 0 to 2^64 - 1, not {_short(item)}")
    return value


def _kind(value: object) -> str:
    """The type of a JSON value, by JSON's names."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), _short(value))


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return str(value)
