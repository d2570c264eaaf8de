"""The race checker: every race that is planted is reported, with both parties and where they come from; what is ordered
is not. Streams are held up by gates, so that nothing has ended when the other side comes."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Gate, bindings, run_python

import kvswap
from kvswap import testing
from kvswap.testing import Race, RaceFound, RaceParty
from kvswap.trtllm import Block, KVCacheBlockPool, KVCacheTransferManager

BLOCKS = 8
SHAPE: dict[str, Any] = {
    "num_layers": 3,
    "kv_factor": 2,
    "num_kv_heads": 2,
    "tokens_per_block": 4,
    "size_per_head": 8,
    "dtype": "fp16",
}
NBYTES = 3 * 2 * 2 * 4 * 8 * 2
LAYER = NBYTES // 3


class Engine:
    """An engine with one pool and a compute stream, which says what its kernels do."""

    def __init__(self, device: kvswap.Device) -> None:
        self.device = device
        self.gpu, self.cpu = Buffer(device, BLOCKS * NBYTES, "gpu"), Buffer(device, BLOCKS * NBYTES, "cpu")
        pool = KVCacheBlockPool(self.gpu.ptr, self.cpu.ptr, BLOCKS, BLOCKS, **SHAPE)
        self.manager = KVCacheTransferManager([pool], device=device)
        self.compute, self.other = kvswap.Stream(device), kvswap.Stream(device)

    def kernel(self, block: int, write: bool, stream: Any = None, **part: int) -> None:
        stream = self.compute if stream is None else stream
        testing.note_access(stream, self.manager.primary_pools[0], [block], write, **part)

    def raw(self, gpu_id: int, cpu_id: int, direction: int, stream: Any) -> kvswap.Transfer:
        """A swap behind the manager's back."""
        return kvswap.swap_cache_per_layer_async(
            self.gpu.ptr, self.cpu.ptr, NBYTES, BLOCKS, BLOCKS, [gpu_id], [cpu_id], direction,
            stream=stream, device=self.device,
        )  # fmt: skip


@pytest.fixture
def engine(device: kvswap.Device) -> Engine:
    return Engine(device)


def the_race(checker: testing.RaceChecker, pool: str, slot: int) -> Race:
    """The only one, at that block, with both parties known."""
    races = checker.races
    assert len(races) == 1, [str(race) for race in races]
    race = races[0]
    assert (race.pool, race.slot) == (pool, slot)
    for party in (race.first, race.second):
        assert "test_racechecker.py" in party.where, party
        assert "stream" in party.stream
        if party.transfer:
            assert party.lane >= 0 and party.sequence > 0 and " by " in party.what
        assert party.where in str(race)
    assert pool in str(race) and str(slot) in str(race)
    return race


def parties(race: Race) -> list[tuple[bool, int]]:
    return [(party.write, party.transfer) for party in (race.first, race.second)]


# -- races ------------------------------------------------------------------------------------------------------------


def test_no_sync_with_compute_before_a_store(engine: Engine) -> None:
    with testing.race_checker(raise_at_exit=False) as checker, Gate(engine.device) as gate:
        gate.hold(engine.compute)
        engine.kernel(3, True)
        store = engine.manager.offload(3, 5)
        assert parties(the_race(checker, "primary 0", 3)) == [(True, 0), (False, store.number)]
    with testing.race_checker(), Gate(engine.device) as gate:
        gate.hold(engine.compute)
        engine.kernel(3, True)
        engine.manager.sync_with_compute(engine.compute)
        engine.manager.offload(3, 5)


def test_no_sync_with_compute_before_a_load(engine: Engine) -> None:
    """A kernel may still read the block that is loaded into."""
    with testing.race_checker(raise_at_exit=False) as checker, Gate(engine.device) as gate:
        gate.hold(engine.compute)
        engine.kernel(3, False)
        load = engine.manager.onboard(5, 3)
        assert parties(the_race(checker, "primary 0", 3)) == [(False, 0), (True, load.number)]
    with testing.race_checker(), Gate(engine.device) as gate:
        gate.hold(engine.compute)
        engine.kernel(3, False)
        engine.manager.sync_with_compute(engine.compute)
        engine.manager.onboard(5, 3)


