"""One host pool of all ranks with the same latents, under a stand-in: rank 0 is here, rank 1 in a process of its own.
tests/integration/sglang_shared.py has the real SGLang."""

# mypy: disable-error-code="arg-type,misc,attr-defined,no-any-return,no-untyped-def"

from __future__ import annotations

import logging
import multiprocessing
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import sglang_shared_stand_in as stand_in
from conftest import PATIENCE, Gate, elsewhere, until
from sglang_coded_stand_in import NAMES, ComponentType
from sglang_copies_stand_in import NAMES as COPIES
from sglang_copies_stand_in import DeviceIds, pages, put_in
from sglang_shared_stand_in import HOST_PAGES, LAYERS, OURS, PAGE, SWITCHES, WIDTH, Group, Rank

import kvswap
from kvswap import share, testing
from kvswap.memory import SharedPool
from kvswap.sglang import _plugin, register

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
DEVICE = "host:146"
PIECE = 2 * PAGE * LAYERS * WIDTH * 2  # two pages


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    put_in(monkeypatch, stand_in.modules(DEVICE), OURS)
    for name, value in SWITCHES.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.INFO)
    yield
    _plugin.unregister()  # hooks replace classes in the stand-in, too
    for name in OURS:
        sys.modules.pop(name, None)


def of(name: str) -> Any:
    return sys.modules[(NAMES | COPIES)[name]]


def hook() -> None:
    register()
    of("hooks").HookRegistry.apply_hooks()


