"""kvswap's copies in SGLang's HiCache, under a stand-in: tests/integration/sglang_copies.py has the real SGLang."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return,no-untyped-def"

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_copies_stand_in as stand_in
from conftest import Gate
from sglang_copies_stand_in import (
    NAMES,
    DeviceIds,
    L2Transfer,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    OtherHostPool,
    ids,
    pages,
)

import kvswap
from kvswap import testing
from kvswap.sglang import _places, _plugin

LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
OURS = ("kvswap.sglang._copies", "kvswap.sglang._memory")


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(_plugin, "_hooks", [])
    yield
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.fixture
def device() -> kvswap.Device:
    return kvswap.Device(stand_in.DEVICE)


def of(name: str) -> Any:
    return sys.modules[NAMES[name]]


def engine(io_backend: str = "direct") -> Any:
    return importlib.import_module("kvswap.sglang._copies").CopyEngine(io_backend)


def transfer(pool: Any, host: Any, device: Any, **more: Any) -> L2Transfer:
    return L2Transfer(pool, more.pop("device_pool", object()), host, device, **more)


def store(made: Any, *transfers: L2Transfer) -> Any:
    return made.submit_device_to_host(list(transfers))


def load(made: Any, *transfers: L2Transfer, layers: int = 3, **more: Any) -> Any:
    return made.submit_host_to_device(list(transfers), transfer_layer_id_max=layers, **more)


def submitted(device: kvswap.Device) -> int:
    return device.stats()["submitted"]


def pool_of(kind: str, layout: str, **more: Any) -> Any:
    return (MLATokenToKVPoolHost if kind == "mla" else MHATokenToKVPoolHost)(layout=layout, **more)


def is_copied(pool: Any, host: Any, device: Any, layers: range) -> bool:
    """Whether these tokens have the same bytes on both sides."""
    return all(
        np.array_equal(pool.host_rows(part, layer, host), pool.device[part][layer][np.asarray(device)])
        for part in range(len(pool.device))
        for layer in layers
    )


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_go_out_and_come_back(kind: str, layout: str, page: int, device: kvswap.Device) -> None:
    pool, made = pool_of(kind, layout, page=page), engine()
    _, before = pool.snapshot()
    count = submitted(device)
    host, source, target = pages([9, 2, 3, 15], page), pages([1, 30, 0, 7], page), pages([4, 5, 31, 20], page)
    completion = store(made, transfer(pool, host, source))
    completion.finish_event.synchronize()
    assert completion.finish_event.query() and completion.start_event.elapsed_time(completion.finish_event) >= 0
    assert is_copied(pool, host, source, range(3))
    done: list[int] = []
    load(made, transfer(pool, host, target), on_layer_done=done.append).finish_event.synchronize()
    assert done == [0, 1, 2]
    assert submitted(device) - count == 2, "one transfer each"
    for part, layers in enumerate(before):
        for layer, rows in enumerate(layers):
            rows[np.asarray(target)] = rows[np.asarray(source)]
            np.testing.assert_array_equal(pool.device[part][layer], rows)  # and nothing else was touched
    assert pool.calls == [] and made.log == ["lease", "recorded", "release"] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_that_is_left_out_is_noticed(layout: str, device: kvswap.Device) -> None:
    pool, made = pool_of("mha", layout), engine()
    host, source = pages([9, 2, 3], 4), pages([1, 30, 0], 4)
    with testing.fault(device, "copy", "skip", nth=2):
        store(made, transfer(pool, host, source)).finish_event.synchronize()
    assert not is_copied(pool, host, source, range(3))


def arrivals(layout: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How many of nine layers had arrived, each time that it was looked at. The device's work runs step by step, in an
    order that a seed decides."""
    device = testing.deterministic_device(seed)
    device.set_defaults(path="dma")
    for name, module in stand_in.modules(device).items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(OURS[0], None)
    pool, made = pool_of("mha", layout, layers=9, device=device), engine()
    host, target = pages([9, 2, 3, 11, 12], 4), pages([1, 30, 0, 7, 8], 4)
    events = [of("transfer").device_module.Event() for _ in range(9)]
    seen, arrived = set[int](), 0
    with Gate(device) as gate:
        gate.hold(made.host_to_device_stream)
        call = transfer(pool, host, target)
        completion = load(made, call, layers=9, on_layer_done=lambda layer: events[layer].record())
        gate.open()
        while arrived < 9:
            testing.step(device)
            while arrived < 9 and events[arrived].query():
                arrived += 1
                assert is_copied(pool, host, target, range(arrived)), f"layer {arrived - 1} is not whole"
            seen.add(arrived)
    completion.finish_event.synchronize()
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_event_of_a_layer_comes_after_its_bytes(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(len(arrivals(layout, seed, monkeypatch)) for seed in range(1, 13)) > 2, "all arrived at once"


@pytest.mark.parametrize("direction", ["store", "load"])
def test_sglangs_fences_hold(direction: str, device: kvswap.Device) -> None:
    pool, made = pool_of("mha", "page_first"), engine()
    module = of("transfer").device_module
    forward = module.Stream()
    host, tokens = pages([9, 2], 4), pages([1, 30], 4)
    with Gate(device) as gate:
        gate.hold(forward)
        own = made.device_to_host_stream if direction == "store" else made.host_to_device_stream
        own.wait_stream(forward)
        call = transfer(pool, host, tokens)
        completion = store(made, call) if direction == "store" else load(made, call)
        later = module.Event()
        later.record(own)
        assert not completion.start_event.query() and not completion.finish_event.query() and not later.query()
        assert not is_copied(pool, host, tokens, range(3))
        gate.open()
        completion.finish_event.synchronize()
    assert is_copied(pool, host, tokens, range(3))


def test_a_start_event_is_waited_for(device: kvswap.Device) -> None:
    pool, made, module = pool_of("mla", "layer_first"), engine(), of("transfer").device_module
    producer, start = module.Stream(), module.Event()
    with Gate(device) as gate:
        gate.hold(producer)
        start.record(producer)
        completion = load(made, transfer(pool, pages([1], 4), pages([3], 4)), start_event=start)
        assert not completion.finish_event.query()
        gate.open()
        completion.finish_event.synchronize()
    assert is_copied(pool, pages([1], 4), pages([3], 4), range(3))


ENDS = r"a copy of SGLang's HiCache failed \(.*so the engine has to end"


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_is_refused_ends_the_engine(direction: str, device: kvswap.Device) -> None:
    pool, made = pool_of("mha", "layer_first"), engine()
    call, done = transfer(pool, pages([9, 2], 4), pages([1, 30], 4)), list[int]()
    with testing.fault(device, "copy", "fail", every=1), pytest.raises(kvswap.Error, match=ENDS):
        if direction == "store":
            store(made, call).finish_event.synchronize()
        else:
            load(made, call, on_layer_done=done.append).finish_event.synchronize()
    with pytest.raises(kvswap.Error, match=ENDS):  # and it stays so
        store(made, call)
    assert "recorded" not in made.log or done == [0, 1, 2]


class Failing:
    """A transfer that turns out to have failed when it has ended."""

    def __init__(self, own: Any) -> None:
        self.own = own

    @property
    def error(self) -> Exception | None:
        return kvswap.Error("block 1 is lost") if self.own.done() else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("ask", ["query", "synchronize", "submit"])
def test_a_copy_that_fails_later_ends_the_engine(
    direction: str, ask: str, device: kvswap.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, made, module = pool_of("mha", "layer_first"), engine(), of("transfer").device_module
    own, swap = sys.modules[OURS[0]]._C, kvswap.swap_cache_all_layers_async
    lost = SimpleNamespace(**vars(own) | {"swap_cache_all_layers_async": lambda *a, **o: Failing(swap(*a, **o))})
    monkeypatch.setattr(sys.modules[OURS[0]], "_C", lost)
    forward, call = module.Stream(), transfer(pool, pages([9, 2], 4), pages([1, 30], 4))
    with Gate(device) as gate:
        gate.hold(forward)
        (made.device_to_host_stream if direction == "store" else made.host_to_device_stream).wait_stream(forward)
        end = (store(made, call) if direction == "store" else load(made, call)).finish_event
        assert not end.query()
        gate.open()
        end.event.synchronize()
    for _ in range(2):
        with pytest.raises(kvswap.Error, match=f"{ENDS.replace('.*', '.*block 1 is lost.*')}"):
            if ask == "submit":
                store(made, call)
            else:
                getattr(end, ask)()


def test_loads_are_urgent_and_stores_are_not(device: kvswap.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, made, asked = pool_of("mha", "layer_first"), engine(), list[tuple[Any, Any]]()
    own, swap = sys.modules[OURS[0]]._C, kvswap.swap_cache_all_layers_async

    def noted(*args: Any, **options: Any) -> Any:
        asked.append((args[-1], options.get("priority")))
        return swap(*args, **options)

    monkeypatch.setattr(
        sys.modules[OURS[0]], "_C", SimpleNamespace(**vars(own) | {"swap_cache_all_layers_async": noted})
    )
    call = transfer(pool, pages([9, 2], 4), pages([1, 30], 4))
    store(made, call).finish_event.synchronize()
    load(made, call).finish_event.synchronize()
    assert asked == [("D2H", None), ("H2D", "high")]


def test_wrong_ids_are_refused(device: kvswap.Device) -> None:
    pool, made = pool_of("mha", "layer_first"), engine()
    before, _ = pool.snapshot()
    with pytest.raises(IndexError):
        store(made, transfer(pool, pages([1], 4), pages([32], 4)))
    with pytest.raises(ValueError, match="two blocks would be written to one destination"):
        store(made, transfer(pool, pages([1, 1], 4), pages([2, 3], 4)))
    np.testing.assert_array_equal(pool.kv_buffer.array, before)
    assert made.log == ["lease", "release"] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_that_are_no_pages(layout: str, device: kvswap.Device) -> None:
    """Where a block is a page they are SGLang's; where it is a token they are copied like any others."""
    pool, made = pool_of("mha", layout), engine()
    host, tokens = pages([1, 2], 4), ids([3, 4, 5, 6, 40, 41, 42, 43])
    store(made, transfer(pool, host, tokens)).finish_event.synchronize()
    load(made, transfer(pool, host, tokens)).finish_event.synchronize()
    if layout == "page_first":
        assert pool.calls == [] and is_copied(pool, host, tokens, range(3))
    else:
        assert [call[:2] for call in pool.calls] == [("store", None), ("load", 0), ("load", 1), ("load", 2)]


def test_pieces_of_pages() -> None:
    def by(*tokens: Any, of: int = 4) -> Any:
        return _places.blocks_of(ids(*tokens), of)

    assert by(range(8, 12), range(4)).tolist() == [2, 0]
    assert by(range(8, 11)) is None  # not whole
    assert by(range(9, 13)) is None  # not at a page's begin
    assert by([8, 9, 11, 10]) is None and by([8, 9, 10, 12]) is None
    assert by([5, 3], of=1).tolist() == [5, 3] and by([]).tolist() == []

    assert _places.device_blocks_of(ids(range(8, 12), range(4)), 4).tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert _places.device_blocks_of(ids(range(8, 11)), 4) is None
    assert _places.device_blocks_of(ids([5, 3]), 1).tolist() == [5, 3]


def test_orders_of_loads_are_kept_apart() -> None:
    """The same rows in the same order give the same arrays again. A bounded number of orders is kept."""
    places = _places.places_of(pool_of("mha", "page_first", layers=9), False)
    made = {rows: places.order(rows) for rows in [(0, 1, 2), (2, 1, 0), (1,), tuple(range(9))]}
    for rows, order in made.items():
        assert places.order(list(rows)) is order
        gpu, cpu, ends = places._order(rows)
        assert order[0].tolist() == gpu.tolist() and order[1].tolist() == cpu.tolist() and order[2] == ends
        assert sorted(order[0]) == sorted(places.gpu[list(rows)].ravel()) and len(ends) == len(rows)
    for first in range(9):
        for second in range(9):
            places.order((first, second))
    assert len(places.orders) <= 16


def test_what_kvswap_does_not_know_stays_with_sglang(device: kvswap.Device) -> None:
    other, made = OtherHostPool(2, 64, 4, "layer_first", stand_in.DEVICE), engine()
    count = submitted(device)
    store(made, transfer(other, pages([1], 4), pages([2], 4)))
    load(made, transfer(other, pages([1], 4), pages([2], 4)))
    assert "own store" in made.log and "own load" in made.log and submitted(device) == count
    assert not made.keeps_ids(other) and made.keeps_ids(pool_of("mha", "page_first"))


def test_several_pools_with_layers_of_their_own(device: kvswap.Device) -> None:
    full, window = pool_of("mha", "page_first_direct", layers=2), pool_of("mha", "layer_first", layers=1)
    other, made = OtherHostPool(2, 64, 4, "layer_first", stand_in.DEVICE), engine()
    host, tokens, done = pages([5, 1], 4), pages([2, 8], 4), list[int]()
    transfers = [
        transfer(full, host, tokens, layer_mapper={0: 0, 2: 1}.get),
        transfer(window, pages([3], 4), pages([9], 4), layer_mapper={1: 0}.get),
        transfer(other, host, tokens),
    ]
    count = submitted(device)
    store(made, *transfers).finish_event.synchronize()
    assert is_copied(full, host, tokens, range(2)) and is_copied(window, pages([3], 4), pages([9], 4), range(1))
    for pool in (full, window):
        for part in pool.device:
            for layer in part:
                layer[:] = 7
    load(made, *transfers, on_layer_done=done.append).finish_event.synchronize()
    assert is_copied(full, host, tokens, range(2)) and is_copied(window, pages([3], 4), pages([9], 4), range(1))
    assert submitted(device) - count == 4 and done == [0, 1, 2]
    assert [call[:2] for call in other.calls] == [("store", None), ("load", 0), ("load", 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_come_with_their_model(layout: str, device: kvswap.Device) -> None:
    """SGLang writes all layers back at once, and names a draft's layer in a transfer of its own for loads."""
    pool, made = pool_of("mha", layout, drafts=1), engine()
    host, tokens, target = pages([5, 1], 4), pages([2, 8], 4), pages([20, 9], 4)
    store(made, transfer(pool, host, tokens)).finish_event.synchronize()
    assert is_copied(pool, host, tokens, range(4))
    count = submitted(device)
    model = transfer(pool, host, target, layer_mapper=lambda layer: layer)
    load(made, model).finish_event.synchronize()
    assert is_copied(pool, host, target, range(3)) and not is_copied(pool, host, target, range(3, 4))
    draft = transfer(pool, host, target, layer_mapper={0: 3}.get, is_draft=True)
    load(made, model, draft).finish_event.synchronize()
    assert is_copied(pool, host, target, range(4)) and submitted(device) - count == 2


def test_layers_of_a_pipelines_stage(device: kvswap.Device) -> None:
    pool, made = pool_of("mla", "page_first", first=3), engine()
    host, tokens, done = pages([5, 1], 4), pages([2, 8], 4), list[int]()
    load(made, transfer(pool, host, tokens), layers=6, on_layer_done=done.append).finish_event.synchronize()
    assert is_copied(pool, host, tokens, range(3)) and done == [*range(6)]


def test_device_rows_with_gaps(device: kvswap.Device) -> None:
    for layout in LAYOUTS:
        pool, made = pool_of("mha", layout, gap=8), engine()
        host, tokens = pages([5, 1], 4), pages([2, 8], 4)
        store(made, transfer(pool, host, tokens)).finish_event.synchronize()
        assert is_copied(pool, host, tokens, range(3)) == (layout != "page_first_direct")
        assert bool(pool.calls) == (layout == "page_first_direct")


def test_ids_are_translated_by_sglang(device: kvswap.Device) -> None:
    pool, made = pool_of("mha", "layer_first"), engine()
    translating = SimpleNamespace(host_transfer_translate=lambda tokens: (np.asarray(tokens) + 8).view(type(tokens)))
    store(made, transfer(pool, pages([5], 4), pages([2], 4), device_pool=translating)).finish_event.synchronize()
    assert is_copied(pool, pages([5], 4), pages([4], 4), range(3))


def test_nothing_to_copy(device: kvswap.Device) -> None:
    pool, made, count, done = pool_of("mha", "page_first"), engine(), submitted(device), list[int]()
    store(made, transfer(pool, ids([]), ids([]))).finish_event.synchronize()
    load(made, transfer(pool, ids([]), ids([])), on_layer_done=done.append).finish_event.synchronize()
    assert submitted(device) == count and done == [0, 1, 2] and pool.calls == []


def test_a_full_lane_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = kvswap.Device("host:142")
    testing.set_lane_depth(device, 2)
    for name, module in stand_in.modules("host:142").items():
        monkeypatch.setitem(sys.modules, name, module)
    pool, made = pool_of("mha", "layer_first", device="host:142"), engine()
    with testing.fault(device, "call", "delay", operation="copy_direct", every=1, delay=0.01):
        ends = [store(made, transfer(pool, pages([i], 4), pages([i], 4))).finish_event for i in range(8)]
        for end in ends:
            end.synchronize()
    assert is_copied(pool, pages([*range(8)], 4), pages([*range(8)], 4), range(3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "page_head"}, "layout page_head"),
        ({"shared_allocation_domain": object()}, "shares with other pools"),
        ({"token_stride_size": 20}, "host memory of"),
        ({"layer_num": 4}, "host memory of"),
        ({"device_k_buffers": ()}, "device tensors of"),
        ({"_buffer_infos": [object()]}, "has no attribute"),
    ],
)
def test_a_pool_of_another_shape_stays_with_sglang(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool, made = pool_of("mha", "layer_first"), engine()
    for name, value in change.items():
        setattr(pool, name, value)
    with caplog.at_level(logging.WARNING, "kvswap"):
        assert not made.keeps_ids(pool) and not made.keeps_ids(pool)
    assert [*caplog.text.splitlines()][1:] == [] and "stays with SGLang's own copies" in caplog.text
    assert reason in caplog.text


def test_host_memory_that_was_allocated_anew(device: kvswap.Device) -> None:
    pool, made = pool_of("mha", "page_first"), engine()
    host, tokens = pages([5, 1], 4), pages([2, 8], 4)
    store(made, transfer(pool, host, tokens)).finish_event.synchronize()
    pool.kv_buffer = stand_in.Tensor(np.zeros_like(pool.kv_buffer.array))
    store(made, transfer(pool, host, tokens)).finish_event.synchronize()
    assert is_copied(pool, host, tokens, range(3))


def test_latents_that_are_divided_stay_with_sglang(caplog: pytest.LogCaptureFixture) -> None:
    made = engine()
    for name, value in (
        ("dcp_size", 2),
        ("_layer_shard_enabled", True),
        ("_buffer_index_by_layer", {0: 1, 1: 0, 2: 2}),
    ):
        pool = pool_of("mla", "page_first")
        setattr(pool, name, value)
        assert not made.keeps_ids(pool), name


# -- ids in device memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_in_device_memory(layout: str, device: kvswap.Device, caplog: pytest.LogCaptureFixture) -> None:
    """They are handed on as they are; without kernels, or with a kvswap that does not take them, SGLang copies."""
    pool, made, count = pool_of("mha", layout), engine(), submitted(device)
    host, tokens = pages([5, 1, 9], 4), DeviceIds(pages([2, 30, 7], 4))
    assert made.keeps_ids(pool)
    with caplog.at_level(logging.WARNING, "kvswap"):
        store(made, transfer(pool, host, tokens)).finish_event.synchronize()
        load(made, transfer(pool, pages([3, 4, 5], 4), tokens)).finish_event.synchronize()
    if made.keeps_ids(pool):
        assert submitted(device) - count == 2 and pool.calls == [] and not caplog.records
        other = pool_of("mha", layout, page=8)  # and of pages of another size
        store(made, transfer(other, pages([1], 8), DeviceIds(pages([4], 8)))).finish_event.synchronize()
        assert is_copied(other, pages([1], 8), pages([4], 8), range(3)) and other.calls == []
        assert is_copied(pool, pages([3, 4, 5], 4), tokens.values, range(3))
    else:
        assert "ids in device memory are not taken" in caplog.text and submitted(device) == count
        assert len(pool.calls) == 4


@pytest.mark.parametrize("tokens", [[8, 9, 11, 10], [9, 10, 11, 12], [8, 9, 10, 200], [-4, -3, -2, -1]])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_tokens_in_device_memory_that_are_no_page(tokens: list[int], direction: str, device: kvswap.Device) -> None:
    """The copy fails, and touches nothing of the device; the page beside it is copied."""
    pool, made = pool_of("mha", "layer_first"), engine()
    if not made.keeps_ids(pool) or not device.info["kernels"]:
        pytest.skip("no ids in device memory")
    host, mixed = pages([5, 6], 4), DeviceIds(ids(tokens, range(20, 24)))
    _, before = pool.snapshot()
    completion = store(made, transfer(pool, host, mixed)) if direction == "store" else None
    if completion is None:
        completion = load(made, transfer(pool, host, mixed))
    with pytest.raises(
        kvswap.Error, match=r"gpu_block_ids\[0\] begins with token -?\d+, read on the device: these are not"
    ):
        completion.finish_event.synchronize()
    assert is_copied(pool, host[4:], ids(range(20, 24)), range(3))
    for part, layers in enumerate(before):
        for layer, rows in enumerate(layers):
            if direction == "load":
                rows[20:24] = pool.device[part][layer][20:24]
            np.testing.assert_array_equal(pool.device[part][layer], rows)


@pytest.mark.parametrize(
    "error", [TypeError("not a list of integers"), kvswap.Error("path 'dma' needs ids in host memory")]
)
def test_without_ids_in_device_memory_the_copy_is_sglangs(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, made = pool_of("mha", "page_first"), engine()
    host, tokens = pages([5], 4), DeviceIds(pages([2], 4))

    def refuse(*given: Any, **options: Any) -> Any:
        raise error

    own = sys.modules[OURS[0]]._C
    monkeypatch.setattr(
        sys.modules[OURS[0]], "_C", SimpleNamespace(**vars(own) | {"swap_cache_all_layers_async": refuse})
    )
    with caplog.at_level(logging.WARNING, "kvswap"):
        store(made, transfer(pool, host, tokens))
        load(made, transfer(pool, host, tokens))
    assert "ids in device memory are not taken" in caplog.text and not made.keeps_ids(pool)
    assert [call[:2] for call in pool.calls] == [("store", None), ("load", 0), ("load", 1), ("load", 2)]
    assert {call[3].device.type for call in pool.calls} == {"cpu"}, "SGLang's ids are where it wants them"
    with pytest.raises(type(error)):  # with ids in host memory it is an error
        store(made, transfer(pool, host, pages([2], 4)))
    monkeypatch.setattr(sys.modules[OURS[0]], "_C", own)
    store(made, transfer(pool, host, pages([2], 4))).finish_event.synchronize()  # as SGLang moves them from now on
    assert is_copied(pool, host, pages([2], 4), range(3))


def test_pageable_memory_with_ids_in_device_memory_is_sglangs(device: kvswap.Device) -> None:
    pool, made, count = pool_of("mha", "page_first"), engine(), submitted(device)
    pool.pin_memory = False
    store(made, transfer(pool, pages([5], 4), DeviceIds(pages([2], 4))))
    assert submitted(device) == count and len(pool.calls) == 1


def test_host_ids_that_sglang_has_moved_are_its_own(device: kvswap.Device) -> None:
    pool, made = pool_of("mha", "page_first"), engine("kernel")
    pool.can_use_write_back_jit = True
    count = submitted(device)
    store(made, transfer(pool, DeviceIds(pages([5], 4)), DeviceIds(pages([2], 4))))
    assert submitted(device) == count and [call[0] for call in pool.calls] == ["store"]
