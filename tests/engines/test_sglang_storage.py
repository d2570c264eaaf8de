"""kvswap.sglang.FileStorage under a stand-in for SGLang: tests/integration/sglang_package.py has the real one."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang_stand_in as stand_in
from conftest import AT_ONCE, PATIENCE, run_python, until
from processes import Process
from sglang_stand_in import HostPool, MarkPool, PoolHitPolicy, PoolName, PoolTransfer, config

import kvswap
from kvswap import _shared_files, cli, testing

KV, LATENT, LAYERS, UNEVEN = [8192, 8192], [4608], [512] * 6, [4096, 100, 1]
CAPACITY = 64 << 20


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvswap.sglang._storage", raising=False)
    yield
    sys.modules.pop("kvswap.sglang._storage", None)


def keys_of(*numbers: int) -> list[str]:
    return [f"{number:064x}" for number in numbers]


def storage(folder: Path, pools: HostPool | dict[Any, HostPool], *, extra: Any = None, **changes: Any) -> Any:
    from kvswap.sglang import FileStorage

    given = {"backend_name": "kvswap", "module_path": "kvswap.sglang", "class_name": "FileStorage", "interface_v1": 1}
    given |= {"directory": str(folder / "kv"), "capacity": CAPACITY, "revision": "r", **(extra or {})}
    made = FileStorage(config(extra_config=given, **changes), {})
    pools = pools if isinstance(pools, dict) else {PoolName.KV: pools}
    made.register_mem_pool_host(pools[PoolName.KV])
    for name, pool in pools.items():
        made.register_mem_host_pool_v2(pool, name)
    made.on_host_pools_registered()
    return made


def store_of(made: Any, name: str = "kv") -> Any:
    return made._pages[name].store._store


def save(made: Any, pool: HostPool, numbers: list[int], pages: list[int]) -> list[bool]:
    return made.batch_set_v1(keys_of(*numbers), pool.tokens_of(pages))


def load(made: Any, pool: HostPool, numbers: list[int], pages: list[int]) -> list[bool]:
    return made.batch_get_v1(keys_of(*numbers), pool.tokens_of(pages))


@pytest.mark.parametrize("sizes", [KV, LATENT, LAYERS, UNEVEN], ids=["kv", "latent", "layers", "uneven"])
def test_pages_go_down_and_come_up(tmp_path: Path, sizes: list[int]) -> None:
    pool = HostPool(sizes)
    before = [pool.bytes_of(page) for page in range(16)]
    made = storage(tmp_path, pool)
    assert made.batch_exists(keys_of(1, 2, 3)) == 0
    assert save(made, pool, [1, 2, 3], [5, 0, 15]) == [True] * 3
    for piece in pool.pieces:
        piece[:] = 0xEE
    assert load(made, pool, [3, 1], [7, 8]) == [True] * 2
    assert (pool.bytes_of(7), pool.bytes_of(8)) == (before[15], before[5])
    others = [page for page in range(16) if page not in (7, 8)]
    assert all((piece[others] == 0xEE).all() for piece in pool.pieces)
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.batch_exists(keys_of(1))


def test_the_command_finds_the_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As docs/start/sglang.md says: in the directory of the extra config, while the engine runs and afterwards."""
    pool = HostPool(KV)
    made = storage(tmp_path, pool)
    save(made, pool, [1, 2, 3], [5, 0, 15])
    for _ in range(2):
        assert cli.main(["files", "stat", str(tmp_path / "kv")]) == 0
        assert "6 of" in capsys.readouterr().out  # pieces of three pages
        made.close()


