"""Host memory: pools, pools shared by processes, and pinned memory by address. Device memory shared by processes: one
process exports it, others open it.

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
