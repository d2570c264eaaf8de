"""Managers for tests: their ranks are real processes on host devices, and the caches are checked through mappings."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from conftest import PATIENCE, ROOT, Bytes, until

import kvswap
from kvswap import memory
from kvswap.fastdeploy.client import SWAP2CPU, Client, Result

SHAPE = (24, 2, 4, 8)
MODEL = (
    "--num_layers", "2", "--key_cache_shape", ",".join(map(str, SHAPE)),
    "--value_cache_shape", ",".join(map(str, SHAPE)), "--num_cpu_blocks", "32", "--cache_dtype", "float16",
)  # fmt: skip
PATIENT = ("--rank_timeout", "60")  # on a busy machine a rank may get no time for seconds
GPU_BLOCKS, CPU_BLOCKS, BLOCK_NBYTES, TENSORS = SHAPE[0], 32, 2 * 4 * 8 * 2, 4


_numbers = itertools.count(1)


class Manager:
    """Ranks as processes, in a folder of their own. Lines of rank i's log: log(i)."""

    def __init__(
        self,
        ranks: int = 1,
        *options: str,
        model: tuple[str, ...] = MODEL,
        create: bool = True,
        device: str | None = None,
    ) -> None:
        """device: of all ranks; None: host:0, host:1, ..."""
        self.device = device
        self.ranks, self.options = ranks, (*model, *(("--create_cache_tensor",) if create else ()), *PATIENT, *options)
        self._folder = tempfile.TemporaryDirectory(prefix="kvm-")
        self.directory = Path(self._folder.name, "m")
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * ranks
        self.clients: list[Client] = []
        # Names of segments are a machine's: managers that run beside each other must not share them.
        self.device_id = os.getpid() * 10_000 + next(_numbers) * 10

    def __enter__(self) -> Manager:
        try:
            for rank in range(self.ranks):
                self.start(rank)
            until(lambda: (self.directory / "manager.sock").exists() or self.check_alive(), "a socket")
        except BaseException:
            self.__exit__()
            raise
        return self

    def check_alive(self) -> None:
        for rank, process in enumerate(self.processes):
            assert process is None or process.poll() is None, f"rank {rank} ended: {self.log(rank)}"

    def start(self, rank: int, *options: str) -> subprocess.Popen[bytes]:
        places = [str(Path(kvswap.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
        with self._log(rank).open("ab") as log:
            self.processes[rank] = process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "kvswap.fastdeploy.manager", "--rank", str(rank),
                 "--mp_num", str(self.ranks), "--device_id", str(self.device_id + rank),
                 "--device", self.device or f"host:{rank}", "--socket_dir", str(self.directory),
                 "--log_level", "debug", *self.options, *options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=ROOT / "tests", env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            )  # fmt: skip
        return process

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank{rank}.log")

    def log(self, rank: int) -> str:
        return self._log(rank).read_text()

    def client(self) -> Client:
        self.clients.append(Client(self.directory))
        return self.clients[-1]

    def ready_client(self, timeout: float = PATIENCE) -> Client:
        """One whose engine has opened the caches."""
        client = self.client()
        client.wait_started(PATIENCE)
        client.attach()
        client.wait_ready(timeout)
        return client

    def signal(self, rank: int, number: int) -> None:
        process = self.processes[rank]
        assert process is not None
        process.send_signal(number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)
        self.wait(rank)

    def wait(self, rank: int, timeout: float = PATIENCE) -> int:
        process = self.processes[rank]
        assert process is not None
        status = process.wait(timeout)
        self.processes[rank] = None
        return status

    def segments(self) -> list[str]:
        """Names in /dev/shm that are this manager's."""
        numbers = {f".device{self.device_id + rank}" for rank in range(self.ranks)}
        return sorted(path.name for path in Path("/dev/shm").iterdir() if path.suffix in numbers)

    def __exit__(self, *error: object) -> None:
        for client in self.clients:
            client.close()
        for process in self.processes:
            if process is not None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for rank, process in enumerate(self.processes):
            if process is not None:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(PATIENCE)
                    print(f"rank {rank} did not stop:\n{self.log(rank)}", file=sys.stderr)
        for name in self.segments():
            Path("/dev/shm", name).unlink(missing_ok=True)
        self._folder.cleanup()


class Model:
    """What the caches of all ranks must hold, as contents: number -1 is zeros, another is bytes that were written once.

    Swaps are applied in the order in which they were submitted: the manager promises that they end as if they had run
    in that order.
    """

    def __init__(self, manager: Manager, client: Client, seed: int = 1) -> None:
        self.manager, self.client = manager, client
        self.random = np.random.default_rng(seed)
        self.contents: list[Bytes] = []  # [ranks, tensors, bytes], by number
        self.cpu = np.full(CPU_BLOCKS, -1)
        self.written = np.zeros(CPU_BLOCKS, np.bool_)
        self.mappings: list[list[kvswap._C.Mapped]] = []
        self.open()

    def open(self) -> None:
        """The caches as they are now: new ones are zeros."""
        self.close()
        self.told = self.client.handles()
        for rank in self.told:
            made = [memory.open(data, generation=rank["generation"]) for data in rank["handles"].values()]
            self.mappings.append(made)
        self.gpu = np.full(GPU_BLOCKS, -1)

    def close(self) -> None:
        for mapping in self._each():
            mapping.close()
        self.mappings = []

    def _each(self) -> Iterator[kvswap._C.Mapped]:
        for rank in self.mappings:
            yield from rank

    def cache(self, rank: int, tensor: int) -> Bytes:
        return np.asarray(self.mappings[rank][tensor]).view(np.uint8).reshape(GPU_BLOCKS, BLOCK_NBYTES)

    def write(self, blocks: Any) -> None:
        """The engine computes: new bytes in these GPU blocks. No swap may be under way."""
        for block in np.asarray(blocks):
            size = (self.manager.ranks, TENSORS, BLOCK_NBYTES)
            self.gpu[block] = len(self.contents)
            self.contents.append(self.random.integers(0, 256, size, np.uint8))
            for rank in range(self.manager.ranks):
                for tensor in range(TENSORS):
                    self.cache(rank, tensor)[block] = self.contents[-1][rank, tensor]

    def swap(self, kind: int, gpu_ids: list[int], cpu_ids: list[int], **options: Any) -> str:
        task = self.client.swap(kind, gpu_ids, cpu_ids, timeout=PATIENCE, **options)
        if kind == SWAP2CPU:
            self.cpu[cpu_ids] = self.gpu[gpu_ids]
            self.written[cpu_ids] = True
        else:
            self.gpu[gpu_ids] = self.cpu[cpu_ids]
        return task

    def swap_some(self) -> str:
        """A few random blocks, out or back."""
        count = int(self.random.integers(1, 5))
        gpu_ids = self.random.choice(GPU_BLOCKS, count, replace=False).tolist()
        held = np.flatnonzero(self.written)
        if held.size >= count and self.random.random() < 0.5:
            return self.swap(2, gpu_ids, self.random.choice(held, count, replace=False).tolist())
        return self.swap(1, gpu_ids, self.random.choice(CPU_BLOCKS, count, replace=False).tolist())

    def collect(self, count: int) -> list[Result]:
        return [self.client.next_result(PATIENCE) for _ in range(count)]

    def check(self) -> None:
        """All GPU blocks of all ranks; nothing may be under way."""
        zeros = np.zeros((self.manager.ranks, TENSORS, BLOCK_NBYTES), np.uint8)
        expected = np.stack([zeros if number < 0 else self.contents[number] for number in self.gpu])
        for rank in range(self.manager.ranks):
            for tensor in range(TENSORS):
                np.testing.assert_array_equal(self.cache(rank, tensor), expected[:, rank, tensor])

    def check_host(self) -> None:
        """All host blocks that hold anything, by way of the GPU."""
        held = np.flatnonzero(self.written).tolist()
        for begin in range(0, len(held), GPU_BLOCKS):
            some = held[begin : begin + GPU_BLOCKS]
            task = self.swap(2, list(range(len(some))), some)
            assert self.client.result(task, PATIENCE).ok
            self.check()
