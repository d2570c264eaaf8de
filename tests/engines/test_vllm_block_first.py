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

pytestmark = pytest.mark.not_sanitized("Python only")


def config(
    connector: str | None = "KVSwapConnector",
    *,
    second_runner: bool = True,
    model: Any = None,
    backend: Any = None,
    tokens: int | None = 16,
    **extra: Any,
) -> Any:
    """vLLM's configuration; connector None: no offloading."""
    transfer = connector and SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    return SimpleNamespace(
        kv_transfer_config=transfer,
        use_v2_model_runner=second_runner,
        model_config=model,
        attention_config=SimpleNamespace(backend=backend),
        cache_config=SimpleNamespace(block_size=tokens),
    )


def model(**properties: Any) -> Any:
    return SimpleNamespace(**properties)


TIERS = [{"type": "FileTier"}]
MODEL = model(use_mla=False, is_hybrid=False, has_inner_state=False, hf_text_config=model(layer_types=["full"] * 3))
LAYERS_APART = [  # what keeps a tensor a layer
    config(kvswap_block_first=False),
    config(canonical_layout=True),
    config(secondary_tiers=TIERS, blocks_per_chunk=4),
    config(secondary_tiers=TIERS, block_size=64),
    config(model=model(use_mla=True)),
    config(model=model(is_hybrid=True)),
    config(model=model(has_inner_state=True)),
    config(model=model(hf_text_config=model(layer_types=["full", "sliding"]))),
    config(backend=SimpleNamespace(name="FLEX_ATTENTION")),
    config(backend="FLEX_ATTENTION"),
    config(tokens=128),
    config("OffloadingConnector"),
    config("MultiConnector"),
    config(None),
]
TOGETHER = [
    config(),
    config(kvswap_block_first=True),
    config(model=MODEL),
    config(kvswap_overlap=True),
    config(secondary_tiers=TIERS),
    config(blocks_per_chunk=4),
    config(tokens=64),
    config(tokens=None),
    config(backend=SimpleNamespace(name="FLASH_ATTN")),
]


def group(by_stride: bool = True, tokens: int = 16, padded: int | None = None) -> Any:
    spec = SimpleNamespace(indexes_kv_by_block_stride=by_stride, block_size=tokens, page_size_padded=padded)
    return SimpleNamespace(kv_cache_spec=spec)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """0.26's, which packs the caches of one model."""
    module, vllm = ModuleType(PLANNER), ModuleType("vllm")
    module._use_packed_kv_cache_config = lambda vllm_config, kv_cache_groups: len(kv_cache_groups) == 9
    vllm.__version__ = "0.26.0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, PLANNER, module)
    return module


@pytest.mark.parametrize("asked", LAYERS_APART)
def test_some_configurations_keep_a_tensor_a_layer(planner: ModuleType, asked: Any) -> None:
    register()
    assert _block_first.why_not(asked)
    assert planner._use_packed_kv_cache_config(asked, [group()]) is False
    assert planner._use_packed_kv_cache_config(asked, [group()] * 9) is True  # vLLM's own answer
    assert _block_first.layout(asked, "LBHNC") == "LBHNC"


@pytest.mark.parametrize("asked", TOGETHER)
def test_others_have_all_layers_together(planner: ModuleType, asked: Any) -> None:
    register()
    assert planner._use_packed_kv_cache_config(asked, [group()]) is True
    assert _block_first.layout(asked, "LBHNC") == "BLHNC"
    asked.use_v2_model_runner = False  # the first runner asks its connector
    assert planner._use_packed_kv_cache_config(asked, [group()]) is False


@pytest.mark.parametrize(
    "groups",
    [
        [group(by_stride=False)],
        [group(), group()],
        [group(tokens=128)],
        [group(padded=4096)],
        [SimpleNamespace(kv_cache_spec=0)],
    ],
)
def test_some_groups_keep_a_tensor_a_layer(planner: ModuleType, groups: list[Any]) -> None:
    register()
    assert planner._use_packed_kv_cache_config(config(), groups) is False


@pytest.mark.parametrize("release", ["0.24.0", "0.25.1", "0.25.2.dev1+g1234", "what"])
def test_releases_whose_packed_layout_is_wrong_decide_as_before(
    planner: ModuleType, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", release)
    theirs = planner._use_packed_kv_cache_config
    register()
    assert planner._use_packed_kv_cache_config is theirs and not _block_first.is_installed()


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


@pytest.mark.parametrize("theirs", ["BLHNC", "HND", None])  # HND, in 0.26: what a layer's pages look like
def test_other_layouts_stay(theirs: str | None) -> None:
    assert _block_first.layout(config(), theirs) == theirs


def test_a_child_of_a_connector_prefers_what_its_siblings_do() -> None:
    """vLLM's MultiConnector ends the engine if its children prefer different layouts."""

    def asked() -> str | None:  # KVSwapConnector's
        return _block_first.layout(config(), "LBHNC")

    def get_required_kvcache_layout() -> str | None:  # MultiConnector's
        return asked()

    assert [asked(), get_required_kvcache_layout()] == ["BLHNC", "LBHNC"]


def test_the_option_is_true_or_false() -> None:
    with pytest.raises(ValueError, match=r"kvswap_block_first.* is 'yes'; it is true or false"):
        _block_first.why_not(config(kvswap_block_first="yes"))