@pytest.mark.parametrize("sizes", [KV, LAYERS], ids=["in place", "in parts"])
def test_pages_over_several_disks(tmp_path: Path, sizes: list[int]) -> None:
    pool = HostPool(sizes)
    before = [pool.bytes_of(page) for page in range(16)]
    disks = {"directory": [str(tmp_path / "one"), str(tmp_path / "two")]}
    made = storage(tmp_path, pool, extra=disks)
    assert save(made, pool, list(range(16)), list(range(16))) == [True] * 16
    reader = storage(tmp_path, pool, extra=disks)
    for each in (made, reader):
        assert load(each, pool, list(range(16)), list(reversed(range(16)))) == [True] * 16
        assert [pool.bytes_of(page) for page in range(16)] == before[::-1]
        each.close()
    assert all(list((tmp_path / name).rglob("segment-*.kvs")) for name in ("one", "two"))


def test_how_many_pages_from_the_first_one_on(tmp_path: Path) -> None:
    pool = HostPool(KV)
    made = storage(tmp_path, pool)
    save(made, pool, [1, 2, 4], [1, 2, 4])
    assert [made.batch_exists(keys_of(*numbers)) for numbers in ([1, 2, 3, 4], [3], [4, 1], [2], [])] == [2, 0, 2, 1, 0]
    assert made.exists(keys_of(4)[0]) and not made.exists(keys_of(3)[0])
    half = keys_of(1)[0].encode() + b".v"
    store_of(made).delete([half]).wait(PATIENCE)
    assert made.batch_exists(keys_of(1, 2)) == 0  # a page without V is no page
    assert load(made, pool, [1, 2], [1, 2]) == [False, True]
    made.close()


def test_each_page_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(KV)
    made = storage(tmp_path, pool)
    save(made, pool, [1, 2, 3], [1, 2, 3])
    assert load(made, pool, [1, 99, 3], [4, 5, 6]) == [True, False, True]
    assert (pool.bytes_of(4), pool.bytes_of(6)) == (pool.bytes_of(1), pool.bytes_of(3))
    with testing.file_fault(store_of(made), "write", "fail", nth=3, code=errno.ENOSPC):
        saved = save(made, pool, [11, 12, 13], [1, 2, 3])
    assert saved.count(False) == 1, saved
    assert [made.exists(key) for key in keys_of(11, 12, 13)] == saved
    with testing.file_fault(store_of(made), "read", "fail", every=1):
        assert load(made, pool, [1, 2], [8, 9]) == [False, False]
    assert load(made, pool, [1, 2], [8, 9]) == [False, False]  # what could not be read is no longer stored
    assert save(made, pool, [1, 2], [1, 2]) == load(made, pool, [1, 2], [8, 9]) == [True, True]
    assert "1 of 3 pages of kv failed" in caplog.text and "No space left" in caplog.text
    made.close()


def test_a_full_disk_stores_nothing_and_serves_what_there_is(tmp_path: Path) -> None:
    pool = HostPool(KV)
    made = storage(tmp_path, pool)
    save(made, pool, [1, 2], [1, 2])
    with testing.file_fault(store_of(made), "write", "fail", every=1, code=errno.ENOSPC):
        assert save(made, pool, [3, 4], [3, 4]) == [False, False]
    assert made.batch_exists(keys_of(1, 2, 3)) == 2
    assert load(made, pool, [1, 2], [5, 6]) == [True, True] and pool.bytes_of(5) == pool.bytes_of(1)
    assert save(made, pool, [3, 4], [3, 4]) == [True, True]
    made.close()


def test_a_damaged_page_is_not_served(tmp_path: Path) -> None:
    pool = HostPool(KV)
    made = storage(tmp_path, pool)
    save(made, pool, [1, 2], [1, 2])
    (segment,) = tmp_path.rglob("segment-*.kvs")
    content = bytearray(segment.read_bytes())
    content[content.index(pool.pieces[1][2].tobytes()) + 17] ^= 4  # V of page 2
    with segment.open("r+b") as file:
        file.write(content)
    assert load(made, pool, [1, 2], [5, 6]) == [True, False]
    assert made.batch_exists(keys_of(1, 2)) == 1
    assert save(made, pool, [2], [2]) == [True] and load(made, pool, [2], [6]) == [True]
    made.close()


