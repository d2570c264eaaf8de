"""The remote tier: blocks in the memory of other nodes, which Mooncake Store runs. A loaded block has exactly the
stored bytes, or is reported as missing.

    from kvswap.files import Layout
    from kvswap.remote import RemoteStore

    layout = Layout(2 << 20, model="llama-3-70b", dtype="bf16", tokens=16, tp_rank=0, tp_size=8)
    with RemoteStore("10.0.0.1:50051", layout) as store:
        store.store(hashes, host_memory, ids).wait(timeout=10)
        load = store.load(hashes, host_memory, ids)
        load.wait(timeout=10)  # raises what went wrong; load.failed_positions says which blocks are missing

Nodes and master are Mooncake's own programs: docs/many-nodes.md has the commands.
"""

from ._store import RemoteStore
from ._transfer import RemoteTransfer

__all__ = ["RemoteStore", "RemoteTransfer"]