class Both:
    """Two ranks with one host pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layout: str = "page_first_direct") -> None:
        self.asked, control = multiprocessing.Pipe()
        pipe, their = multiprocessing.Pipe()
        fds = (control.fileno(), their.fileno())
        script = f"import sglang_shared_stand_in as s; s.other(*{fds}, {DEVICE!r}, {layout!r}, {PIECE})"
        command = [sys.executable, "-X", "faulthandler", "-c", script]
        self.popen = subprocess.Popen(command, pass_fds=fds, **elsewhere())
        control.close()
        their.close()
        hook()
        join = share.join
        monkeypatch.setattr(share, "join", lambda *given, **named: join(*given, piece_nbytes=PIECE, **named))
        self.group = Group(0, pipe)
        self.here = Rank(self.group, DEVICE, layout)
        self.hear()

    def say(self, what: str, *given: Any) -> None:
        self.asked.send((what, given))

    def hear(self) -> Any:
        assert self.asked.poll(PATIENCE), "rank 1 does not answer"
        return self.asked.recv()

    def ask(self, what: str, *given: Any) -> Any:
        self.say(what, *given)
        return self.hear()

    def store(self, host: list[int], device: list[int]) -> None:
        """On both ranks, to the end."""
        number = self.here.store(host, device)
        assert self.ask("rank.store", host, device) == number
        self.here.end(number)
        assert self.ask("rank.end", number) is None

    def close(self) -> None:
        self.asked.close()
        try:
            assert self.popen.wait(PATIENCE) == 0
        finally:
            self.popen.kill()
            self.popen.wait()
            self.here.host.destroy()


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Both]]:
    made: list[Both] = []
    yield lambda *given: made.append(Both(monkeypatch, *given)) or made[-1]
    for each in made:
        each.close()


@pytest.mark.parametrize("layout", ["page_first_direct", "page_first"])
def test_both_ranks_load_what_both_have_stored(layout: str, both: Any, caplog: pytest.LogCaptureFixture) -> None:
    ranks, here = both(layout), None
    here = ranks.here
    source, host, target = [1, 11, 0, 7, 2, 3, 4], [9, 2, 23, 15, 0, 4, 17], [5, 14, 12, 8, 9, 10, 6]
    wanted = here.rows(source)
    ranks.store(host, source)
    np.testing.assert_array_equal(here.host_rows(host), wanted)
    np.testing.assert_array_equal(ranks.ask("rank.host_rows", host), wanted)
    rest = [page for page in range(HOST_PAGES) if page not in host]
    assert not here.host_rows(rest).any(), "no other page was written"
    for clear in (lambda: here.fill(target, 7), lambda: ranks.ask("rank.fill", target, 8)):
        clear()
    ranks.say("rank.load", host, target)
    assert here.load(host, target) == ranks.hear() == [0, 1, 2]
    np.testing.assert_array_equal(here.rows(target), wanted)
    np.testing.assert_array_equal(ranks.ask("rank.rows", target), wanted)
    assert "kvswap copies blocks of" in caplog.text and "2 ranks share the pool" in caplog.text
    assert here.host.calls == [], "nothing is SGLang's own copy"
    assert not os.path.exists(here.host.shared.path), "killed ranks would leave it behind"


def test_each_rank_writes_a_part(both: Any) -> None:
    """The ranks' bytes differ here, so that the host's say which rank wrote them."""
    ranks = both()
    ranks.here.fill([0, 1, 2, 3, 4, 5, 6, 7], 100)
    ranks.ask("rank.fill", [0, 1, 2, 3, 4, 5, 6, 7], 200)
    ranks.store([8, 9, 10, 11, 12, 13, 14, 15], [0, 1, 2, 3, 4, 5, 6, 7])
    found = ranks.here.host_rows([8, 9, 10, 11, 12, 13, 14, 15])
    assert [set(np.unique(found[:, i]).tolist()) for i in range(8)] == [{100}, {100}, {200}, {200}] * 2
    ranks.say("rank.load", [8, 9, 10, 11, 12, 13, 14, 15], [8, 9, 10, 11, 12, 13, 14, 15])
    ranks.here.load([8, 9, 10, 11, 12, 13, 14, 15], [8, 9, 10, 11, 12, 13, 14, 15])
    ranks.hear()
    np.testing.assert_array_equal(ranks.here.rows([*range(8, 16)]), found)
    np.testing.assert_array_equal(ranks.ask("rank.rows", [*range(8, 16)]), found)


def test_a_store_ends_when_all_ranks_have_written(both: Any) -> None:
    """SGLang's write_back evicts pages when its own rank's store has ended, and asks no other rank."""
    ranks = both()
    number = ranks.here.store([8, 9, 10, 11], [0, 1, 2, 3])
    time.sleep(0.05)
    assert not ranks.here.has_ended(number)
    assert not ranks.here.ends[number].timing_enabled, "its events say nothing of the time that it takes"
    ranks.ask("rank.store", [8, 9, 10, 11], [0, 1, 2, 3])
    until(lambda: ranks.here.has_ended(number), "the end of the store")
    np.testing.assert_array_equal(ranks.here.host_rows([8, 9, 10, 11]), ranks.here.rows([0, 1, 2, 3]))
    assert ranks.ask("rank.end", 0) is None


def test_pages_are_forgotten_after_all_ranks_have_written_them(both: Any) -> None:
    """SGLang's flush forgets stores that have not ended; the next ones may write to the same pages."""
    ranks = both()
    ranks.ask("rank.store", [8, 9, 10, 11], [0, 1, 2, 3])
    ranks.say("rank.host.clear")
    assert not ranks.asked.poll(0.3), "rank 0 has not written yet"
    ranks.here.store([8, 9, 10, 11], [0, 1, 2, 3])
    assert ranks.hear() is None
    ranks.here.host.clear()
    assert ranks.here.host.cleared and all(store.done() for store in ranks.here.host.stores)


def test_a_rank_that_is_late_keeps_no_load_waiting(both: Any) -> None:
    ranks = both()
    ranks.store([8, 9, 10, 11], [0, 1, 2, 3])
    assert ranks.here.load([8, 9, 10, 11], [4, 5, 6, 7]) == [0, 1, 2]
    assert ranks.ask("rank.load", [8, 9, 10, 11], [4, 5, 6, 7]) == [0, 1, 2]
    for rows in (ranks.here.rows, lambda at: ranks.ask("rank.rows", at)):
        np.testing.assert_array_equal(rows([4, 5, 6, 7]), rows([0, 1, 2, 3]))


