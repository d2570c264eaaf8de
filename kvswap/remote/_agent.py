"""What moves the bytes: an agent. NixlAgent is NIXL's; tests have one of their own over shared memory.

NIXL is imported when an agent is made, and nowhere else. Its agents are unlocked: the one lock here is held in each
call. begin() may block its caller until the bytes have moved (UCX does, between processes of one host).
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvswap import _C

Operation: TypeAlias = Literal["READ", "WRITE"]


class Agent(Protocol):
    """Remote memory. Errors of begin(), running() and add() are exceptions of any kind: the transfer failed."""

    name: str

    def register(self, ptr: int, nbytes: int) -> None: ...
    def metadata(self) -> bytes:
        """What add() of another agent needs to reach the registered memory."""

    def add(self, metadata: bytes) -> str:
        """Another agent's name."""

    def remove(self, name: str) -> None:
        """Disconnect from an agent."""

    def begin(self, operation: Operation, name: str, local: NDArray[Any], remote: NDArray[Any], nbytes: int) -> Any:
        """Start to move pieces of nbytes each, by their addresses; returns a handle."""

    def running(self, handle: Any) -> bool:
        """False: all has moved."""

    def end(self, handle: Any) -> bool:
        """Forget a transfer. False: it still runs and cannot be stopped; ask again."""

    def close(self) -> None: ...


class NixlAgent:
    """NIXL, by UCX. kvswap.Error: it is not installed, or has no UCX here.

    serve: others read and write the registered memory, for which NIXL has a thread that takes a whole processor. An
      agent without it makes progress in running().
    """

    def __init__(self, name: str, *, serve: bool = False, backend: str = "UCX") -> None:
        self._lock = threading.Lock()
        self.name = name
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise _C.Error(f"kvswap.remote needs NIXL ({error}): pip install --no-deps nixl nixl-cu13") from None
        if not os.environ.get("NIXL_LOG_LEVEL"):  # NIXL logs to the standard output
            logging.getLogger("nixl").setLevel(logging.WARNING)
        try:
            self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=serve, backends=[backend]))
        except Exception as error:
            raise _C.Error(f"NIXL's {backend} backend cannot be used here: {type(error).__name__}: {error}") from error
        if backend not in self._agent.backends:
            raise _C.Error(f"this NIXL has no {backend} backend: it has {', '.join(self._agent.get_plugin_list())}")
        self._registered: list[Any] = []

    def register(self, ptr: int, nbytes: int) -> None:
        with self._lock:
            self._registered.append(self._agent.register_memory([(ptr, nbytes, 0, "")], "DRAM"))

    def metadata(self) -> bytes:
        with self._lock:
            data: bytes = self._agent.get_agent_metadata()
        return data

    def add(self, metadata: bytes) -> str:
        with self._lock:
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        with self._lock:
            self._agent.remove_remote_agent(name)

    def begin(self, operation: Operation, name: str, local: NDArray[Any], remote: NDArray[Any], nbytes: int) -> Any:
        with self._lock:
            sides = [self._agent.get_xfer_descs(_pieces(side, nbytes), "DRAM") for side in (local, remote)]
            begun = _Begun(self._agent.initialize_xfer(operation, *sides, name))
            try:  # after an error some pieces may be under way: the caller gets the handle all the same
                begun.state = self._agent.transfer(begun.handle)
            except Exception as error:
                begun.error = error
        return begun

    def running(self, handle: Any) -> bool:
        begun: _Begun = handle
        with self._lock:
            if begun.error is None and begun.state == "PROC":
                begun.state = self._agent.check_xfer_state(begun.handle)
        if begun.error is not None:
            raise begun.error
        if begun.state == "ERR":
            raise _C.Error("NIXL's transfer failed")
        return begun.state == "PROC"

    def end(self, handle: Any) -> bool:
        with self._lock:
            try:
                handle.handle.release()
            except Exception:  # of any kind: it is still under way
                return False
        return True

    def close(self) -> None:
        with self._lock:
            for each in self._registered:
                self._agent.deregister_memory(each)
            self._registered.clear()
            self._agent = None


class _Begun:
    """A transfer of NIXL."""

    __slots__ = ("error", "handle", "state")

    def __init__(self, handle: Any) -> None:
        self.handle, self.state = handle, "ERR"
        self.error: Exception | None = None


def _pieces(addresses: NDArray[Any], nbytes: int) -> NDArray[np.uint64]:
    pieces = np.zeros((len(addresses), 3), np.uint64)
    pieces[:, 0], pieces[:, 1] = addresses, nbytes
    return pieces
