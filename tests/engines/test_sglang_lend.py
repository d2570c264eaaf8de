"""SGLang engines that lend each other their links, under a stand-in: one is here, others in processes of their own.
tests/integration/sglang_lend.py has the real SGLang."""

# mypy: disable-error-code="arg-type,misc,attr-defined,no-any-return,no-untyped-def"

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import sglang_lend_stand_in as stand_in
from conftest import PATIENCE, Gate, elsewhere, until
from sglang_coded_stand_in import ComponentType
from sglang_copies_stand_in import DeviceIds, pages, put_in
from sglang_lend_stand_in import ALL, LAYERS, LEAST, OURS, PAGE, SWITCHES, Engine, hook
from sglang_shared_stand_in import Group

import kvswap
from kvswap.sglang import _plugin
from kvswap.share import _steps

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
DEVICE, OTHER = "host:147", "host:148"
names = iter(range(1 << 20))


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    put_in(monkeypatch, stand_in.modules(DEVICE), OURS)
    for name, value in SWITCHES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_steps, "IDLE", 0.0)
    caplog.set_level(logging.INFO)
    yield
    _plugin.unregister()
    for name in OURS:
        sys.modules.pop(name, None)


def of(name: str) -> Any:
    return sys.modules[ALL[name]]


@pytest.fixture
def name() -> str:
    return f"s{os.getpid()}.{next(names)}"


@pytest.fixture
def make(name: str) -> Iterator[Callable[..., Engine]]:
    """Engines that lend."""
    made: list[Engine] = []

    def engine(**given: Any) -> Engine:
        hook()
        made.append(Engine(name, DEVICE, **given))
        return made[-1]

    yield engine
    for each in made:
        if each.host.kv_buffer is not None:
            each.host.destroy()


class Other:
    """An engine in another process."""

    def __init__(self, name: str, **given: Any) -> None:
        script = "import sglang_lend_stand_in as stand_in; stand_in.serve()"
        self.popen = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", script, json.dumps({"name": name, "device": OTHER, **given})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **elsewhere(),
        )  # fmt: skip

    def ask(self, line: str) -> Any:
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()
        return json.loads(self.popen.stdout.readline())

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate(timeout=PATIENCE)

    def end(self) -> None:
        self.popen.communicate(timeout=PATIENCE)
        assert self.popen.returncode == 0


@pytest.mark.parametrize(("kind", "layout"), [("mha", "page_first_direct"), ("mla", "page_first")])
def test_large_copies_go_over_both_links(kind: str, layout: str, make: Any, name: str, caplog: Any) -> None:
    here = make(kind=kind, layout=layout)
    assert here.check() == [0, 0], "nobody lends"
    other = Other(name, kind="mla" if kind == "mha" else "mha")  # with memory of another form
    until(here.peers)
    found = [0, 0]
    while not all(found):
        found = [a + b for a, b in zip(found, here.check(), strict=True)]
    until(lambda: other.ask("engine.peers()"))
    while not all(other.ask("engine.check()")):
        pass
    [(lends, *brought)] = other.ask("engine.lent()")
    assert lends and brought == here.brought()
    assert here.check(LEAST - 1) == [0, 0], "small copies use the own link only"
    assert f"use the links of engines of the name {name}" in caplog.text
    other.end()
    until(lambda: not here.peers())
    assert here.check() == [0, 0]


def test_what_sglang_does_not_wait_for_goes_over_the_own_link(make: Any, name: str) -> None:
    here = make(policy="write_through")
    other = Other(name)
    until(here.peers)
    loads = 0
    while not loads:
        stores, loads = here.check()
        assert stores == 0
    other.end()


def test_a_lender_that_is_killed(make: Any, name: str) -> None:
    here = make()
    other = Other(name)
    until(here.peers)
    host, device = list(range(64)), list(range(64))
    with Gate(kvswap.Device(DEVICE)) as gate:
        gate.hold(here.copies.device_to_host_stream)
        end = here.store(host, device)
        assert not end.query()
        other.kill()
        gate.open()
        end.synchronize()
    before = here.rows(device)
    assert here.load(host, device[::-1]) == list(range(LAYERS))
    np.testing.assert_array_equal(here.rows(device[::-1]), before)
    until(lambda: not here.peers())
    assert here.check() == [0, 0]


