"""Codecs: blocks that are smaller in host memory and on the link. docs/codecs.md says what each one is for.

    coding = Coding(2 << 20, "exact", page_nbytes=32 << 10)
    coded, verdicts = coding.encode(blocks)    # blocks: (n, 2 << 20) bytes of bf16
    blocks, verdicts = coding.decode(coded)    # the same bytes, where verdicts are Verdict.GOOD

`kvswap.codecs.reader` reads coded blocks with NumPy alone; `kvswap.codecs.measure` finds what a codec does to given
keys and values. All run on the CPU, on arrays in host memory.
"""

from __future__ import annotations

from ._coding import CODECS, KINDS, Coding, Field, Verdict

__all__ = ["CODECS", "KINDS", "Coding", "Field", "Verdict"]
