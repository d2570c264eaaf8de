"""Device memory that several processes use: what one exports, another opens.

data = kvswap.memory.export(tensor).to_bytes()        # in the process that owns the memory
with kvswap.memory.open(data) as mapped: ...          # in another: mapped.ptr, mapped.pool(), ...
"""

from kvswap._C import Mapped
from kvswap.memory.ipc import Export, export, export_event, open, open_event

__all__ = ["Export", "Mapped", "export", "export_event", "open", "open_event"]