def test_no_sync_transfers_after_a_load(engine: Engine) -> None:
    with testing.race_checker(raise_at_exit=False) as checker, Gate(engine.device) as gate:
        gate.hold(engine.manager.onboard_stream)
        load = engine.manager.onboard(5, 1)
        engine.kernel(1, False)
        assert parties(the_race(checker, "primary 0", 1)) == [(True, load.number), (False, 0)]
    with testing.race_checker(), Gate(engine.device) as gate:
        gate.hold(engine.manager.onboard_stream)
        engine.manager.onboard(5, 1)
        engine.manager.sync_transfers(engine.compute)
        engine.kernel(1, False)
        engine.kernel(1, True)


def test_a_block_that_is_used_again_too_early(engine: Engine) -> None:
    """The store still reads it: waiting on the stream or on the host makes it right."""
    with testing.race_checker(raise_at_exit=False) as checker, Gate(engine.device) as gate:
        gate.hold(engine.manager.offload_stream)
        store = engine.manager.offload(3, 5)
        engine.kernel(3, True)
        assert parties(the_race(checker, "primary 0", 3)) == [(False, store.number), (True, 0)]
    with testing.race_checker(), Gate(engine.device) as gate:
        gate.hold(engine.manager.offload_stream)
        store = engine.manager.offload(3, 5)
        store.make_wait(engine.compute)
        engine.kernel(3, True)
    with testing.race_checker():
        engine.manager.offload(2, 5).wait(PATIENCE)
        engine.kernel(2, True)


def test_two_stores_to_one_slot_behind_the_managers_back(engine: Engine) -> None:
    with testing.race_checker(raise_at_exit=False) as checker, Gate(engine.device) as gate:
        gate.hold(engine.compute)
        first, second = engine.raw(1, 5, 0, engine.compute), engine.raw(2, 5, 0, engine.other)
        race = the_race(checker, "secondary 0", 5)
        assert parties(race) == [(True, first.number), (True, second.number)]
        assert race.first.lane != race.second.lane
    with testing.race_checker(), Gate(engine.device) as gate:
        gate.hold(engine.manager.offload_stream)
        engine.manager.offload(1, 5)
        engine.manager.offload(2, 5)


def test_a_copy_of_a_block_that_is_being_loaded_behind_the_managers_back(engine: Engine) -> None:
    with testing.race_checker(raise_at_exit=False) as checker, Gate(engine.device) as gate:
        gate.hold(engine.manager.onboard_stream)
        load = engine.manager.onboard(5, 1)
        copy = kvswap.swap_blocks_batch(
            [engine.gpu.ptr + NBYTES], [engine.gpu.ptr + 2 * NBYTES], 64, stream=engine.other, device=engine.device
        )
        assert parties(the_race(checker, "primary 0", 1)) == [(True, load.number), (False, copy.number)]
    with testing.race_checker(), Gate(engine.device) as gate:
        gate.hold(engine.manager.onboard_stream)
        engine.manager.onboard(5, 1)
        engine.manager.offload(Block(1), Block(2), 2)
        engine.manager.onboard(Block(2), 3, 2)


def test_two_kernels_on_two_streams(engine: Engine) -> None:
    with testing.race_checker(raise_at_exit=False) as checker:
        engine.kernel(1, True)
        engine.kernel(1, False, engine.other)
        race = the_race(checker, "primary 0", 1)
        assert parties(race) == [(True, 0), (False, 0)] and race.first.stream != race.second.stream
    with testing.race_checker():
        engine.kernel(1, True)
        event = kvswap.Event(engine.device)
        event.record(engine.compute)
        event.wait(engine.other)
        engine.kernel(1, False, engine.other)
        engine.kernel(2, True)
        engine.kernel(3, False, engine.other)


def test_readers_do_not_race(engine: Engine) -> None:
    with testing.race_checker(), Gate(engine.device) as gate:
        gate.hold(engine.manager.offload_stream)
        engine.manager.offload(3, 5)
        engine.kernel(3, False)
        engine.raw(3, 6, 0, engine.other)


