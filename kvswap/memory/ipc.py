"""Sharing of device memory with other processes. See docs/ipc.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvswap import _C

if TYPE_CHECKING:
    from kvswap.typing import DeviceLike

__all__ = ["Export", "export", "export_event", "open", "open_event"]


class Export:
    """An exported range of device memory. From export(), or from_bytes() in another process.

    device, uuid: where the memory lies; the name is the owner's. owner: its process. nbytes: the size of the memory,
    which begins at byte `offset` of an allocation of allocation_nbytes bytes. dtype, shape, generation: as they were
    given to export(). An Export from export() holds the exported object.
    """

    def __init__(self, data: bytes, source: Any = None, server: object | None = None) -> None:
        """Use export() or Export.from_bytes()."""
        self._data = bytes(data)
        self._source = source
        self._server = server
        self._fields = _C._ipc_read(self._data)

    @classmethod
    def from_bytes(cls, data: bytes) -> Export:
        """An Export from the bytes of to_bytes(). ValueError: not an export, another version, or damaged."""
        return cls(data)

    def close(self) -> None:
        """Release the exported object and stop serving: memory in chunks cannot be opened any more.

        Open mappings stay valid. Dropping the object does the same. A second call does nothing. Does not wait."""
        server, self._server, self._source = self._server, None, None
        if server is not None:
            _C._ipc_stop(server)

    def to_bytes(self) -> bytes:
        """512 bytes that another process of this user and machine can open; docs/ipc.md describes them. A process of
        this user that has the bytes can read and write the memory."""
        return self._data

    @property
    def device(self) -> str:
        """The device's name in the process that exported it."""
        return self._fields["device"]

    @property
    def uuid(self) -> bytes:
        """16 bytes: the device's UUID, which does not depend on its name."""
        return self._fields["uuid"]

    @property
    def owner(self) -> int:
        """The process that exported it."""
        return self._fields["pid"]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self._fields["nbytes"]

    @property
    def offset(self) -> int:
        """Where in its allocation the memory begins, bytes."""
        return self._fields["offset"]

    @property
    def allocation_nbytes(self) -> int:
        """Bytes of the allocation, which another process maps as a whole."""
        return self._fields["allocation_nbytes"]

    @property
    def dtype(self) -> str:
        """Name of the element type; empty if unknown."""
        return self._fields["dtype"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements; empty if unknown."""
        return self._fields["shape"]

    @property
    def generation(self) -> int:
        """The number that the exporter gave it."""
        return self._fields["generation"]

    def __repr__(self) -> str:
        return f"<kvswap.memory.Export {self.nbytes} bytes of process {self.owner} on {self.device}>"


def export(
    source: Any,
    *,
    device: DeviceLike | None = None,
    nbytes: int | None = None,
    dtype: str | None = None,
    shape: Sequence[int] | None = None,
    generation: int = 0,
) -> Export:
    """Let other processes of this user on this machine open memory of a device.

    source: a tensor on a GPU (all of it contiguous), a kvswap.Memory or Pool, or an address with nbytes. A pool is
      exported with its layout. The memory may begin anywhere in its allocation: other processes find the same bytes.
    device: the memory's device, if source does not have it (needed on host devices, unless source is kvswap's).
    dtype, shape: passed to the opening process; None: the tensor's, if it has them.
    generation: a number of the caller, 0 to 2**64 - 1, which open() can require. Increase it when the memory's
      contents or address change their meaning.

    The memory must stay allocated while other processes have it open; only the owner holds it. Memory mapped in chunks
    (torch's expandable segments, Device.alloc(chunks=True)) can be opened while the Export lives: a thread of this
    process serves the chunks. Other memory can be opened while it is allocated.

    Does not wait for queued work. Any thread may call. ValueError: not memory of the device; DeviceError: the
    driver cannot share it.
    """
    if dtype is None:
        dtype = _dtype_of(source)
    if shape is None:
        shape = _shape_of(source)
    data, server = _C._ipc_export(source, device=device, nbytes=nbytes, dtype=dtype, shape=shape, generation=generation)
    return Export(data, source, server)


def open(export: Export | bytes, *, device: DeviceLike | None = None, generation: int | None = None) -> _C.Mapped:
    """Open memory that another process exported; in the exporting process this gives the plain address.

    export: an Export, or its bytes. device: where to open it; None: the device of this UUID, whose name
    may differ here. generation: the required generation; None: any.

    Several exports of one allocation share one mapping. Only events (export_event) or messages order the work of the
    two processes. Any thread may call.

    ValueError: not an export; another device, generation or size; or freed. kvswap.Error: the owner has ended.
    DeviceError: the driver refuses, or the memory belongs to another user.
    """
    try:
        data = memoryview(export.to_bytes() if isinstance(export, Export) else export)
    except TypeError:
        raise TypeError(f"export must be an Export or its bytes, not {type(export).__name__}") from None
    return _C._ipc_open(data, device=device, generation=generation)


def export_event(event: _C.Event) -> bytes:
    """An event made with interprocess=True, as 512 bytes that other processes of this user can open.

    Keep the Event as long as others use what they opened. Returns at once. Any thread may call. DeviceError: it was not
    made with interprocess=True.
    """
    return _C._ipc_export_event(event)


def open_event(data: bytes, *, device: DeviceLike | None = None) -> _C.Event:
    """An event of another process, which both may record, query and wait for.

    A wait refers to the latest recording of either process at the time of the call, so send a message after recording.
    A recording of a process that ends counts as reached: check Mapped.alive() before using the bytes. On a host device
    at most 64 recordings can be unfinished.

    device: None: the device with its UUID. ValueError: no event, of another device, or this process's own;
    kvswap.Error: its owner has ended.
    """
    return _C._ipc_open_event(data, device=device)


def _dtype_of(source: Any) -> str:
    """As NumPy and torch name it, if it is a short name."""
    dtype = getattr(source, "dtype", None)
    name = str(dtype).removeprefix("torch.") if dtype is not None else ""
    return name if name.isidentifier() and len(name) < 16 else ""


def _shape_of(source: Any) -> tuple[int, ...]:
    try:
        shape = tuple(int(count) for count in getattr(source, "shape", ()))
    except TypeError:
        return ()
    return shape if len(shape) <= 8 else ()
