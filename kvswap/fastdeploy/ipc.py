"""FastDeploy's segments: files in /dev/shm by which one process shares a cache with others under a name.

The format is that of FastDeploy's ops (custom_ops/gpu_ops/set_data_ipc.cu, share_external_data.cu, get_data_ptr_ipc.cu
and unset_data_ipc.cu, releases 2.0 to 2.6): 8 unused bytes, then the driver's 64-byte IPC handle of an allocation. It
has no size, offset or owner. A tensor inside an allocation cannot be shared by it: FastDeploy's set_data_ipc() shares
the start of the allocation, which are another tensor's bytes, and kvswap's refuses. kvswap.memory.export() has no such
limit.

kvswap creates segments with mode 0600 and opens only segments of the same user.
"""

from __future__ import annotations

import math
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvswap import _C, memory
from kvswap._regular import open_regular
from kvswap.fastdeploy._tensors import framework_of, itemsize
from kvswap.fastdeploy.ops import current_device

if TYPE_CHECKING:
    from kvswap.typing import DeviceLike

__all__ = [
    "SharedTensor",
    "get_data_ptr_ipc",
    "open_segment",
    "set_data_ipc",
    "share_external_data",
    "unlink_segment",
    "unset_data_ipc",
    "write_segment",
    "zero",
]

_Device: TypeAlias = "DeviceLike | None"

_FOLDER = Path("/dev/shm")
_SEGMENT = struct.Struct("=Q64s")

_INTERFACES = ("__cuda_array_interface__", "__array_interface__")

_lock = threading.Lock()
_written: dict[str, tuple[bytes, bytes]] = {}  # guarded by _lock; this process's segments by name: handle, export
_shared: list[tuple[int, _C.Mapped]] = []  # guarded by _lock; what share_external_data() opened, with its address


def zero(allocated: _C.Memory) -> None:
    """Fill new memory with zeros and wait until that is done."""
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
    """Write a segment by which other processes can open this memory. An existing segment of that name is replaced.

    ValueError: the memory does not begin at the start of its allocation, or is not device memory.
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
        os.replace(new, path)  # atomic: a reader never sees a partly written segment
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    with _lock:
        _written[path.name] = handle, exported.to_bytes()


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


def open_segment(name: str, device: _C.Device, nbytes: int) -> _C.Mapped:
    """Open the memory behind a segment; at least nbytes bytes. kvswap.Error: there is no such segment. DeviceError: the
    driver cannot open the memory, because its owner has freed it or has ended."""
    handle = _read_segment(name)
    with _lock:
        own, exported = _written.get(_path(name).name, (b"", b""))
    if own != handle:  # else this process's, of which drivers open no handle
        exported = _C._ipc_of_handle(handle, device, nbytes)
    return memory.open(exported, device=device)


def unlink_segment(name: str) -> None:
    """Remove the name. Processes that have the memory open keep it. Does nothing if the name is gone."""
    path = _path(name)
    with _lock:
        _written.pop(path.name, None)
    path.unlink(missing_ok=True)


# -- FastDeploy's ops -------------------------------------------------------------------------------------------------


class SharedTensor:
    """A cache of another process, with the array interfaces, as the swap ops take it. share_external_data() returns it
    if it knows no framework to make a tensor with."""

    def __init__(self, opened: _C.Mapped, shape: tuple[int, ...], size: int, dtype: Any) -> None:
        self._opened, self._ptr, self.shape, self._itemsize, self.dtype = opened, opened.ptr, shape, size, dtype

    def data_ptr(self) -> int:
        """The address in this process."""
        return self._ptr

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of an element."""
        return self._itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.numel() * self._itemsize

    def is_contiguous(self) -> bool:
        """True: the elements lie one behind the other."""
        return True

    def __getattr__(self, name: str) -> Any:
        """__cuda_array_interface__ for memory of a GPU, __array_interface__ for memory of a host device; elements are
        bytes."""
        if name in _INTERFACES and name == _INTERFACES[self._opened.device.kind == "host"]:
            return {"data": (self._ptr, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __repr__(self) -> str:
        return f"<SharedTensor {list(self.shape)} of {self.dtype} at {self._ptr:#x} on {self._opened.device.name}>"


def _as_framework(shared: SharedTensor, like: Any) -> Any:
    """A tensor of the framework of `like` over the shared memory, without a copy."""
    framework, module = framework_of(like)
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
    """Share a cache under a name with other processes of this user. FastDeploy's op of this name.

    tensor: must begin at the start of its allocation and stay allocated. device: the tensor's device, needed on host
      devices only.
    ValueError: the tensor begins inside an allocation, which a segment cannot express, or is not device memory. Any
    thread may call.
    """
    if device is None and not isinstance(tensor, _C.Memory):
        device = current_device(None, tensor)
    write_segment(shm_name, device, tensor)


def share_external_data(tensor: Any, shm_name: str, shape: Sequence[int], *, device: _Device = None) -> Any:
    """Open a cache that another process has shared by set_data_ipc(). FastDeploy's op of this name.

    tensor: its type selects the type of the result (a torch or paddle tensor on a GPU, a torch tensor on a host device,
      else a SharedTensor), and its dtype the elements. shape: the cache's, in elements. device: None: the current GPU,
      or host:0.

    unset_data_ipc() closes it. kvswap.Error: there is no such segment, or it belongs to another user. DeviceError: the
    driver cannot open it. Any thread may call.
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
        _shared.append((opened.ptr, opened))
    return made


def get_data_ptr_ipc(tensor: Any, shm_name: str, *, device: _Device = None) -> Any:
    """Open a cache that another process has shared, and return its address in this process. FastDeploy's op of this
    name.

    Returns one int64: in a CPU tensor of `tensor`'s framework, else in a NumPy array of shape (1,). The memory stays
    open until unset_data_ipc() or the end of the process. Errors: as share_external_data(). Any thread may call."""
    opened = open_segment(shm_name, current_device(device, tensor), 1)
    with _lock:
        _shared.append((opened.ptr, opened))
    address = np.array([opened.ptr], np.int64)
    framework, module = framework_of(tensor)
    if framework == "torch" and module is not None:
        return module.from_numpy(address)
    if framework == "paddle" and module is not None:
        return module.to_tensor(address, place=module.CPUPlace())
    return address


def unset_data_ipc(tensor: Any, shm_name: str, close_ipc: bool, unlink_shm: bool) -> None:
    """End sharing. FastDeploy's op of this name.

    close_ipc: close what share_external_data() opened, after the copies that use it have ended; the tensor must not be
      used afterwards. unlink_shm: remove the name.

    ValueError: close_ipc of a tensor that share_external_data() did not return, or that is closed. TimeoutError: copies
    still run after 60 s. Any thread may call.
    """
    path = _path(shm_name)
    if close_ipc:
        ptr = int(tensor.data_ptr())
        with _lock:
            last = next((each for each in reversed(_shared) if each[0] == ptr), None)
            if last is None:
                raise ValueError(
                    f"{path.name}: nothing that share_external_data() opened is at {ptr:#x}, or it is closed"
                )
            _shared.remove(last)
        try:
            last[1].close()
        except BaseException:
            with _lock:
                _shared.append(last)
            raise
    if unlink_shm:
        unlink_segment(shm_name)
