"""FastDeploy's segments: a cache of one process in others, by a name in /dev/shm.

A segment is what FastDeploy's own ops write and read: 8 bytes that nobody uses, and the 64 bytes of the driver's handle
of an allocation. It carries neither size nor offset, nor whose it is. So a tensor that begins within its allocation
cannot travel like that: set_data_ipc() refuses it, where FastDeploy's own hands out the allocation's beginning, another
tensor's bytes. kvswap.memory.export() has no such limit.

What kvswap writes is for this user alone (0600), and what it opens must be this user's.
"""

from __future__ import annotations

import math
import os
import secrets
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvswap import _C, memory
from kvswap._regular import open_regular
from kvswap.fastdeploy._tensors import itemsize
from kvswap.fastdeploy.ops import current_device

__all__ = [
    "Opened",
    "SharedTensor",
    "export_bytes",
    "get_data_ptr_ipc",
    "open_bytes",
    "open_event",
    "open_segment",
    "set_data_ipc",
    "share_external_data",
    "unlink_segment",
    "unset_data_ipc",
    "write_segment",
    "zero",
]

_Device: TypeAlias = _C.Device | str | None

_FOLDER = Path("/dev/shm")
_SEGMENT = struct.Struct("=Q64s")

_INTERFACES = ("__cuda_array_interface__", "__array_interface__")

_lock = threading.Lock()
_written: dict[str, tuple[bytes, int]] = {}  # guarded by _lock: this process's own segments: handle, address
_shared: dict[int, list[Opened]] = {}  # guarded by _lock: what share_external_data() opened, by address


# -- memory ------------------------------------------------------------------------------------------------------------


class Opened:
    """Memory of another process (or our own): ptr is where it is here. close() once it is not needed."""

    def __init__(self, ptr: int, nbytes: int, mapped: _C.Mapped | None, device: _C.Device) -> None:
        self.ptr, self.nbytes, self.device = ptr, nbytes, device
        self._mapped = mapped  # None: it is this process's own memory

    def close(self, timeout: float | None = 60.0) -> None:
        """Wait for the copies that use it, and close it. Harmless if done. TimeoutError: they still run; it is open."""
        if self._mapped is not None and not self._mapped.closed:
            self._mapped.close(timeout)


def export_bytes(device: _C.Device, ptr: int, nbytes: int, generation: int) -> bytes:
    """A handle as kvswap.memory has it: with offset, size, owner and generation."""
    return memory.export(ptr, device=device, nbytes=nbytes, generation=generation).to_bytes()


def open_bytes(handle: bytes, device: _C.Device, nbytes: int) -> Opened:
    """What export_bytes() gave, in another process. ValueError: it is of another size."""
    mapped = memory.open(handle, device=device)
    if mapped.nbytes != nbytes:
        found = mapped.nbytes
        mapped.close()
        raise ValueError(f"the handle is of {found} bytes, but the cache has {nbytes}: the two sides have other shapes")
    return Opened(mapped.ptr, nbytes, mapped, device)


def open_event(exported: bytes, device: _C.Device) -> _C.Event:
    """An event of another process."""
    event: _C.Event = memory.open_event(exported, device=device)
    return event


def zero(allocated: _C.Memory) -> None:
    """Fill new memory with zeros, and wait for that."""
    words = allocated.nbytes // 4
    stream = _C.Stream(allocated.device)
    if words:
        _C._seam(allocated.device, "fill", allocated.ptr, 0, words, stream.handle)
    if rest := allocated.nbytes % 4:
        tail = allocated.device.alloc(4, host=True)
        np.asarray(tail)[:] = 0
        _C._seam(allocated.device, "copy", allocated.ptr + words * 4, tail.ptr, rest, stream.handle)
    stream.synchronize(60.0)


# -- segments ---------------------------------------------------------------------------------------------------------


def _path(name: Any) -> Path:
    if not isinstance(name, str):
        raise TypeError(f"a segment's name must be a str, not {type(name).__name__}")
    plain = name.removeprefix("/")
    if not plain or "/" in plain or "\0" in plain or plain in (".", "..") or len(plain.encode()) > 255:
        raise ValueError(f"{name!r} is no name for a segment: 1 to 255 bytes, none of them a slash")
    return _FOLDER / plain


