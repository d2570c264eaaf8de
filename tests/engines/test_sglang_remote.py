"""kvswap.sglang.RemoteStorage under a stand-in for SGLang, over Mooncake's nodes; skipped where it is missing."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sglang_stand_in as stand_in
from conftest import elsewhere
from sglang_stand_in import HostPool, PoolName, config

pytest.importorskip("mooncake.store", reason="Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
from mooncake_nodes import Cluster

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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """One for each test, as they share the nodes."""
    return f"model of {request.node.name} {time.time_ns()}"


def keys_of(*numbers: int) -> list[str]:
    return [f"{number:064x}" for number in numbers]


def storage(cluster: Cluster, model: str, pool: HostPool, *, extra: Any = None, **changes: Any) -> Any:
    from kvswap.sglang import RemoteStorage

    given = {"interface_v1": 1, "master": cluster.address, "timeout": 5.0, "revision": model, **(extra or {})}
    made = RemoteStorage(config(extra_config=given, **changes), {})
    made.register_mem_pool_host(pool)
    made.register_mem_host_pool_v2(pool, PoolName.KV)
    made.on_host_pools_registered()
    return made


@pytest.mark.parametrize("sizes", [KV, LATENT], ids=["kv", "latent"])
def test_pages_go_to_nodes_and_come_back(cluster: Cluster, model: str, sizes: list[int]) -> None:
    pool = HostPool(sizes)
    before = [pool.bytes_of(page) for page in range(16)]
    made = storage(cluster, model, pool)
    assert made.batch_exists(keys_of(1, 2, 3)) == 0
    assert made.batch_set_v1(keys_of(1, 2, 3), pool.tokens_of([5, 0, 15])) == [True] * 3
    made.close()
    again = storage(cluster, model, pool)  # another engine finds them
    assert again.batch_exists(keys_of(1, 2, 3, 4)) == 3
    for piece in pool.pieces:
        piece[:] = 0xEE
    assert again.batch_get_v1(keys_of(3, 9, 1), pool.tokens_of([7, 9, 8])) == [True, False, True]
    assert (pool.bytes_of(7), pool.bytes_of(8)) == (before[15], before[5])
    others = [page for page in range(16) if page not in (7, 8)]
    assert all((piece[others] == 0xEE).all() for piece in pool.pieces)
    again.close()


def test_clear_is_for_all_engines(cluster: Cluster, model: str) -> None:
    pool = HostPool(KV)
    first, second = storage(cluster, model, pool), storage(cluster, model, pool)
    other = storage(cluster, model + " not", pool)
    first.batch_set_v1(keys_of(1, 2), pool.tokens_of([1, 2]))
    other.batch_set_v1(keys_of(3), pool.tokens_of([3]))
    assert second.exists(keys_of(1)[0])
    first.clear()
    time.sleep(1.0)
    assert not any(second.exists(key) for key in keys_of(1, 2)) and other.exists(keys_of(3)[0])
    for each in (first, second, other):
        each.close()


def test_ranks_and_models_do_not_mix(cluster: Cluster, model: str) -> None:
    pool = HostPool(KV)
    made = storage(cluster, model, pool, tp_rank=0, tp_size=2)
    made.batch_set_v1(keys_of(1), pool.tokens_of([1]))
    others = [storage(cluster, model, pool, tp_rank=1, tp_size=2), storage(cluster, "other", pool, tp_size=2)]
    same = storage(cluster, model, pool, tp_rank=0, tp_size=2, dp_rank=3)
    assert [each.exists(keys_of(1)[0]) for each in (made, *others, same)] == [True, False, False, True]
    for each in (made, *others, same):
        each.close()


def test_one_rank_writes_pages_that_all_have(cluster: Cluster, model: str) -> None:
    pool = HostPool(LATENT)
    writer, reader = (storage(cluster, model, pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1))
    assert reader.batch_set_v1(keys_of(1), pool.tokens_of([1])) == [False]
    assert writer.batch_set_v1(keys_of(1), pool.tokens_of([1])) == [True]
    assert reader.exists(keys_of(1)[0])
    for each in (writer, reader):
        each.close()


@pytest.mark.parametrize(
    ("extra", "sizes", "complaint"),
    [
        ({"master": None}, KV, '"master": HOST:PORT'),
        ({"interface_v1": 0}, KV, "interface_v1"),
        ({}, LAYERS, "pages of host pool kv have 6 pieces"),
        ({"replicas": 0}, KV, '"replicas" of .* is 0'),
        ({"masterr": "x:1"}, KV, 'is "master" meant'),
    ],
    ids=["no master", "no interface", "layers", "no replicas", "misspelt"],
)
def test_what_it_refuses(cluster: Cluster, model: str, extra: Any, sizes: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        storage(cluster, model, HostPool(sizes), extra=extra)


OTHER_PROCESS = """
import sys
import sglang_stand_in as stand_in
sys.modules.update(stand_in.modules())
import test_sglang_remote as ours
from types import SimpleNamespace
pool = stand_in.HostPool(ours.KV)
made = ours.storage(SimpleNamespace(address=sys.argv[1]), sys.argv[2], pool)
before = [pool.bytes_of(page) for page in range(16)]
for piece in pool.pieces: piece[:] = 0xEE
assert made.batch_get_v1(ours.keys_of(1, 2), pool.tokens_of([3, 4])) == [True, True]
assert [pool.bytes_of(3), pool.bytes_of(4)] == [before[1], before[2]]
made.close()
"""


def test_two_processes(cluster: Cluster, model: str) -> None:
    pool = HostPool(KV)
    made = storage(cluster, model, pool)
    assert made.batch_set_v1(keys_of(1, 2), pool.tokens_of([1, 2])) == [True, True]
    command = [sys.executable, "-c", OTHER_PROCESS, cluster.address, model]
    done = subprocess.run(command, **elsewhere(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made.close()