@pytest.mark.parametrize("direction", ["store", "load"])
def test_sglangs_fences_hold(direction: str, both: Any) -> None:
    """What the streams of SGLang's copies wait for: the model still reads and writes the pages of the GPU."""
    ranks = both()
    ranks.store([8, 9, 10, 11], [0, 1, 2, 3])
    here, module = ranks.here, of("transfer").device_module
    forward, device = module.Stream(), kvswap.Device(DEVICE)
    before, wanted = here.rows([4, 5, 6, 7]), here.rows([0, 1, 2, 3])
    with Gate(device) as gate:
        gate.hold(forward)
        if direction == "store":
            here.engine.device_to_host_stream.wait_stream(forward)
            number = here.store([12, 13, 14, 15], [0, 1, 2, 3])
            assert ranks.ask("rank.store", [12, 13, 14, 15], [0, 1, 2, 3]) == number
            assert not here.host_rows([12, 13]).any() and not here.has_ended(number)
            gate.open()
            here.end(number)
            np.testing.assert_array_equal(here.host_rows([12, 13, 14, 15]), wanted)
            assert ranks.ask("rank.end", number) is None
        else:
            here.engine.host_to_device_stream.wait_stream(forward)
            load = threading.Thread(target=here.load, args=([8, 9, 10, 11], [4, 5, 6, 7]))
            load.start()
            load.join(0.2)
            assert load.is_alive() and here.done == [], "SGLang's events of the layers come after the load"
            np.testing.assert_array_equal(here.rows([4, 5, 6, 7]), before)
            gate.open()
            load.join(PATIENCE)
            np.testing.assert_array_equal(here.rows([4, 5, 6, 7]), wanted)


def test_a_load_of_some_layers_is_not_shared(both: Any) -> None:
    ranks = both()
    ranks.store([8, 9], [0, 1])
    before = ranks.here.rows([4, 5])
    assert ranks.here.load([8, 9], [4, 5], layers=2) == [0, 1]
    after = ranks.here.rows([4, 5])
    np.testing.assert_array_equal(after[:2], ranks.here.rows([0, 1])[:2])
    np.testing.assert_array_equal(after[2], before[2])
    assert ranks.here.host.numbers == {"H2D": 0, "D2H": 1}


def test_ranks_that_disagree_end_the_engine(both: Any) -> None:
    """The pages of a store are compared: none of them can be loaded by a rank for which it is another one."""
    ranks = both()
    ranks.store([8, 9], [0, 1])
    number = ranks.here.store([10, 11, 12, 13], [2, 3, 4, 5])
    ranks.ask("rank.store", [11, 12, 13, 14], [2, 3, 4, 5])
    for _ in range(2):
        with pytest.raises(kvswap.Error, match=r"did not store its part.*so the engine has to end"):
            ranks.here.end(number)
    assert "so the engine has to end" in ranks.ask("rank.end", number)
    assert "so the engine has to end" in ranks.ask("rank.store", [13], [2])
    with pytest.raises(kvswap.Error, match="so the engine has to end"):
        ranks.here.load([8], [4])


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_fails_ends_the_engine(direction: str, both: Any) -> None:
    ranks = both()
    ranks.store([8, 9, 10, 11], [0, 1, 2, 3])
    failing = testing.fault(kvswap.Device(DEVICE), "copy", "fail", every=1)
    with failing, pytest.raises(kvswap.Error, match="so the engine has to end"):
        if direction == "load":
            ranks.here.load([8, 9, 10, 11], [4, 5, 6, 7])
        else:
            number = ranks.here.store([8, 9, 10, 11], [4, 5, 6, 7])
            ranks.ask("rank.store", [8, 9, 10, 11], [4, 5, 6, 7])
            ranks.here.end(number)
    if direction == "store":
        assert "did not store its part" in ranks.ask("rank.end", 1), "a page is there for all ranks, or for none"


