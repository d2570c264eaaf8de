"""kvswap.sglang.RemoteStorage under stand-ins for SGLang and for NIXL; test_remote_nixl.py has the store over NIXL."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang_stand_in as stand_in
from conftest import PATIENCE
from sglang_stand_in import HostPool, PoolName, config

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
import remote_agent
import test_remote

from kvswap import remote
from kvswap.remote import _store

KV, LATENT, LAYERS = [4096, 4096], [4096], [512] * 6


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = ("kvswap.sglang._storage", "kvswap.sglang._remote")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ours:
        sys.modules.pop(name, None)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    remote_agent.be_patient(monkeypatch, PATIENCE)
    pair = remote.new_secret()
    remote.write_secret(tmp_path / "key", pair)
    monkeypatch.setattr(_store, "NixlAgent", remote_agent.LocalAgent)
    monkeypatch.setattr(test_remote, "NBYTES", 4096)
    nodes = [test_remote.NodeThread([pair.public], blocks=100) for _ in range(2)]
    (tmp_path / "nodes").write_text("".join(f"{node.address} {node.pair.public}\n" for node in nodes))
    yield nodes
    for node in nodes:
        if node._thread.is_alive():
            node.stop()


def keys_of(*numbers: int) -> list[str]:
    return [f"{number:064x}" for number in numbers]


def storage(folder: Path, pool: HostPool, *, extra: Any = None, up: int = 2, **changes: Any) -> Any:
    from kvswap.sglang import RemoteStorage

    given = {
        "interface_v1": 1,
        "nodes": str(folder / "nodes"),
        "key": str(folder / "key"),
        "revision": "r",
        **(extra or {}),
    }
    made = RemoteStorage(config(extra_config=given, **changes), {})
    made.register_mem_pool_host(pool)
    made.register_mem_host_pool_v2(pool, PoolName.KV)
    made.on_host_pools_registered()
    assert made._pages["kv"].store._store.wait_nodes(timeout=PATIENCE) == up
    return made


@pytest.mark.parametrize("sizes", [KV, LATENT], ids=["kv", "latent"])
def test_pages_go_to_nodes_and_come_back(tmp_path: Path, nodes: Any, sizes: list[int]) -> None:
    pool = HostPool(sizes)
    before = [pool.bytes_of(page) for page in range(16)]
    made = storage(tmp_path, pool)
    assert made.batch_exists(keys_of(1, 2, 3)) == 0
    assert made.batch_set_v1(keys_of(1, 2, 3), pool.tokens_of([5, 0, 15])) == [True] * 3
    made.close()
    again = storage(tmp_path, pool)  # another engine finds them
    assert again.batch_exists(keys_of(1, 2, 3, 4)) == 3
    for piece in pool.pieces:
        piece[:] = 0xEE
    assert again.batch_get_v1(keys_of(3, 9, 1), pool.tokens_of([7, 9, 8])) == [True, False, True]
    assert (pool.bytes_of(7), pool.bytes_of(8)) == (before[15], before[5])
    others = [page for page in range(16) if page not in (7, 8)]
    assert all((piece[others] == 0xEE).all() for piece in pool.pieces)
    assert sum(node.server.counts["stored"] for node in nodes) == 3 * len(sizes)
    again.close()


def test_pages_of_a_dead_node_are_missing(tmp_path: Path, nodes: Any) -> None:
    pool = HostPool(LATENT)
    before = [pool.bytes_of(page) for page in range(16)]
    made = storage(tmp_path, pool)
    pages = list(range(16))
    assert made.batch_set_v1(keys_of(*pages), pool.tokens_of(pages)) == [True] * 16
    nodes[0].stop()
    for piece in pool.pieces:
        piece[:] = 0xEE
    arrived = made.batch_get_v1(keys_of(*pages), pool.tokens_of(pages))
    assert 0 < sum(arrived) < 16
    assert [pool.bytes_of(page) == before[page] for page in pages] == arrived
    assert [made.exists(key) for key in keys_of(*pages)] == arrived
    made.close()


def test_clear_deletes_what_this_engine_stored(tmp_path: Path, nodes: Any) -> None:
    pool = HostPool(KV)
    first, second = storage(tmp_path, pool), storage(tmp_path, pool)
    first.batch_set_v1(keys_of(1, 2), pool.tokens_of([1, 2]))
    second.batch_set_v1(keys_of(3), pool.tokens_of([3]))
    first.clear()
    assert [second.exists(key) for key in keys_of(1, 2, 3)] == [False, False, True]
    first.clear()  # nothing is left
    for each in (first, second):
        each.close()


def test_ranks_and_models_do_not_mix(tmp_path: Path, nodes: Any) -> None:
    pool = HostPool(KV)
    made = storage(tmp_path, pool, tp_rank=0, tp_size=2)
    made.batch_set_v1(keys_of(1), pool.tokens_of([1]))
    others = [
        storage(tmp_path, pool, tp_rank=1, tp_size=2),
        storage(tmp_path, pool, tp_size=2, extra={"revision": "s"}),
    ]
    same = storage(tmp_path, pool, tp_rank=0, tp_size=2, dp_rank=3)
    assert [each.exists(keys_of(1)[0]) for each in (made, *others, same)] == [True, False, False, True]
    for each in (made, *others, same):
        each.close()


def test_one_rank_writes_pages_that_all_have(tmp_path: Path, nodes: Any) -> None:
    pool = HostPool(LATENT)
    writer, reader = (storage(tmp_path, pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1))
    assert reader.batch_set_v1(keys_of(1), pool.tokens_of([1])) == [False]
    assert writer.batch_set_v1(keys_of(1), pool.tokens_of([1])) == [True]
    assert reader.exists(keys_of(1)[0])
    for each in (writer, reader):
        each.close()


def test_each_pool_has_its_nodes(tmp_path: Path, nodes: Any) -> None:
    pool = HostPool(KV)
    made = storage(tmp_path, pool, extra={"nodes": {"kv": str(tmp_path / "nodes")}})
    assert made.batch_set_v1(keys_of(1), pool.tokens_of([1])) == [True]
    made.close()
    with pytest.raises(ValueError, match='host pool kv has no list of nodes: "nodes" has mamba'):
        storage(tmp_path, pool, extra={"nodes": {"mamba": str(tmp_path / "nodes")}})


@pytest.mark.parametrize(
    ("extra", "sizes", "complaint"),
    [
        ({"nodes": None}, KV, '"nodes": the path of the list of nodes'),
        ({"key": 3}, KV, '"key" of .* is 3; it is the path'),
        ({"interface_v1": 0}, KV, "interface_v1"),
        ({}, LAYERS, "pages of host pool kv have 6 pieces"),
        ({"replicas": 0}, KV, "replicas.* is 0"),
    ],
    ids=["no nodes", "no key", "no interface", "layers", "no replicas"],
)
def test_what_it_refuses(tmp_path: Path, nodes: Any, extra: Any, sizes: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        storage(tmp_path, HostPool(sizes), extra=extra)


def test_a_list_that_is_not_there(tmp_path: Path, nodes: Any) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        storage(tmp_path, HostPool(KV), extra={"nodes": str(tmp_path / "none")})


def test_a_key_of_the_files_is_told(
    tmp_path: Path, nodes: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvswap._options._warned", set())
    made = storage(tmp_path, HostPool(KV), extra={"directory": "/tmp"})
    assert "does not know directory" in caplog.text
    made.close()
