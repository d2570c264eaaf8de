"""Coded pages of SGLang's host pools, under a stand-in: tests/integration/sglang_codec.py has the real SGLang."""

# mypy: disable-error-code="arg-type,misc,attr-defined,no-any-return,no-untyped-def"

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_coded_stand_in as stand_in
import sglang_stand_in as storage_stand_in
from sglang_coded_stand_in import NAMES, PAGE, Cache, ComponentType, DType, Match
from sglang_copies_stand_in import NAMES as COPIES
from sglang_copies_stand_in import DeviceIds, L2Transfer, ids, pages, put_in

import kvswap
from kvswap import testing
from kvswap.sglang import _plugin, register

DEVICE = "host:144"
OURS = ("kvswap.sglang._copies", "kvswap.sglang._memory", "kvswap.sglang._coded", "kvswap.sglang._coded_tree")


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    put_in(monkeypatch, stand_in.modules(DEVICE), OURS)
    monkeypatch.delenv(_plugin.MEMORY_SWITCH, raising=False)
    monkeypatch.setenv(_plugin.SWITCH, "1")
    monkeypatch.setenv(_plugin.CODEC_SWITCH, "exact")
    caplog.set_level(logging.INFO)
    yield
    for name in OURS:
        sys.modules.pop(name, None)


def of(name: str) -> Any:
    return sys.modules[(NAMES | COPIES)[name]]


def start(**more: Any) -> tuple[Cache, Any, Any]:
    """With kvswap's hooks: pools, SGLang's tree, and the engine of the copies."""
    register()
    of("hooks").HookRegistry.apply_hooks()
    cache, tree = Cache(DEVICE, **more), of("tree").UnifiedRadixCache()
    engine = of("controller").L2TransferEngine("direct")
    tree.init_hicache(None, (cache.host, engine))
    return cache, tree, engine


def write(cache: Cache, tree: Any, engine: Any, host: Any, tokens: Any) -> Any:
    completion = engine.submit_device_to_host([L2Transfer(cache.host, object(), host, tokens)])
    completion.finish_event.synchronize()
    assert completion.finish_event.query()
    tree._log_write_ack_metrics(completion)
    return completion


def load(cache: Cache, engine: Any, host: Any, tokens: Any, done: Any = None) -> None:
    call = [L2Transfer(cache.host, object(), host, tokens)]
    engine.submit_host_to_device(call, transfer_layer_id_max=3, on_layer_done=done).finish_event.synchronize()


@pytest.mark.parametrize("where", [lambda tokens: tokens, DeviceIds])
@pytest.mark.parametrize("mla", [False, True])
def test_pages_go_out_coded_and_come_back(mla: bool, where: Any) -> None:
    cache, tree, engine = start(mla=mla)
    host, source, target = pages([9, 2, 3, 15], PAGE), pages([1, 11, 0, 7], PAGE), pages([4, 5, 14, 12], PAGE)
    before = [[layer.copy() for layer in part] for part in cache.device]
    write(cache, tree, engine, host, where(source))
    written = np.flatnonzero((cache.host.kv_buffer.array != 0xEE).any(axis=1))
    assert written.tolist() == [2, 3, 9, 15], "a page is a slot"
    done: list[int] = []
    load(cache, engine, host, where(target), done.append)
    assert done == [0, 1, 2]
    for part, layers in enumerate(before):
        for layer, rows in enumerate(layers):
            rows[np.asarray(target)] = rows[np.asarray(source)]
            np.testing.assert_array_equal(cache.device[part][layer], rows)
    assert engine.keeps_ids(cache.host) and not cache.host.not_stored


def test_the_same_memory_holds_more_pages() -> None:
    cache, _, _ = start(host_nbytes=1 << 20)
    uncoded = (1 << 20) // (2 * 3 * stand_in.ROW * PAGE)
    assert cache.host.slot_nbytes == 2 * 3 * cache.host.coding.coded_nbytes
    assert cache.host.page_num * cache.host.slot_nbytes <= 1 << 20 and cache.host.page_num > 1.2 * uncoded


class Foreign:
    """A storage backend of SGLang's."""


