"""Mooncake's own master and nodes on loopback, for tests. The module `mooncake` must be installed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import mooncake
import numpy as np
from conftest import PATIENCE

PROGRAMS = Path(mooncake.__file__).parent
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"{process.args!r} does not listen on {port}: {process.poll()}")


class Cluster:
    """A master and nodes that lend memory. flags: of the master; lease: seconds."""

    def __init__(self, folder: Path, *flags: str, nodes: int = 2, memory: str = "64MB", lease: float = 10.0) -> None:
        self._log = (folder / "mooncake.log").open("ab")
        self._folder, self._flags, self._memory, self._lease = folder, flags, memory, lease
        self.port = free_port()
        self.master = self._start_master()
        self.nodes = [self.start_node() for _ in range(nodes)]

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def _start(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "MC_TCP_BIND_ADDRESS": HOST}
        command = [str(PROGRAMS / name), *flags]
        return subprocess.Popen(command, cwd=self._folder, stdout=self._log, stderr=self._log, env=environment)

    def _start_master(self) -> subprocess.Popen[bytes]:
        process = self._start(
            "mooncake_master",
            f"--rpc_address={HOST}",
            f"--rpc_port={self.port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={free_port()}",
            f"--default_kv_lease_ttl={int(self._lease * 1000)}",
            *self._flags,
        )
        wait_for(self.port, process)
        return process

    def restart_master(self) -> None:
        self.master.kill()
        self.master.wait()
        self.master = self._start_master()

    def start_node(self) -> subprocess.Popen[bytes]:
        port = free_port()
        process = self._start(
            "mooncake_client",
            f"--host={HOST}",
            f"--port={port}",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={self.address}",
            f"--global_segment_size={self._memory}",
            "--protocol=tcp",
        )
        wait_for(port, process)
        return process

    def close(self) -> None:
        for process in (*self.nodes, self.master):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        self._log.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Raw:
    """Mooncake's own client, for what a test does behind kvswap's back."""

    def __init__(self, cluster: Cluster, nbytes: int = 4 << 20) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store: Any = MooncakeDistributedStore()
        port = free_port()
        assert self.store.setup(f"{HOST}:{port}", "P2PHANDSHAKE", 0, 0, "tcp", "", cluster.address) == 0
        self.memory = np.zeros(nbytes, np.uint8)
        assert self.store.register_buffer(self.memory.ctypes.data, self.memory.nbytes) == 0
        self._nodes = cluster.nodes

    def put(self, name: str, data: bytes) -> int:
        self.memory[: len(data)] = np.frombuffer(data, np.uint8)
        return int(self.store.batch_put_from([name], [self.memory.ctypes.data], [len(data)])[0])

    def get(self, name: str, nbytes: int) -> bytes:
        code = self.store.batch_get_into([name], [self.memory.ctypes.data], [nbytes])[0]
        return self.memory[:nbytes].tobytes() if code == nbytes else b""

    def place(self, name: str) -> tuple[int, int]:
        """(pid of its node, address there)."""
        at = self.store.get_replica_desc(name)[0].get_memory_descriptor().buffer_descriptor.buffer_address
        for node in self._nodes:
            for line in Path(f"/proc/{node.pid}/maps").read_text().splitlines():
                begin, end = (int(each, 16) for each in line.split()[0].split("-"))
                if begin <= at < end and self._has(node.pid, at, name):
                    return node.pid, at
        raise AssertionError(f"{name} is in no node's memory")

    def _has(self, pid: int, at: int, name: str) -> bool:
        """Nodes may have segments at one address: compare what is there."""
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            memory.seek(at)
            return memory.read(64) == self.get(name, int(self.store.get_size(name)))[:64]

    def flip(self, name: str, offset: int) -> None:
        """A bit of the object, in its node's memory."""
        pid, at = self.place(name)
        with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
            memory.seek(at + offset)
            byte = memory.read(1)[0]
            memory.seek(at + offset)
            memory.write(bytes([byte ^ 1 << offset % 8]))

    def close(self) -> None:
        self.store.close()