def test_bytes_that_do_not_meet_do_not_race(engine: Engine) -> None:
    with testing.race_checker():
        engine.kernel(3, True, offset=0, nbytes=10)
        engine.kernel(3, True, engine.other, offset=10, nbytes=10)
        engine.kernel(3, True, engine.other, offset=20)
    with testing.race_checker(raise_at_exit=False) as checker:
        engine.kernel(4, True, offset=0, nbytes=11)
        engine.kernel(4, True, engine.other, offset=10, nbytes=10)
        the_race(checker, "primary 0", 4)


def test_layer_by_layer(engine: Engine) -> None:
    """A kernel of layer 1 may run once that layer is there; one of layer 2 may not yet."""
    with testing.race_checker(raise_at_exit=False) as checker, Gate(engine.device) as gate:
        gate.hold(engine.manager.onboard_stream)
        load = engine.manager.onboard(5, 1, layer_events=True)
        for layer in (0, 1):
            load.make_wait_layer(layer, engine.compute)
            engine.kernel(1, False, offset=layer * LAYER, nbytes=LAYER)
        engine.kernel(1, False, offset=0, nbytes=2 * LAYER)
        assert checker.races == []
        engine.kernel(1, False, offset=2 * LAYER, nbytes=LAYER)
        assert parties(the_race(checker, "primary 0", 1)) == [(True, load.number), (False, 0)]


def test_a_store_layer_by_layer(engine: Engine) -> None:
    """Each layer's copies come after that layer's kernel; without the last event that layer is a race."""
    events = [kvswap.Event(engine.device) for _ in range(3)]
    for complete in (True, False):
        with testing.race_checker(raise_at_exit=False) as checker, Gate(engine.device) as gate:
            gate.hold(engine.compute)
            for layer in range(3):
                engine.kernel(3, True, offset=layer * LAYER, nbytes=LAYER)
                events[layer].record(engine.compute)
            engine.manager.offload(3, 5, after_layers=events if complete else [*events[:2], None])
            if complete:
                assert checker.races == []
            else:
                the_race(checker, "primary 0", 3)


def test_order_that_was_made_elsewhere(engine: Engine) -> None:
    """Told by note_order: between streams, and on the host."""
    event = kvswap.Event(engine.device)
    with testing.race_checker():
        engine.kernel(1, True)
        testing.note_order(engine.compute, engine.other)
        engine.kernel(1, True, engine.other)
        event.record(engine.other)
        testing.note_order(event, engine.compute)
        engine.kernel(1, True)
        testing.note_order(engine.compute, None)
        engine.kernel(1, True, engine.other)
    with testing.race_checker(), Gate(engine.device) as gate:
        gate.hold(engine.manager.offload_stream)
        store = engine.manager.offload(3, 5)
        testing.note_order(store, engine.other)
        engine.kernel(3, True, engine.other)
    with testing.race_checker(raise_at_exit=False) as checker:
        testing.note_order(engine.compute, engine.other)
        engine.kernel(4, True)
        engine.kernel(4, True, engine.other)  # what was queued after the order was told of is not in it
        the_race(checker, "primary 0", 4)


@pytest.mark.parametrize("kind", ["raw", "war", "waw"])
def test_a_wait_of_the_librarys_that_is_missing(engine: Engine, kind: str) -> None:
    manager = engine.manager
    with testing.race_checker(raise_at_exit=False) as checker, Gate(engine.device) as gate:
        gate.hold(manager.offload_stream)
        with testing.fault(engine.device, "hazard", "skip", operation=kind):
            if kind == "raw":
                first, second = manager.offload(1, 5), manager.onboard(5, 2)
            elif kind == "war":
                first, second = manager.offload(1, 5), manager.onboard(6, 1)
            else:
                first, second = manager.offload(1, Block(4)), manager.onboard(6, 4)
        pool, slot = {"raw": ("secondary 0", 5), "war": ("primary 0", 1), "waw": ("primary 0", 4)}[kind]
        race = the_race(checker, pool, slot)
        assert parties(race) == [(kind != "war", first.number), (kind != "raw", second.number)]


