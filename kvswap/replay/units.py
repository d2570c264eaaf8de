"""Sizes as people write them, and as they like to read them."""

from __future__ import annotations

import re

from .errors import UsageError

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?b?)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of '8GiB', '512 KiB', '1.5g' or '4096'. GB is 10^9; GiB, and G alone, are 2^30."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"not a size: {text!r} (write 8GiB, 512KiB, 4096)")
    number, prefix, suffix = match.groups()
    units = _DECIMAL if suffix.lower() == "b" else _BINARY
    return round(float(number) * units[prefix.lower()]) if "." in number else int(number) * units[prefix.lower()]


def format_size(nbytes: float) -> str:
    """'64 KiB', '1.5 GiB': at most four digits, no trailing zeros."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    digits = f"{value:.0f}" if unit == "B" or value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {unit}"
