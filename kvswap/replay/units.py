"""Sizes as people write them, and as people read them."""

from __future__ import annotations

import re
from fractions import Fraction

from .errors import UsageError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE | re.ASCII)
_EXAMPLES = "write 8GiB, 512KiB or 4096; units are KiB, MiB, GiB, TiB, KB, MB, GB, TB"


def parse_size(text: str) -> int:
    """Bytes of '8GiB', '8G', '8GB' or '4096', as dd and the other GNU tools read them.

    K, M, G and T alone, and KiB, MiB, GiB and TiB, are powers of 1024; KB, MB, GB and TB are powers of 1000. A small b
    without an i is refused: docker reads 64kb as 65,536 bytes, and dd refuses it, as it does not mean bytes there.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"not a size: {text!r} ({_EXAMPLES})")
    number, prefix, binary, unit = match.groups()
    if (binary and not prefix) or (unit == "b" and not binary):
        raise UsageError(f"not a size: {text!r} ({_meant(number, prefix)})")
    base = Fraction(1000 if unit and not binary else 1024)
    nbytes = Fraction(number) * base ** _POWERS[prefix.lower()]
    if nbytes.denominator != 1 and not prefix:
        raise UsageError(f"not a whole number of bytes: {text!r} ({_EXAMPLES})")
    return round(nbytes)


def _meant(number: str, prefix: str) -> str:
    """The ways to write what a small b may stand for."""
    if not prefix:
        return f"write {number}, or {number}B"
    ways = []
    for base, name in ((1024, f"{prefix.upper()}iB"), (1000, f"{prefix.upper()}B")):
        ways.append(f"{number}{name}, which is {round(Fraction(number) * base ** _POWERS[prefix.lower()]):,} bytes")
    return f"write {ways[0]}, or {ways[1]}"


def says_otherwise(text: str, nbytes: int) -> str:
    """For a size by powers of 1000: what was taken, and what the power of 1024 is. Empty for any other size."""
    match = _SIZE.fullmatch(text)
    if match is None or not match[2] or match[3] or not match[4]:
        return ""
    other = f"{match[1]}{match[2].upper()}iB"
    return f"{text.strip()} is {nbytes:,} bytes; {other} would be {parse_size(other):,}"


def format_size(nbytes: float) -> str:
    """'64 KiB', '1.5 GiB': at most four digits, no trailing zeros."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    digits = f"{value:.0f}" if unit == "B" or value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {unit}"