def test_deterministic_devices_and_batches() -> None:
    """The legal twin of a whole step, and the same without its first line."""
    for seed in range(1, 11):
        for sync in (True, False):
            engine = Engine(testing.deterministic_device(seed))
            with testing.race_checker(raise_at_exit=False) as checker:
                for block in range(4):
                    engine.kernel(block, True)
                if sync:
                    engine.manager.sync_with_compute(engine.compute)
                engine.manager.offload(np.arange(4), np.arange(4))
                engine.manager.onboard([2, 3], [6, 7])
                engine.manager.sync_transfers(engine.compute)
                for block in (6, 7, 0):
                    engine.kernel(block, block == 0)
            assert [(race.pool, race.slot) for race in checker.races] == (
                [] if sync else [("primary 0", slot) for slot in range(4)]
            )


# -- what only kvswap saw ---------------------------------------------------------------------------------------------


def by_the_next_call(engine: Engine) -> None:
    """The lane finds out what of it ended."""
    engine.raw(6, 6, 0, engine.compute)


def by_an_event_of_a_layer(engine: Engine) -> None:
    """An event that a layer is to start after is asked whether it can be waited for."""
    event = kvswap.Event(engine.device)
    event.record(engine.compute)
    time.sleep(0.05)
    engine.manager.offload(6, 7, after_layers=[event, None, None])


def by_a_synchronize_that_timed_out(engine: Engine) -> None:
    """Its thread goes on after the caller's time was up."""
    held, threads = kvswap.Stream(engine.device), len(os.listdir("/proc/self/task"))
    with Gate(engine.device) as gate:
        gate.hold(held)
        with pytest.raises(TimeoutError):
            engine.device.synchronize(0.01)
        gate.open()
        end = time.monotonic() + PATIENCE
        while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < end:
            time.sleep(0.01)
        engine.kernel(3, True, engine.other)  # before the gate's own end, which the caller does see


def by_the_numbers_of_a_transfer(engine: Engine) -> None:
    """What a transfer was submitted with says nothing of its end."""
    later = engine.raw(6, 6, 0, engine.compute)
    time.sleep(0.05)
    assert (later.nbytes, later.num_blocks, later.num_layers, later.path) and later.number > 0


def by_giving_memory_back(engine: Engine) -> None:
    """Dropped memory is freed once the device has ended what it had."""
    memory = engine.device.alloc(4096)
    kvswap.swap_blocks_batch([memory.ptr], [memory.ptr + 2048], 64, stream=engine.compute, device=engine.device)
    del memory
    time.sleep(0.2)


def by_a_lane_for_another_stream(engine: Engine) -> None:
    """A lane on whose streams a refused call left something is looked at before another stream may have it."""
    with testing.fault(engine.device, "call", "fail", operation="event_record"), pytest.raises(kvswap.Error):
        engine.raw(6, 6, 0, engine.compute)
    time.sleep(0.05)
    engine.raw(7, 7, 0, kvswap.Stream(engine.device))


LOOKS = (
    by_the_next_call,
    by_an_event_of_a_layer,
    by_a_synchronize_that_timed_out,
    by_the_numbers_of_a_transfer,
    by_giving_memory_back,
    by_a_lane_for_another_stream,
)


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
def test_what_kvswap_finds_to_be_over_the_caller_has_not_seen(engine: Engine, look: Callable[[Engine], None]) -> None:
    """The store has ended and kvswap knows, the caller does not: that no race happened was luck."""
    with testing.race_checker(raise_at_exit=False) as checker:
        store = engine.raw(3, 5, 0, engine.compute)
        time.sleep(0.05)
        look(engine)
        engine.kernel(3, True, engine.other)
        assert parties(checker.races[0]) == [(False, store.number), (True, 0)], checker.races
        assert {(race.pool, race.slot) for race in checker.races} == {("primary 0", 3)}


# -- the tool ---------------------------------------------------------------------------------------------------------


def race(engine: Engine, block: int = 1) -> None:
    engine.kernel(block, True)
    engine.kernel(block, True, engine.other)


def test_off_nothing_is_found(engine: Engine) -> None:
    found = bindings.racecheck_found()
    race(engine)
    assert bindings.racecheck_found() == found
    with testing.race_checker() as checker:
        pass
    assert checker.races == []