def test_pages_survive_the_engine_and_belong_to_their_rank(tmp_path: Path) -> None:
    pool = HostPool(KV)
    for rank in (0, 1):
        made = storage(tmp_path, pool, tp_rank=rank, tp_size=2)
        assert made.batch_exists(keys_of(1)) == 0
        save(made, pool, [1], [rank])
        made.close()
    for rank in (0, 1):
        made = storage(tmp_path, pool, tp_rank=rank, tp_size=2)
        assert load(made, pool, [1], [9]) == [True] and pool.bytes_of(9) == pool.bytes_of(rank)
        made.close()
    others: list[dict[str, Any]] = [{"tp_size": 4}, {"pp_rank": 1, "pp_size": 2}, {"extra": {"revision": "b"}}]
    for changes in [*others, {"attn_cp_rank": 1, "attn_cp_size": 2}, {"extra": {"shared": False}, "dp_rank": 1}]:
        made = storage(tmp_path, pool, **{"tp_size": 2, **changes})
        assert made.batch_exists(keys_of(1)) == 0, changes
        made.close()
    for same in ({"dp_rank": 1}, {"model_name": "another served name"}):
        made = storage(tmp_path, pool, tp_size=2, **same)
        assert made.batch_exists(keys_of(1)) == 1
        made.close()
    made = storage(tmp_path, HostPool(KV, layout="page_first_direct"), tp_size=2)  # other bytes in a page
    assert made.batch_exists(keys_of(1)) == 0
    made.close()


def test_pages_whose_weights_are_not_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(KV)
    for _ in range(2):
        made = storage(tmp_path, pool, extra={"revision": None})
        assert (
            made.batch_exists(keys_of(1)) == 0 and save(made, pool, [1], [1]) == [True] and made.exists(keys_of(1)[0])
        )
        made.close()
        assert not list((tmp_path / "kv").rglob("segment-*")), "nothing finds them any more"
    assert caplog.text.count("its revision is not known: stored blocks are this process's own") == 2
    for found in (0, 1):
        made = storage(tmp_path, pool, extra={"revision": None, "unversioned": True})
        assert made.batch_exists(keys_of(1)) == found and save(made, pool, [1], [1]) == [True]
        made.close()
    other = storage(tmp_path, pool, extra={"revision": None, "unversioned": True}, model_name="another")
    assert other.batch_exists(keys_of(1)) == 0
    other.close()


class Counted:
    """A store, and how often it was refreshed."""

    def __init__(self, store: Any, refreshes: list[int]) -> None:
        self.store, self.refreshes = store, refreshes

    def refresh(self) -> None:
        self.refreshes.append(1)
        self.store.refresh()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("shared", [True, False])
def test_one_rank_writes_what_all_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    monkeypatch.setattr(_shared_files, "_READER_AGAIN_SECONDS", 0.0)
    pool, other = HostPool(LATENT), HostPool(LATENT, seed=2)
    same: dict[str, Any] = {"extra": {"shared": shared}, "is_mla_model": True, "tp_size": 2}
    reader = storage(tmp_path, other, tp_rank=1, **same)
    assert reader.batch_exists(keys_of(1)) == 0  # there is no store yet
    assert save(reader, other, [1], [1]) == load(reader, other, [1], [1]) == [False]
    writer = storage(tmp_path, pool, tp_rank=0, **same)
    for number in (1, 2):
        assert save(writer, pool, [number], [number]) == [True]
        until(lambda number=number: reader.batch_exists(keys_of(1, 2)) == number, "a page is not found")
    assert load(reader, other, [1, 2], [8, 9]) == [True, True]
    assert (other.bytes_of(8), other.bytes_of(9)) == (pool.bytes_of(1), pool.bytes_of(2))
    assert save(reader, other, [3], [3]) == [False] and reader.batch_exists(keys_of(3)) == 0
    folders = {path.parent for path in tmp_path.rglob("segment-*.kvs")}
    assert len(folders) == 1, "each rank has files of its own"
    reader.close()
    writer.close()


