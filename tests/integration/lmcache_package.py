"""A real LMCache with kvswap's L2 adapter: the storage manager of its server, its controllers, its L1 memory.

    python tests/integration/lmcache_package.py [SOURCE]

SOURCE: a folder with LMCache's package in it (pip download --no-deps lmcache; unzip), or nothing: the one that is
installed. No GPU is needed. The script does what LMCache's server does for an engine: it reserves L1 memory, fills each
object with bytes that follow from its key, waits until LMCache's store controller has put it into L2, empties L1, and
prefetches it. Every byte of every object that LMCache calls a hit is checked.

It runs: objects of two groups (sizes) and two ranks, a restart, reads and writes that fail, a damaged file, two servers
of one directory, a server that is killed while it stores, and an object that is left out in silence.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

GROUPS = {0: 24_576, 1: 1_000}  # bytes of an object of each group
PATIENCE = 60.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", nargs="?", help="folder with LMCache's package; default: the installed one")
    parser.add_argument("--kills", type=int, default=3, help="how often a server is killed while it stores")
    return parser.parse_args()


def start(source: str | None) -> None:
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    if source:
        sys.path.insert(0, str(Path(source).resolve()))


class Server:
    """The storage manager of an LMCache server, and what an engine asks of it."""

    def __init__(self, folder: Path, name: str = "kv", **params: Any) -> None:
        from lmcache.v1.distributed.config import (
            EvictionConfig,
            L1ManagerConfig,
            L1MemoryManagerConfig,
            StorageManagerConfig,
        )
        from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
        from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import NativePluginL2AdapterConfig
        from lmcache.v1.distributed.storage_manager import StorageManager

        given = {"directory": str(folder / name), "capacity": 64 << 20, "unversioned": True, **params}
        described = {"module_path": "kvswap.lmcache", "class_name": "FileConnector", "adapter_params": given}
        memory = L1MemoryManagerConfig(64 << 20, False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory),
                EvictionConfig("LRU"),
                L2AdaptersConfig([NativePluginL2AdapterConfig.from_dict(described)]),
            )
        )
        ((_, self.adapter),) = self.manager.l2_adapters()
        self.checked = 0

    @property
    def connector(self) -> Any:
        """kvswap's."""
        return self.adapter._client

    def files(self, group: int = 0) -> Any:
        return self.connector._stores[GROUPS[group]]._store

    def store(self, numbers: list[int], group: int = 0, rank: int = 0) -> None:
        """Into L1; LMCache's store controller then stores it in L2."""
        keys = [key_of(number, group, rank) for number in numbers]
        objects = self.manager.reserve_write(keys, layout_of(group))
        for key, held in objects.items():
            np.frombuffer(held.byte_array, np.uint8)[:] = np.frombuffer(bytes_of(key), np.uint8)
        self.manager.finish_write(list(objects))

    def settle(self, numbers: list[int], group: int = 0, rank: int = 0, seconds: float = PATIENCE) -> None:
        """Until L2 has them."""
        end = time.monotonic() + seconds
        names = [f"{string_of(key_of(number, group, rank))}" for number in numbers]
        while not all(self.stored(names, group)):
            assert time.monotonic() < end, f"not stored: {self.stored(names, group)}"
            time.sleep(0.01)

    def stored(self, names: list[str], group: int) -> list[bool]:
        known = self.connector._stores.get(GROUPS[group])
        return known.find([name.encode() for name in names]) if known else [False] * len(names)

    def load(self, numbers: list[int], group: int = 0, rank: int = 0) -> tuple[int, int]:
        """A prefix of these: hits in L1 and in L2, each byte checked."""
        from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

        keys = [key_of(number, group, rank) for number in numbers]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, group, layout_of(group))]))
        assert self.manager.wait_prefetch_status(handle, PATIENCE), "a prefetch does not end"
        result = self.manager.query_prefetch_status(handle)
        hits = [key for i, key in enumerate(keys) if result.hit_cells[0].test(i)]
        with self.manager.read_prefetched_results(hits) as objects:
            assert objects is not None
            for key, held in zip(hits, objects, strict=True):
                assert held.byte_array.tobytes() == bytes_of(key), f"wrong bytes of {string_of(key)}"
                self.checked += 1
        self.manager.finish_read_prefetched(hits)
        return result.l1_hit_count, result.l2_hit_count

    def forget(self) -> None:
        """L1 is emptied, and its bytes are made useless."""
        self.manager.clear(force=True)
        useless = [key_of(10**9 + i, 0, 0) for i in range(300)]
        for held in self.manager.reserve_write(useless, layout_of(0)).values():
            np.frombuffer(held.byte_array, np.uint8)[:] = 0xEE
        self.manager.clear(force=True)

    def again(self, numbers: list[int], group: int = 0, rank: int = 0) -> int:
        """With an empty L1: how many come from files."""
        self.forget()
        in_memory, from_files = self.load(numbers, group, rank)
        assert in_memory == 0
        return from_files

    def close(self) -> int:
        self.manager.close()
        return self.checked


