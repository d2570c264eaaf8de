"""The table of docs/codecs.md, "What a block holds", against the function of each engine that makes the fields."""

# mypy: ignore-errors

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_vllm_codec import FULL, SIZE, latent, spec_of

from kvswap.codecs import Field
from kvswap.codecs._pages import Page
from kvswap.vllm._codec import page_of as vllm_page

K = 2 * SIZE  # bytes of a token's keys in one head

Case = tuple[Callable[[], Page], dict[str, int]]  # the page, and the numbers that the table's letters stand for
CASES: dict[tuple[str, str], list[Case]] = {
    ("vLLM", "bf16 or fp16: full, sliding-window, chunked and cross attention"): [
        (lambda: vllm_page("layer", spec_of(FULL, head_size_v=SIZE // 2)), {"k": K, "v": K // 2}),
        (lambda: vllm_page("layer", spec_of("SlidingWindowSpec")), {"k": K, "v": K}),
        (lambda: vllm_page("layer", spec_of("ChunkedLocalAttentionSpec")), {"k": K, "v": K}),
        (lambda: vllm_page("layer", spec_of("CrossAttentionSpec")), {"k": K, "v": K}),
    ],
    ("vLLM", "MLA in bf16 or fp16"): [(lambda: vllm_page("layer", latent()), {"k": 1152})],
    ("vLLM", "MLA in `fp8_ds_mla`: rows of 656 bytes"): [
        (lambda: vllm_page("layer", latent(dtype="torch.uint8", cache_dtype_str="fp8_ds_mla", row=656)), {})
    ],
    ("vLLM", "fp8, int8 and other bytes, with their scales; an indexer's pages; Mamba's states"): [
        (lambda: vllm_page("layer", spec_of(FULL, dtype="torch.uint8")), {}),
        (lambda: vllm_page("layer", spec_of("MambaSpec")), {}),
    ],
}


def rows() -> dict[tuple[str, str], str]:
    """Engine and cache of each row, and its fields."""
    text = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
    table = re.search(r"\| engine \| cache \|.*?\n\n", text, re.DOTALL)[0]
    cells = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.strip().splitlines()[2:]]
    return {(engine, cache): fields for engine, cache, fields, _ in cells}


def test_the_table_has_a_row_for_each_case() -> None:
    assert set(rows()) == set(CASES)


@pytest.mark.parametrize(("engine", "cache"), list(CASES))
def test_the_table_is_true(engine: str, cache: str) -> None:
    text = rows()[engine, cache]
    for make, letters in CASES[engine, cache]:
        page = make()
        if text == "none":
            assert page.fields == ()
            continue
        spans = re.findall(r"`([^`]+)`", text)
        fields = eval(f"[{spans[0]}]", dict(letters))
        assert page.fields == tuple(Field(*field) for field in fields), page
        pitch = eval(spans[1].removeprefix("pitch="), dict(letters)) if len(spans) > 1 else page.nbytes
        assert (page.pitch or page.nbytes) == pitch


def test_pages_can_be_coded() -> None:
    """What a function gives is what Coding takes."""
    for cases in CASES.values():
        for make, _ in cases:
            page: Any = make()
            if page.fields:
                assert page.coding("mxfp8", 4).coded_nbytes == 4 * page.coding("mxfp8").coded_nbytes