def test_nothing_is_registered_beside_a_step(make: Any, name: str) -> None:
    here = make()
    stream = here.scheduler.forward_stream
    with Gate(kvswap.Device(DEVICE)) as gate:
        gate.hold(stream)
        assert here.scheduler.run_batch(lambda: "result") == "result"
        other = Other(name)
        until(lambda: here.lending.loans)
        assert here.lending.loans[0].registered_nbytes == 0 and not here.lending._loans._is_idle()
        gate.open()
    until(lambda: other.ask("engine.peers()"))
    steps = sys.modules[OURS[-1]].steps
    here.scheduler.run_batch(lambda: setattr(here, "idle", steps.is_idle()))
    assert here.idle is False
    other.end()


def test_a_flush_waits_for_stores(make: Any, name: str) -> None:
    here = make()
    other = Other(name)
    until(here.peers)
    cleared = here.host.cleared
    with Gate(kvswap.Device(DEVICE)) as gate:
        gate.hold(here.copies.device_to_host_stream)
        end = here.store(range(48), range(48))
        flush = threading.Thread(target=here.host.clear)
        flush.start()
        flush.join(0.2)
        assert flush.is_alive() and not end.query()
        gate.open()
        flush.join(PATIENCE)
    assert here.host.cleared == cleared + 1 and end.query()
    here.host.destroy()
    assert here.host.kv_buffer is None
    until(lambda: not other.ask("engine.peers()"))
    other.end()


def test_ids_of_lent_copies_come_to_the_cpu(make: Any, name: str) -> None:
    here, other = make(), Other(name)
    until(here.peers)

    class Ids(DeviceIds):
        def cpu(self):
            return self.values

    small, large = (Ids(pages(range(count), PAGE)) for count in (LEAST - 1, LEAST))
    assert here.copies.device_ids(here.host, small) is small
    assert here.copies.device_ids(here.host, large) is large.values
    other.end()


