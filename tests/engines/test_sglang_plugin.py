"""What kvswap replaces in SGLang by its plugin hook, under a stand-in."""

# mypy: disable-error-code="arg-type,misc,attr-defined,no-any-return,no-untyped-def"

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_copies_stand_in as stand_in
from conftest import ROOT
from sglang_copies_stand_in import NAMES, MHATokenToKVPoolHost, OtherHostPool, ids

from kvswap import _C
from kvswap.sglang import _plugin, register, unregister

pytestmark = pytest.mark.not_sanitized("Python only")

COPIES, MEMORY = _plugin.SWITCH, _plugin.MEMORY_SWITCH
OURS = ("kvswap.sglang._copies", "kvswap.sglang._memory")


class DType:
    """torch.float32's."""

    itemsize = 4


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    torch = SimpleNamespace(frombuffer=lambda memory, dtype, count: np.frombuffer(memory, np.float32, count))
    monkeypatch.setitem(sys.modules, "torch", torch)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in (COPIES, MEMORY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_plugin, "_hooks", [])
    monkeypatch.setattr(logging.getLogger("kvswap"), "parent", logging.getLogger())
    yield
    for name in OURS:
        sys.modules.pop(name, None)


def of(name: str) -> Any:
    return sys.modules[NAMES[name]]


def bound() -> dict[str, Any]:
    """Everything of SGLang's that kvswap may replace."""
    return {
        "controller": of("controller").L2TransferEngine,
        "transfer": of("transfer").L2TransferEngine,
        "move": vars(of("controller").HiCacheController)["move_indices"],
        "pools": vars(of("hybrid").HybridCacheController)["_move_pool_indices"],
        "memory": of("common").HostTensorAllocator,
        "apply": vars(of("hooks").HookRegistry)["apply_hooks"],
    }


def apply(monkeypatch: pytest.MonkeyPatch, *switches: str) -> None:
    """What SGLang does with its plugins."""
    for switch in switches:
        monkeypatch.setenv(switch, "1")
    register()
    of("hooks").HookRegistry.apply_hooks()


def test_the_entry_point_names_it() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."sglang.srt.plugins"]\nkvswap = "kvswap.sglang:register"' in text
    for found in entry_points(group="sglang.srt.plugins"):
        assert found.name != "kvswap" or found.load() is register


def test_without_a_switch_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bound()
    apply(monkeypatch)
    monkeypatch.setenv(COPIES, "0")
    apply(monkeypatch)
    assert bound() == before and not of("hooks").HookRegistry._hooks and OURS[0] not in sys.modules