def test_a_reader_looks_again_when_the_files_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(LATENT)
    same: dict[str, Any] = {"extra": {"shared": False}, "is_mla_model": True, "tp_size": 2}
    writer = storage(tmp_path, pool, tp_rank=0, **same)
    save(writer, pool, [1], [1])
    reader = storage(tmp_path, pool, tp_rank=1, **same)
    files = store_of(reader)
    time.sleep(2 * _shared_files._CLOCK_SECONDS)
    reader.batch_exists(keys_of(77))
    refreshes: list[int] = []
    monkeypatch.setattr(reader._pages["kv"].store, "_store", Counted(files, refreshes))
    for _ in range(3):
        assert reader.batch_exists(keys_of(77)) == 0
    assert refreshes == [], "nothing has changed"
    save(writer, pool, [77], [3])
    until(lambda: reader.batch_exists(keys_of(77)) == 1, "a page is not found")
    assert refreshes
    reader.close()
    writer.close()


WRITER = """
import sglang_stand_in as stand_in
stand_in.install()
from test_sglang_storage import *
pool = HostPool(KV)
made = storage(Path({folder!r}), pool, extra={{"shared": {shared}}})
"""


@pytest.mark.parametrize("shared", [True, False])
def test_a_killed_writer_leaves_whole_pages_and_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(_shared_files, "_OPEN_AGAIN_SECONDS", 0.0)
    pool = HostPool(KV)  # the same bytes
    with Process(WRITER.format(folder=str(tmp_path), shared=shared)) as writer:
        assert writer.do("save(made, pool, [1, 2], [1, 2])") == [True, True]
        made = storage(tmp_path, HostPool(KV, seed=2), extra={"shared": shared})
        mine = made._hosts["kv"]
        until(lambda: made.batch_exists(keys_of(1, 2)) == 2, "pages are not found")
        assert save(made, mine, [3], [3]) == [shared] and made._pages["kv"].store.writes == shared
        writer.do(
            "import threading; fault = testing.file_fault(store_of(made), 'write', 'delay', every=1, delay=0.2)\n"
            "fault.__enter__()\n"
            "threading.Thread(target=save, args=(made, pool, range(10, 16), range(10, 16)), daemon=True).start()"
        )
        writer.kill()
    # the kernel ends the killed process's writes before it drops the lock
    until(lambda: save(made, mine, [4], [4]) == [True], "the writer's place is not taken")
    assert made._pages["kv"].store.writes
    found = [number for number in (1, 2, *range(10, 16)) if made.exists(keys_of(number)[0])]
    assert found[:2] == [1, 2]
    for number in found:
        if load(made, mine, [number], [0]) == [True]:
            assert mine.bytes_of(0) == pool.bytes_of(number), number
        else:
            assert number >= 10, "a page that was stored is lost"
    made.close()


def test_a_second_engine_stores_too(tmp_path: Path) -> None:
    pool = HostPool(KV)
    first, second = storage(tmp_path, pool), storage(tmp_path, pool)
    assert save(first, pool, [1, 2], [1, 2]) == [True, True]
    until(lambda: second.batch_exists(keys_of(1, 2)) == 2, "pages of the other engine are not found")
    assert save(second, pool, [2, 3], [2, 3]) == [True, True]
    assert store_of(second).stats()["stored"] == 2, "a page that is there is stored again"  # K and V of one page
    until(lambda: first.batch_exists(keys_of(1, 2, 3)) == 3, "a page of the other engine is not found")
    assert load(first, pool, [3], [9]) == [True] and pool.bytes_of(9) == pool.bytes_of(3)
    first.close()
    second.close()


def test_a_second_engine_reads_where_one_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(KV)
    first, second = (storage(tmp_path, pool, extra={"shared": False}) for _ in range(2))
    save(first, pool, [1], [1])
    assert save(second, pool, [2], [2]) == [False]
    assert "stores nothing" in caplog.text
    first.close()
    second.close()