def key_of(number: int, group: int, rank: int) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    rank_bits = ObjectKey.ComputeKVRank(2, rank, 2, rank)
    return ObjectKey(number.to_bytes(32, "big"), "org/model", rank_bits, group)


def string_of(key: Any) -> str:
    from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string

    return _object_key_to_string(key)


def bytes_of(key: Any) -> bytes:
    return random.Random(string_of(key)).randbytes(GROUPS[key.object_group_id])


def layout_of(group: int) -> Any:
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc([torch.Size([GROUPS[group]])], [torch.uint8])


def say(what: str) -> None:
    print(f"  {what}", flush=True)


def there_and_back(folder: Path) -> int:
    server = Server(folder)
    for rank in (0, 1):
        for group in GROUPS:
            server.store(list(range(10)), group, rank)
            server.settle(list(range(10)), group, rank)
    assert server.load(list(range(10))) == (10, 0)
    assert [server.again(list(range(12)), group, rank) for group in GROUPS for rank in (0, 1)] == [10] * 4
    assert server.again([3, 4, 99, 5]) == 2
    say(
        "objects of two groups and two ranks: stored, and loaded from files; a prefix ends at the first that is missing"
    )
    server.adapter.delete([key_of(4, 0, 0)])
    assert server.again(list(range(10))) == 4 and server.again(list(range(10)), rank=1) == 10
    say("one that LMCache deletes is gone")
    checked = server.close()
    server = Server(folder)
    assert [server.again(list(range(4)), group, rank) for group in GROUPS for rank in (0, 1)] == [4] * 4
    say("a server that starts anew finds them")
    return checked + server.close()


def faults(folder: Path) -> int:
    from kvswap import testing

    server = Server(folder, "faults")
    numbers = list(range(8))
    server.store([100])
    server.settle([100])
    with testing.file_fault(server.files(), "write", "fail", every=1, code=errno.ENOSPC):
        server.store(numbers)
        time.sleep(1.0)
        assert server.again(numbers) == 0
    time.sleep(2.5)  # a disk that takes no writes is tried every two seconds, with one object
    server.store([101])
    server.settle([101])
    server.store(numbers)
    server.settle(numbers)
    assert server.again(numbers) == 8
    say("a full disk: nothing is offered, the server goes on, and the next time it is stored")
    server.forget()
    with testing.file_fault(server.files(), "read", "fail", nth=4):
        in_memory, from_files = server.load(numbers)
    assert in_memory == 0 and from_files < 8, (in_memory, from_files)
    found = server.stored([string_of(key_of(number, 0, 0)) for number in numbers], 0)
    assert found.count(False) == 1  # what cannot be read is no longer stored
    server.store([number for number, there in zip(numbers, found, strict=True) if not there])
    server.settle(numbers)
    assert server.again(numbers) == 8
    say(f"a read that fails: {from_files} of 8 are hits; the object is stored again")
    damage(folder / "faults", bytes_of(key_of(5, 0, 0)))
    assert server.again(numbers) == 5
    server.store([5])
    server.settle([5])
    assert server.again(numbers) == 8
    say("a damaged object: 5 of 8 are hits; it is stored again")
    return server.close()


