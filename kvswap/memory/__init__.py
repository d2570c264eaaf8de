"""Host memory: pools that come up fast, pools that processes share, and pinned memory by plain addresses; and device
memory that several processes use: what one exports, another opens.

    pool = HostPool(num_blocks, slot_nbytes, layers=32)
    data = export(tensor).to_bytes()       # in the process that owns the memory
    with open(data) as mapped: ...         # in another: mapped.ptr, mapped.pool(), ...
"""

from kvswap._C import HostPool, Mapped, SharedPool, clean, host_alloc, host_free, host_register, host_unregister
from kvswap.memory.ipc import Export, export, export_event, open, open_event

__all__ = [
    "Export",
    "HostPool",
    "Mapped",
    "SharedPool",
    "clean",
    "export",
    "export_event",
    "host_alloc",
    "host_free",
    "host_register",
    "host_unregister",
    "open",
    "open_event",
]
