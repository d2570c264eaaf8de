"""Host memory: pools that come up fast, and pinned memory by plain addresses."""

from kvswap._C import HostPool, host_alloc, host_free, host_register, host_unregister

__all__ = ["HostPool", "host_alloc", "host_free", "host_register", "host_unregister"]
