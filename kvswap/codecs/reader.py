"""Codecs by NumPy alone: a reader and a writer of coded units that share no code with the C ones.

It is what the format means, in the fewest words, and slow. Tests compare both bit by bit. Units are as `Coding` cuts
them; `units_of` gives their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._coding import CODECS, KINDS, Coding, Field, Verdict

__all__ = ["Unit", "decode_block", "encode_block", "units_of"]

_MAGIC, _UNIT, _CUT, _HEAD = 0x764B, 32 << 10, 1024, 16
_NUMBERS = {name: number for number, name in enumerate(("raw", *CODECS))}
_VERSIONS = {"raw": 1, "exact": 2, "mxfp8": 1, "fp4": 1}
_CODED = {"exact": ("bf16",), "mxfp8": ("bf16", "fp16"), "fp4": ("bf16", "fp16", "e4m3")}
_WIDTH = {"bf16": (7, 127), "fp16": (10, 15)}  # bits of the mantissa, bias
_Words = NDArray[Any]  # uint16; of e4m3 uint8
_Bytes = NDArray[np.uint8]


class Unit(NamedTuple):
    """A piece that is coded by itself: rows of row_nbytes bytes of a page, `pitch` apart."""

    offset: int
    row_nbytes: int
    rows: int
    pitch: int
    kind: str
    codec: str

    @property
    def nbytes(self) -> int:
        return self.row_nbytes * self.rows

    @property
    def most_escapes(self) -> int:
        """Of `exact`: so many escapes have a place."""
        return (self.coded_nbytes - _escapes_at(self.nbytes // 2)) // 3

    @property
    def coded_nbytes(self) -> int:
        n = self.nbytes // 2
        if self.codec == "raw":
            return _HEAD + _up(self.nbytes)
        if self.kind == "e4m3":
            return _up(_HEAD + _up(-(-self.nbytes // 2)) + -(-self.nbytes // 32))
        if self.codec == "exact":
            return _up(_escapes_at(n) + n // 180 * 3)
        if self.codec == "mxfp8":
            return _up(_HEAD + _up(n) + -(-n // 32))
        return _up(_HEAD + _up(-(-n // 2)) + -(-n // 16))


def _up(n: int, to: int = 16) -> int:
    return -(-n // to) * to


def _marks_at(n: int) -> int:
    return _HEAD + _up(n) + _up(-(-n // 2)) + -(-n // 512)


def _escapes_at(n: int) -> int:
    return _marks_at(n) + (0 if n % 256 else 2 + n // 256)


# -- where units are --------------------------------------------------------------------------------------------------


def units_of(coding: Coding) -> list[Unit]:
    """The units of a page, in the order in which they lie in a coded page."""
    fields = sorted(coding.fields) or [Field(0, coding.pitch, "bf16")]
    ranges, at = [], 0
    for offset, nbytes, kind, codec in fields:
        ranges.append((at, offset - at, "raw", "raw"))
        chosen = codec or (coding.codec if kind in _CODED[coding.codec] else "raw")
        ranges.append((offset, nbytes, kind, chosen))
        at = offset + nbytes
    ranges.append((at, coding.pitch - at, "raw", "raw"))
    repeated = coding.page_nbytes // coding.pitch
    units = []
    for offset, nbytes, kind, codec in ranges:
        if nbytes == 0:
            continue
        if nbytes == coding.pitch or nbytes > _UNIT:
            for row in range(repeated):
                units += _runs(row * coding.pitch + offset, nbytes, kind, codec)
        else:
            each, most = -(-repeated // -(-repeated // (_UNIT // nbytes))), _UNIT // nbytes
            each = _up(each) if _up(each) <= most else each // 16 * 16 or each
            for row in range(0, repeated, each):
                rows = min(each, repeated - row)
                units.append(Unit(row * coding.pitch + offset, nbytes, rows, coding.pitch, kind, codec))
    return units


def _runs(offset: int, nbytes: int, kind: str, codec: str) -> list[Unit]:
    part = _up(-(-nbytes // -(-nbytes // _UNIT)), _CUT)
    return [Unit(offset + at, min(part, nbytes - at), 1, 0, kind, codec) for at in range(0, nbytes, part)]


# -- exact ------------------------------------------------------------------------------------------------------------


_HEADS = (128, 64, 96, 80, 256)  # values of a head


def _classes(n: int, inner: int) -> NDArray[np.int64]:
    """Of each pair of values, the pair of channels to which it belongs, in rows of `inner` values."""
    value = np.arange(0, n, 2)
    return value // (16 * inner) * (inner // 2) + value % inner // 2


def _marked(finite: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of the first n / 32 pairs of channels, those that have exponents far above a typical one's."""
    count = len(finite) // 32
    most, known = np.zeros(count, np.int64), classes < count
    np.maximum.at(most, classes[known], finite.reshape(-1, 2).max(axis=1)[known])
    typical = np.append(np.sort(most[most > 0])[::-1], 0)[np.count_nonzero(most) * 5 // 8]
    marked: NDArray[np.bool_] = most > typical + 3
    return marked


def _of_pairs(marked: NDArray[np.bool_], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of each value, whether its pair of channels is marked."""
    known = classes < len(marked)
    return np.repeat(marked[np.where(known, classes, 0)] & known, 2)


def _encode_exact(values: _Words, kind: str, room: int) -> tuple[_Bytes, int] | None:
    n = len(values)
    exponent = (values >> 7 & 0xFF).astype(np.int64)
    finite = np.where(exponent == 255, 0, exponent)
    guesses = [0] if n % 256 else [0, n // 16, *(inner for inner in _HEADS if inner < n // 16)]
    for inner in guesses:
        classes = _classes(n, inner) if inner else None
        marked = np.zeros(1, np.bool_) if classes is None else _marked(finite, classes)
        if inner and not marked.any():
            continue
        outliers = np.zeros(n, np.bool_) if classes is None else _of_pairs(marked, classes)
        coded = _with_marks(exponent, finite, outliers, room)
        if coded is None:
            continue
        body, escapes = coded
        body[:n] = values >> 8 & 0x80 | values & 0x7F
        at = _marks_at(n) - _HEAD
        if inner:
            body[at : at + 2] = inner // 16, finite[outliers].max()
            body[at + 2 :][: n // 256] = np.packbits(marked, bitorder="little")
        return body, escapes
    return None


def _with_marks(
    exponent: NDArray[np.int64], finite: NDArray[np.int64], outliers: NDArray[np.bool_], room: int
) -> tuple[_Bytes, int] | None:
    """All but signs, mantissas and marks; None: the escapes do not fit."""
    n, inner = len(exponent), np.where(outliers, 0, finite)
    bases = np.array([inner[i : i + 512].max() for i in range(0, n, 512)], np.int64)
    own = np.where(outliers, finite[outliers].max() if outliers.any() else 0, np.repeat(bases, 512)[:n])
    code = exponent + 14 - own
    code = np.where(exponent == 0, 0, np.where((code < 1) | (code > 14), 15, code))
    escapes = np.flatnonzero(code == 15)
    at = _escapes_at(n) - _HEAD
    if at + 3 * len(escapes) > room:
        return None
    body = np.zeros(room, np.uint8)
    pairs = np.append(code, np.zeros(n % 2, np.int64)).reshape(-1, 2)
    body[_up(n) :][: len(pairs)] = pairs[:, 0] | pairs[:, 1] << 4
    marks = _marks_at(n) - _HEAD
    body[marks - len(bases) : marks] = bases
    places = np.stack([escapes & 0xFF, escapes >> 8, exponent[escapes]], axis=1)
    body[at:][: places.size] = places.reshape(-1)
    return body, len(escapes)


def _decode_exact(body: _Bytes, n: int, kind: str, escapes: int) -> _Words | None:
    at = _escapes_at(n) - _HEAD
    places = body[at : at + 3 * escapes].astype(np.int64)
    if len(places) < 3 * escapes:
        return None
    position, special = places[0::3] | places[1::3] << 8, places[2::3]
    if (np.diff(position, prepend=-1) < 1).any() or (position >= n).any():
        return None
    joined = body[_up(n) :][: -(-n // 2)]
    code = np.stack([joined & 15, joined >> 4], axis=1).reshape(-1)[:n].astype(np.int64)
    marks = _marks_at(n) - _HEAD
    bases = np.repeat(body[marks - -(-n // 512) : marks].astype(np.int64), 512)[:n]
    if n % 256 == 0 and body[marks]:
        marked = np.unpackbits(body[marks + 2 :][: n // 256], bitorder="little").astype(np.bool_)
        bases = np.where(_of_pairs(marked, _classes(n, 16 * int(body[marks]))), body[marks + 1], bases)
    exponent = np.where(code == 0, 0, code - 14 + bases & 0xFF)
    exponent[position] = special
    rest = body[:n].astype(np.int64)
    return ((rest & 0x80) << 8 | exponent << 7 | rest & 0x7F).astype(np.uint16)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _numbers(values: _Words, kind: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Magnitudes, infinity as the largest finite one, and where NaN is (there 0). All are exact in float64."""
    mantissa, bias = _WIDTH[kind]
    magnitude = (values & 0x7FFF).astype(np.int64)
    infinity = 2 * bias + 1 << mantissa
    nan = magnitude > infinity
    magnitude = np.where(nan, 0, np.minimum(magnitude, infinity - 1))
    exponent = np.maximum(magnitude >> mantissa, 1)
    significand = magnitude - (exponent - 1 << mantissa)
    return np.ldexp(significand.astype(np.float64), exponent - bias - mantissa), nan


def _nearest(number: NDArray[np.float64], mantissa: int, least: int) -> NDArray[np.float64]:
    """Rounded to a mantissa of so many bits, ties to even; 2**least is the smallest normal number."""
    _, exponent = np.frexp(number)
    quantum = np.maximum(exponent - 1, least) - mantissa
    rounded: NDArray[np.float64] = np.ldexp(np.rint(np.ldexp(number, -quantum)), quantum)
    return rounded


def _words(number: NDArray[np.float64], sign: NDArray[np.bool_], nan: NDArray[np.bool_], kind: str) -> _Words:
    mantissa, bias = _WIDTH[kind]
    infinity = 2 * bias + 1 << mantissa
    rounded = _nearest(number, mantissa, 1 - bias)
    exponent = np.where(rounded == 0, 1 - bias, np.maximum(np.frexp(rounded)[1] - 1, 1 - bias))
    units = np.ldexp(rounded, mantissa - exponent).astype(np.int64)
    magnitude = np.minimum((exponent + bias - 1 << mantissa) + units, infinity - 1)
    magnitude = np.where(nan, infinity + (1 << mantissa - 1), magnitude)
    words: _Words = (magnitude | sign.astype(np.int64) << 15).astype(np.uint16)
    return words


def _blocks(values: NDArray[Any], size: int) -> NDArray[Any]:
    """In rows of `size`, zeros at the end."""
    return np.append(values, np.zeros(-len(values) % size, values.dtype)).reshape(-1, size)


# -- mxfp8 ------------------------------------------------------------------------------------------------------------

_E4M3 = np.array([np.ldexp((c & 7) + 8 * (c > 7), max(c >> 3, 1) - 10) for c in range(127)])


def _encode_mxfp8(values: _Words, kind: str, room: int) -> tuple[_Bytes, int]:
    number, nan = _numbers(_blocks(values, 32).reshape(-1), kind)
    number, nan = number.reshape(-1, 32), nan.reshape(-1, 32)
    most = number.max(axis=1)
    scale = np.maximum(np.frexp(most)[1] - 1 - 8, -127)
    scale[most == 0] = -127
    saturates = _nearest(np.ldexp(most, -scale), 3, -6) > 448
    scale = scale + (saturates & (scale < _WIDTH[kind][1] - 8))
    scaled = np.minimum(_nearest(np.ldexp(number, -scale[:, None]), 3, -6), 448)
    codes = np.where(nan, 127, np.searchsorted(_E4M3, scaled))
    codes |= (_blocks(values, 32) >> 15).astype(np.int64) << 7
    body, n = np.zeros(room, np.uint8), len(values)
    body[:n] = codes.reshape(-1)[:n]
    body[_up(n) :][: len(scale)] = scale + 127
    return body, 0


def _decode_mxfp8(body: _Bytes, n: int, kind: str, escapes: int) -> _Words | None:
    if escapes:
        return None
    scale = np.repeat(body[_up(n) :][: -(-n // 32)].astype(np.int64), 32)[:n]
    code = body[:n].astype(np.int64)
    nan = (code & 127 == 127) | (scale == 255)
    number = np.ldexp(_E4M3[np.where(nan, 0, code & 127)], scale - 127)
    return _words(number, code > 127, nan, kind)


# -- fp4 --------------------------------------------------------------------------------------------------------------

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E5M3 = np.array([np.ldexp(c & 7 if c < 8 else 8 + (c & 7), max(c >> 3, 1) - 18) for c in range(256)])
_LAST = {"bf16": 254, "fp16": int(np.flatnonzero(_E5M3 == 10240)[0])}


def _e2m1(number: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.int64]:
    """The nearest elements, ties to even. A quotient of so few bits is never rounded to a middle between elements."""
    quotient = np.divide(number, scale, out=np.zeros(np.broadcast(number, scale).shape), where=scale > 0)
    return np.searchsorted(_E2M1, np.minimum(_nearest(quotient, 1, 0), 6))


def _encode_fp4(values: _Words, kind: str, room: int) -> tuple[_Bytes, int]:
    if kind == "e4m3":
        return _encode_fp4_e4m3(values, room), 0
    number, nan = _numbers(_blocks(values, 16).reshape(-1), kind)
    number, bad = number.reshape(-1, 16), np.any(nan.reshape(-1, 16), axis=1)
    most = number.max(axis=1)
    exponent = np.maximum(np.frexp(most / 6)[1] - 1, -14) - 3
    sixth = np.ldexp(np.rint(np.ldexp(most / 6, -exponent)), exponent)
    scale = np.minimum(np.searchsorted(_E5M3[:255], np.minimum(sixth, _E5M3[254])), _LAST[kind])
    scale = scale - ((scale > 0) & (_e2m1(most, _E5M3[scale]) != 7))
    codes = _e2m1(number, _E5M3[scale][:, None]) | (_blocks(values, 16) >> 15).astype(np.int64) << 3
    codes[bad] = 0
    scale[bad] = 255
    body, n = np.zeros(room, np.uint8), len(values)
    joined = (codes.reshape(-1, 2) << (0, 4)).sum(axis=1)
    body[: -(-n // 2)] = joined[: -(-n // 2)]
    body[_up(-(-n // 2)) :][: len(scale)] = scale
    return body, 0


def _decode_fp4(body: _Bytes, n: int, kind: str, escapes: int) -> _Words | None:
    if escapes:
        return None
    if kind == "e4m3":
        return _decode_fp4_e4m3(body, n)
    scale = np.repeat(body[_up(-(-n // 2)) :][: -(-n // 16)], 16)[:n]
    joined = body[: -(-n // 2)]
    code = np.stack([joined & 15, joined >> 4], axis=1).reshape(-1)[:n]
    number = _E2M1[code & 7] * np.where(scale == 255, 0, _E5M3[scale])
    return _words(number, code > 7, scale == 255, kind)


def _encode_fp4_e4m3(values: _Bytes, room: int) -> _Bytes:
    rows = _blocks(values, 32).astype(np.int64)
    magnitude = rows & 127
    most = magnitude.max(axis=1)
    known = np.minimum(most, 126)  # 127 is NaN
    twelfths = 2 * _E2M1[1:] - (0.5, 0.5, 0.5, 0.5, 1, 1, 2)  # the middles below each element
    middles = twelfths * _E4M3[known][:, None]
    number = 12 * _E4M3[np.minimum(magnitude, 126)][:, :, None]
    even = np.arange(1, 8) % 2 == 0
    above = np.where(even, number >= middles[:, None], number > middles[:, None]) & (known > 0)[:, None, None]
    codes = above.sum(axis=2) | rows >> 7 << 3
    codes[most == 127] = 0
    body, n = np.zeros(room, np.uint8), -(-len(values) // 2)
    body[:n] = (codes.reshape(-1, 2) << (0, 4)).sum(axis=1)[:n]
    body[_up(n) :][: len(most)] = most
    return body


def _decode_fp4_e4m3(body: _Bytes, n: int) -> _Bytes:
    scale = np.repeat(body[_up(-(-n // 2)) :][: -(-n // 32)], 32)[:n]
    joined = body[: -(-n // 2)]
    code = np.stack([joined & 15, joined >> 4], axis=1).reshape(-1)[:n]
    nan = scale >= 127
    # Of float64 no quotient is rounded to a middle between two e4m3.
    number = _nearest(_E4M3[np.where(nan, 0, scale)] * (2 * _E2M1[code & 7]) / 12, 3, -6)
    magnitude = np.where(nan, 127, np.searchsorted(_E4M3, number))
    codes: _Bytes = (magnitude | (code & 8).astype(np.int64) << 4).astype(np.uint8)
    return codes


# -- units and blocks -------------------------------------------------------------------------------------------------

_ENCODE = {"exact": _encode_exact, "mxfp8": _encode_mxfp8, "fp4": _encode_fp4}
_DECODE = {"exact": _decode_exact, "mxfp8": _decode_mxfp8, "fp4": _decode_fp4}


def _rows(page: _Bytes, unit: Unit) -> NDArray[np.int64]:
    """Places of the unit's bytes in its page."""
    return (unit.offset + np.arange(unit.rows)[:, None] * unit.pitch + np.arange(unit.row_nbytes)).reshape(-1)


def _type_of(unit: Unit) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if unit.kind == "e4m3" else np.uint16


def _encode_unit(page: _Bytes, unit: Unit) -> tuple[_Bytes, Verdict]:
    data, room = page[_rows(page, unit)], unit.coded_nbytes - _HEAD
    if unit.codec == "raw":
        made: tuple[_Bytes, int] | None = (np.append(data, np.zeros(room - len(data), np.uint8)), 0)
    else:
        made = _ENCODE[unit.codec](data.view(_type_of(unit)), unit.kind, room)
    body, escapes = made or (np.zeros(room, np.uint8), 0)
    head = np.zeros(1, np.dtype("<u2,u1,u1,u1,u1,u2,u4,u4"))
    own = (_MAGIC, _VERSIONS[unit.codec], _NUMBERS[unit.codec])
    head[0] = (*own, 1 if made else 2, KINDS.index(unit.kind), escapes, unit.nbytes, 0)
    return np.concatenate([head.view(np.uint8), body]), Verdict.GOOD if made else Verdict.NOT_STORED


def _decode_unit(coded: _Bytes, unit: Unit) -> tuple[_Bytes, Verdict]:
    zeros = np.zeros(unit.nbytes, np.uint8)
    magic, version, codec, state, kind, escapes, nbytes, rest = coded[:_HEAD].view("<u2,u1,u1,u1,u1,u2,u4,u4")[0]
    own = (_MAGIC, _VERSIONS[unit.codec], _NUMBERS[unit.codec], KINDS.index(unit.kind), unit.nbytes, 0)
    if (magic, version, codec, kind, nbytes, rest) != own or state not in (1, 2):
        return zeros, Verdict.DAMAGED
    if state == 2:
        return zeros, Verdict.NOT_STORED
    if unit.codec == "raw":
        return (zeros, Verdict.DAMAGED) if escapes else (coded[_HEAD:][: unit.nbytes], Verdict.GOOD)
    count = unit.nbytes // np.dtype(_type_of(unit)).itemsize
    values = _DECODE[unit.codec](coded[_HEAD:], count, unit.kind, int(escapes))
    return (zeros, Verdict.DAMAGED) if values is None else (values.view(np.uint8), Verdict.GOOD)


def _pages(coding: Coding) -> tuple[Sequence[Unit], int, int]:
    units = units_of(coding)
    return units, sum(unit.coded_nbytes for unit in units), coding.block_nbytes // coding.page_nbytes


def encode_block(coding: Coding, block: NDArray[Any]) -> tuple[_Bytes, Verdict]:
    """The coded bytes of one block, and its verdict."""
    units, _, pages = _pages(coding)
    data = np.ascontiguousarray(block).reshape(-1).view(np.uint8).reshape(pages, coding.page_nbytes)
    made = [_encode_unit(page, unit) for page in data for unit in units]
    return np.concatenate([coded for coded, _ in made]), max(verdict for _, verdict in made)


def decode_block(coding: Coding, coded: NDArray[np.uint8]) -> tuple[_Bytes, Verdict]:
    """The bytes of one block, and its verdict."""
    units, size, pages = _pages(coding)
    block, worst = np.zeros((pages, coding.page_nbytes), np.uint8), Verdict.GOOD
    for page, source in zip(block, coded.reshape(pages, size), strict=True):
        at = 0
        for unit in units:
            data, verdict = _decode_unit(np.ascontiguousarray(source[at : at + unit.coded_nbytes]), unit)
            page[_rows(page, unit)] = data
            at, worst = at + unit.coded_nbytes, max(worst, verdict)
    return block.reshape(-1), worst
