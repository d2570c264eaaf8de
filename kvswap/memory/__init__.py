"""Host memory: pools that come up fast, pools that processes share, and pinned memory by plain addresses."""

from kvswap._C import HostPool, SharedPool, clean, host_alloc, host_free, host_register, host_unregister

__all__ = ["HostPool", "SharedPool", "clean", "host_alloc", "host_free", "host_register", "host_unregister"]
