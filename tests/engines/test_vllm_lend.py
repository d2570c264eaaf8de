"""kvswap_lend: which engines lend, what is refused, when the model is idle, and a worker's memory.
tests/integration/vllm_package.py --lend runs two engines of vLLM's own, test_offload_lend.py the handlers."""

# mypy: ignore-errors

from __future__ import annotations

import os
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import until

import kvswap
from kvswap import testing
from kvswap.share import _steps
from kvswap.vllm import _handler, _lend

LEND = {"kvswap_lend": True}


def engine(extra: dict[str, Any], ranks: int = 1, blocks: int = 1, groups: int = 1) -> Any:
    """A spec of vLLM's."""
    parallel = SimpleNamespace(world_size=ranks, rank=0, data_parallel_index=0)
    cache = SimpleNamespace(blocks_per_chunk=blocks)
    config = SimpleNamespace(parallel=parallel, cache=cache, groups=(None,) * groups, engine_id="engine")
    return SimpleNamespace(extra_config=extra, replicated_layout=False, config=config)


def test_engines_lend_by_a_name() -> None:
    assert _handler.lend_of({}) is _handler.lend_of({"kvswap_lend": False}) is None
    assert _handler.lend_of(LEND) == ("default", 3)
    assert _handler.lend_of({"kvswap_lend": "a-name", "kvswap_lenders": 7}) == ("a-name", 7)
    assert _lend.check(engine(LEND), True) and _lend.check(engine({**LEND, "kvswap_codec": "exact"}), True)
    assert not _lend.check(engine({"kvswap_path": "dma"}, blocks=2), False)
    for wrong in ({"kvswap_lend": "a/b"}, {"kvswap_lend": "a" * 21}, {"kvswap_lend": 1}, {"kvswap_lenders": 16}):
        with pytest.raises(ValueError, match='"kvswap_lend'):
            _handler.lend_of(wrong)


@pytest.mark.parametrize(
    ("extra", "more", "why"),
    [
        ({"kvswap_overlap": True}, {}, "the layers of a lent load come in any order, and kvswap_overlap waits"),
        ({"kvswap_share": True}, {}, "with kvswap_share the ranks of an engine are a group already"),
        ({"canonical_layout": True}, {}, "with canonical_layout each rank stores pages of its own"),
        ({"kvswap_path": "dma"}, {}, "kvswap_path does not apply"),
        ({"kvswap_priority": "high"}, {}, "kvswap_priority does not apply"),
        ({}, {"blocks": 4}, "a chunk has 4 blocks, layer by layer, and lenders bring whole blocks"),
        ({}, {"groups": 2}, "the cache has 2 groups of layers"),
    ],
)
def test_what_cannot_be_lent_is_refused_by_name(extra: dict[str, Any], more: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"kvswap_lend: {why}"):
        _lend.check(engine({**LEND, **extra}, **more), True)


def test_older_releases_and_other_connectors_are_refused() -> None:
    old = engine(LEND)
    del old.config
    with pytest.raises(ValueError, match=r"kvswap_lend: it needs vLLM 0\.30 or later"):
        _lend.check(old, True)
    with pytest.raises(ValueError, match='kvswap_lend: it needs "kv_connector": "KVSwapConnector"'):
        _lend.check(engine(LEND), False)


@pytest.mark.parametrize("tells", [True, False])
def test_an_engine_that_sleeps_has_to_say_so(tells: bool) -> None:
    connector = type("Connector", (), {"unregister_kv_caches": None} if tells else {})
    for extra in (LEND, {}):
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            model_config=SimpleNamespace(enable_sleep_mode=True),
        )
        if tells or not extra:
            _lend.refuse_sleep(config, connector)
            continue
        with pytest.raises(ValueError, match="this vLLM does not tell the connector"):
            _lend.refuse_sleep(config, connector)


def test_the_model_is_idle_some_time_after_a_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(_steps.time, "monotonic", lambda: now[0])
    steps = _steps.Steps()
    assert steps.is_idle(), "no step has been seen"
    steps.begin()
    now[0] += 1
    assert not steps.is_idle()
    steps.end()
    assert not steps.is_idle()
    now[0] += 2 * _steps.IDLE
    assert steps.is_idle()
    steps.begin()
    now[0] += _steps._STUCK
    assert steps.is_idle(), "the step was given up"


def test_a_step_goes_on_on_the_device_after_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_steps, "IDLE", 0.0)
    device = kvswap.Device("host:0")
    stream = kvswap.Stream(device)
    steps = _steps.Steps()
    steps.attach(device, lambda: stream)
    testing.delay(device, 0.3, stream.handle)
    begin = time.monotonic()
    steps.begin()
    steps.end()
    until(steps.is_idle)
    assert time.monotonic() - begin >= 0.2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_workers_memory_is_its_region(ranks: int) -> None:
    base = np.zeros(4096, np.int8)
    region = SimpleNamespace(fd=os.memfd_create("region"), _base=SimpleNamespace(data_ptr=lambda: base.ctypes.data))
    steps = _steps.Steps()
    lend = _lend.describe(engine({"kvswap_lend": "x"}, ranks=ranks), region, steps)
    assert (lend.name, lend.lenders, lend.cells) == ("x", 3, ranks == 2)
    assert lend.file == (region.fd, 0, base.ctypes.data) and lend.generation == os.fstat(region.fd).st_ino
    assert lend.is_idle == steps.is_idle and lend.engine == "engine\x000"
    os.close(region.fd)
    with pytest.raises(kvswap.Error, match="is not one file"):
        _lend.describe(engine(LEND), SimpleNamespace(fd=0, _segments=[1, 2]), steps)
    with pytest.raises(kvswap.Error, match="is not one file"):
        _lend.start(steps, [SimpleNamespace(lending=None)])


def test_the_region_is_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.33 splits it."""
    module = ModuleType("vllm.v1.kv_offload.cpu.spec")
    module._REGION_SEGMENTS = 32
    for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.cpu"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["vllm.v1.kv_offload.cpu"].spec = module
    for extra, segments in ((LEND, 1), ({}, 32)):
        with _lend.one_file(engine(extra)):
            assert segments == module._REGION_SEGMENTS
        assert module._REGION_SEGMENTS == 32
