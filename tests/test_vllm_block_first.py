"""Where KVSwapConnector has all layers of a block together in the GPU's cache, on stand-ins for what vLLM asks.

tests/integration/vllm_package.py --block-first takes the real planners, and moves the blocks of their plans.
"""

# mypy: ignore-errors

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvswap.vllm import _block_first, register
from kvswap.vllm._plugin import PLANNER


def config(
    connector: str | None = "KVSwapConnector", *, second_runner: bool = True, mla: bool = False, **extra: Any
) -> Any:
    """vLLM's configuration; connector None: no offloading."""
    transfer = connector and SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    model = SimpleNamespace(use_mla=mla)
    return SimpleNamespace(kv_transfer_config=transfer, use_v2_model_runner=second_runner, model_config=model)


def group(by_stride: bool = True, tokens: int = 16, padded: int | None = None) -> Any:
    spec = SimpleNamespace(indexes_kv_by_block_stride=by_stride, block_size=tokens, page_size_padded=padded)
    return SimpleNamespace(kv_cache_spec=spec)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """0.24's to 0.28's, which packs the caches of one model."""
    module = ModuleType(PLANNER)
    module._use_packed_kv_cache_config = lambda vllm_config, kv_cache_groups: len(kv_cache_groups) == 9
    monkeypatch.setitem(sys.modules, PLANNER, module)
    return module


@pytest.mark.parametrize(
    ("asked", "groups", "packed"),
    [
        (config(), [group()], True),
        (config(kvswap_block_first=True), [group()], True),
        (config(kvswap_block_first=False), [group()], False),
        (config(kvswap_overlap=True), [group()], False),
        (config(canonical_layout=True), [group()], False),
        (config(mla=True), [group()], False),
        (config(second_runner=False), [group()], False),
        (config("OffloadingConnector"), [group()], False),
        (config(None), [group()], False),
        (config(), [group(by_stride=False)], False),
        (config(), [group(tokens=64)], True),
        (config(), [group(tokens=128)], False),
        (config(), [group(padded=4096)], False),
        (config(), [group(), group()], False),
        (config(), [SimpleNamespace(kv_cache_spec=object())], False),
        (config("OffloadingConnector"), [group()] * 9, True),  # vLLM's own answer
        (config(kvswap_block_first=False), [group()] * 9, True),
    ],
)
def test_the_planner_packs_what_one_copy_a_block_can_move(
    planner: ModuleType, asked: Any, groups: list[Any], packed: bool
) -> None:
    register()
    assert planner._use_packed_kv_cache_config(asked, groups) is packed


def test_the_question_is_replaced_once(planner: ModuleType) -> None:
    register()
    first = planner._use_packed_kv_cache_config
    register()
    assert planner._use_packed_kv_cache_config is first


def test_an_unknown_question_stays(planner: ModuleType) -> None:
    theirs = planner._use_packed_kv_cache_config = lambda config, groups, more: False
    register()
    assert planner._use_packed_kv_cache_config is theirs


def test_a_process_without_a_planner_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, PLANNER, raising=False)
    register()
    assert PLANNER not in sys.modules


@pytest.mark.parametrize(
    ("asked", "theirs", "ours"),
    [
        (config(), "LBHNC", "BLHNC"),
        (config(), "BLHNC", "BLHNC"),
        (config(), "HND", "HND"),  # to 0.28: what a layer's pages look like
        (config(), None, None),
        (config(kvswap_block_first=False), "LBHNC", "LBHNC"),
        (config(mla=True), "LBHNC", "LBHNC"),
        (config(kvswap_overlap=True), "LBHNC", "LBHNC"),
        (config(canonical_layout=True), "LBHNC", "LBHNC"),
    ],
)
def test_the_layout_that_a_release_asks_for(asked: Any, theirs: str | None, ours: str | None) -> None:
    assert _block_first.layout(asked, theirs) == ours


def test_the_option_is_true_or_false() -> None:
    with pytest.raises(ValueError, match="kvswap_block_first is 'yes'; it is true or false"):
        _block_first.is_wanted(config(kvswap_block_first="yes"))
