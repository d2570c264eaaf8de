"""Moves paged KV-cache blocks between GPU and host memory.

Importing opens no device, starts no thread and makes no CUDA context. Most want one call: ``help(kvswap.copy_blocks)``.
``kvswap.devices()`` shows what this machine has.
"""

import os
from enum import IntEnum
from typing import TYPE_CHECKING

try:
    from kvswap._C import (
        Device,
        DeviceError,
        Error,
        Event,
        Memory,
        Pool,
        QueueFull,
        Stream,
        Transfer,
        __version__,
        move_blocks,
        swap_blocks_batch,
        swap_cache_all_layers,
        swap_cache_all_layers_async,
        swap_cache_per_layer,
        swap_cache_per_layer_async,
    )
except ModuleNotFoundError as error:
    if error.name != "kvswap._C":
        raise
    raise ImportError(
        f"{os.path.dirname(os.path.abspath(__file__))} is kvswap's source tree, without the compiled part: "
        "start Python in another folder, or build it in place with `pip install -e .`"
    ) from None
from kvswap._copy import copy_blocks
from kvswap._devices import DeviceInfo, devices
from kvswap._switches import switch

__all__ = [
    "Device",
    "DeviceError",
    "DeviceInfo",
    "Direction",
    "Error",
    "Event",
    "Memory",
    "Pool",
    "QueueFull",
    "Stream",
    "Transfer",
    "__version__",
    "copy_blocks",
    "devices",
    "get_include",
    "move_blocks",
    "swap_blocks_batch",
    "swap_cache_all_layers",
    "swap_cache_all_layers_async",
    "swap_cache_per_layer",
    "swap_cache_per_layer_async",
]


class Direction(IntEnum):
    """The `direction` of the swap_cache functions: D2H, GPU to host (offload), or H2D, host to GPU (onboard)."""

    D2H = 0
    H2D = 1


if os.environ.get("KVSWAP_LOG"):
    from kvswap._log import to_stderr

    to_stderr(os.environ["KVSWAP_LOG"])


def _log_races() -> None:
    """KVSWAP_RACECHECK=1: the core starts the race checker, and what it finds goes to the log."""
    from kvswap import _C, _races

    _C._set_race_hook(_races.log_races)


switch("KVSWAP_RACECHECK", "It counts as 1: set it to 0 or unset it to switch the race checker off")
if os.environ.get("KVSWAP_RACECHECK", "0") not in ("", "0"):  # as the core reads it
    _log_races()


if switch("KVSWAP_TOP") or os.environ.get("KVSWAP_METRICS_PORT"):
    from kvswap import metrics

    metrics.start_from_environment()


if os.environ.get("KVSWAP_NVTX") or os.environ.get("NVTX_INJECTION64_PATH"):
    from kvswap import tracing

    tracing.start_from_environment()


def get_include() -> str:
    """The folder of the C headers: kvswap.h, and kvswap_capi.h for extensions of Python."""
    package = os.path.dirname(os.path.abspath(__file__))
    installed = os.path.join(package, "include")
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(package), "csrc")


if not TYPE_CHECKING:  # a type checker takes a module with __getattr__ to have every name

    def __getattr__(name: str) -> object:
        """Says where a name is that is not here."""
        import sys
        from importlib.util import find_spec

        hint, here = "", sys.modules[__name__]
        if name in ("HostPool", "SharedPool", "Export", "Mapped", "export", "host_alloc", "host_register"):
            hint = f": it is kvswap.memory.{name}"
        elif name in ("FileStore", "FileTransfer", "Layout", "MissingKey"):
            hint = f": it is kvswap.files.{name}"
        elif name in ("note_access", "note_order"):
            hint = f": it is kvswap.testing.{name}"
        elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            hint = f": import kvswap.{name} first"
        raise AttributeError(f"module 'kvswap' has no attribute {name!r}{hint}", name=name, obj=here)