def test_what_was_before_is_unknown(engine: Engine) -> None:
    engine.kernel(1, True)
    with testing.race_checker():
        engine.kernel(1, True, engine.other)


def test_at_exit_it_raises(engine: Engine) -> None:
    with pytest.raises(RaceFound, match=r"1 found:\n.*primary 0") as caught, testing.race_checker():
        race(engine)
    assert [found.slot for found in caught.value.races] == [1]
    with pytest.raises(RaceFound, match=r"(?s)12 found:.*and 2 more"), testing.race_checker():
        for block in range(6):
            race(Engine(engine.device), block)
            race(Engine(engine.device), block + 1)


def test_an_error_of_the_block_comes_first(engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError), testing.race_checker() as checker:
        race(engine)
        raise ZeroDivisionError
    assert len(checker.races) == 1
    with testing.race_checker():  # it is off again, and nothing is left
        pass


def test_races_may_be_looked_at_again_and_again(engine: Engine) -> None:
    with testing.race_checker(raise_at_exit=False) as checker:
        assert checker.races == []
        race(engine, 1)
        assert [found.slot for found in checker.races] == [1]
        race(engine, 2)
        assert [found.slot for found in checker.races] == [1, 2]
        assert checker.races == checker.races
        race(engine, 3)
    assert [found.slot for found in checker.races] == [1, 2, 3]


def test_checkers_nest(engine: Engine) -> None:
    """The innermost gets what is found while it is open."""
    with testing.race_checker(raise_at_exit=False) as outer:
        race(engine, 1)
        with testing.race_checker(raise_at_exit=False) as inner:
            race(engine, 2)
        race(engine, 3)
    assert [found.slot for found in outer.races] == [1, 3]
    assert [found.slot for found in inner.races] == [2]


def test_a_race_reads_well() -> None:
    first = RaceParty(True, 12, 3, 7, "D2H by dma", "cuda:0 stream 0x55", "engine.py:12 in step")
    second = RaceParty(False, 0, 0, 0, "access", "cuda:0 stream 0x66", "")
    found = Race("primary 0", 4, first, second)
    for text in ("primary 0", "4", "12", "D2H by dma", "0x55", "engine.py:12 in step", "0x66"):
        assert text in str(found)
    assert "12" in str(first) and "0x66" in str(second)
    assert found == Race("primary 0", 4, first, second) and len({found, found}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operation": "rar"}, "operation is 'rar'; it is one of raw, war, waw"),
        ({}, "operation is ''"),
        ({"operation": "raw", "every": 2}, "not for hazards"),
        ({"operation": "raw", "nth": 2}, "not for hazards"),
        ({"operation": "raw", "action": "fail"}, "action is 'fail'; a fault of kind 'hazard' is one of skip"),
        ({"operation": "raw", "kind": "copy", "action": "skip"}, "operation is 'raw'"),
    ],
)
def test_wrong_faults(device: kvswap.Device, arguments: dict[str, Any], message: str) -> None:
    kind, action = arguments.pop("kind", "hazard"), arguments.pop("action", "skip")
    with pytest.raises(ValueError, match=message), testing.fault(device, kind, action, **arguments):
        pass
    assert testing.parse_kind("hazard") is None


SCRIPT = """
    import numpy as np
    import kvswap
    from kvswap import testing

    device = kvswap.Device("host:0")
    memory = device.alloc(4096)
    pool = kvswap.Pool(device, memory, 4, 1024, name="the pool")
    first, second = kvswap.Stream(device), kvswap.Stream(device)
    testing.note_access(first, pool, [2], True)
    testing.note_access(second, pool, [2], {write})
    print("done")
"""


def test_by_the_environment() -> None:
    for write in (True, False):
        result = run_python(SCRIPT.format(write=write), KVSWAP_RACECHECK="1", KVSWAP_LOG="warning")
        assert result.returncode == 0 and result.stdout == "done\n", result.stderr
        assert "the pool" in result.stderr and "2" in result.stderr, result.stderr
        assert result.stderr.count("the pool") == 1
    without = run_python(SCRIPT.format(write=True), KVSWAP_RACECHECK="", KVSWAP_LOG="warning")
    assert (without.stdout, without.stderr) == ("done\n", "")