def test_the_pools_of_a_hybrid_model(tmp_path: Path) -> None:
    pools = {
        PoolName.KV: HostPool(KV),
        PoolName.SWA: HostPool(LATENT, seed=3),
        PoolName.MAMBA: HostPool(UNEVEN, tokens=1),
    }
    made = storage(tmp_path, pools)
    for name in ("kv", "swa", "mamba"):  # they share the directory's
        info = store_of(made, name).info
        assert (info["capacity"], info["bound"]) == (CAPACITY, str(tmp_path / "kv"))
    before = {name: [pool.bytes_of(page) for page in range(16)] for name, pool in pools.items()}
    save(made, pools[PoolName.KV], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])

    def transfers(numbers: list[int], pages: list[int]) -> list[PoolTransfer]:
        names = (PoolName.SWA, PoolName.MAMBA)
        return [PoolTransfer(name, pools[name].tokens_of(pages), keys_of(*numbers)) for name in names]

    saved = made.batch_set_v2(transfers([2, 3, 5], [6, 7, 8]))
    assert saved == {PoolName.SWA: [True] * 3, PoolName.MAMBA: [True] * 3}
    loaded = made.batch_get_v2(transfers([3, 9], [0, 1]))
    assert loaded == {PoolName.SWA: [True, False], PoolName.MAMBA: [True, False]}
    for name in (PoolName.SWA, PoolName.MAMBA):
        assert pools[name].bytes_of(0) == before[name][7], name
    assert made.batch_set_v2([PoolTransfer(PoolName.INDEXER, None, keys_of(1))]) == {PoolName.INDEXER: [False]}
    made.close()


