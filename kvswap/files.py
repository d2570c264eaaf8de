"""The file tier: stores blocks in files. A loaded block has exactly the stored bytes, or is reported as lost.

    layout = Layout(2 << 20, model="llama-3-70b", dtype="bf16", tokens=16, tp_rank=0, tp_size=8)
    with FileStore("/mnt/nvme/kv", layout, capacity=500 << 30, device="cuda:0") as store:
        store.store(hashes, gpu_pools, ids, replace=False).wait(timeout=10)
        load = store.load(hashes, gpu_pools, ids)
        load.wait(timeout=10)  # raises what went wrong; load.failed_positions: which are lost; load.reasons: why

A store is a directory; docs/files.md describes its files byte by byte. What a load delivers has been compared with the
checksum that was made when it was stored, before a byte of it goes to a device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvswap._C import FileStore, FileTransfer, MissingKey
from kvswap._clear import Cleared, clear
from kvswap._regular import open_regular
from kvswap.codecs import Coding

__all__ = [
    "Cleared",
    "FileStore",
    "FileTransfer",
    "Layout",
    "MissingKey",
    "clear",
    "read_block_files",
    "write_block_files",
]

_MOST_TEXT = 3072
_MOST_CODINGS = 1024


class Layout:
    """The layout of a store's blocks. Two stores hold the same kind of blocks if, and only if, their layouts are equal.

    block_nbytes: bytes of a block in the files, from 1 on. coding: the blocks are coded: a kvswap.codecs.Coding, or a
    list with one for each pool of a block; block_nbytes is their coded_nbytes in all. fields: whatever tells blocks of
    one kind from another: model, dtype, tokens a block, layers, heads, tensor-parallel rank and size; strings, numbers,
    booleans, None, or lists and dicts of them. Their order does not count.
    """

    __slots__ = ("block_nbytes", "codings", "fields", "text")

    def __init__(self, block_nbytes: int, *, coding: Coding | Sequence[Coding] | None = None, **fields: Any) -> None:
        if isinstance(block_nbytes, bool) or not hasattr(block_nbytes, "__index__"):
            raise TypeError(f"block_nbytes must be an int, not {type(block_nbytes).__name__}")
        self.block_nbytes: int = block_nbytes.__index__()
        if self.block_nbytes < 1:
            raise ValueError(f"block_nbytes is {self.block_nbytes}: must be at least 1")
        self.codings: tuple[Coding, ...] = (coding,) if isinstance(coding, Coding) else tuple(coding or ())
        if self.codings:
            _check_coded(self.block_nbytes, self.codings)
            fields["coding"] = [
                [len(list(same)), json.loads(text)] for text, same in groupby(c.text for c in self.codings)
            ]
        self.fields: Mapping[str, Any] = dict(fields)
        self.text: str = _canonical(fields)  # stands in the store's files

    @classmethod
    def parse(cls, block_nbytes: int, text: str) -> Layout:
        """The layout of which a store's files hold this text. ValueError: it holds none."""
        try:
            fields = json.loads(text)
        except RecursionError:
            fields = None
        if not isinstance(fields, dict) or fields.keys() & {"self", "block_nbytes"}:
            raise ValueError(f"layout is {text!r}: must be a JSON object of fields")
        codings = _parse_codings(fields.pop("coding", []), text)
        return cls(block_nbytes, coding=codings, **fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self.block_nbytes, self.text) == (other.block_nbytes, other.text)

    def __hash__(self) -> int:
        return hash((self.block_nbytes, self.text))

    def __repr__(self) -> str:
        fields = "".join(f", {name}={value!r}" for name, value in self.fields.items())
        return f"Layout({self.block_nbytes}{fields})"


def _check_coded(block_nbytes: int, codings: Sequence[Coding]) -> None:
    for i, one in enumerate(codings):
        if not isinstance(one, Coding):
            raise TypeError(f"coding[{i}] must be a kvswap.codecs.Coding, not {type(one).__name__}")
    coded = sum(one.coded_nbytes for one in codings)
    if coded != block_nbytes:
        raise ValueError(f"block_nbytes is {block_nbytes}; a block is coded to {coded} bytes")


def _parse_codings(value: Any, text: str) -> list[Coding]:
    """A list of (how many pools in turn, their coding)."""
    good = isinstance(value, list) and all(isinstance(item, list) and len(item) == 2 for item in value)
    if not good or not all(isinstance(count, int) and 0 < count <= _MOST_CODINGS for count, _ in value):
        raise ValueError(f"layout is {text!r}: coding must be a list of pairs (pools, their coding)")
    return [coding for count, one in value for coding in [Coding.parse(json.dumps(one))] * count]


def _canonical(fields: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a layout's fields must be what JSON can hold: {error}") from None
    if len(text) > _MOST_TEXT:
        raise ValueError(f"a layout's fields take {len(text)} bytes as JSON: at most {_MOST_TEXT}")
    return text


# -- files of one block and pool each, as TensorRT-LLM names them -----------------------------------------------------


def _block_files(directory: str | os.PathLike[str], block_id: int, pools: int) -> list[Path]:
    return [Path(directory, f"block_{block_id}_pool_{pool}.bin") for pool in range(pools)]


def write_block_files(
    directory: str | os.PathLike[str], block_id: int, pool_nbytes: Sequence[int], block: NDArray[np.uint8]
) -> None:
    """Write a block as TensorRT-LLM's manager does: the bytes of pool i alone in block_{block_id}_pool_{i}.bin.

    block: the bytes of all pools, one after the other. Each file gets its name when it is whole (mode 0600). OSError.
    """
    begin = 0
    for path, nbytes in zip(_block_files(directory, block_id, len(pool_nbytes)), pool_nbytes, strict=True):
        part = path.with_suffix(".tmp")
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(block[begin : begin + nbytes].tobytes())
        part.replace(path)
        begin += nbytes


def read_block_files(
    directory: str | os.PathLike[str], block_id: int, pool_nbytes: Iterable[int]
) -> NDArray[np.uint8] | None:
    """A block from such files, or None where there are none. ValueError: there are, and of another size; OSError:
    they cannot be read, or are no files.

    The files carry no checksum: of their bytes nothing can be said but that their number is right.
    """
    sizes = list(pool_nbytes)
    paths = _block_files(directory, block_id, len(sizes))
    if not all(path.exists() for path in paths):
        return None
    return np.concatenate([_read_exactly(path, nbytes) for path, nbytes in zip(paths, sizes, strict=True)])


def _read_exactly(path: Path, nbytes: int) -> NDArray[np.uint8]:
    """Reads at most nbytes bytes, even if the file grows meanwhile."""
    with open(open_regular(path, follow=True), "rb") as file:
        there = os.fstat(file.fileno()).st_size
        if there == nbytes:
            part = np.fromfile(file, np.uint8, nbytes)
            there = part.size
    if there != nbytes:
        raise ValueError(f"{path} has {there} bytes; a block of that pool has {nbytes}")
    return part
