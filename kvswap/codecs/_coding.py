"""How blocks are coded, and their encoding and decoding by the CPU."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvswap import _C

CODECS = ("exact", "mxfp8", "fp4")
KINDS = ("raw", "bf16", "fp16", "e4m3", "e5m2", "fp32")


# Where a path may be named, those that code.
PATHS = ("auto", *(row["name"] for row in _C._paths() if row["codes"] and not row["lender"]))


class Field(NamedTuple):
    """Bytes [offset, offset + nbytes) of each repetition, and what they are: one of KINDS.

    codec: for this field; "raw": the bytes are kept as they are. None: the coding's, where that one codes the kind, and
    otherwise they are kept.
    """

    offset: int
    nbytes: int
    kind: str
    codec: str | None = None


class Verdict(enum.IntEnum):
    """What became of a block."""

    GOOD = 0
    NOT_STORED = 1  # its values do not fit the coded size
    DAMAGED = 2  # decoding: these bytes are not a coded block


class Coding:
    """How the blocks of a pool are coded: to a size that is the same for all of them.

    block_nbytes: bytes of a block. codec: one of CODECS. page_nbytes: a block is pages of this size, a tensor's part
    each (default: one). fields: what the bytes of a page are; they repeat every `pitch` bytes (default: a page), and
    what no field names is kept as it is. No fields: all is bf16. Nothing is coded across pages or fields, or across
    repetitions of a field that fills the pitch.

    text: all that the coded bytes depend on, as JSON. Codings are equal where their texts are.
    """

    __slots__ = (
        "_coding",
        "block_nbytes",
        "codec",
        "coded_nbytes",
        "fields",
        "lossless",
        "page_nbytes",
        "pitch",
        "text",
        "units",
    )

    def __init__(
        self,
        block_nbytes: int,
        codec: str,
        *,
        page_nbytes: int | None = None,
        fields: Iterable[Field | tuple[Any, ...]] = (),
        pitch: int | None = None,
    ) -> None:
        self.fields = tuple(Field(*field) for field in fields)
        rows = tuple(tuple(field) for field in self.fields)
        self._coding = _C._coding_open(block_nbytes, page_nbytes or 0, pitch or 0, codec, rows)
        found = _C._coding_info(self._coding)
        self.block_nbytes, self.page_nbytes, self.coded_nbytes, _, self.units, self.lossless, self.text = found
        self.codec, self.pitch = codec, pitch or self.page_nbytes

    @classmethod
    def parse(cls, text: str) -> Coding:
        """The coding of that text. ValueError: it is none, or of a codec's version that this kvswap does not have."""
        import json  # not with kvswap itself

        try:
            of = json.loads(text)
            sizes = {"page_nbytes": of["page_nbytes"], "pitch": of["pitch"]}
            coding = cls(of["block_nbytes"], of["codec"], fields=[field[:4] for field in of["fields"]], **sizes)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{text!r} is not the text of a Coding: {error}") from None
        if json.loads(coding.text) != of:
            raise ValueError(f"blocks coded as {text!r} cannot be read: this kvswap codes as {coding.text!r}")
        return coding

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coding) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def ratio(self) -> float:
        """Coded bytes over bytes."""
        return self.coded_nbytes / self.block_nbytes

    def encode(
        self, blocks: NDArray[Any], *, out: NDArray[np.uint8] | None = None, valid_nbytes: int | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Code blocks: a C-contiguous array of any type whose bytes are whole blocks.

        Returns (coded, verdicts): uint8 arrays of shape (blocks, coded_nbytes) and (blocks,). A block whose verdict is
        NOT_STORED must not be kept. out: the coded array, to be filled. valid_nbytes: of each page; the encoder reads
        zeros behind. The same block always gives the same bytes.
        """
        source = _bytes_of(blocks, "blocks", self.block_nbytes)
        target = _target(out, "out", len(source), self.coded_nbytes)
        verdicts = np.zeros(len(source), np.uint8)
        valid = (1 << 64) - 1 if valid_nbytes is None else valid_nbytes
        _C._coding_encode(
            self._coding, source.ctypes.data, 0, 0, target.ctypes.data, self.coded_nbytes, len(source),
            verdicts.ctypes.data, valid,
        )  # fmt: skip
        return target, verdicts

    def decode(
        self, coded: NDArray[Any], *, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Decode: (blocks, verdicts), uint8 arrays of shape (blocks, block_nbytes) and (blocks,).

        Any bytes can be given. Of a block that is not GOOD, the parts that cannot be decoded are zeros.
        """
        source = _bytes_of(coded, "coded", self.coded_nbytes)
        target = _target(out, "out", len(source), self.block_nbytes)
        verdicts = np.zeros(len(source), np.uint8)
        _C._coding_decode(
            self._coding, target.ctypes.data, 0, 0, source.ctypes.data, self.coded_nbytes, len(source),
            verdicts.ctypes.data,
        )  # fmt: skip
        return target, verdicts

    def __repr__(self) -> str:
        return f"<kvswap.codecs.Coding {self.codec}: blocks of {self.block_nbytes} bytes coded to {self.coded_nbytes}>"


def _bytes_of(array: NDArray[Any], name: str, nbytes: int) -> NDArray[np.uint8]:
    """As rows of nbytes bytes, without a copy."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous")
    if array.nbytes % nbytes:
        raise ValueError(f"{name} has {array.nbytes} bytes, which is not a whole number of {nbytes}")
    return array.reshape(-1).view(np.uint8).reshape(-1, nbytes)


def _target(out: NDArray[np.uint8] | None, name: str, count: int, nbytes: int) -> NDArray[np.uint8]:
    if out is None:
        return np.empty((count, nbytes), np.uint8)
    rows = _bytes_of(out, name, nbytes)
    if len(rows) != count:
        raise ValueError(f"{name} has room for {len(rows)} blocks, not {count}")
    if not out.flags.writeable:
        raise ValueError(f"{name} is read-only")
    return rows
