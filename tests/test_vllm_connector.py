"""What KVSwapConnector does with a configuration, on a stand-in for vLLM's connector.

tests/integration/vllm_package.py runs the real one: its scheduler, its worker, failing stores and loads.
"""

# mypy: ignore-errors

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvswap
from kvswap.vllm._handler import VLLMHandler

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class OurHandler(VLLMHandler):
    """Recognised by its class."""

    def __init__(self) -> None:
        self.strict = True


class OffloadingConnector:
    """vLLM's: the spec by its name, and the spec's worker when the caches are registered."""

    workers: dict[str, list[Any]]

    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        del role, kv_cache_config
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.spec_name = extra.get("spec_name", "CPUOffloadingSpec")
        self.connector_worker = SimpleNamespace(spec=type(self.spec_name, (), {})(), worker=None)

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.connector_worker.worker = SimpleNamespace(handlers=self.workers[self.spec_name])


@dataclass
class OffloadingWorkerMetadata:
    pass


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A KVSwapConnector of such options, its caches registered."""
    parts = V1.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    contents = {
        **{name: {} for name in names},
        "vllm": {"__version__": "0.0"},
        f"{V1}.base": {"KVConnectorRole": SimpleNamespace(SCHEDULER="scheduler", WORKER="worker")},
        f"{V1}.offloading": {},
        f"{V1}.offloading.common": {"OffloadingWorkerMetadata": OffloadingWorkerMetadata},
        f"{V1}.offloading_connector": {"OffloadingConnector": OffloadingConnector},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvswap.vllm._connector", raising=False)
    ours = [OurHandler(), OurHandler()]
    monkeypatch.setattr(
        OffloadingConnector,
        "workers",
        {
            "KVSwapOffloadingSpec": ours,
            "KVSwapTieringOffloadingSpec": ours,
            "CPUOffloadingSpec": [object()],
            "TieringOffloadingSpec": [object()],
            "TheirSpec": [object()],
        },
        raising=False,
    )
    module = importlib.import_module("kvswap.vllm._connector")

    def make(**extra: Any) -> Any:
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
        made = module.KVSwapConnector(config, "worker", SimpleNamespace(kv_cache_groups=[None]))
        made.register_kv_caches({})
        return made

    yield make
    sys.modules.pop("kvswap.vllm._connector", None)


@pytest.mark.parametrize(
    ("extra", "spec"),
    [
        ({}, "KVSwapOffloadingSpec"),
        ({"spec_name": "CPUOffloadingSpec"}, "KVSwapOffloadingSpec"),
        ({"spec_name": "CPUOffloadingSpec", "spec_module_path": "kvswap.vllm"}, "KVSwapOffloadingSpec"),
        ({"spec_name": "TieringOffloadingSpec"}, "KVSwapTieringOffloadingSpec"),
        ({"spec_name": "KVSwapTieringOffloadingSpec"}, "KVSwapTieringOffloadingSpec"),
        ({"spec_name": "KVSwapOffloadingSpec", "spec_module_path": "kvswap.vllm"}, "KVSwapOffloadingSpec"),
    ],
)
def test_the_connector_takes_kvswaps_spec_by_itself(connector: Any, extra: dict[str, str], spec: str) -> None:
    made = connector(**extra, cpu_bytes_to_use=1 << 30)
    assert made.spec_name == spec
    assert not made.connector_worker.worker.handlers[0].strict


def test_transfers_that_are_not_kvswaps_are_refused(connector: Any) -> None:
    with pytest.raises(kvswap.Error, match=r'TheirSpec.*vLLM 0\.0.*"KVSwapOffloadingSpec" and "kvswap\.vllm"'):
        connector(spec_name="TheirSpec", spec_module_path="theirs")


def test_handlers_that_could_not_be_replaced_are_refused(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvswap's spec was taken, and left vLLM's handlers in place, because it does not know them."""
    monkeypatch.setitem(OffloadingConnector.workers, "KVSwapOffloadingSpec", [object()])
    with pytest.raises(kvswap.Error, match="does not move blocks by kvswap"):
        connector()


def test_a_fallback_is_asked_for(connector: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        made = connector(spec_name="TheirSpec", spec_module_path="theirs", kvswap_fallback=True)
    assert made.spec_name == "TheirSpec" and "vLLM's own transfers stay" in caplog.text
    with pytest.raises(ValueError, match="kvswap_fallback is 'yes'"):
        connector(kvswap_fallback="yes")
