"""The table of docs/codecs.md, "What a block holds", against the function of each engine that makes the fields."""

# mypy: ignore-errors

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_codec import FULL, SIZE, latent, spec_of

from kvswap.codecs import Field
from kvswap.codecs._pages import Page
from kvswap.fastdeploy._codec import page_of as fastdeploy_page
from kvswap.fastdeploy.manager.layout import Cache, Layout
from kvswap.sglang._codec import page_of as sglang_page
from kvswap.trtllm import KVCacheBlockPool
from kvswap.vllm._codec import page_of as vllm_page

K = 2 * SIZE  # bytes of a token's keys in one head

TOKENS, HEADS = 64, 8
PAGE = TOKENS * HEADS * K


def sglang(dtype: str, width: int = 2) -> Callable[[], Page]:
    return lambda: sglang_page(
        "kv", SimpleNamespace(dtype=dtype, page_size=TOKENS, token_stride_size=HEADS * SIZE * width)
    )


def trtllm(factor: int) -> Page:
    """The transfer manager's pool makes the coding by itself."""
    shape = {"num_layers": 2, "kv_factor": factor, "num_kv_heads": HEADS, "tokens_per_block": TOKENS}
    pool = KVCacheBlockPool(1 << 20, 1 << 30, 4, 4, **shape, size_per_head=SIZE, dtype="bf16", codec="mxfp8")
    assert pool.coding is not None and pool.coding.block_nbytes == 2 * factor * PAGE
    return Page(pool.coding.page_nbytes, pool.coding.fields, pool.coding.pitch)


def fastdeploy(cache_dtype: str, which: int, values: bool = True) -> Callable[[], Page]:
    """Of the first layer: its caches by number."""
    shape = (10, HEADS, TOKENS, SIZE)
    layout = Layout(0, 0, 1, shape, shape if values else (), cache_dtype, "bfloat16", 0, 0, 4)
    return lambda: fastdeploy_page(layout.caches()[which])


Case = tuple[Callable[[], Page], dict[str, int]]  # the page, and the numbers that the table's letters stand for
CASES: dict[tuple[str, str], list[Case]] = {
    ("vLLM", "bf16 or fp16: full, sliding-window, chunked and cross attention"): [
        (lambda: vllm_page("layer", spec_of(FULL, head_size_v=SIZE // 2)), {"k": K, "v": K // 2}),
        (lambda: vllm_page("layer", spec_of("SlidingWindowSpec")), {"k": K, "v": K}),
        (lambda: vllm_page("layer", spec_of("ChunkedLocalAttentionSpec")), {"k": K, "v": K}),
        (lambda: vllm_page("layer", spec_of("CrossAttentionSpec")), {"k": K, "v": K}),
    ],
    ("vLLM", "MLA in bf16 or fp16"): [(lambda: vllm_page("layer", latent()), {"page": 16 * 1152})],
    ("vLLM", "MLA in `fp8_ds_mla`: rows of 656 bytes"): [
        (lambda: vllm_page("layer", latent(dtype="torch.uint8", cache_dtype_str="fp8_ds_mla", row=656)), {})
    ],
    ("vLLM", "fp8, int8 and other bytes, with their scales; an indexer's pages; Mamba's states"): [
        (lambda: vllm_page("layer", spec_of(FULL, dtype="torch.uint8")), {}),
        (lambda: vllm_page("layer", spec_of("MambaSpec")), {}),
    ],
    ("SGLang", "bf16 or fp16: keys or values of a layer, MLA's latents"): [(sglang("torch.bfloat16"), {"page": PAGE})],
    ("SGLang", "fp8, which is stored as bytes"): [
        (sglang("torch.uint8", 1), {}),
        (sglang("torch.float8_e4m3fn", 1), {}),
    ],
    ("TensorRT-LLM", "bf16 or fp16: keys or values of a layer, or latents"): [
        (lambda: trtllm(2), {"page": PAGE}),
        (lambda: trtllm(1), {"page": PAGE}),
    ],
    ("FastDeploy", "bf16 or fp16: keys or values of a layer, or latents"): [
        (fastdeploy("bfloat16", 0), {"page": PAGE}),
        (fastdeploy("bfloat16", 1), {"page": PAGE}),
        (fastdeploy("bfloat16", 0, values=False), {"page": PAGE}),
    ],
    ("FastDeploy", "fp8, which is stored as bytes, and its scales"): [
        (fastdeploy("block_wise_fp8", which), {}) for which in range(4)
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


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (sglang("torch.float64"), "host pool kv keeps torch.float64"),
        (lambda: fastdeploy_page(Cache("key_caches_7", (10, HEADS, TOKENS, SIZE), "int32")), "key_caches_7 has"),
    ],
)
def test_what_is_not_known_is_refused_by_name(make: Callable[[], Page], why: str) -> None:
    """test_vllm_codec.py has vLLM's."""
    with pytest.raises(ValueError, match=why):
        make()
