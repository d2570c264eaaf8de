"""FastDeploy's own cache managers, unmodified, on kvswap's ops.

    python tests/integration/fastdeploy_managers.py SOURCE [SOURCE ...] [--batches 40] [--seed 1]

SOURCE: an unpacked FastDeploy of July 2025 or later: a checkout, or `git archive REF fastdeploy setup.py`. Nothing of
it is kept. Each of its managers is run, and every byte looked at:

- cache_transfer_manager.py is started as FastDeploy starts it: a script, a process a rank, with its own command line.
  Its queue, signals and tasks are FastDeploy's own too. This process is the engine: it makes the caches (or opens those
  that the manager makes), puts swaps of random blocks in both directions into the queue, several at a time, and
  compares all caches of all ranks with a model after each batch. Blocks that were stored are overwritten, and at the
  end every host block is loaded back. Then caches are cleared and restored, where that generation's own clearing works.
- cache_manager/v1/transfer_manager.py, where there is one, is called within this process, as the engine calls it.

Whatever else they import is made by fastdeploy_stubs.py; the output names all that is stubbed and the SHA-256 of all
that is FastDeploy's. At the end the first run is made again with swaps that drop their last block: it has to fail.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import itertools
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastdeploy_stubs as stubs
import numpy as np

import kvswap
from kvswap import fastdeploy
from kvswap.fastdeploy.manager import arguments

LAYERS, BLOCKS, HEADS, TOKENS, HEAD_DIM, HOST_BLOCKS = 3, 24, 2, 16, 24, 40
SCRIPT = Path("fastdeploy/cache_manager/cache_transfer_manager.py")
WITHIN = Path("fastdeploy/cache_manager/v1/transfer_manager.py")
SIGNALS = (
    "cache_ready_signal",
    "swap_space_ready_signal",
    "cache_task_broadcast_signal",
    "worker_healthy_live_signal",
    "kv_cache_status",
    "cache_task_is_paused",
    "cache_task_inflight",
    "cache_transfer_inited_signal",
)

NOT_AS = "are not as they should be"


class Wrong(Exception):
    """Bytes are not what they should be, or a manager does not do what it should."""


def options_of(source: Path) -> set[str]:
    """Of the manager's command line."""
    return set(re.findall(r'"--(\w+)"', (source / SCRIPT).read_text()))


def version_of(source: Path) -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r'"FASTDEPLOY_VERSION", "([^"]+)"', (source / "setup.py").read_text()):
            return found[1]
    return "of no known version"


def wait_for(what: str, done: Any, *, alive: Any = lambda: None) -> Any:
    end = time.monotonic() + stubs.LIMIT
    while not (found := done()):
        alive()
        if time.monotonic() > end:
            raise Wrong(f"waited {stubs.LIMIT:.0f} s for {what}")
        time.sleep(0.002)
    return found


# -- what is run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A run of the manager. create: it makes the caches; extra: layers of speculative decoding."""

    ranks: int = 1
    create: bool = False
    dtype: str = "bfloat16"
    values: bool = True
    extra: int = 0
    storage: bool = False
    clear: bool = False

    def __str__(self) -> str:
        parts = [f"{self.ranks} rank{'s' * (self.ranks > 1)}"]
        parts += ["caches made by the manager" if self.create else "caches attached", self.dtype]
        parts += ["keys only"] * (not self.values) + [f"{self.extra} extra layer"] * bool(self.extra)
        parts += ["storage"] * self.storage + ["cleared and restored"] * self.clear
        return ", ".join(parts)


def scenarios(options: set[str]) -> list[Scenario]:
    """What a generation with these options can do."""
    newest = "model_path" in options  # since then a manager that made the caches can also clear them
    asks = "create_cache_tensor" in options  # before that it always made them, and cleared nothing
    wanted = [
        Scenario(ranks=2, extra=1, create=not asks),
        Scenario(create=not asks, clear=asks),
        Scenario(dtype="uint8", extra=1, create=not asks),
    ]
    if asks:
        wanted.append(Scenario(create=True, ranks=2, clear=newest))
    if "key_cache_shape" in options:
        wanted.append(Scenario(values=False, create=newest))
    if "default_dtype" in options:
        wanted.append(Scenario(dtype="block_wise_fp8", ranks=2))
        wanted.append(Scenario(dtype="block_wise_fp8", create=True, clear=newest))
    if newest:
        wanted += [Scenario(storage=True), Scenario(storage=True, values=False)]
        wanted.append(Scenario(storage=True, dtype="block_wise_fp8", create=True))
    return wanted


