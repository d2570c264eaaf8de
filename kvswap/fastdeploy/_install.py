"""Replaces FastDeploy's cache ops by kvswap's in a process that has FastDeploy loaded."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from types import ModuleType
from typing import Any

from kvswap import _C
from kvswap.fastdeploy import ipc, ops

__all__ = ["Installed", "install"]

_log = logging.getLogger("kvswap")

# Newer releases of FastDeploy import the ops from the first module. The second defines them; older releases import
# from there.
_MODULES = ("fastdeploy.cache_manager.ops", "fastdeploy.model_executor.ops.gpu")

_OPS: dict[str, Any] = {
    "cuda_host_alloc": ops.cuda_host_alloc,
    "cuda_host_free": ops.cuda_host_free,
    "get_data_ptr_ipc": ipc.get_data_ptr_ipc,
    "set_data_ipc": ipc.set_data_ipc,
    "share_external_data": ipc.share_external_data,
    "swap_cache": ops.swap_cache,
    "swap_cache_all_layers": ops.swap_cache_all_layers,
    "swap_cache_layout": ops.swap_cache_layout,
    "swap_cache_per_layer": ops.swap_cache_per_layer,
    "swap_cache_per_layer_async": ops.swap_cache_per_layer_async,
    "unset_data_ipc": ipc.unset_data_ipc,
}

_lock = threading.Lock()


class Installed:
    """The names that install() has rebound, as "module.name". remove() restores them, and so does leaving `with`."""

    def __init__(self) -> None:
        self._before: list[tuple[ModuleType, str, Any]] = []  # guarded by _lock

    @property
    def names(self) -> list[str]:
        with _lock:
            return [f"{module.__name__}.{name}" for module, name, _ in self._before]

    def _rebind_locked(self, module: ModuleType, name: str, new: Any = None) -> None:
        self._before.append((module, name, getattr(module, name)))
        setattr(module, name, new or _OPS[name])

    def remove(self) -> None:
        """Restore FastDeploy's ops. Free or close before this what kvswap's ops have allocated or opened. A second call
        does nothing. Any thread may call."""
        with _lock:
            while self._before:
                module, name, own = self._before.pop()
                setattr(module, name, own)

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _import(name: str) -> ModuleType | None:
    """Import a module; None if this FastDeploy has no such module. An error inside an existing module is raised."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise


def _users(name: str, own: Any) -> list[ModuleType]:
    """FastDeploy's modules that have bound this op to this name."""
    return [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("fastdeploy.") and name in vars(module) and vars(module)[name] is own
    ]


def _watch_paddle(own: Any) -> Any:
    """Wrap paddle.set_device: the wrapper passes each device name to ops.note_gpu()."""

    @functools.wraps(own)
    def set_device(*args: Any, **options: Any) -> Any:
        place = own(*args, **options)
        ops.note_gpu(args[0] if args else next(iter(options.values()), None))
        return place

    return set_device


def install() -> Installed:
    """Rebind FastDeploy's cache ops to kvswap's in every FastDeploy module that holds them. Other names stay unchanged.

    Call install() in each process whose ops kvswap is to replace, before or after FastDeploy's cache manager is
    imported. All ops change together: memory from one side's cuda_host_alloc() must not reach the other side's
    cuda_host_free(). paddle.set_device is wrapped, works as before, and tells kvswap which GPU it sets.

    kvswap.Error: FastDeploy cannot be imported, or has none of the ops. Any thread may call.
    """
    found = [module for module in map(_import, _MODULES) if module is not None]
    if not found:
        raise _C.Error(f"there is no FastDeploy here: neither {_MODULES[0]} nor {_MODULES[1]} can be imported")
    installed = Installed()
    with _lock:
        for module in found:
            for name in _OPS.keys() & vars(module).keys():
                own = vars(module)[name]
                if own is _OPS[name]:
                    continue
                installed._rebind_locked(module, name)
                for user in _users(name, own):
                    installed._rebind_locked(user, name)
        paddle = sys.modules.get("paddle")
        if installed._before and paddle is not None and hasattr(paddle, "set_device"):
            installed._rebind_locked(paddle, "set_device", _watch_paddle(paddle.set_device))
    if not installed.names and not any(_OPS.keys() & vars(module).keys() for module in found):
        raise _C.Error(f"{found[0].__name__} has none of the ops that kvswap has: is it for another device?")
    _log.info("FastDeploy's ops are kvswap's now: %s", ", ".join(sorted(installed.names)))
    return installed
