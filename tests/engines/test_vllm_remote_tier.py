"""The remote tier as vLLM's tiering loads it, with vLLM's own classes and Mooncake's own nodes; skipped where
there is no vLLM or no Mooncake."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE, elsewhere, random_bytes

tiering = pytest.importorskip("vllm.v1.kv_offload.tiering.base", reason="needs vLLM's tiered offloading")
pytest.importorskip("mooncake.store", reason="Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
base = pytest.importorskip("vllm.v1.kv_offload.base")
of_files = pytest.importorskip("test_vllm_file_tier")
from mooncake_nodes import Cluster  # noqa: E402

pytestmark = pytest.mark.not_sanitized("Python only")

if not hasattr(base.LookupResult, "RETRY"):
    pytest.skip("this vLLM's lookups cannot be answered later", allow_module_level=True)
if not of_files.BY_PATH:
    of_files.Factory.register_tier("RemoteTier", "kvswap.vllm", "RemoteTier")


class Rig(of_files.Rig):
    def __init__(self, master: str) -> None:
        options = {"type": "RemoteTier", "master": master, "timeout": 3.0, "revision": "r"}
        self.memory = random_bytes(1, of_files.CHUNKS * of_files.NBYTES).reshape(of_files.CHUNKS, -1).copy()
        self.before, self.jobs = self.memory.copy(), 0
        self.open(options)
        self.context = base.ReqContext(req_id="request")

    def has(self, number: int) -> bool:
        end = time.monotonic() + PATIENCE
        while (found := self.tier.lookup(of_files.key_of(number), self.context)) == base.LookupResult.RETRY:
            assert time.monotonic() < end
            time.sleep(0.001)
        return bool(found == base.LookupResult.HIT)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=1) as cluster:
        yield cluster


@pytest.fixture
def rig(cluster: Cluster) -> Iterator[Rig]:
    rig = Rig(cluster.address)
    yield rig
    rig.tier.shutdown()


def test_an_answer_waits_for_a_long_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvswap.vllm._remote_tier._FRESH_SECONDS", 0.01)
    retry = base.LookupResult.RETRY
    for wanted in (retry, base.LookupResult.MISS):  # a step of half a second between the two
        assert rig.tier.lookup(of_files.key_of(7), rig.context) == wanted
        time.sleep(0.5)
    assert rig.tier.lookup(of_files.key_of(7), rig.context) == retry, "used once, it is not fresh any more"


def test_blocks_go_down_and_come_up(rig: Rig) -> None:
    assert rig.tier.lookup(of_files.key_of(7), rig.context) == base.LookupResult.RETRY
    assert not rig.has(7)
    job = rig.job([7, 8, 9], [2, 0, 11], load=False)
    assert rig.finished()[job].success
    assert rig.has(8) and rig.has(9) and not rig.has(1)
    end = time.monotonic() + PATIENCE
    while not rig.has(7):  # the answer of before is used for a second
        assert time.monotonic() < end
    rig.memory[:] = 0xEE
    job = rig.job([9, 7], [5, 6], load=True)
    assert rig.finished()[job].success
    np.testing.assert_array_equal(rig.memory[[5, 6]], rig.before[[11, 2]])
    assert (np.delete(rig.memory, [5, 6], axis=0) == 0xEE).all()


def test_a_missing_block_is_a_failed_key(rig: Rig) -> None:
    rig.finished() if rig.job([1], [1], load=False) else None
    rig.memory[:] = 0xEE
    job = rig.job([1, 2], [3, 4], load=True)
    result = rig.finished()[job]
    assert not result.success and list(getattr(result, "successful_keys", None) or [of_files.key_of(1)]) == [
        of_files.key_of(1)
    ]
    np.testing.assert_array_equal(rig.memory[3], rig.before[1])
    assert (rig.memory[4] == 0xEE).all()


def test_a_dead_node_has_nothing(rig: Rig, cluster: Cluster) -> None:
    job = rig.job([1], [1], load=False)
    assert rig.finished()[job].success and rig.has(1)
    cluster.nodes[0].kill()
    job = rig.job([1], [2], load=True)
    assert not rig.finished()[job].success
    end = time.monotonic() + PATIENCE
    while rig.has(1):
        assert time.monotonic() < end
    rig.tier.drain_jobs()


def test_hits_are_not_a_disks(rig: Rig) -> None:
    """0.33: vLLM's metrics name where a hit came from; a store on other nodes is one that they do not name."""
    source = getattr(tiering.SecondaryTierManager, "cache_hit_source", None)
    assert rig.tier.cache_hit_source == source
    assert source is None or source.name == "EXTERNAL_UNSPECIFIED"


def test_it_is_a_tier_as_vllm_has_them(rig: Rig) -> None:
    assert isinstance(rig.tier, tiering.SecondaryTierManager)
    rig.tier.touch([of_files.key_of(1)], rig.context)
    assert rig.tier.on_new_request(rig.context) is not None


OTHER_PROCESS = """
import sys
sys.path[:0] = sys.argv[1:3]
import numpy as np
import test_vllm_remote_tier as ours
rig = ours.Rig(sys.argv[3])
assert rig.has(7) and rig.has(9) and not rig.has(1)
rig.memory[:] = 0xEE
job = rig.job([9, 7], [5, 6], load=True)
assert rig.finished()[job].success
np.testing.assert_array_equal(rig.memory[[5, 6]], rig.before[[11, 2]])
rig.tier.shutdown()
print("found", flush=True)
"""


def test_two_processes(rig: Rig, cluster: Cluster) -> None:
    job = rig.job([7, 8, 9], [2, 0, 11], load=False)
    assert rig.finished()[job].success
    here = Path(__file__).parent
    command = [sys.executable, "-c", OTHER_PROCESS, str(here), str(here.parent), cluster.address]
    done = subprocess.run(command, **elsewhere(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and "found" in done.stdout, done.stderr[-3000:]