def damage(folder: Path, content: bytes) -> None:
    for path in folder.rglob("segment-*.kvs"):
        found = path.read_bytes().find(content)
        if found >= 0:
            with path.open("r+b") as file:
                file.seek(found + 77)
                file.write(bytes([content[77] ^ 1]))
            return
    raise AssertionError("the object is not in the files")


def second_server(source: str | None, folder: Path, told: Any, ready: Any) -> None:
    start(source)
    server = Server(folder, "shared")
    ready.set()
    assert told.wait(PATIENCE)
    end = time.monotonic() + PATIENCE
    while server.again(list(range(6))) != 6:
        assert time.monotonic() < end, "what the first server stored is not found"
    server.store([50])
    server.settle([50])
    server.close()


def two_servers(source: str | None, folder: Path) -> int:
    server = Server(folder, "shared")
    server.store([1])
    server.settle([1])
    own = multiprocessing.get_context("spawn")
    told, ready = own.Event(), own.Event()
    other = own.Process(target=second_server, args=(source, folder, told, ready))
    other.start()
    assert ready.wait(120), "the other server does not start"
    server.store(list(range(6)))
    server.settle(list(range(6)))
    told.set()
    other.join(120)
    assert other.exitcode == 0, other.exitcode
    assert server.again([50]) == 1
    say("two servers of one directory: each finds what the other one stores")
    return server.close()


def store_until_killed(source: str | None, folder: Path, told: Any, first: int) -> None:
    start(source)
    server = Server(folder, "killed")
    server.store([first, first + 1])
    server.settle([first, first + 1])
    told.set()
    for i in range(first + 2, first + 10_000):
        server.store([i])


def killed(source: str | None, folder: Path, kills: int) -> int:
    checked, hits = 0, []
    own = multiprocessing.get_context("spawn")
    for kill in range(kills):
        told = own.Event()
        victim = own.Process(target=store_until_killed, args=(source, folder, told, kill * 10_000))
        victim.start()
        assert told.wait(120), "the other server does not start"
        time.sleep(random.Random(kill).random() * 0.3)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(60)
        server = Server(folder, "killed")
        numbers = list(range(kill * 10_000, kill * 10_000 + 200))
        hits.append(server.again(numbers))
        assert hits[-1] >= 2, "an object that was stored is lost"
        checked += server.close()
    say(f"{kills} servers killed while they stored: {hits} of what they stored from the first on, all bytes right")
    return checked


def left_out(folder: Path) -> None:
    """An object that is told as loaded, and was not: the bytes say so."""
    server = Server(folder, "left-out")
    server.store(list(range(4)))
    server.settle(list(range(4)))
    submit = server.connector.submit_batch_get

    def but_one(keys: list[str], views: list[Any]) -> int:
        aside = memoryview(bytearray(views[-1].nbytes))
        return submit(keys, [*views[:-1], aside])

    server.connector.submit_batch_get = but_one
    server.forget()
    try:
        server.load(list(range(4)))
    except AssertionError as error:
        say(f"an object that was left out in silence is found: {error}")
    else:
        raise AssertionError("an object was left out, and this test did not notice")
    server.manager.close()


def main() -> int:
    options = parse()
    start(options.source)
    import lmcache

    print(f"LMCache {lmcache.__version__}, storage manager of its server, native_plugin: kvswap", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checked = there_and_back(folder) + faults(folder) + two_servers(options.source, folder)
        checked += killed(options.source, folder, options.kills)
        left_out(folder)
    say(f"{checked} objects checked: all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