def test_what_is_no_whole_page_is_not_stored(both: Any) -> None:
    ranks = both()
    call = stand_in.L2Transfer(ranks.here.host, object(), pages([8], PAGE), pages([1], PAGE) + 1)
    with pytest.raises(NotImplementedError, match="host pool kv is shared by ranks"):
        ranks.here.engine.submit_device_to_host([call])


def test_ids_on_a_gpu_are_fetched_before_the_stream_of_the_copies(both: Any) -> None:
    """On that stream the call would wait for the model."""
    ranks = both("page_first")
    assert not ranks.here.host.can_use_write_back_jit, "SGLang moves no ids then"
    controller = of("controller").HiCacheController(ranks.here.host)
    controller.l2_transfer_engine = ranks.here.engine
    ranks.here.engine._takes_device_ids = False  # as after a failure in another pool

    class OnGpu(DeviceIds):
        def cpu(self):
            return self.values

    host, device = controller.move_indices(pages([8], PAGE), OnGpu(pages([1], PAGE)))
    assert device.device.type == "cpu" and device.tolist() == [4, 5, 6, 7] and host.tolist() == [32, 33, 34, 35]


# -- what is not shared ------------------------------------------------------------------------------------------------


def alone(group: Group | None = None, **more: Any) -> Rank:
    """A rank that does not share: no other one is asked for anything."""
    of("base").budget.append(1 << 30)
    hook()
    rank = Rank(group or Group(0, object()), DEVICE, **more)
    assert rank.host.shared is None and not rank.engine.places(rank.host).shared
    before = rank.rows([0, 1])
    rank.end(rank.store([8, 9], [0, 1]))
    rank.load([8, 9], [4, 5])
    np.testing.assert_array_equal(rank.rows([4, 5]), before)
    return rank


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"group": Group(0)}, "one rank has this KV"),
        ({"group": Group(0, object(), 17)}, "17 ranks have this KV, and at most 16"),
        ({"tree": {"attn_tp_group": Group(0)}}, "one rank has this KV"),
        ({"tree": {"attn_cp_group": Group(0, object())}}, "context parallelism"),
        ({"tree": {"pp_size": 2}}, "several pipeline stages"),
        ({"tree": {"tree_components": (ComponentType.FULL, ComponentType.SWA)}}, "more than full attention"),
        ({"layout": "layer_first"}, "keeps the layers of a page apart"),
    ],
)
def test_engines_without_a_common_pool(change: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    alone(**change)
    (said,) = [line.getMessage() for line in caplog.records if "not shared" in line.getMessage()]
    assert why in said


def test_pools_of_another_kind_are_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    of("base").budget.append(1 << 30)
    hook()
    assert Rank(Group(0, object()), DEVICE, shard=True).host.shared is None
    assert "host pool kv is not shared by 2 ranks: it is divided among ranks" in caplog.text


@pytest.mark.parametrize(
    ("where", "what", "why"),
    [("get_memory", "hicache_host_memory_mode", "buffer_only"), ("get_disagg", "disaggregation_mode", "decode")],
)
def test_modes_without_a_common_pool(where: str, what: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    setattr(getattr(of("context"), where)(), what, why)
    alone()
    assert "host pools are not shared: " in caplog.text and why in caplog.text


def test_a_pool_that_is_none_of_hicaches(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang makes such pools outside of the tree, on ranks that it does not ask for acknowledgements together."""
    of("base").budget.append(1 << 30)
    hook()
    made = alone(Group(0)).host
    assert type(of("mla").MLATokenToKVPoolHost(made.layout, made._transfer_device, made.device_kv_buffers)) is type(
        made
    )
    assert "is not shared by" not in caplog.text


class Alike:
    """A second rank that answers as the first one did, or says no."""

    def __init__(self, agrees: int = 1) -> None:
        self.agrees, self.sent = agrees, list[Any]()

    def send(self, value: Any) -> None:
        self.sent.append(value)

    def poll(self, timeout: float) -> bool:
        return True

    def recv(self) -> Any:
        return self.agrees if isinstance(self.sent[-1], int) else self.sent[-1]


def test_ranks_that_cannot_map_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    """As of another machine: all ranks then keep pools of their own."""
    pipe = Alike(agrees=0)
    alone(Group(0, pipe))
    (told,) = [bytes(sent) for sent in pipe.sent if isinstance(sent, list)]
    name, generation = struct.unpack("<8sQ", told)
    assert generation and not os.path.exists(f"/dev/shm/kvswap.sglang-{name.hex()}")


def test_memory_that_is_short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KVSWAP_RESERVE", str(1 << 60))
    pipe = Alike(agrees=0)
    alone(Group(0, pipe))
    assert "host pool kv is not shared by 2 ranks: " in caplog.text and "KVSWAP_RESERVE" in caplog.text
    (told,) = [bytes(sent) for sent in pipe.sent if isinstance(sent, list)]
    assert struct.unpack("<8sQ", told)[1] == 0, "the other rank looks for nothing"


def test_the_second_rank_maps_what_the_first_has_made() -> None:
    number = os.urandom(8)
    slot = PAGE * LAYERS * WIDTH * 2

    class Told(Alike):
        def recv(self) -> Any:
            return list(struct.pack("<8sQ", number, generation)) if isinstance(self.sent[-1], list) else 0

    with SharedPool(f"sglang-{number.hex()}", HOST_PAGES, slot, device=DEVICE) as first:
        pipe, generation = Told(), first.generation
        alone(Group(1, pipe))
        assert pipe.sent[1] == 1, "it could"
    pipe = Told()
    alone(Group(1, pipe))
    assert pipe.sent[1] == 0, "there is none"


def test_ranks_that_do_not_meet_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is that of all ranks already, so that no rank can go on with a pool of its own."""
    hook()
    monkeypatch.setattr(sys.modules["kvswap.sglang._shared"], "_JOIN_TIMEOUT", 0.01)
    match = r"KVSWAP_SGLANG_SHARE: host pool kv cannot be shared by 2 ranks: .*Unset KVSWAP_SGLANG_SHARE"
    with pytest.raises(ValueError, match=match):
        Rank(Group(0, Alike()), DEVICE)


def test_hooks_that_are_not_applied(caplog: pytest.LogCaptureFixture) -> None:
    of("hooks").HookRegistry.broken.add(f"{COPIES['controller']}.HiCacheController.move_indices")
    alone()
    assert "host pools are not shared: SGLang did not apply all of kvswap's hooks" in caplog.text


@pytest.mark.parametrize(
    ("switches", "why"),
    [
        ({"KVSWAP_SGLANG_COPIES": "0"}, "KVSWAP_SGLANG_SHARE needs KVSWAP_SGLANG_COPIES=1"),
        ({"KVSWAP_SGLANG_CODEC": "exact"}, "KVSWAP_SGLANG_SHARE does not go with KVSWAP_SGLANG_CODEC"),
    ],
)
def test_settings_that_are_wrong(
    switches: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    hook()
    assert why in caplog.text and OURS[-1] not in sys.modules


def test_another_sglang(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of("base").HostKVCache, "clear", lambda self, now: None)
    hook()
    assert "KVSWAP_SGLANG_SHARE is set, but this SGLang is not known: its HostKVCache.clear takes" in caplog.text


def test_removal() -> None:
    hook()
    assert of("mla").MLATokenToKVPoolHost is sys.modules[OURS[-1]].SharedMLATokenToKVPoolHost
    assert len(_plugin.unregister()) == 5
    assert of("mla").MLATokenToKVPoolHost is stand_in.MLATokenToKVPoolHost
