"""kvswap's copies under vLLM's SimpleCPUOffloadConnector, by the calls of vLLM's worker on NumPy tensors.

tests/integration/vllm_package.py --simple runs vLLM's own scheduler and worker over the same class.
"""

# mypy: ignore-errors

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Gate

import kvswap
from kvswap import testing
from kvswap.vllm import _plugin
from kvswap.vllm._simple import Copy, CopyBackend

pytestmark = pytest.mark.not_sanitized("Python only")

BLOCKS, HOST_BLOCKS = 12, 20
PAGES = [256, 656, 256]


def tensors(count: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"layer.{i}": rng.integers(-128, 128, (count, page), dtype=np.int8) for i, page in enumerate(PAGES)}


class Worker:
    """What vLLM's does with a backend: events by index, oldest first."""

    def __init__(self) -> None:
        self.gpu, self.cpu = tensors(BLOCKS, 1), tensors(HOST_BLOCKS, 2)
        self.backend = CopyBackend()
        self.backend.init(self.gpu, self.cpu, None, None, None)
        self.events: dict[bool, list[tuple[int, Copy]]] = {True: [], False: []}

    def copy(self, src: list[int], dst: list[int], store: bool, index: int = 0) -> None:
        events = self.events[store]
        self.backend.launch_copy(src, dst, is_store=store, event_idx=index, events_list=events, wait_event=object())

    def end(self, store: bool) -> None:
        for _, event in self.events[store]:
            event.synchronize()
            assert event.query()
        self.events[store].clear()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.backend.shutdown()


def test_blocks_go_out_and_come_back(worker: Worker) -> None:
    before = {name: tensor.copy() for name, tensor in worker.gpu.items()}
    host = {name: tensor.copy() for name, tensor in worker.cpu.items()}
    worker.copy([3, 0, 11], [19, 4, 7], True)
    worker.end(True)
    for name, tensor in worker.cpu.items():
        host[name][[19, 4, 7]] = before[name][[3, 0, 11]]
        np.testing.assert_array_equal(tensor, host[name])
    worker.copy([7, 19], [1, 2], False)
    worker.end(False)
    for name, tensor in worker.gpu.items():
        before[name][[1, 2]] = before[name][[11, 3]]
        np.testing.assert_array_equal(tensor, before[name])


def test_events_of_several_copies_keep_their_index(worker: Worker) -> None:
    for index in range(5):
        worker.copy([index], [index], True, 10 + index)
    assert [index for index, _ in worker.events[True]] == [10, 11, 12, 13, 14]
    last = worker.events[True][-1][1]
    last.synchronize()  # collects the results of the four before
    assert all(event.query() and event.query() for _, event in worker.events[True])


def test_a_store_waits_for_the_model(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    store = worker.backend.handlers[0]
    model = kvswap.Stream(store.device)
    monkeypatch.setattr(store, "_compute", lambda: model)
    with Gate(store.device) as gate:
        gate.hold(model)
        worker.copy([1], [2], True)
        event = worker.events[True][0][1]
        assert not event.query()
        gate.open()
        event.synchronize()
    assert event.query()


@pytest.mark.parametrize("store", [True, False])
def test_a_copy_that_fails_is_told(worker: Worker, store: bool) -> None:
    before = worker.cpu["layer.0"].copy()
    with testing.fault(worker.backend.handlers[0].device, "copy", "fail", every=1):
        worker.copy([1], [2], store)
        event = worker.events[store][0][1]
        with pytest.raises(kvswap.Error, match=f"{'store' if store else 'load'} 1 failed: .*the engine has to end"):
            event.synchronize()
    with pytest.raises(kvswap.Error, match="failed"):  # also if it is asked again
        event.query()
    np.testing.assert_array_equal(worker.cpu["layer.0"], before)
    worker.copy([1], [2], True)  # and the next one is as good as ever
    worker.events[True][-1][1].synchronize()
    np.testing.assert_array_equal(worker.cpu["layer.0"][2], worker.gpu["layer.0"][1])


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([1, 2], [3], "has 2 blocks, but dst_blocks has 1"),
        ([BLOCKS], [0], str(BLOCKS)),
        ([0, 1], [5, 5], "5"),
        ([0], [-1], "-1"),
    ],
)
def test_wrong_blocks_raise_at_once(worker: Worker, src: list[int], dst: list[int], message: str) -> None:
    with pytest.raises((ValueError, IndexError), match=message):
        worker.copy(src, dst, True)
    assert worker.events[True] == []


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    gpu, cpu = tensors(4, 1), tensors(4, 2)
    with pytest.raises(ValueError, match=r"gpu_caches has .*cpu_caches has"):
        CopyBackend().init(gpu, {"other": cpu["layer.0"]}, None, None, None)
    cpu["layer.1"] = np.zeros((4, 100), np.int8)
    with pytest.raises(ValueError, match="656"):
        CopyBackend().init(gpu, cpu, None, None, None)


