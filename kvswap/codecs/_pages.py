"""What a page of an engine's cache holds, for codecs: made by one function of each engine, from its own description.

A page is one layer's part of a block.
"""

from __future__ import annotations

from typing import NamedTuple

from kvswap.codecs import Coding, Field


class Page(NamedTuple):
    """nbytes: of a page. fields: what they are; they repeat every `pitch` bytes. No fields: the bytes stay as they
    are."""

    nbytes: int
    fields: tuple[Field, ...] = ()
    pitch: int = 0

    def coding(self, codec: str, pages: int = 1) -> Coding:
        """Of blocks of so many such pages. ValueError: the codec codes none of the fields."""
        fields = self.fields_of(codec) or (Field(0, self.nbytes, "raw"),)
        nbytes, pitch = self.nbytes, self.pitch or self.nbytes
        return Coding(pages * nbytes, codec, page_nbytes=nbytes, fields=fields, pitch=pitch)

    def fields_of(self, codec: str) -> tuple[Field, ...]:
        """fp4 codes latents of e4m3. What an engine keeps in bf16 beside them, their RoPE parts, stays as it is."""
        if codec != "fp4" or all(field.kind != "e4m3" for field in self.fields):
            return self.fields
        return tuple(field if field.kind == "e4m3" else field._replace(codec="raw") for field in self.fields)

    def kept(self) -> Page:
        """The same page, whose bytes stay as they are."""
        fields = self.fields or (Field(0, self.nbytes, "raw"),)
        return self._replace(fields=tuple(field._replace(codec="raw") for field in fields))

    def is_coded(self, codec: str) -> bool:
        """Whether this codec makes the page smaller."""
        try:
            return self.coding(codec).coded_nbytes < self.nbytes
        except ValueError:
            return False


def token_by_token(nbytes: int, keys: int, values: int, kind: str) -> Page:
    """Each token, or each head of a token, has its keys, then its values, of so many bytes."""
    return Page(nbytes, (Field(0, keys, kind), Field(keys, values, kind)), keys + values)


def plain(nbytes: int, kind: str) -> Page:
    """All of a page is of one kind: keys or values alone, or latents."""
    return Page(nbytes, () if kind == "raw" else (Field(0, nbytes, kind),), nbytes if kind != "raw" else 0)


_KINDS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("float32", "float"), "fp32"),
}
_BYTES = ("uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def name_of(dtype: object) -> str:
    """Of a torch, NumPy or JAX type, or a name."""
    name = next((getattr(dtype, word) for word in ("name", "__name__") if hasattr(dtype, word)), dtype)
    return str(name).lower().removeprefix("torch.").removeprefix("jax.")


def kind_of(dtype: object) -> str | None:
    """The kind of a torch or NumPy type, or of its name. "raw": bytes that no codec codes. None: not known."""
    name = name_of(dtype)
    return "raw" if name in _BYTES else _KINDS.get(name)
