"""Memory of a device in other processes than the one that allocated it. See docs/ipc.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvswap import _C

__all__ = ["Export", "export", "export_event", "open", "open_event"]


class Export:
    """Memory of a device, as other processes can be told of it. From export(), or from_bytes() in another process.

    device, uuid: where the memory lies; the name is the owner's. owner: its process. nbytes: the size of the memory,
    which begins at byte `offset` of an allocation of allocation_nbytes bytes. dtype, shape, generation: as they were
    given to export(). As long as an Export from export() lives, it holds what was exported.
    """

    def __init__(self, data: bytes, source: Any = None, server: object | None = None) -> None:
        """Use export() or Export.from_bytes()."""
        self._data = bytes(data)
        self._source = source
        self._server = server
        self._fields = _C._ipc_read(self._data)

    @classmethod
    def from_bytes(cls, data: bytes) -> Export:
        """What to_bytes() made. ValueError: the bytes are none, of another version, or damaged."""
        return cls(data)

    def close(self) -> None:
        """Let go of what was exported, and serve it no more: memory in chunks cannot be opened any more.

        What others have open stays so. Also done when the object goes. Again: nothing happens. Waits for nobody."""
        server, self._server, self._source = self._server, None, None
        if server is not None:
            _C._ipc_stop(server)

    def to_bytes(self) -> bytes:
        """512 bytes that another process of this machine can open; docs/ipc.md says what stands in them. They are as
        good as the memory itself to whoever may open it, which is the same user alone."""
        return self._data

    @property
    def device(self) -> str:
        """The device's name in the process that exported it."""
        return self._fields["device"]

    @property
    def uuid(self) -> bytes:
        """16 bytes: which device that is, whatever it is called."""
        return self._fields["uuid"]

    @property
    def owner(self) -> int:
        """The process that exported it."""
        return self._fields["pid"]

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return self._fields["nbytes"]

    @property
    def offset(self) -> int:
        """Where in its allocation the memory begins, bytes."""
        return self._fields["offset"]

    @property
    def allocation_nbytes(self) -> int:
        """Size of the allocation, which is what another process maps."""
        return self._fields["allocation_nbytes"]

    @property
    def dtype(self) -> str:
        """Name of the type of the elements; empty where it is not known."""
        return self._fields["dtype"]

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements; empty where it is not known."""
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
    device: _C.Device | str | None = None,
    nbytes: int | None = None,
    dtype: str | None = None,
    shape: Sequence[int] | None = None,
    generation: int = 0,
) -> Export:
    """Let other processes of this user on this machine open memory of a device.

    source: a tensor on a GPU (all of it contiguous), a kvswap.Memory or Pool, or an address, then nbytes is needed. Of
      a pool its layout travels too. It may lie anywhere in what its allocator got from the driver: other processes
      find the same bytes.
    device: whose memory it is, where source does not say so (needed for host devices, unless source is kvswap's own).
    dtype, shape: to be told to whoever opens it; None: the tensor's own, where it has such.
    generation: a number of the caller's, 0 to 2**64 - 1, that whoever opens it may insist on: count it up when what
      the memory holds, or where it lies, changes its meaning.

    The memory must stay allocated as long as others have it open; nothing holds it there but its owner. Memory that is
    mapped in chunks (torch's expandable segments, Device.alloc(chunks=True)) can be opened as long as the Export lives:
    a thread of this process gives out the chunks. Other memory can be opened as long as it is there.

    Returns at once, waits for no work. Any thread may call. ValueError: not memory of the device; DeviceError: the
    driver cannot share it.
    """
    if dtype is None:
        dtype = _dtype_of(source)
    if shape is None:
        shape = _shape_of(source)
    data, server = _C._ipc_export(source, device=device, nbytes=nbytes, dtype=dtype, shape=shape, generation=generation)
    return Export(data, source, server)


def open(export: Export | bytes, *, device: _C.Device | str | None = None, generation: int | None = None) -> _C.Mapped:
    """Open memory that another process exported; in the process that exported it, the plain memory.

    export: an Export, or its bytes. device: where to open it; None: the device with its UUID, which may have another
    name here. generation: the one that it must have; None: any.

    The allocation is mapped once, however many exports of it are opened. Work of the two processes is in no order until
    it is made, by events (export_event) or by telling each other. Any thread may call.

    ValueError: no export, of another device, another generation or size, or freed since; kvswap.Error: its owner has
    ended; DeviceError: the driver refuses, or it belongs to another user.
    """
    return _C._ipc_open(
        export.to_bytes() if isinstance(export, Export) else export, device=device, generation=generation
    )


def export_event(event: _C.Event) -> bytes:
    """An event made with interprocess=True, as 512 bytes that other processes of this user can open.

    Keep the Event as long as others use what they opened. Returns at once. Any thread may call. DeviceError: it was not
    made with interprocess=True.
    """
    return _C._ipc_export_event(event)


def open_event(data: bytes, *, device: _C.Device | str | None = None) -> _C.Event:
    """An event of another process, which both may record, query and wait for.

    What waits for it, waits for the latest recording, whoever queued it, at the time of the call: so tell the other
    side when it is queued. A recording whose process ends before it is reached holds nobody up: ask Mapped.alive()
    before trusting the bytes that it should have announced. Of a host device at most 64 recordings can be unfinished.

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