def test_prefixes_that_every_pool_can_restore(tmp_path: Path) -> None:
    pools = {PoolName.KV: HostPool(KV), PoolName.SWA: HostPool(LATENT), PoolName.INDEXER: HostPool(LATENT)}
    made = storage(tmp_path, pools)
    save(made, pools[PoolName.KV], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    made.batch_set_v2([PoolTransfer(PoolName.SWA, pools[PoolName.SWA].tokens_of([2, 3, 5]), keys_of(2, 3, 5))])
    made.batch_set_v2([PoolTransfer(PoolName.INDEXER, pools[PoolName.INDEXER].tokens_of([1, 2, 4]), keys_of(1, 2, 4))])

    def asked(*transfers: PoolTransfer) -> tuple[int, dict[Any, int], list[int]]:
        found = made.batch_exists_v2(keys_of(1, 2, 3, 4, 5, 6), list(transfers))
        return found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages

    trailing = [PoolTransfer(PoolName.SWA, None, keys_of(*range(n)), PoolHitPolicy.TRAILING_PAGES) for n in range(3)]
    everywhere = PoolTransfer(PoolName.INDEXER, None, None)
    assert asked() == (5, {"kv": 5}, [1, 2, 3, 4, 5])
    assert asked(everywhere) == (2, {"kv": 5, "indexer": 2}, [1, 2])
    assert asked(trailing[1]) == asked(trailing[0]) == (5, {"kv": 5, "swa": 5}, [2, 3, 5])
    assert asked(trailing[2]) == (3, {"kv": 5, "swa": 3}, [3])
    assert asked(trailing[1], everywhere) == (2, {"kv": 5, "swa": 5, "indexer": 2}, [2])
    assert asked(trailing[2], everywhere)[0] == 0
    with pytest.raises(ValueError, match="does not know the policy"):
        asked(PoolTransfer(PoolName.SWA, None, None, PoolHitPolicy.BLOCK_GROUPS))
    assert made.batch_exists_v2(keys_of(7), [everywhere]).extra_pool_hit_pages == {}
    made.close()


def test_pages_that_are_only_marks(tmp_path: Path) -> None:
    pools = {PoolName.KV: MarkPool([1]), PoolName.SWA: HostPool(LATENT)}
    made = storage(tmp_path, pools)
    assert save(made, pools[PoolName.KV], [1, 2], [1, 2]) == [True, True]
    assert made.batch_exists(keys_of(1, 2, 3)) == 2
    assert load(made, pools[PoolName.KV], [2, 1, 3], [1, 2, 3]) == [True, True, False]
    made.close()


def test_a_pool_that_is_registered_later(tmp_path: Path) -> None:
    made = storage(tmp_path, HostPool(KV))
    late = HostPool(LATENT)
    made.register_mem_host_pool_v2(late, PoolName.DRAFT)
    moved = made.batch_set_v2([PoolTransfer(PoolName.DRAFT, late.tokens_of([1]), keys_of(1))])
    assert moved == {PoolName.DRAFT: [True]}
    made.close()


def test_one_thread_stores_while_another_loads(tmp_path: Path) -> None:
    pool = HostPool(LAYERS, pages=64)
    before = [pool.bytes_of(page) for page in range(64)]
    made = storage(tmp_path, pool)
    save(made, pool, list(range(16)), list(range(16)))
    wrong: list[Any] = []

    def loads() -> None:
        for turn in range(20):
            numbers = [(turn + i) % 16 for i in range(8)]
            if load(made, pool, numbers, list(range(48, 56))) != [True] * 8:
                wrong.append(turn)
            wrong.extend(i for i, number in enumerate(numbers) if pool.bytes_of(48 + i) != before[number])

    thread = threading.Thread(target=loads)
    thread.start()
    for turn in range(20):
        save(made, pool, [100 + turn], [16 + turn])
    thread.join(PATIENCE)
    assert not thread.is_alive() and wrong == []
    assert made.batch_exists(keys_of(*range(100, 120))) == 20
    made.close()


def test_a_slow_disk_is_waited_for_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvswap.sglang import _pages

    monkeypatch.setattr(_pages, "_LOG_SECONDS", 0.05)
    pool = HostPool(LATENT)
    made = storage(tmp_path, pool)
    with testing.file_fault(store_of(made), "write", "delay", every=1, delay=0.5):
        assert save(made, pool, [1], [1]) == [True]
    assert "storing 1 blocks of kv has taken" in caplog.text
    made.close()


@pytest.mark.parametrize("shared", [True, False])
def test_clearing(tmp_path: Path, shared: bool) -> None:
    """The pages of all engines, those that have ended too, by whichever engine is asked."""
    pool = HostPool(KV)
    ended, made = (storage(tmp_path, pool, extra={"shared": shared}) for _ in range(2))
    save(ended, pool, [1, 2], [1, 2])
    ended.close()
    other = storage(tmp_path, pool, extra={"shared": shared})
    save(other, pool, [3], [3])
    until(lambda: made.batch_exists(keys_of(1, 2, 3)) == 3, "pages of the other engines are not found")
    made.clear()
    assert [other.exists(key) or made.exists(key) for key in keys_of(1, 2, 3)] == [False] * 3
    assert save(other, pool, [1], [4]) == [True]
    until(lambda: made.batch_exists(keys_of(1)) == 1, "what is stored afterwards is not found")
    assert load(made, pool, [1], [5]) == [True] and pool.bytes_of(5) == pool.bytes_of(4)
    made.close()
    other.close()


@pytest.mark.parametrize("right", [True, False])
def test_the_order_of_a_weight_update(tmp_path: Path, right: bool) -> None:
    """Stop, reset the engine's own tiers, clear, update, resume. If the engine clears first, and backs up a page of its
    host pool that it made with the older weights, that page is stored: it cannot be told apart (docs/files.md)."""
    pool = HostPool(KV)
    made = storage(tmp_path, pool)
    save(made, pool, [1], [1])
    host = {2: 2}  # pages in SGLang's host pool, by number: of the older weights
    if right:
        host.clear()
        made.clear()
    else:
        made.clear()
    for number, page in host.items():
        save(made, pool, [number], [page])
    assert not made.exists(keys_of(1)[0])
    assert made.exists(keys_of(2)[0]) == (not right)
    made.close()


def test_a_clear_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Raises, and is in the log: SGLang's answer does not show it. Nothing has changed."""
    pool = HostPool(KV)
    made = storage(tmp_path, pool)
    save(made, pool, [1], [1])
    with (
        testing.file_fault(store_of(made), "write", "fail", every=1),
        pytest.raises(kvswap.Error, match=r"clearing .*: Input/output error"),
    ):
        made.clear()
    assert "pages of kv are not cleared: clearing" in caplog.text
    assert made.exists(keys_of(1)[0]) and load(made, pool, [1], [2]) == [True]
    made.clear()
    assert not made.exists(keys_of(1)[0])
    made.close()


def test_a_rank_that_only_reads_clears_too(tmp_path: Path) -> None:
    """Also before it has found a store."""
    pool = HostPool(LATENT)
    for shared in (True, False):
        extra = {"shared": shared}
        reader = storage(tmp_path / str(shared), pool, is_mla_model=True, tp_rank=1, tp_size=2, extra=extra)
        reader.clear()
        writer = storage(tmp_path / str(shared), pool, is_mla_model=True, tp_rank=0, tp_size=2, extra=extra)
        save(writer, pool, [1], [1])
        reader.clear()
        assert not writer.exists(keys_of(1)[0]) and not reader.exists(keys_of(1)[0])
        writer.close()
        reader.close()


def test_figures_for_sglangs_metrics(tmp_path: Path) -> None:
    pool = HostPool(KV)
    made = storage(tmp_path, pool, enable_storage_metrics=True)
    save(made, pool, [1, 2], [1, 2])
    load(made, pool, [1], [1])
    figures = made.get_stats()
    assert (figures.backup_pgs, figures.prefetch_pgs) == ([2], [1])
    assert figures.backup_bandwidth[0] > 0 and figures.prefetch_bandwidth[0] > 0
    assert made.get_stats().backup_pgs == []
    made.close()


@pytest.mark.parametrize(
    ("extra", "changes", "match"),
    [
        ({"interface_v1": 0}, {}, "interface_v1"),
        ({"directory": ""}, {}, "directory"),
        ({"directory": [3]}, {}, "directory"),
        ({"capacity": None}, {}, "capacity"),
        ({"capacity": "1 TB"}, {}, "capacity"),
        ({"capacity": True}, {}, "capacity"),
        ({"shared": "false"}, {}, "\"shared\" of .*'false'; it is true or false"),
        ({"buffered": 0}, {}, '"buffered" of .* 0; it is true or false'),
        ({"capacity": "500G"}, {}, '"500GiB"'),
        ({"directory": "kv"}, {}, "absolute path"),
        ({"depth": "8"}, {}, '"depth" of .* from 1 to 256'),
        ({"engine": "uring"}, {}, "one of auto, threads, io_uring"),
        ({}, {"should_split_heads": True}, "tp_lcm_size"),
        ({}, {"dcp_size": 2}, "decode context"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, extra: Any, changes: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        storage(tmp_path, HostPool(KV), extra=extra, **changes)


def test_pools_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    class NoPages(HostPool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            raise ValueError("Unsupported layout: layer_first")

    with pytest.raises(ValueError, match=r"host pool kv .*Unsupported layout: layer_first"):
        storage(tmp_path, NoPages(KV))
    draft = HostPool(KV)
    draft.head_num = 4
    pools = {PoolName.KV: HostPool(LATENT), PoolName.DRAFT: draft}
    with pytest.raises(ValueError, match=r"host pool draft: .*differ between ranks"):
        storage(tmp_path, pools, is_mla_model=True, tp_size=2)
    storage(tmp_path, pools, is_mla_model=True).close()
    made = storage(tmp_path, HostPool(KV))
    with pytest.raises(ValueError, match="not 3 equal pages"):
        made.batch_set_v1(keys_of(1, 2, 3), made._hosts["kv"].tokens_of([1, 2]))
    made.close()


def test_calls_without_interface_v1_say_what_is_missing(tmp_path: Path) -> None:
    made = storage(tmp_path, HostPool(KV))
    for call in (lambda: made.get("a"), lambda: made.set("a"), lambda: made.batch_get([]), lambda: made.batch_set([])):
        with pytest.raises(NotImplementedError, match="interface_v1"):
            call()
    made.close()


def test_keys_that_kvswap_does_not_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own are no surprise, those of another backend are ignored, and a misspelt one is refused."""
    monkeypatch.setattr("kvswap._options._warned", set())
    theirs = {"prefetch_threshold": 1, "hicache_storage_pass_prefix_keys": True}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            storage(tmp_path, HostPool(KV), extra={"hashing": "x", "~": 1, **theirs}).close()
    (said,) = [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()]
    assert "does not know hashing, ~ of" in said and "there are buffered, capacity," in said
    with pytest.raises(ValueError, match=r'has "durabilty".*is "durability" meant'):
        storage(tmp_path, HostPool(KV), extra={"durabilty": "fsync"})


def test_importing_it_needs_no_sglang() -> None:
    done: subprocess.CompletedProcess[str] = run_python("""
        import sys
        import kvswap.sglang
        assert not {"torch", "sglang"} & set(sys.modules)
        try:
            kvswap.sglang.FileStorage
        except ImportError as error:
            assert "sglang" in str(error)
        try:
            kvswap.sglang.Other
        except AttributeError as error:
            print(error)
    """)
    assert done.returncode == 0, done.stderr
    assert "has no attribute 'Other'" in done.stdout


def test_the_files_are_nobody_elses(tmp_path: Path) -> None:
    made = storage(tmp_path, HostPool(KV))
    assert oct((tmp_path / "kv").stat().st_mode & 0o777) == "0o700"
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "kv").rglob("*"))
    assert len([path for path in (tmp_path / "kv").iterdir() if path.is_dir()]) == 1
    made.close()


def test_what_the_store_refuses_ends_no_thread_of_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise kvswap.Error("the store has no memory left")

    pool = HostPool(KV)
    made = storage(tmp_path, pool)
    assert made.batch_set_v1(keys_of(1), pool.tokens_of([1])) == [True]
    assert made.batch_exists(["k" * 600]) == 0  # too long for a key of a store
    assert made.batch_set_v1(["k" * 600], pool.tokens_of([1])) == [False]
    for name in ("find", "load", "store"):
        with monkeypatch.context() as patch:
            patch.setattr(made._pages["kv"].store, name, refuse)
            assert made.batch_exists(keys_of(1)) == (name != "find")
            assert made.batch_get_v1(keys_of(1), pool.tokens_of([1])) == [name != "load"]
            assert made.batch_set_v1(keys_of(1), pool.tokens_of([1])) == [name != "store"]
    assert "no memory left" in caplog.text
    made.close()


def test_backups_and_look_ups_beside_prefetches_that_never_pause(tmp_path: Path) -> None:
    """SGLang's backup thread waits for its store, while other threads load without pause."""
    pool = HostPool([1 << 20], pages=16)
    made = storage(tmp_path, pool, extra={"engine": "threads", "depth": 1, "capacity": 256 << 20})
    assert all(save(made, pool, list(range(8)), list(range(8))))
    stop = threading.Event()

    def prefetch(first: int) -> None:
        while not stop.is_set():
            load(made, pool, [*range(8)][first::2], [*range(8)][first::2])

    threads = [threading.Thread(target=prefetch, args=(i % 2,)) for i in range(4)]
    with testing.file_fault(store_of(made), "read", "delay", every=1, delay=0.002):
        for thread in threads:
            thread.start()
        try:
            begin = time.monotonic()
            assert save(made, pool, [100, 101], [9, 10]) == [True, True]
            assert made.batch_exists(keys_of(100, 101, 7)) == 3
            store_of(made).delete([keys_of(100)[0].encode()]).wait(AT_ONCE)
            assert time.monotonic() - begin < AT_ONCE
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE)
    made.close()