# -- the engine -------------------------------------------------------------------------------------------------------


class Cache:
    """One cache of a rank: its name and shape, the tensor here, and what it must hold."""

    def __init__(self, kind: str, layer: int, rank: int, number: int, shape: list[int], dtype: str) -> None:
        self.name = f"{kind}_{layer}_rank{rank}.device{number}"
        self.shape, self.dtype, self.device = shape, dtype, stubs.device(number)
        self.nbytes = int(np.prod(shape)) * stubs.ITEM[dtype]
        self.tensor: Any = None
        self.model = np.zeros((shape[0], self.nbytes // shape[0]), np.uint8)
        self.host: dict[int, np.ndarray] = {}

    def randomise(self, random: Any, blocks: Any = ...) -> None:
        """Fresh bytes, as the model's kernels write them."""
        self.model[blocks] = random.integers(0, 256, self.model[blocks].shape, np.uint8)
        stubs.write(self.tensor, self.model, self.device)

    def check(self) -> int:
        found = stubs.read(self.tensor, self.nbytes, self.device).reshape(self.model.shape)
        if (found != self.model).any():
            bad = np.unique(np.nonzero(found != self.model)[0]).tolist()
            raise Wrong(f"{self.name}: blocks {bad} {NOT_AS}")
        return self.nbytes


class Engine:
    """The engine's side of one scenario, with FastDeploy's own queue and signals."""

    def __init__(self, source: Path, scenario: Scenario, seed: int, drop: bool) -> None:
        self.source, self.scenario, self.drop = source, scenario, drop
        self.options, self.random = options_of(source), np.random.default_rng(seed)
        self.newer = "key_cache_shape" in self.options
        self.events_first = "= data[0]" in (source / SCRIPT).read_text()
        self.folder = Path(tempfile.mkdtemp(prefix="fastdeploy-managers-"))
        self.managers: list[subprocess.Popen[bytes]] = []
        self.reports: list[dict[str, Any]] = []
        self.count = {"batches": 0, "tasks": 0, "blocks": 0, "moved": 0, "verified": 0}
        stubs.enter(source)
        from fastdeploy import inter_communicator as theirs
        from fastdeploy.cache_manager.cache_data import CacheStatus

        self.status, self.port = CacheStatus, self._free_port()
        self.queue = theirs.EngineCacheQueue(
            address=("127.0.0.1", self.port), is_server=True, num_client=scenario.ranks, client_id=-1
        )
        self.signals = {
            name: theirs.IPCSignal(name=name, array=np.zeros(scenario.ranks, np.int32), dtype=np.int32,
                                   suffix=self.port, create=True)
            for name in SIGNALS
        }  # fmt: skip
        self.caches = [list(self._caches(rank)) for rank in range(scenario.ranks)]

    @staticmethod
    def _free_port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def number(self, rank: int) -> int:
        """The GPU of a rank: not 0 for rank 0 where devices are for nothing, so that nobody takes one for the other."""
        return rank + 1 if stubs.ops.device_kind() == "host" else rank % kvswap._C._cuda_count()[0]

    def _caches(self, rank: int) -> Any:
        scenario, shape = self.scenario, [BLOCKS, HEADS, TOKENS, HEAD_DIM]
        scaled = scenario.dtype == "block_wise_fp8"
        for layer in range(LAYERS + scenario.extra):
            for kind in ("key", "value")[: 1 + scenario.values]:
                where = layer, rank, self.number(rank)
                yield Cache(f"{kind}_caches", *where, shape, "uint8" if scaled else scenario.dtype)
                if scaled:
                    yield Cache(f"{kind}_cache_scales", *where, shape[:3], "bfloat16")

    def words(self, rank: int) -> list[str]:
        """FastDeploy's command line, of the options that this generation has."""
        scenario, item = self.scenario, stubs.ITEM.get(self.scenario.dtype, 1)
        shape = f"{BLOCKS},{HEADS},{TOKENS},{HEAD_DIM}"
        speculative = {"num_extra_cache_layer": scenario.extra, "num_gpu_block_expand_ratio": 1.0}
        given = {
            "splitwise_role": "mixed",
            "rank": rank,
            "mp_num": scenario.ranks,
            "device_id": self.number(rank),
            "num_layers": LAYERS,
            "num_gpu_blocks": BLOCKS,
            "kv_num_head": HEADS,
            "block_size": TOKENS,
            "head_dim": HEAD_DIM,
            "bytes_per_layer_per_block": HEADS * TOKENS * HEAD_DIM * item,
            "key_cache_shape": shape,
            "num_cpu_blocks": HOST_BLOCKS,
            "cache_dtype": scenario.dtype,
            "default_dtype": "bfloat16",
            "speculative_config": json.dumps(speculative),
            "routing_replay_config": "{}",
            "protocol": "ipc",
            "rdma_port": 0,
            "enable_splitwise": 0,
            "pod_ip": "127.0.0.1",
            "cache_queue_port": self.port,
            "engine_worker_queue_port": self.port,
            "engine_pid": self.port,
            "ipc_suffix": self.port,
            "local_data_parallel_id": 0,
            "max_model_len": HOST_BLOCKS * TOKENS,
            "write_policy": "write_through",
            "model_path": "/nowhere/model",
        }
        if scenario.values:
            given["value_cache_shape"] = shape
        if scenario.storage:
            given["kvcache_storage_backend"] = "mooncake"
        words = [word for name, value in given.items() if name in self.options for word in (f"--{name}", str(value))]
        return words + ["--create_cache_tensor"] * (scenario.create and "create_cache_tensor" in self.options)

    def check_words(self) -> None:
        """kvswap's own manager takes the same line (but for storage, which it refuses)."""
        if self.scenario.storage:
            return
        parser = argparse.ArgumentParser()
        arguments.add_run(parser)
        for rank, caches in enumerate(self.caches):
            layout = arguments.settings_of(parser.parse_args(self.words(rank))).layout
            found = [(cache.name, list(cache.shape)) for cache in layout.caches()]
            if sorted(found) != sorted((cache.name, cache.shape) for cache in caches):
                raise Wrong(f"`kvswap manager run` makes other caches of the same command line: {found}")

    def start(self) -> None:
        self.check_words()
        if not self.scenario.create:
            self.make_caches()
        (self.folder / "sitecustomize.py").write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "import fastdeploy_stubs\nfastdeploy_stubs.enter_manager()\n"
        )
        script = self.source / SCRIPT
        for rank in range(self.scenario.ranks):
            settings = {"source": str(self.source), "script": str(script), "drop": self.drop}
            settings["report"] = str(self.folder / f"report-{rank}")
            environment = {**os.environ, "PYTHONPATH": str(self.folder), "FASTDEPLOY_STUBS": json.dumps(settings)}
            environment.update(FD_ENABLE_SWAP_SPACE_CLEARING="1", FD_ENGINE_TASK_QUEUE_WITH_SHM="0")
            words = [sys.executable, str(script), *self.words(rank)]
            with (self.folder / f"log-{rank}").open("wb") as log:
                options: Any = {"cwd": self.folder, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                self.managers.append(subprocess.Popen(words, env=environment, **options))
        self.await_ready()
        if self.scenario.create:
            self.open_caches()

    def alive(self) -> None:
        for rank, manager in enumerate(self.managers):
            if manager.poll() is not None:
                raise Wrong(f"their manager of rank {rank} has ended with {manager.returncode}")

    def await_ready(self) -> None:
        for name in ("cache_ready_signal", "swap_space_ready_signal"):
            if name == "swap_space_ready_signal" and name not in (self.source / SCRIPT).read_text():
                continue
            wait_for(name, lambda name=name: self.signals[name].value.all(), alive=self.alive)

    def every(self) -> Any:
        return itertools.chain.from_iterable(self.caches)

    def make_caches(self) -> None:
        """As the engine's model runners do, each on its GPU."""
        import paddle
        from fastdeploy.model_executor.ops.gpu import set_data_ipc

        for rank, caches in enumerate(self.caches):
            paddle.set_device(f"gpu:{self.number(rank)}")
            for cache in caches:
                cache.tensor = paddle.full(shape=cache.shape, fill_value=0, dtype=cache.dtype)
                set_data_ipc(cache.tensor, cache.name)
                cache.randomise(self.random)
        self.signals["cache_ready_signal"].value[:] = 1

    def open_caches(self) -> None:
        import paddle
        from fastdeploy.model_executor.ops.gpu import share_external_data

        for rank, caches in enumerate(self.caches):
            paddle.set_device(f"gpu:{self.number(rank)}")
            for cache in caches:
                like = paddle.empty(shape=[], dtype=cache.dtype)
                cache.tensor = share_external_data(like, cache.name, cache.shape)
                cache.randomise(self.random)

    def close_caches(self) -> None:
        from fastdeploy.model_executor.ops.gpu import unset_data_ipc

        for cache in self.every():
            unset_data_ipc(cache.tensor, cache.name, True, False)
        self.signals["cache_ready_signal"].value[:] = 0

    # -- swaps --

    def put(self, number: int, kind: Any, gpu_ids: list[int], cpu_ids: list[int]) -> tuple[Any, ...]:
        name = f"task-{number}"
        old, new = ([number], gpu_ids, cpu_ids, kind, name), (kind, name, [number], gpu_ids, cpu_ids)
        task = new if self.events_first else old
        # Put while the ranks read another, it can make FastDeploy's queue forget which of them have read that one: a
        # rank then does it twice. Several are under way all the same.
        wait_for("the ranks to read a task", self.queue.empty, alive=self.alive)
        self.queue.put_transfer_task(task)
        return task

    def results(self, tasks: list[tuple[Any, ...]]) -> None:
        """Each is reported once, as it was sent."""
        left = list(tasks)
        while left:
            found = tuple(wait_for("a task's end", self.queue.get_transfer_done_signal, alive=self.alive))
            if found not in left:
                raise Wrong(f"{found} was reported, which is not under way")
            left.remove(found)

    def batch(self) -> None:
        """Some tasks at once, no two on the same blocks; then all bytes."""
        first = self.caches[0][0]
        held, stores, loads = sorted(first.host), [], []
        gpu_ids = self.random.permutation(BLOCKS).tolist()
        held = self.random.permutation(held).tolist() if held else []
        targets = [i for i in self.random.permutation(HOST_BLOCKS).tolist() if i not in held[: len(held) // 2]]
        held, tasks = held[: len(held) // 2], []
        for _ in range(int(self.random.integers(1, 5))):
            count = int(self.random.integers(1, 6))
            load = bool(self.random.integers(2)) and len(held) >= count
            side = held if load else targets
            gpu, cpu = gpu_ids[:count], side[:count]
            del gpu_ids[:count], side[:count]
            if not cpu or len(cpu) < len(gpu):
                break
            (loads if load else stores).append((gpu, cpu))
            kind = self.status.SWAP2GPU if load else self.status.SWAP2CPU
            tasks.append(self.put(self.count["tasks"] + len(tasks), kind, gpu, cpu))
        self.results(tasks)
        for cache in self.every():
            for gpu, cpu in loads:
                cache.model[gpu] = [cache.host[i] for i in cpu]
            for gpu, cpu in stores:
                cache.host.update(zip(cpu, cache.model[gpu].copy(), strict=True))
        self.account([*stores, *loads], len(tasks))
        for cache in self.every():
            for gpu, _ in stores:
                cache.randomise(self.random, gpu)

    def account(self, moves: list[Any], tasks: int) -> None:
        blocks = sum(len(gpu) for gpu, _ in moves)
        self.count["batches"] += 1
        self.count["tasks"] += tasks
        self.count["blocks"] += blocks
        self.count["moved"] += blocks * sum(cache.model.shape[1] for cache in self.every())
        self.count["verified"] += sum(cache.check() for cache in self.every())

    def load_all(self) -> None:
        """Every host block that was written, once more."""
        held = sorted(self.caches[0][0].host)
        for start in range(0, len(held), BLOCKS):
            cpu = held[start : start + BLOCKS]
            gpu = self.random.permutation(BLOCKS)[: len(cpu)].tolist()
            self.results([self.put(self.count["tasks"], self.status.SWAP2GPU, gpu, cpu)])
            for cache in self.every():
                cache.model[gpu] = [cache.host[i] for i in cpu]
            self.account([(gpu, cpu)], 1)

    # -- storage --

    def store_and_read(self) -> None:
        """Blocks to the storage, through the manager's block-first buffer, and back to other places."""
        from fastdeploy.cache_manager.cache_tasks import ReadStorageTask, WriteStorageTask

        for i in range(6):
            gpu = self.random.permutation(BLOCKS)[:8].tolist()
            keys = [f"key-{i}-{j}" for j in range(4)]
            common = {"task_id": f"storage-{i}", "keys": keys, "token_ids": []}
            write = WriteStorageTask(gpu_block_ids=gpu[:4], timeout=stubs.LIMIT, **common)
            self.storage_task(self.status.GPU2STORAGE, write)
            saved = [cache.model[gpu[:4]].copy() for cache in self.every()]
            for cache in self.every():
                cache.randomise(self.random)
            read = ReadStorageTask(gpu_block_ids=gpu[4:], start_read_block_idx=0, timeout=stubs.LIMIT, **common)
            self.storage_task(self.status.STORAGE2GPU, read)
            for cache, blocks in zip(self.every(), saved, strict=True):
                cache.model[gpu[4:]] = blocks
            self.account([(gpu, None)], 2)

    def storage_task(self, kind: Any, task: Any) -> None:
        self.queue.put_transfer_task((kind, task))
        found = tuple(wait_for("a storage task", self.queue.get_transfer_done_signal, alive=self.alive))
        if found != (kind, task.task_id, task.keys, task.gpu_block_ids):
            raise Wrong(f"{found} was reported for {task}")

    # -- clearing --

    def clear_and_restore(self) -> None:
        status, ready = self.signals["kv_cache_status"].value, self.signals["cache_ready_signal"].value
        if self.scenario.create:
            self.close_caches()
        status[0] = -1
        wait_for("CLEARED", lambda: status[0] == -2 and not ready.any(), alive=self.alive)
        time.sleep(1)  # each rank sets the status by itself, the last a moment after it was seen here
        for cache in self.every():
            cache.host.clear()
        if not self.scenario.create:
            self.make_caches()
        status[0] = 1
        wait_for("NORMAL", lambda: status[0] == 0, alive=self.alive)
        self.await_ready()
        time.sleep(1)
        if self.scenario.create:
            self.open_caches()

    # -- all of it --

    def run(self, batches: int) -> None:
        for _ in range(batches):
            self.batch()
        self.load_all()
        if self.scenario.storage:
            self.store_and_read()
        if self.scenario.clear:
            for _ in range(2):
                self.clear_and_restore()
                for _ in range(max(1, batches // 4)):
                    self.batch()
                self.load_all()

    def close(self) -> None:
        for manager in self.managers:
            manager.terminate()
        for rank, manager in enumerate(self.managers):
            try:
                manager.wait(20)
            except subprocess.TimeoutExpired:
                manager.kill()
            with contextlib.suppress(OSError):
                self.reports.append(json.loads((self.folder / f"report-{rank}").read_text()))
        self.queue.manager.shutdown()
        for one in self.signals.values():
            one.clear()
        for cache in self.every():
            Path("/dev/shm", cache.name).unlink(missing_ok=True)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("log-*")))


def run_processes(source: Path, scenario: Scenario, batches: int, seed: int, drop: bool) -> dict[str, Any]:
    engine = Engine(source, scenario, seed, drop)
    try:
        engine.start()
        engine.run(batches)
    except BaseException:
        print(engine.logs(), file=sys.stderr)
        raise
    finally:
        engine.close()
    if len(engine.reports) != scenario.ranks:
        raise Wrong("a manager did not end when it was told to")
    for rank, found in enumerate(engine.reports):
        if found["devices"] != [stubs.device(engine.number(rank)).name]:
            raise Wrong(f"rank {rank} allocated its host memory for {found['devices']}, not for its own device")
    return {"count": engine.count, "ran": engine.reports[0]["files"], "here": stubs.report(source)}


# -- the manager within the engine ------------------------------------------------------------------------------------


def run_within(source: Path, seed: int) -> dict[str, Any]:
    """Evictions of all layers, loads layer by layer on CuPy's stream, each with an event recorded behind it."""
    stubs.enter(source)
    import paddle
    from fastdeploy.cache_manager.v1.transfer_manager import CacheTransferManager
    from fastdeploy.model_executor.ops.gpu import cuda_host_alloc

    random, count = np.random.default_rng(seed), {"batches": 0, "tasks": 0, "blocks": 0, "moved": 0, "verified": 0}
    scaled = SimpleNamespace(kv_cache_quant_type="block_wise_fp8")
    for quant in (None, scaled):
        config = SimpleNamespace(cache_dtype="bfloat16", num_cpu_blocks=HOST_BLOCKS, kvcache_storage_backend=None)
        manager = CacheTransferManager(
            SimpleNamespace(cache_config=config, quant_config=quant,
                            model_config=SimpleNamespace(num_hidden_layers=LAYERS))
        )  # fmt: skip
        caches = [
            Cache(kind, layer, 0, 0, [BLOCKS, HEADS, TOKENS, HEAD_DIM][: 3 if "scales" in kind else 4], "bfloat16")
            for layer in range(LAYERS)
            for kind in ("key_caches", "value_caches", "key_cache_scales", "value_cache_scales")[: 4 if quant else 2]
        ]
        for cache in caches:
            cache.tensor = paddle.full(shape=cache.shape, fill_value=0, dtype=cache.dtype)
            cache.randomise(random)
        hosts = {cache.name: cuda_host_alloc(HOST_BLOCKS * cache.model.shape[1]) for cache in caches}
        manager.set_cache_kvs_map({cache.name: cache.tensor for cache in caches})
        manager.set_host_cache_kvs_map(hosts)
        for _ in range(20):
            blocks = int(random.integers(1, 9))
            gpu, back = random.permutation(BLOCKS)[:blocks].tolist(), random.permutation(BLOCKS)[:blocks].tolist()
            cpu = random.permutation(HOST_BLOCKS)[:blocks].tolist()
            if not manager.evict_to_host_async(gpu, cpu):
                raise Wrong("evict_to_host_async() failed")
            manager.sync_output_stream()
            for cache in caches:
                memory = ctypes.string_at(hosts[cache.name], HOST_BLOCKS * cache.model.shape[1])
                found = np.frombuffer(memory, np.uint8).reshape(HOST_BLOCKS, -1)
                if (found[cpu] != cache.model[gpu]).any():
                    raise Wrong(f"{cache.name}: the host's blocks are not the GPU's")
                cache.host = dict(zip(cpu, cache.model[gpu].copy(), strict=True))
                cache.randomise(random)
            events: list[Any] = []
            loaded = manager.load_layers_to_device_async(
                list(range(LAYERS)),
                cpu,
                back,
                lambda layer: events.append(manager.record_input_stream_event()),  # noqa: B023
            )
            if not loaded or len(events) != LAYERS:
                raise Wrong("load_layers_to_device_async() failed")
            for layer, event in enumerate(events):
                event.own.synchronize(stubs.LIMIT)
                for cache in caches:
                    if cache.name.split("_rank")[0].endswith(f"_{layer}") and "scales" not in cache.name:
                        cache.model[back] = [cache.host[i] for i in cpu]
                        count["verified"] += cache.check()
            count["batches"] += 1
            count["tasks"] += 1 + LAYERS
            count["blocks"] += 2 * blocks
            count["moved"] += 2 * blocks * sum(cache.model.shape[1] for cache in caches)
        for ptr in hosts.values():
            fastdeploy.cuda_host_free(ptr)
    return {"count": count, "ran": stubs.report(source), "here": {}}


# -- the runs ---------------------------------------------------------------------------------------------------------


def one(source: Path, index: int, batches: int, seed: int, drop: bool) -> None:
    """A scenario in this process; its result is the last line of the output, as JSON."""
    multiprocessing.set_start_method("fork")  # FastDeploy's queue hands functions of its own to its process
    with (Path(tempfile.gettempdir()) / "fastdeploy-managers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the names of its segments are the same for all engines of a machine
        if index < 0:
            found = run_within(source, seed)
        else:
            found = run_processes(source, scenarios(options_of(source))[index], batches, seed, drop)
    print(json.dumps(found), flush=True)


def start_one(source: Path, index: int, args: argparse.Namespace, *, drop: bool = False) -> Any:
    words = [sys.executable, __file__, str(source), "--scenario", str(index), "--batches", str(args.batches),
             "--seed", str(args.seed), *["--drop"] * drop]  # fmt: skip
    return subprocess.run(words, capture_output=True, text=True, timeout=args.limit, check=False)


def run_source(source: Path, args: argparse.Namespace) -> int:
    print(f"\nFastDeploy {version_of(source)} in {source.name}")
    ran: dict[str, str] = {}
    here: dict[str, str] = {}
    failed = 0
    wanted = list(enumerate(map(str, scenarios(options_of(source)))))
    if (source / WITHIN).exists():
        wanted.append((-1, f"{WITHIN} within the engine, with and without scales"))
    for index, what in wanted:
        done = start_one(source, index, args)
        if done.returncode:
            failed += 1
            print(f"  FAILED: {what}\n{done.stdout}{done.stderr}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        ran.update(found["ran"])
        here.update(found["here"])
        count = found["count"]
        print(
            f"  {what}: {count['tasks']} tasks of {count['blocks']} blocks in {count['batches']} batches, "
            f"{count['moved']:,} bytes moved, {count['verified']:,} bytes of caches verified"
        )
    done = start_one(source, 0, args, drop=True)
    told = [line for line in done.stderr.splitlines() if line.startswith("Wrong: ") and line.endswith(NOT_AS)]
    failed += not told
    found = f"noticed, as it must be: {told[0]}" if told else f"NOT NOTICED\n{done.stdout}{done.stderr}"
    print(f"  with the last block of each swap dropped: {found}")
    print("  FastDeploy's own files that ran in the managers' processes (SHA-256):")
    for name, digest in sorted(ran.items()):
        print(f"    {digest}  {name}")
    for name, digest in sorted(set(here.items()) - set(ran.items())):
        print(f"    {digest}  {name} (in the engine's process only)")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help="an unpacked FastDeploy")
    parser.add_argument("--batches", type=int, default=40, help="of random swaps, a run (40)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="for a run (300)")
    parser.add_argument("--scenario", type=int, help=argparse.SUPPRESS)  # one of them, in this process
    parser.add_argument("--drop", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sources = [source.resolve() for source in args.sources]
    if args.scenario is not None:
        one(args.sources[0], args.scenario, args.batches, args.seed, args.drop)
        return 0
    print(f"kvswap {kvswap.__version__}, devices {stubs.ops.device_kind()}:N")
    print("stubbed (a dot at the end: the package itself, its other modules are FastDeploy's): paddle, cupy,")
    print("  " + ",\n  ".join(stubs.stubs()))
    print("FastDeploy's compiled ops are kvswap's by install(): " + ", ".join(stubs._install._OPS))
    failed = sum(run_source(source, args) for source in args.sources)
    print(f"\n{failed} runs FAILED" if failed else "\nall as it should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