def alone(name: str, **given: Any) -> Engine:
    """An engine that does not lend, and goes on."""
    hook()
    engine = Engine(name, DEVICE, **given)
    before = engine.rows([0, 1])
    engine.store([8, 9], [0, 1]).synchronize()
    engine.load([8, 9], [4, 5])
    np.testing.assert_array_equal(engine.rows([4, 5]), before)
    assert engine.host not in sys.modules[OURS[-1]]._pools
    engine.host.destroy()
    return engine


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"saver": True}, "with --enable-memory-saver the GPU's memory can be released"),
        ({"layout": "layer_first"}, "--hicache-mem-layout layer_first keeps the layers of a page apart"),
        ({"tree": {"pp_size": 2}}, "several pipeline stages"),
        ({"tree": {"attn_cp_group": Group(0, object())}}, "context parallelism"),
        ({"tree": {"tree_components": (ComponentType.FULL, ComponentType.SWA)}}, "more than full attention"),
    ],
)
def test_engines_that_do_not_lend(change: Any, why: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    alone(name, **change)
    (said,) = [line.getMessage() for line in caplog.records if "links are not lent" in line.getMessage()]
    assert why in said


def test_memory_that_is_not_kvswaps(name: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("KVSWAP_RESERVE", str(1 << 60))
    alone(name)
    assert "is left to SGLang, and not lent to" in caplog.text
    assert "host pool kv: links are not lent: its memory is not kvswap's" in caplog.text


def test_a_pool_that_kvswap_does_not_know(name: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    hook()
    with monkeypatch.context() as patch:
        patch.setattr(of("mha").MHATokenToKVPoolHost, "shared_allocation_domain", object())
        Engine(name, DEVICE).host.destroy()
        assert "host pool kv: links are not lent: its pages move" in caplog.text
        patch.setattr(of("mha"), "MHATokenToKVPoolHost", type("Asymmetric", (stand_in.MHATokenToKVPoolHost,), {}))
        Engine(name, DEVICE).host.destroy()
        assert "host pool kv: links are not lent: SGLang copies this kind of pool" in caplog.text


def test_ranks_of_an_engine_have_its_name(make: Any) -> None:
    class Pipe:
        sent: Any = None

        def send(self, value: Any) -> None:
            self.sent = list(value)

        def poll(self, timeout: float) -> bool:
            return True

        def recv(self) -> Any:
            return list(b"rank 0's")

    make()
    lend = sys.modules[OURS[-1]]
    first = Pipe()
    told = [lend._name_of(stand_in.UnifiedRadixCache(Group(rank, first if rank == 0 else Pipe()))) for rank in (0, 1)]
    assert told == [bytes(first.sent).hex(), b"rank 0's".hex()]
    assert lend._name_of(stand_in.UnifiedRadixCache()) != lend._name_of(stand_in.UnifiedRadixCache(Group(0)))


@pytest.mark.parametrize(
    ("switches", "why"),
    [
        ({"KVSWAP_SGLANG_COPIES": "0"}, "KVSWAP_SGLANG_LEND needs KVSWAP_SGLANG_COPIES=1"),
        ({"KVSWAP_SGLANG_CODEC": "exact"}, "KVSWAP_SGLANG_LEND does not go with KVSWAP_SGLANG_CODEC: coded pages"),
        ({"KVSWAP_SGLANG_SHARE": "1"}, "KVSWAP_SGLANG_LEND does not go with KVSWAP_SGLANG_SHARE: its ranks are"),
        ({"KVSWAP_SGLANG_LEND": "a/b"}, "KVSWAP_SGLANG_LEND is 'a/b': 1, or a name"),
        ({"KVSWAP_SGLANG_LENDERS": "16"}, "KVSWAP_SGLANG_LENDERS is '16': it is 1 to 15"),
        ({"KVSWAP_SGLANG_LEND_MIB": "0"}, "KVSWAP_SGLANG_LEND_MIB is '0': it is 1 to 1048576"),
    ],
)
def test_settings_that_are_wrong(switches: dict[str, str], why: str, monkeypatch: Any, caplog: Any) -> None:
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    assert not _plugin._is_lent()
    assert why in caplog.text and "Links are not lent" in caplog.text


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _plugin.lend() == ("default", 3, 512 << 20)
    for name, value in {"LEND": "chat", "LENDERS": "7", "LEND_MIB": "64"}.items():
        monkeypatch.setenv(f"KVSWAP_SGLANG_{name}", value)
    assert _plugin.lend() == ("chat", 7, 64 << 20)
    monkeypatch.setenv("KVSWAP_SGLANG_LEND", "0")
    assert _plugin.lend() is None


@pytest.mark.parametrize("loaded", [True, False])
def test_hooks_and_their_removal(loaded: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Processes of SGLang that have no scheduler do not import it."""
    if not loaded:
        monkeypatch.delitem(sys.modules, ALL["scheduler"])
    hook()
    assert "SGLang's loads may go over other engines' links now" in caplog.text
    assert of("common").HostTensorAllocator is sys.modules[OURS[-1]].LentAllocator
    assert len(_plugin.unregister()) == 7 + loaded
    assert of("common").HostTensorAllocator is stand_in.HostTensorAllocator


def test_another_sglang(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of("scheduler").Scheduler, "run_batch", lambda self, batch: None)
    hook()
    assert "KVSWAP_SGLANG_LEND is set, but this SGLang is not known: its Scheduler.run_batch takes" in caplog.text


def test_hooks_that_are_not_applied(name: str, caplog: pytest.LogCaptureFixture) -> None:
    of("hooks").HookRegistry.broken.add(f"{ALL['controller']}.HiCacheController.move_indices")
    alone(name)
    assert "links are not lent: SGLang did not apply all of kvswap's hooks" in caplog.text