def test_the_switches(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = bound()
    with caplog.at_level(logging.INFO, "kvswap"):
        apply(monkeypatch, MEMORY)
        assert {name for name, value in bound().items() if value is not before[name]} == {"memory"}
        assert "SGLang's host memory is kvswap's now" in caplog.text and "copies" not in caplog.text
        apply(monkeypatch, COPIES)
    assert {name for name, value in bound().items() if value is before[name]} == {"apply"}
    assert of("transfer").L2TransferEngine is of("controller").L2TransferEngine is sys.modules[OURS[0]].CopyEngine
    assert "SGLang's copies between device and host memory are kvswap's now" in caplog.text
    hooked = bound()
    apply(monkeypatch, COPIES, MEMORY)  # twice is once
    assert bound() == hooked and all(len(hooks) == 1 for hooks in of("hooks").HookRegistry._hooks.values())


def test_another_value_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    before = bound()
    monkeypatch.setenv(COPIES, "yes")
    apply(monkeypatch)
    assert bound() == before and f"{COPIES} is 'yes'; it is 0 or 1" in caplog.text


@pytest.mark.parametrize("kind", ["HiCacheController", "HybridCacheController"])
def test_ids_stay_where_they_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(monkeypatch, COPIES)
    host, device = ids([1]), stand_in.DeviceIds(ids([2]))
    mine, other = MHATokenToKVPoolHost(), OtherHostPool(2, 64, 4, "layer_first", stand_in.DEVICE)
    for pool, kept in ((mine, True), (other, False)):
        if kind == "HiCacheController":
            moved = of("controller").HiCacheController(pool).move_indices(host, device)
        else:
            made = of("hybrid").HybridCacheController(object())
            moved = made._move_pool_indices(pool, host, device, write_back_jit=False)
        assert (moved[0] is host and moved[1] is device) == kept
        assert kept or moved[1].device.type == "cpu"


def test_with_sglangs_engine_its_ids_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    own = of("transfer").L2TransferEngine
    apply(monkeypatch, COPIES)
    made = of("controller").HiCacheController(MHATokenToKVPoolHost())
    made.l2_transfer_engine = own("direct")
    assert made.move_indices(ids([1]), stand_in.DeviceIds(ids([2])))[1].device.type == "cpu"


CHANGES = {
    "submit_host_to_device": "its L2TransferEngine.submit_host_to_device takes ['self', 'transfers'], not ['self', ",
    "_submission": "L2TransferEngine._submission: ",
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_unknown_release_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = of("transfer").L2TransferEngine
    if name == "_submission":
        monkeypatch.delattr(own, name)
    else:
        monkeypatch.setattr(own, name, lambda self, transfers: None)
    before = bound()
    apply(monkeypatch, COPIES)
    assert bound() == before
    assert f"{COPIES} is set, but this SGLang is not known: {CHANGES[name]}" in caplog.text


def test_a_missing_module_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delitem(sys.modules, NAMES["hooks"])
    monkeypatch.setenv(MEMORY, "1")
    register()
    assert f"{MEMORY} is set, but this SGLang is not known: " in caplog.text
    assert of("common").HostTensorAllocator.__name__ == "HostTensorAllocator"


@pytest.mark.parametrize(
    "broken", [f"{NAMES['controller']}.L2TransferEngine", _plugin._CONTROLLER + ".HiCacheController.move_indices"]
)
def test_a_hook_that_was_not_applied_is_told(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of("hooks").HookRegistry.broken = {broken}
    with caplog.at_level(logging.INFO, "kvswap"):
        apply(monkeypatch, COPIES)
    assert f"{COPIES} is set, but SGLang did not apply the hooks of {broken}" in caplog.text
    assert "are kvswap's now" not in caplog.text


def test_removal_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bound()
    apply(monkeypatch, COPIES, MEMORY)
    restored = unregister()
    assert bound() == before and len(restored) == 4
    assert not of("hooks").HookRegistry._hooks and not of("hooks").HookRegistry._patched
    assert unregister() == [] and bound() == before
    apply(monkeypatch, COPIES)  # and it can be registered again
    assert of("controller").L2TransferEngine is sys.modules[OURS[0]].CopyEngine
    unregister()
    assert bound() == before


def test_removal_leaves_another_plugins_hook(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    apply(monkeypatch, COPIES)
    theirs = type("Theirs", (of("controller").L2TransferEngine,), {})
    of("controller").L2TransferEngine = theirs
    assert f"{NAMES['controller']}.L2TransferEngine" not in unregister()
    assert of("controller").L2TransferEngine is theirs and "another plugin has replaced it too" in caplog.text


# -- host memory ------------------------------------------------------------------------------------------------------


def allocator(monkeypatch: pytest.MonkeyPatch) -> Any:
    apply(monkeypatch, MEMORY)
    return of("common").HostTensorAllocator()


def test_host_memory_is_a_host_pools(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvswap"):
        made = allocator(monkeypatch)
        tensor = made.allocate((2, 3, 5000), DType, "cpu")
    assert tensor.shape == (2, 3, 5000) and not tensor.any() and made.dims == (2, 3, 5000) and made.dtype is DType
    tensor[:] = 7
    assert "host memory of 120000 bytes is kvswap's: " in caplog.text
    assert (tensor == 7).all()


def test_host_memory_that_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = allocator(monkeypatch)
    assert made.allocate((2, 0), DType, "cpu") == made.allocate((2, 3), DType, "npu") == "SGLang's own"
    assert not caplog.records
    assert made.allocate((1 << 50,), DType, "cpu") == "SGLang's own"
    assert f"host memory of {4 << 50} bytes is left to SGLang: " in caplog.text
    of("environ").envs.SGLANG_HUGEPAGE_SIZE.value = "2MB"
    assert made.allocate((2, 3), DType, "cpu") == "SGLang's own"


def test_host_memory_goes_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Any] = []
    made = allocator(monkeypatch)
    own = _C.HostPool
    stub = SimpleNamespace(HostPool=lambda *a, **o: pools.append(own(*a, **o)) or pools[-1], Error=_C.Error)
    monkeypatch.setattr(sys.modules[OURS[1]], "_C", stub)
    tensor = made.allocate((16,), DType, "cpu")
    (pool,) = pools
    with pytest.raises(BufferError):
        pool.close()
    del tensor
    pool.close()