def write_segment(name: str, device: _Device, source: Any, nbytes: int | None = None) -> None:
    """Let other processes open this memory under a name; one that is there already is replaced.

    ValueError: the memory begins within its allocation, or is no device memory.
    """
    path = _path(name)
    exported = memory.export(source, device=device, nbytes=nbytes)
    if exported.offset:
        raise ValueError(
            f"{name}: the tensor begins at byte {exported.offset} of an allocation of {exported.allocation_nbytes} "
            "bytes, and a segment can only stand for a whole allocation: allocate it by itself, or share it by "
            "kvswap.memory.export()"
        )
    handle = _C._ipc_handle(exported.to_bytes())
    new = path.with_name(f".kvswap-{os.getpid()}-{secrets.token_hex(8)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_SEGMENT.pack(0, handle))
        os.replace(new, path)  # never seen half written
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    with _lock:
        _written[path.name] = handle, _address(source)


def _address(source: Any) -> int:
    if isinstance(source, int):
        return source
    if callable(method := getattr(source, "data_ptr", None)):
        return int(method())
    for name in _INTERFACES:
        if (interface := getattr(source, name, None)) is not None:
            return int(interface["data"][0])
    raise TypeError(f"{type(source).__name__} does not say where it lies")


def _read_segment(name: str) -> bytes:
    path = _path(name)
    try:
        fd = open_regular(path)  # any user may have put a pipe there, and opening that would wait
    except FileNotFoundError:
        raise _C.Error(f"there is no segment {name}: nobody has called set_data_ipc() with it yet") from None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise _C.Error(
                f"segment {name} belongs to user {found.st_uid}: only this user's ({os.geteuid()}) are opened"
            )
        data = file.read(_SEGMENT.size)
    if len(data) < _SEGMENT.size:
        raise _C.Error(
            f"segment {name} has {len(data)} bytes instead of {_SEGMENT.size}: it is not written yet, or none"
        )
    handle: bytes = _SEGMENT.unpack(data)[1]
    if not any(handle):
        raise _C.Error(f"segment {name} holds no handle yet")
    return handle


def open_segment(name: str, device: _C.Device, nbytes: int) -> Opened:
    """The memory behind a segment, at least so many bytes. kvswap.Error: there is none; DeviceError: it does not open,
    because its owner has freed it, or is gone."""
    handle = _read_segment(name)
    with _lock:
        own = _written.get(_path(name).name)
    if own is not None and own[0] == handle:
        return Opened(own[1], nbytes, None, device)
    mapped = memory.open(_C._ipc_of_handle(handle, device, nbytes), device=device)
    return Opened(mapped.ptr, nbytes, mapped, device)


def unlink_segment(name: str) -> None:
    """Take the name away; who has the memory open keeps it. Harmless if done."""
    path = _path(name)
    with _lock:
        _written.pop(path.name, None)
    path.unlink(missing_ok=True)


# -- FastDeploy's ops -------------------------------------------------------------------------------------------------


class SharedTensor:
    """A cache of another process, for the swap ops and for whoever reads array interfaces; what share_external_data()
    returns where it knows no framework to make a tensor with."""

    def __init__(self, opened: Opened, shape: tuple[int, ...], size: int, dtype: Any) -> None:
        self._opened, self.shape, self._itemsize, self.dtype = opened, shape, size, dtype

    def data_ptr(self) -> int:
        return self._opened.ptr

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self._itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self._itemsize

    def is_contiguous(self) -> bool:
        return True

    def _interface(self) -> dict[str, Any]:
        return {"data": (self._opened.ptr, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def __getattr__(self, name: str) -> Any:
        """Either array interface, as bytes: by where the memory is."""
        if name in _INTERFACES and name == _INTERFACES[self._opened.device.kind == "host"]:
            return self._interface()
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __repr__(self) -> str:
        return (
            f"<SharedTensor {list(self.shape)} of {self.dtype} at {self._opened.ptr:#x} on {self._opened.device.name}>"
        )


def _as_framework(shared: SharedTensor, like: Any) -> Any:
    """A tensor of the same kind as `like`, which reads and writes the shared bytes."""
    framework = type(like).__module__.partition(".")[0]
    module = sys.modules.get(framework)
    if module is None or framework not in ("torch", "paddle"):
        return shared
    if shared._opened.device.kind != "cuda":
        plain = np.asarray(shared)
        flat = module.from_numpy(plain) if framework == "torch" else None
    elif framework == "torch":
        flat = module.as_tensor(shared, device=shared._opened.device.name)
    else:
        flat = module.to_tensor(shared)
    if flat is None:
        return shared
    made = flat.view(like.dtype).reshape(list(shared.shape))
    if made.data_ptr() != shared.data_ptr():
        raise _C.Error(f"this {framework} copies what it should share: use the address (data_ptr()) of a SharedTensor")
    return made


def set_data_ipc(tensor: Any, shm_name: str, *, device: _Device = None) -> None:
    """Let other processes of this user share a cache under a name.

    tensor: at the beginning of its allocation; it must stay allocated. device: whose memory it is, needed on host
      devices only.
    ValueError: a tensor within an allocation, which a segment cannot express, or no device memory. Any thread may call.
    """
    if device is None and not isinstance(tensor, _C.Memory):
        device = current_device(None, tensor)
    write_segment(shm_name, device, tensor)


def share_external_data(tensor: Any, shm_name: str, shape: Sequence[int], *, device: _Device = None) -> Any:
    """Open a cache that another process has named by set_data_ipc().

    tensor: says by its type what is made (torch's or paddle's tensor on a GPU, torch's on a host device; else a
      SharedTensor) and of which elements. shape: of the cache. device: where; None: the current GPU, or host:0.

    Closed by unset_data_ipc(). kvswap.Error: there is no such segment, or it is somebody else's. DeviceError: it does
    not open. Any thread may call.
    """
    extents = tuple(int(extent) for extent in shape)
    size = itemsize(tensor, "tensor")
    if not extents or min(extents) < 1:
        raise ValueError(f"shape is {list(extents)}: every extent must be at least 1")
    opened = open_segment(shm_name, current_device(device, tensor), math.prod(extents) * size)
    shared = SharedTensor(opened, extents, size, getattr(tensor, "dtype", None))
    try:
        made = _as_framework(shared, tensor)
    except BaseException:
        opened.close()
        raise
    with _lock:
        _shared.setdefault(opened.ptr, []).append(opened)
    return made


def get_data_ptr_ipc(tensor: Any, shm_name: str, *, device: _Device = None) -> Any:
    """The address in this process of what another one has named: one int64, in a tensor of `tensor`'s framework on the
    CPU, else in a NumPy array. It stays open until the process ends, or unset_data_ipc() closes it."""
    opened = open_segment(shm_name, current_device(device, tensor), 1)
    with _lock:
        _shared.setdefault(opened.ptr, []).append(opened)
    address = np.array([opened.ptr], np.int64)
    framework = type(tensor).__module__.partition(".")[0]
    module = sys.modules.get(framework)
    if framework == "torch" and module is not None:
        return module.from_numpy(address)
    if framework == "paddle" and module is not None:
        return module.to_tensor(address, place=module.CPUPlace())
    return address


def unset_data_ipc(tensor: Any, shm_name: str, close_ipc: bool, unlink_shm: bool) -> None:
    """End sharing. close_ipc: close what share_external_data() opened, once the copies that use it have ended: the
    tensor must not be used any more. unlink_shm: take the name away.

    ValueError: close_ipc of a tensor that share_external_data() did not make, or that is closed. TimeoutError: copies
    still run. Any thread may call.
    """
    path = _path(shm_name)
    if close_ipc:
        ptr = int(tensor.data_ptr())
        with _lock:
            opened = _shared.get(ptr)
            if not opened:
                raise ValueError(
                    f"{path.name}: nothing that share_external_data() opened is at {ptr:#x}, or it is closed"
                )
            last = opened.pop()
            if not opened:
                del _shared[ptr]
        try:
            last.close()
        except BaseException:
            with _lock:
                _shared.setdefault(ptr, []).append(last)
            raise
    if unlink_shm:
        unlink_segment(shm_name)
