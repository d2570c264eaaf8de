"""What each codec does to given keys and values: size, escapes, blocks that are not stored, and errors. Behind `kvswap
codec`.

Queries are seldom at hand, so the error of attention is that of Gaussian queries, scaled until the scores of a head
have a standard deviation of 2 over its tokens: a few tokens then get most of the weight, as in a trained model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._coding import CODECS, Coding, Verdict

__all__ = ["Keys", "Report", "measure", "read", "recommend", "synthetic"]

LENGTHS = (1024, 4096, 16384, 65536, 131072)
_QUERIES, _SHARPNESS, _LEAST = 16, 2.0, 128
_BF16 = "bf16"


class Keys(NamedTuple):
    """Keys and values: words of shape (layers, heads, tokens, head_dim); of a latent cache (MLA) keys alone."""

    keys: NDArray[np.uint16]
    values: NDArray[np.uint16] | None
    kind: str  # "bf16" or "fp16"
    name: str

    @property
    def sides(self) -> dict[str, NDArray[np.uint16]]:
        return {"k": self.keys} if self.values is None else {"k": self.keys, "v": self.values}


class Report(NamedTuple):
    """Of one codec. Errors are relative RMS; by layer in `layers`, and of all layers together elsewhere."""

    codec: str
    ratio: float
    escapes: dict[str, float]  # by side: share of values; exact only
    most_escapes: int  # in a page
    not_stored: float  # share of blocks
    error: dict[str, float]  # by side
    attention: dict[int, dict[str, float]]  # by length: "k", "v" (only that side is coded), "both"
    layers: list[dict[str, float]]  # "k", "v"; "attention_k", "attention_v" at the longest length


# -- reading ----------------------------------------------------------------------------------------------------------


def to_bf16(array: NDArray[Any]) -> NDArray[np.uint16]:
    """Nearest, ties to even. Words of 16 bits are taken as bf16."""
    if array.dtype == np.uint16:
        return array
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(array), bits >> 16 | 0x40, rounded).astype(np.uint16)


def to_float(words: NDArray[np.uint16], kind: str) -> NDArray[np.float32]:
    if kind == _BF16:
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.view(np.float16).astype(np.float32)


def read(path: str | Path) -> Keys:
    """Keys and values of an .npz or .safetensors file. ValueError: there are none.

    Arrays whose names begin with "k" are keys, with "v" values: "k", "key.3", "v_cache". Each has the shape (heads,
    tokens, head_dim) or (layers, heads, tokens, head_dim). uint16 is bf16; float32 is rounded to it.
    """
    path = Path(path)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    elif path.suffix == ".safetensors":
        arrays = _safetensors(path)
    else:
        raise ValueError(f"{path}: must be an .npz or a .safetensors file")
    keys, values = (_side(arrays, letter) for letter in "kv")
    if not keys:
        raise ValueError(f"{path} has {', '.join(arrays) or 'no arrays'}; keys begin with 'k', values with 'v'")
    kinds = {array.dtype for array in (*keys, *values)}
    half = kinds == {np.dtype(np.float16)}
    sides = [_stack(side, half, f"{path}: {what}") for side, what in ((keys, "keys"), (values, "values")) if side]
    if len(sides) == 2 and sides[0].shape[:3] != sides[1].shape[:3]:
        raise ValueError(f"{path}: keys have the shape {sides[0].shape}, values {sides[1].shape}")
    return Keys(sides[0], sides[1] if len(sides) == 2 else None, "fp16" if half else _BF16, path.name)


def _side(arrays: Mapping[str, NDArray[Any]], letter: str) -> list[NDArray[Any]]:
    return [array for name, array in arrays.items() if name.lower().startswith(letter) and array.ndim in (3, 4)]


def _stack(arrays: Iterable[NDArray[Any]], half: bool, what: str) -> NDArray[np.uint16]:
    layers = [array if array.ndim == 4 else array[None] for array in arrays]
    if len({array.shape[1:] for array in layers}) > 1:
        raise ValueError(f"{what} differ in shape: {', '.join(str(array.shape) for array in layers)}")
    words = [np.ascontiguousarray(array).view(np.uint16) if half else to_bf16(array) for array in layers]
    return np.concatenate(words)


def _safetensors(path: Path) -> dict[str, NDArray[Any]]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    types = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
    try:
        header = json.loads(data[8:end])
        found = {}
        for name, item in header.items():
            if name != "__metadata__" and item["dtype"] in types:
                first, last = item["data_offsets"]
                found[name] = np.frombuffer(data[end + first : end + last], types[item["dtype"]]).reshape(item["shape"])
        return found
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: not a .safetensors file") from None


def synthetic(outliers: float = 1.0, tokens: int = 4096, seed: int = 1) -> Keys:
    """Gaussian keys and values in bf16: 1 layer, 2 heads of 128. A channel in 32 of the keys is `outliers` as large."""
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, 1, 2, tokens, 128), np.float32)
    keys[..., ::32] *= outliers
    name = "synthetic" if outliers == 1 else f"synthetic, a key channel in 32 times {outliers:g}"
    return Keys(to_bf16(keys), to_bf16(values), _BF16, name)


# -- measuring --------------------------------------------------------------------------------------------------------


def _pages(words: NDArray[np.uint16], tokens: int) -> NDArray[np.uint16]:
    """(layers, blocks, a page's values): `tokens` tokens of all heads, as engines keep them."""
    layers, heads, length, dim = words.shape
    blocks = length // tokens
    cut = words[:, :, : blocks * tokens].reshape(layers, heads, blocks, tokens, dim)
    return np.ascontiguousarray(cut.transpose(0, 2, 3, 1, 4)).reshape(layers, blocks, -1)


def _unpaged(pages: NDArray[np.uint16], shape: tuple[int, ...], tokens: int) -> NDArray[np.uint16]:
    layers, heads, _, dim = shape
    cut = pages.reshape(layers, -1, tokens, heads, dim).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(cut).reshape(layers, heads, -1, dim)


def _rms(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Relative. Infinity and NaN of the original are left out."""
    known = np.isfinite(wanted)
    power = float(np.square(wanted[known], dtype=np.float64).sum())
    apart = float(np.square(found[known].astype(np.float64) - wanted[known]).sum())
    return (apart / power) ** 0.5 if power else 0.0


def _attend(queries: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    scores = np.einsum("hqd,htd->hqt", queries, keys)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: NDArray[Any] = np.einsum("hqt,htd->hqd", weights / weights.sum(axis=-1, keepdims=True), values)
    return result


def _queries(keys: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    queries = rng.standard_normal((len(keys), _QUERIES, keys.shape[-1])).astype(np.float32)
    spread = np.einsum("hqd,htd->hqt", queries, keys).std(axis=-1, keepdims=True)
    result: NDArray[Any] = queries * (_SHARPNESS / np.maximum(spread, 1e-30))
    return result


def _attention(plain: dict[str, NDArray[Any]], coded: dict[str, NDArray[Any]], length: int) -> list[dict[str, float]]:
    """By layer. Of a latent cache the keys are the values too."""
    rng, found = np.random.default_rng(7), []
    for layer in range(len(plain["k"])):
        k, ck = (side["k"][layer, :, :length] for side in (plain, coded))
        v, cv = (side.get("v", side["k"])[layer, :, :length] for side in (plain, coded))
        queries = _queries(k, rng)
        wanted = _attend(queries, k, v)
        cases = {"k": (ck, v), "v": (k, cv), "both": (ck, cv)}
        found.append({name: _rms(_attend(queries, *case), wanted) for name, case in cases.items()})
    return found


def _mean(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    rows = list(rows)
    return {name: float(np.sqrt(np.mean([row[name] ** 2 for row in rows]))) for name in rows[0]}


def _one(data: Keys, codec: str, tokens: int, lengths: Iterable[int]) -> Report:
    sides, plain, coded = data.sides, {}, {}
    escapes, most, ratio, by_side = {}, 0, 0.0, {}
    bad = np.zeros(data.keys.shape[2] // tokens, np.bool_)
    for side, words in sides.items():
        pages = _pages(words, tokens)
        coding = Coding(pages[0, 0].nbytes, codec, fields=[(0, pages[0, 0].nbytes, data.kind)])
        made, verdicts = coding.encode(pages)
        back, _ = coding.decode(made)
        shape = (*words.shape[:2], pages.shape[1] * tokens, words.shape[3])
        plain[side] = to_float(_unpaged(pages, shape, tokens), data.kind)
        coded[side] = to_float(_unpaged(back.view(np.uint16).reshape(pages.shape), shape, tokens), data.kind)
        count = _escapes(made, coding)
        escapes[side], most = float(count.sum() / pages.size), max(most, int(count.max(initial=0)))
        bad |= np.any((verdicts != Verdict.GOOD).reshape(pages.shape[:2]), axis=0)
        stored = np.repeat(verdicts == Verdict.GOOD, tokens).reshape(pages.shape[0], 1, -1, 1)
        coded[side] = np.where(stored, coded[side], plain[side])  # what is not stored has no error
        by_side[side] = (
            _rms(coded[side], plain[side]),
            [_rms(*pair) for pair in zip(coded[side], plain[side], strict=True)],
        )
        ratio += coding.ratio / len(sides)
    attention = {length: _attention(plain, coded, length) for length in lengths}
    layers = [{side: found[1][layer] for side, found in by_side.items()} for layer in range(len(data.keys))]
    for layer, row in enumerate(attention[max(attention)] if attention else ()):
        layers[layer] |= {"attention_k": row["k"], "attention_v": row["v"]}
    return Report(
        codec, ratio, escapes, most, float(np.mean(bad)), {side: found[0] for side, found in by_side.items()},
        {length: _mean(rows) for length, rows in attention.items()}, layers,
    )  # fmt: skip


def _escapes(coded: NDArray[np.uint8], coding: Coding) -> NDArray[np.int64]:
    """Of each block, which is one page: the counts in the heads of its units."""
    from .reader import units_of

    starts = np.cumsum([0, *(unit.coded_nbytes for unit in units_of(coding))])[:-1]
    counts = coded[:, starts[:, None] + (6, 7)].astype(np.int64) << (0, 8)
    total: NDArray[np.int64] = counts.sum(axis=(1, 2))
    return total


def measure(
    data: Keys, codecs: Iterable[str] = CODECS, *, tokens: int = 16, lengths: Iterable[int] = LENGTHS
) -> list[Report]:
    """A report for each codec that codes this kind. tokens: of a block. Lengths beyond the data's are left out; if all
    are, the data's own is taken."""
    known = data.keys.shape[2] // tokens * tokens
    if known < tokens:
        raise ValueError(f"{data.name} has {data.keys.shape[2]} tokens; a block has {tokens}")
    within = sorted({length for length in lengths if length <= known}) or [known]
    return [_one(data, codec, tokens, within) for codec in codecs if data.kind == _BF16 or codec != "exact"]


def recommend(reports: Iterable[Report]) -> str:
    """For a person, from the error of attention at the longest length."""
    lines = []
    for report in reports:
        worst = max((row["both"] for row in report.attention.values()), default=0.0)
        fits = f"{1 / report.ratio:.2f} times the blocks"
        if report.not_stored > 0.001:
            lines.append(f"{report.codec}: not for these: {report.not_stored:.2%} of the blocks would not be stored")
        elif worst == 0:
            lines.append(f"{report.codec}: {fits}, and no bit is lost")
        elif worst < 0.02:
            lines.append(f"{report.codec}: {fits}; attention changes by {worst:.1%}")
        elif worst < 0.1:
            lines.append(f"{report.codec}: {fits}; attention changes by {worst:.1%}: check the answers of your model")
        else:
            lines.append(f"{report.codec}: not for these without a test: attention changes by {worst:.1%}")
    return "\n".join(lines)