# -- in files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> None:
    """FileStorage under the stand-in for its part of SGLang."""
    for name, module in storage_stand_in.modules().items():
        if name.endswith("hicache_storage"):
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["torch"], "arange", np.arange, raising=False)
    monkeypatch.setattr(sys.modules["torch"], "int64", np.int64, raising=False)
    monkeypatch.delitem(sys.modules, "kvswap.sglang._storage", raising=False)


def storage(folder: Path, cache: Cache, tree: Any) -> Any:
    from kvswap.sglang import FileStorage

    extra = {"interface_v1": 1, "directory": str(folder), "capacity": 64 << 20, "revision": "r"}
    made = FileStorage(storage_stand_in.config(extra_config=extra))
    made.register_mem_pool_host(cache.host)
    made.on_host_pools_registered()
    assert tree.attach_storage_backend(made) == (True, "") and tree.cache_controller.storage_backend is made
    return made


@pytest.mark.parametrize("mla", [False, True])
def test_files_keep_coded_pages_as_they_are(
    mla: bool, files: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A page that did not fit is not stored; the others come back to other slots, also in the next process."""
    cache, tree, engine = start(mla=mla)
    cache.spoil(PAGE * 2 + 1)
    made, slots, keys = storage(tmp_path, cache, tree), [3, 8, 5, 6], [f"{i:064x}" for i in range(4)]
    write(cache, tree, engine, pages(slots, PAGE).view(stand_in.Indices), pages([0, 1, 2, 3], PAGE))
    assert made.batch_set_v1(keys, pages(slots, PAGE)) == [True, True, False, True]
    assert [made.exists(key) for key in keys] == [True, True, False, True] and made.batch_exists(keys) == 2
    assert "failed" not in caplog.text, "the host pool has said it"
    coded = cache.host.kv_buffer.array[[3, 8]].copy()
    made.close()
    cache.host.kv_buffer.array[:] = 0xEE
    made = storage(tmp_path, cache, tree)
    assert made.batch_get_v1([keys[0], keys[1], keys[2]], pages([11, 12, 13], PAGE)) == [True, True, False]
    np.testing.assert_array_equal(cache.host.kv_buffer.array[[11, 12]], coded)
    load(cache, engine, pages([11, 12], PAGE), pages([10, 12], PAGE))
    for part in cache.device:
        for layer in part:
            np.testing.assert_array_equal(layer[40:44], layer[:4])
            np.testing.assert_array_equal(layer[48:52], layer[4:8])
    made.close()


def test_files_of_another_codec_are_others(files: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of a store has the codec, its version and the fields; what another codec wrote is not found."""
    keys, found = [f"{i:064x}" for i in range(2)], {}
    for codec in ("exact", "mxfp8"):
        monkeypatch.setenv(_plugin.CODEC_SWITCH, codec)
        cache, tree, engine = start()
        made = storage(tmp_path, cache, tree)
        assert made.batch_exists(keys) == 0
        write(cache, tree, engine, pages([3, 4], PAGE), pages([0, 1], PAGE))
        assert made.batch_set_v1(keys, pages([3, 4], PAGE)) == [True, True] and made.batch_exists(keys) == 2
        found[codec] = made._pages["kv"].layout
        assert found[codec].codings == (cache.host.page_coding,)
        assert cache.host.page_coding.coded_nbytes == cache.host.slot_nbytes
        made.close()
        _plugin.unregister()
        monkeypatch.setattr(_plugin, "_hooks", [])
    assert found["exact"].block_nbytes > found["mxfp8"].block_nbytes
    assert all(f'"bf16","{codec}",' in layout.text for codec, layout in found.items())
    assert len(list(tmp_path.glob("*/"))) == 2, "a folder each"


def test_nodes_do_not_take_coded_pages(files: None) -> None:
    from kvswap.sglang import FileStorage, RemoteStorage

    assert FileStorage.takes_coded_pages and not RemoteStorage.takes_coded_pages


# -- prefixes ---------------------------------------------------------------------------------------------------------


def hits(tree: Any, tokens: int) -> int:
    found = tree.match_prefix(Match(list(range(tokens))))
    return found.device_prefix_len + found.host_hit_length


@pytest.mark.parametrize("on_device", [0, 2 * PAGE])
def test_a_prefix_ends_before_a_page_that_did_not_fit(on_device: int, caplog: pytest.LogCaptureFixture) -> None:
    cache, tree, engine = start()
    cache.spoil(PAGE * 2 + 1)
    rows = pages([3, 8, 5, 6], PAGE).view(stand_in.Indices)
    completion = write(cache, tree, engine, rows, pages([0, 1, 2, 3], PAGE))
    assert tree.acks == [completion], "SGLang's own part of it is called"
    assert "1 of 4 pages did not fit" in caplog.text
    tree.on_device, tree.rows = on_device, rows
    assert cache.host.missing.nonzero()[0].tolist() == [5] and cache.host.not_stored == 1
    assert hits(tree, 100) == on_device + 2 * PAGE
    assert hits(tree, on_device + PAGE) == on_device + PAGE, "what ends before it is as it was"
    tree.rows = rows[2 * PAGE :]
    assert hits(tree, 100) == on_device, "nothing of the host"
    load(cache, engine, pages([3, 8, 6], PAGE), pages([10, 11, 12], PAGE))  # the others of the write-back are good
    for part in cache.device:
        for layer in part:
            assert np.array_equal(layer[40:52], layer[np.asarray(pages([0, 1, 3], PAGE))])
    cache.host.free(pages([6, 5], PAGE).view(stand_in.Indices))
    assert not cache.host.missing.any(), "a page that was given back is as good as any"
    write(cache, tree, engine, pages([5], PAGE), pages([0], PAGE))
    load(cache, engine, pages([5], PAGE), pages([9], PAGE))
    assert np.array_equal(cache.device[0][0][36:40], cache.device[0][0][:4])


def test_pages_that_did_not_fit_on_another_rank() -> None:
    cache, tree, engine = start()
    rows = pages([3, 8, 5], PAGE)
    tree.rows, tree.elsewhere = rows, [1]
    write(cache, tree, engine, rows, pages([0, 1, 2], PAGE))
    assert hits(tree, 100) == PAGE
    cache.host.clear()
    assert hits(tree, 100) == 3 * PAGE


def test_a_load_of_a_page_that_did_not_fit_fails() -> None:
    """SGLang's tree never asks for it."""
    cache, tree, engine = start()
    cache.spoil(1)
    write(cache, tree, engine, pages([3, 4], PAGE), pages([0, 1], PAGE))
    with pytest.raises(kvswap.Error, match="so the engine has to end"):
        load(cache, engine, pages([4, 3], PAGE), pages([8, 9], PAGE))


@pytest.mark.parametrize("direction", ["write-back", "load"])
def test_kernels_that_fail(direction: str) -> None:
    """That is no page that does not fit: it ends the engine, as where pages are not coded."""
    cache, tree, engine = start()
    write(cache, tree, engine, pages([3, 4], PAGE), pages([0, 1], PAGE))
    failing = testing.fault(kvswap.Device(DEVICE), "call", "fail", operation="launch", every=1)
    with failing, pytest.raises(kvswap.Error, match="so the engine has to end"):
        if direction == "write-back":
            write(cache, tree, engine, pages([5, 6], PAGE), pages([0, 1], PAGE))
        else:
            load(cache, engine, pages([3, 4], PAGE), pages([8, 9], PAGE))


def test_what_is_no_whole_page_is_refused() -> None:
    cache, tree, engine = start()
    with pytest.raises(NotImplementedError, match="a host pool of coded pages"):
        write(cache, tree, engine, pages([3, 4], PAGE), ids([1, 2, 3, 4, 40, 41, 42, 43]))


def test_a_codec_that_does_not_fit_the_pool() -> None:
    register()
    of("hooks").HookRegistry.apply_hooks()
    with pytest.raises(ValueError, match=r"KVSWAP_SGLANG_CODEC: host pool kv has pages of .* exact makes no smaller"):
        Cache(DEVICE, dtype=DType("torch.float8_e4m3fn", 1))
    with pytest.raises(ValueError, match="host pool swa has pages of"):
        Cache(DEVICE, dtype=DType("torch.float16", 2), pool_label="swa")
    with pytest.raises(ValueError, match="is divided among ranks"):
        Cache(DEVICE, mla=True, dcp_size=2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tree: setattr(tree, "at_start", Foreign()), "has the storage backend Foreign, and only"),
        (lambda tree: setattr(of("context").get_memory(), "hicache_host_memory_mode", "buffer_only"), "buffer_only"),
        (lambda tree: setattr(of("context").get_disagg(), "disaggregation_mode", "decode"), "retracted request"),
        (lambda tree: os.environ.update(KVSWAP_PATH="strided"), "KVSWAP_PATH=strided: use one of auto, burst, kernel"),
        (lambda tree: setattr(tree, "pp_size", 2), "one pipeline stage"),
        (lambda tree: setattr(tree, "tree_components", (ComponentType.FULL, ComponentType.SWA)), "full attention"),
    ],
)
def test_what_does_not_go_with_a_codec(change: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_PATH", "")  # as it was, after the test
    cache, _, engine = start()
    tree = of("tree").UnifiedRadixCache()
    change(tree)
    with pytest.raises(ValueError, match=f"KVSWAP_SGLANG_CODEC: host pool kv .*{why}.*Unset KVSWAP_SGLANG_CODEC"):
        tree.init_hicache(None, (cache.host, engine))


def test_other_pools_and_backends_are_refused() -> None:
    cache, tree, engine = start()
    done, why = tree.attach_storage_backend(Foreign())
    assert not done and "only kvswap.sglang.FileStorage takes coded pages, and this is Foreign" in why
    assert tree.cache_controller.storage_backend is None
    with pytest.raises(ValueError, match="is of a kind that is not coded"):
        of("tree").UnifiedRadixCache().init_hicache(None, (SimpleNamespace(), engine))
    for call in (cache.host.get_data_page, cache.host.load_to_device_per_layer):
        with pytest.raises(NotImplementedError, match="a host pool of coded pages"):
            call(0)
    with pytest.raises(NotImplementedError):
        _ = cache.host.k_buffer


def test_hooks_that_are_not_applied(caplog: pytest.LogCaptureFixture) -> None:
    registry = of("hooks").HookRegistry
    registry.broken.add(f"{NAMES['tree']}.UnifiedRadixCache.match_prefix")
    register()
    registry.apply_hooks()
    assert "KVSWAP_SGLANG_CODEC is set, but SGLang did not apply the hooks of" in caplog.text
    with pytest.raises(ValueError, match="SGLang did not apply all of kvswap's hooks"):
        Cache(DEVICE)


@pytest.mark.parametrize(
    ("codec", "copies", "why"),
    [("exct", "1", "is 'exct': it is one of exact"), ("exact", "0", "needs KVSWAP_SGLANG_COPIES=1")],
)
def test_settings_that_are_wrong(
    codec: str, copies: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(_plugin.SWITCH, copies)
    monkeypatch.setenv(_plugin.CODEC_SWITCH, codec)
    register()
    of("hooks").HookRegistry.apply_hooks()
    assert f"KVSWAP_SGLANG_CODEC {why}" in caplog.text
    assert of("mha").MHATokenToKVPoolHost is stand_in.MHATokenToKVPoolHost


def test_removal() -> None:
    start()
    assert of("mha").MHATokenToKVPoolHost is importlib.import_module("kvswap.sglang._coded").CodedMHATokenToKVPoolHost
    assert len(_plugin.unregister()) == 9
    assert of("mha").MHATokenToKVPoolHost is stand_in.MHATokenToKVPoolHost
    assert of("mla").MLATokenToKVPoolHost is stand_in.MLATokenToKVPoolHost


def test_an_sglang_that_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    del of("tree").UnifiedRadixCache._log_write_ack_metrics
    register()
    of("hooks").HookRegistry.apply_hooks()
    assert "KVSWAP_SGLANG_CODEC is set, but this SGLang is not known" in caplog.text
    assert of("mha").MHATokenToKVPoolHost is stand_in.MHATokenToKVPoolHost
