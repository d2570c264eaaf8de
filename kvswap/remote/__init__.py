"""The remote tier: blocks in the memory of other nodes, moved by NIXL. A loaded block has exactly the stored bytes, or
is reported as missing.

    from kvswap.files import Layout
    from kvswap.remote import RemoteStore

    layout = Layout(2 << 20, model="llama-3-70b", dtype="bf16", tokens=16, tp_rank=0, tp_size=8)
    with RemoteStore("/etc/kvswap/nodes", layout, key="/etc/kvswap/client.key", replicas=2) as store:
        store.store(hashes, host_memory, ids, replace=False).wait(timeout=10)
        load = store.load(hashes, host_memory, ids)
        load.wait(timeout=10)  # raises what went wrong; load.failed_blocks says which blocks are missing

Each node runs `kvswap remote serve`. docs/remote.md has the protocol, the life of a block, and what a hostile peer can
do. Needs NIXL (pip install --no-deps nixl nixl-cu13), and pip install 'kvswap[remote]'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._placement import Node, Placement, parse_nodes
from ._secrets import Secret, new_secret, read_secret, write_secret
from ._transfer import RemoteTransfer

if TYPE_CHECKING:
    from ._server import Server
    from ._store import RemoteStore

__all__ = [
    "Node",
    "Placement",
    "RemoteStore",
    "RemoteTransfer",
    "Secret",
    "Server",
    "new_secret",
    "parse_nodes",
    "read_secret",
    "write_secret",
]


def __getattr__(name: str) -> Any:
    """The two that need pyzmq and msgspec."""
    if name in ("RemoteStore", "Server"):
        from ._secrets import need_curve

        need_curve()
        if name == "Server":
            from ._server import Server

            return Server
        from ._store import RemoteStore

        return RemoteStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