def test_before_and_after_its_life() -> None:
    backend = CopyBackend()
    backend.shutdown()
    with pytest.raises(kvswap.Error, match="before init"):
        backend.launch_copy([0], [0], True, 0, [])
    backend.before_step()
    backend.init(tensors(4, 1), tensors(4, 2), None, None, None)
    backend.shutdown()
    backend.shutdown()
    with pytest.raises(kvswap.Error, match="after shutdown"):
        backend.launch_copy([0], [0], True, 0, [])


def test_loads_wait_for_the_steps_before_the_present_one(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's own kernels, queued after before_step(), hold up no load; those of earlier steps do."""
    device = worker.backend.handlers[0].device
    model = kvswap.Stream(device)
    monkeypatch.setattr(worker.backend, "_current", lambda: model)
    with Gate(device) as gate:
        worker.backend.before_step()
        gate.hold(model)  # the present step
        worker.copy([1], [2], False)
        worker.events[False][0][1].synchronize()
        worker.backend.before_step()  # the next step: the one before it is not done yet
        worker.copy([3], [4], False)
        event = worker.events[False][1][1]
        assert not event.query()
        gate.open()
        event.synchronize()


# -- vLLM's plugin hook -----------------------------------------------------------------------------------------------


class DmaCopyBackend:
    def init(self, gpu_caches: Any, cpu_caches: Any, device: Any, load_stream: Any, store_stream: Any) -> None: ...

    def launch_copy(
        self,
        src_blocks: Any,
        dst_blocks: Any,
        is_store: Any,
        event_idx: Any,
        events_list: Any,
        wait_event: Any = None,
    ) -> None: ...

    def shutdown(self) -> None: ...


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for vLLM's worker module."""
    for name in ("vllm", "vllm.v1", "vllm.v1.simple_kv_offload", "vllm.v1.simple_kv_offload.worker"):
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)

    class SimpleCPUOffloadWorker:
        def __init__(self, backend: Any) -> None:
            self._backend, self.bound = backend, []

        def bind_connector_metadata(self, metadata: Any) -> None:
            self.bound.append(metadata)

    module.DmaCopyBackend, module.SimpleCPUOffloadWorker = DmaCopyBackend, SimpleCPUOffloadWorker
    monkeypatch.delenv("KVSWAP_VLLM_SWAP_BLOCKS", raising=False)
    monkeypatch.setenv("KVSWAP_VLLM_SIMPLE_OFFLOAD", "1")
    return module


def test_the_plugin_replaces_the_copies(theirs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    _plugin.register()
    _plugin.register()  # vLLM calls it in every process, and sometimes twice
    assert theirs.DmaCopyBackend is CopyBackend
    backend, told = theirs.DmaCopyBackend(), []
    monkeypatch.setattr(backend, "before_step", lambda: told.append(True))
    worker = theirs.SimpleCPUOffloadWorker(backend)
    worker.bind_connector_metadata(SimpleNamespace(load_cpu_blocks=[]))
    worker.bind_connector_metadata(SimpleNamespace(load_cpu_blocks=[1]))
    assert told == [True] and len(worker.bound) == 2
    theirs.SimpleCPUOffloadWorker(DmaCopyBackend()).bind_connector_metadata(SimpleNamespace(load_cpu_blocks=[1]))


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_the_plugin_does_nothing_unasked(
    theirs: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str | None
) -> None:
    monkeypatch.delenv("KVSWAP_VLLM_SIMPLE_OFFLOAD")
    if value is not None:
        monkeypatch.setenv("KVSWAP_VLLM_SIMPLE_OFFLOAD", value)
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        _plugin.register()
    assert theirs.DmaCopyBackend is DmaCopyBackend
    assert ("it is 0 or 1" in caplog.text) == (value == "yes")


def test_a_release_that_is_not_known_keeps_its_own(
    theirs: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(DmaCopyBackend):
        def launch_copy(self, src_blocks: Any, dst_blocks: Any, priority: int) -> None: ...

    theirs.DmaCopyBackend = Other
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        _plugin.register()
    assert (
        theirs.DmaCopyBackend is Other and "launch_copy takes ['src_blocks', 'dst_blocks', 'priority']" in caplog.text
    )
    monkeypatch.setitem(sys.modules, "vllm.v1.simple_kv_offload.worker", None)
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        _plugin.register()
    assert "this vLLM is not known" in caplog.records[-1].message
