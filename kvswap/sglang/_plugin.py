"""What SGLang's plugin hook replaces (group sglang.srt.plugins), each by a switch in the environment: the copies
between device and host memory (_copies.py), and the allocator of host memory (_memory.py).

SGLang applies hooks after all plugins have run, and logs those that it cannot apply. Here the interface is compared
before hooks are registered, and each hook is looked at after SGLang has applied them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvswap._log import into, logger
from kvswap._switches import switch

_log = logger("kvswap.sglang")

SWITCH = "KVSWAP_SGLANG_COPIES"
MEMORY_SWITCH = "KVSWAP_SGLANG_HOST_MEMORY"
CODEC_SWITCH = "KVSWAP_SGLANG_CODEC"
SHARE_SWITCH = "KVSWAP_SGLANG_SHARE"
LEND_SWITCH = "KVSWAP_SGLANG_LEND"
LENDERS_SWITCH = "KVSWAP_SGLANG_LENDERS"
LEND_LEAST_SWITCH = "KVSWAP_SGLANG_LEND_MIB"

_TRANSFER = "sglang.srt.mem_cache.l2_transfer"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_COMMON = "sglang.srt.mem_cache.pool_host.common"
_POOLS = "sglang.srt.mem_cache.pool_host"
_TREE = "sglang.srt.mem_cache.unified_radix_cache"
_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface"
_SCHEDULER = "sglang.srt.managers.scheduler"

# What kvswap calls or takes the place of, and what each takes.
_KNOWN = {
    f"{_TRANSFER}:L2TransferEngine.__init__": ["self", "io_backend"],
    f"{_TRANSFER}:L2TransferEngine._submission": ["self", "transfers", "stream", "transfer_key", "start_event"],
    f"{_TRANSFER}:L2TransferEngine.submit_device_to_host": ["self", "transfers"],
    f"{_TRANSFER}:L2TransferEngine.submit_host_to_device": [
        *("self", "transfers", "transfer_layer_id_max", "start_event", "on_layer_done")
    ],
    f"{_TRANSFER}:L2Transfer": [
        *("host_pool", "device_pool", "host_indices", "device_indices", "layer_mapper", "is_draft")
    ],
    f"{_TRANSFER}:TransferCompletion": ["start_event", "finish_event", "timing_enabled"],
    f"{_CONTROLLER}:HiCacheController.move_indices": ["self", "host_indices", "device_indices"],
    f"{_HYBRID}:HybridCacheController._move_pool_indices": [
        *("self", "host_pool", "host_indices", "device_indices", "write_back_jit")
    ],
}
_KNOWN_MEMORY = {f"{_COMMON}:HostTensorAllocator.allocate": ["self", "dims", "dtype", "device"]}
_KNOWN_CODEC = {
    f"{_COMMON}:alloc_with_host_register": [
        *("dims", "dtype", "device", "pin_memory", "allocator", "registration_granularity_bytes")
    ],
    f"{_POOLS}.mha:MHATokenToKVPoolHost._initialize_transfer_views": ["self", "buffer_info", "write_back_staging"],
    f"{_POOLS}.mla:MLATokenToKVPoolHost._initialize_transfer_views": ["self"],
    f"{_POOLS}.base:HostKVCache.get_size_per_token": ["self"],
    f"{_POOLS}.base:HostKVCache.init_kv_buffer": ["self"],
    f"{_POOLS}.base:HostKVCache.clear": ["self"],
    f"{_POOLS}.base:HostKVCache.free": ["self", "indices"],
    f"{_TREE}:UnifiedRadixCache.init_hicache": ["self", "server_args", "params"],
    f"{_TREE}:UnifiedRadixCache.match_prefix": ["self", "params"],
    f"{_TREE}:UnifiedRadixCache.detach_storage_backend": ["self"],
    f"{_TREE}:UnifiedRadixCache._log_write_ack_metrics": ["self", "ack"],
    f"{_TREE}:UnifiedRadixCache._all_reduce_attn_groups": ["self", "tensor", "op"],
    f"{_CORE}:UnifiedTreeCoreInterface.build_load_back_spec": ["self", "node_id", "req"],
}
_KNOWN_SHARE = {
    f"{_POOLS}.mla:MLATokenToKVPoolHost.init_kv_buffer": ["self"],
    f"{_POOLS}.mla:MLATokenToKVPoolHost._initialize_transfer_views": ["self"],
    f"{_POOLS}.base:HostKVCache._allocate_host_buffer": ["self"],
    f"{_POOLS}.base:HostKVCache.clear": ["self"],
    f"{_POOLS}.base:HostKVCache.destroy": ["self"],
    f"{_POOLS}.base:host_memory_budget_scope": ["budget_bytes"],
    f"{_TREE}:UnifiedRadixCache.init_hicache": ["self", "server_args", "params"],
}
_KNOWN_LEND = {
    f"{_COMMON}:HostTensorAllocator.allocate": ["self", "dims", "dtype", "device"],
    f"{_POOLS}.base:HostKVCache.clear": ["self"],
    f"{_POOLS}.base:HostKVCache.destroy": ["self"],
    f"{_TREE}:UnifiedRadixCache.init_hicache": ["self", "server_args", "params"],
}
_KNOWN_STEPS = {f"{_SCHEDULER}:Scheduler.run_batch": ["self", "batch", "pp_proxy_tensors"]}
PROBE: Any = object()


@dataclass
class _Hook:
    target: str
    replacement: Any
    before: Any  # what SGLang has there
    after: Any = None

    def there(self) -> tuple[Any, str]:
        """Where the target is bound."""
        path, _, name = self.target.rpartition(".")
        try:
            return importlib.import_module(path), name
        except ModuleNotFoundError:
            path, _, owner = path.rpartition(".")
            return getattr(importlib.import_module(path), owner), name

    def applies(self) -> bool:
        """Whether a call reaches it."""
        owner, name = self.there()
        bound = getattr(owner, name)
        if isinstance(self.replacement, type):
            return isinstance(bound, type) and issubclass(bound, self.replacement)
        try:
            return bound(PROBE, *[None] * 3) is PROBE
        except Exception:  # SGLang's own method on what is no controller
            return False


_hooks: list[_Hook] = []
_incomplete: set[str] = set()  # switches, of whose hooks some were not applied
_DONE = {
    SWITCH: "copies between device and host memory are kvswap's",
    MEMORY_SWITCH: "host memory is kvswap's",
    CODEC_SWITCH: "pages of host memory are coded",
    SHARE_SWITCH: "ranks with the same latents share one host pool",
    LEND_SWITCH: "loads may go over other engines' links",
}


def _is_on(name: str) -> bool:
    return switch(name, "Nothing is replaced", "kvswap.sglang") is True


def codec() -> str | None:
    """The codec of host pools; None: they are not coded. ValueError: the switch names no codec."""
    name = os.environ.get(CODEC_SWITCH, "")
    if not name:
        return None
    from kvswap.codecs import CODECS

    if name not in CODECS:
        raise ValueError(f"{CODEC_SWITCH} is {name!r}: it is one of {', '.join(CODECS)}")
    return name


class Lend(NamedTuple):
    """How links are lent. name: engines with the same one lend to each other. lenders: at most so many to an engine.
    least_nbytes: of a load that goes over several links."""

    name: str
    lenders: int
    least_nbytes: int


def lend() -> Lend | None:
    """None: links are not lent. ValueError: a variable has a wrong value."""
    name = os.environ.get(LEND_SWITCH, "")
    if name in ("", "0"):
        return None
    from kvswap.share._lend import DEFAULT_NAME, LENDERS, MOST_LENDERS, NAME

    if not NAME.fullmatch(name):
        raise ValueError(f"{LEND_SWITCH} is {name!r}: 1, or a name of 1 to 20 letters, digits, '.', '_' or '-'")
    lenders = _number(LENDERS_SWITCH, LENDERS, MOST_LENDERS)
    return Lend(DEFAULT_NAME if name == "1" else name, lenders, _number(LEND_LEAST_SWITCH, 512, 1 << 20) << 20)


def _number(name: str, default: int, most: int) -> int:
    text = os.environ.get(name, "") or str(default)
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise ValueError(f"{name} is {text!r}: it is 1 to {most}")
    return int(text)


def is_incomplete(switch: str) -> bool:
    """Whether SGLang did not apply all hooks of a switch."""
    return switch in _incomplete


def _why_not(known: dict[str, list[str]]) -> str | None:
    """Why this SGLang's parts cannot be replaced; None: they can."""
    for place, wanted in known.items():
        module, _, path = place.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
            takes = list(found._fields) if hasattr(found, "_fields") else list(inspect.signature(found).parameters)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            return f"{path}: {error}"
        if takes != wanted:
            return f"its {path} takes {takes}, not {wanted}"
    return None


def _kept(controller: Any, host_pool: Any, device: Any) -> Any:
    """Ids of the device for kvswap's copies; None: SGLang moves them."""
    engine: Any = getattr(controller, "l2_transfer_engine", None)
    keeps = getattr(engine, "keeps_ids", None)  # CopyEngine's
    return engine.device_ids(host_pool, device) if keeps is not None and keeps(host_pool) else None


def _move_indices(original: Callable[..., Any], controller: Any, host: Any, device: Any, *_: Any) -> Any:
    """HiCacheController.move_indices: for pools that kvswap copies, the ids are returned unchanged."""
    if controller is PROBE:
        return PROBE
    kept = _kept(controller, controller.mem_pool_host, device)
    return original(controller, host, device) if kept is None else (host, kept)


def _move_pool_indices(
    original: Callable[..., Any], controller: Any, pool: Any, host: Any, device: Any, **options: Any
) -> Any:
    """HybridCacheController._move_pool_indices: the same, by pool."""
    if controller is PROBE:
        return PROBE
    kept = _kept(controller, pool, device)
    return original(controller, pool, host, device, **options) if kept is None else (host, kept)


def _add(registry: Any, target: str, replacement: Any, kind: Any) -> None:
    if any(hook.target == target for hook in _hooks):
        return
    hook = _Hook(target, replacement, None)
    owner, name = hook.there()
    hook.before = vars(owner)[name]
    registry.register(target, replacement, kind)
    _hooks.append(hook)


def _look(switch: str, hooks: list[_Hook]) -> None:
    """After SGLang has applied the hooks: say what they do."""
    missing = []
    _incomplete.discard(switch)
    for hook in hooks:
        owner, name = hook.there()
        hook.after = vars(owner).get(name)
        if not hook.applies():
            missing.append(hook.target)
    if missing:
        _incomplete.add(switch)
        _log.warning("%s is set, but SGLang did not apply the hooks of %s", switch, ", ".join(missing))
    else:
        _log.info("SGLang's %s now", _DONE[switch])


def _register(switch: str, known: dict[str, list[str]], targets: Callable[[Any], list[tuple[str, Any, Any]]]) -> None:
    reason = _why_not(known)
    if reason is None:
        try:
            hooking: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
            wanted = targets(hooking.HookType)
        except (ImportError, AttributeError) as error:
            reason = str(error)
    if reason is not None:
        _log.warning("%s is set, but this SGLang is not known: %s. Nothing is replaced", switch, reason)
        return
    before = len(_hooks)
    for target, replacement, kind in wanted:
        _add(hooking.HookRegistry, target, replacement, kind)
    if len(_hooks) > before:
        _afterwards(hooking.HookRegistry, functools.partial(_look, switch, _hooks[before:]))


def _afterwards(registry: Any, look: Callable[[], None]) -> None:
    """Call `look` once, when SGLang has applied all plugins' hooks."""
    own = vars(registry)["apply_hooks"]

    def apply_hooks(cls: Any) -> None:
        registry.apply_hooks = own
        own.__get__(None, cls)()
        look()

    registry.apply_hooks = classmethod(apply_hooks)


def _copies(kind: Any) -> list[tuple[str, Any, Any]]:
    from kvswap.sglang._copies import CopyEngine

    return [
        (f"{_CONTROLLER}.L2TransferEngine", CopyEngine, kind.REPLACE),
        (f"{_CONTROLLER}.HiCacheController.move_indices", _move_indices, kind.AROUND),
        (f"{_HYBRID}.HybridCacheController._move_pool_indices", _move_pool_indices, kind.AROUND),
    ]


def _coded(kind: Any) -> list[tuple[str, Any, Any]]:
    from kvswap.sglang._coded import CodedMHATokenToKVPoolHost, CodedMLATokenToKVPoolHost
    from kvswap.sglang._coded_tree import AROUND

    return [
        (f"{_POOLS}.mha.MHATokenToKVPoolHost", CodedMHATokenToKVPoolHost, kind.REPLACE),
        (f"{_POOLS}.mla.MLATokenToKVPoolHost", CodedMLATokenToKVPoolHost, kind.REPLACE),
        *((f"{_TREE}.UnifiedRadixCache.{name}", hook, kind.AROUND) for name, hook in AROUND.items()),
    ]


def _shared(kind: Any) -> list[tuple[str, Any, Any]]:
    from kvswap.sglang._shared import AROUND, SharedMLATokenToKVPoolHost

    return [
        (f"{_POOLS}.mla.MLATokenToKVPoolHost", SharedMLATokenToKVPoolHost, kind.REPLACE),
        *((f"{_TREE}.UnifiedRadixCache.{name}", hook, kind.AROUND) for name, hook in AROUND.items()),
    ]


def _lent(kind: Any) -> list[tuple[str, Any, Any]]:
    from kvswap.sglang._lend import AROUND_POOL, AROUND_TREE, LentAllocator, run_batch

    return [
        (f"{_COMMON}.HostTensorAllocator", LentAllocator, kind.REPLACE),
        *((f"{_POOLS}.base.HostKVCache.{name}", hook, kind.AROUND) for name, hook in AROUND_POOL.items()),
        *((f"{_TREE}.UnifiedRadixCache.{name}", hook, kind.AROUND) for name, hook in AROUND_TREE.items()),
        *([(f"{_SCHEDULER}.Scheduler.run_batch", run_batch, kind.AROUND)] if _has_scheduler() else []),
    ]


def _has_scheduler() -> bool:
    """Whether this process may run steps: SGLang's other processes do not import so much."""
    return _SCHEDULER in sys.modules


def _memory(kind: Any) -> list[tuple[str, Any, Any]]:
    from kvswap.sglang._memory import HostPoolAllocator

    return [(f"{_COMMON}.HostTensorAllocator", HostPoolAllocator, kind.REPLACE)]


def _is_coded() -> bool:
    try:
        found = codec()
    except ValueError as error:
        _log.error("%s. Pages of host memory are not coded", error)
        return False
    if found and not _is_on(SWITCH):
        _log.error("%s needs %s=1: kvswap's copies code. Pages of host memory are not coded", CODEC_SWITCH, SWITCH)
        return False
    return found is not None


def _is_shared() -> bool:
    if not _is_on(SHARE_SWITCH):
        return False
    if os.environ.get(CODEC_SWITCH):
        _log.error("%s does not go with %s. Host pools are not shared", SHARE_SWITCH, CODEC_SWITCH)
        return False
    if not _is_on(SWITCH):
        _log.error("%s needs %s=1: kvswap's copies share. Host pools are not shared", SHARE_SWITCH, SWITCH)
        return False
    return True


def _is_lent() -> bool:
    try:
        found = lend()
    except ValueError as error:
        _log.error("%s. Links are not lent", error)
        return False
    if found is None:
        return False
    for other, why in ((CODEC_SWITCH, "coded pages use the own link only"), (SHARE_SWITCH, "its ranks are a group")):
        if os.environ.get(other, "0") not in ("", "0"):
            _log.error("%s does not go with %s: %s. Links are not lent", LEND_SWITCH, other, why)
            return False
    if not _is_on(SWITCH):
        _log.error("%s needs %s=1: kvswap's copies use lent links. Links are not lent", LEND_SWITCH, SWITCH)
        return False
    return True


def register() -> None:
    """SGLang's plugin hook (group sglang.srt.plugins).

    KVSWAP_SGLANG_COPIES=1: the copies between device and host memory are kvswap's. KVSWAP_SGLANG_HOST_MEMORY=1: so is
    the host memory's allocator. KVSWAP_SGLANG_CODEC=CODEC, beside the first: pages of host memory are coded.
    KVSWAP_SGLANG_SHARE=1, beside the first: ranks with the same latents share one host pool. KVSWAP_SGLANG_LEND=1, or a
    name, beside the first: engines lend each other their links for large loads. Otherwise it does nothing.
    """
    if any(os.environ.get(name) for name in (SWITCH, MEMORY_SWITCH, CODEC_SWITCH, SHARE_SWITCH, LEND_SWITCH)):
        into("sglang")
    copies, coded, shared, lent = _is_on(SWITCH), _is_coded(), _is_shared(), _is_lent()
    if copies:
        _register(SWITCH, _KNOWN, _copies)
    if coded:
        _register(CODEC_SWITCH, _KNOWN_CODEC, _coded)
    if shared:
        _register(SHARE_SWITCH, _KNOWN_SHARE, _shared)
    if lent:  # before the allocator below, whose place it takes
        _register(LEND_SWITCH, _KNOWN_LEND | (_KNOWN_STEPS if _has_scheduler() else {}), _lent)
    if _is_on(MEMORY_SWITCH):
        _register(MEMORY_SWITCH, _KNOWN_MEMORY, _memory)


def unregister() -> list[str]:
    """Undo register() in this process: what SGLang makes from now on is its own. Returns the names that were restored.

    What another plugin hooked after kvswap stays as it is, with a warning.
    """
    restored = []
    registry = getattr(sys.modules.get("sglang.srt.plugins.hook_registry"), "HookRegistry", None)
    while _hooks:
        hook = _hooks.pop()
        owner, name = hook.there()
        if registry is not None:
            hooks = registry._hooks[hook.target]
            hooks[:] = [each for each in hooks if each[1] is not hook.replacement]
            if not hooks:
                del registry._hooks[hook.target]
            registry._patched.discard(hook.target)
        bound = vars(owner).get(name)
        if bound is hook.before:
            continue
        if bound is not hook.after:
            _log.warning("%s is not SGLang's own again: another plugin has replaced it too", hook.target)
            continue
        setattr(owner, name, hook.before)
        if isinstance(hook.before, type):  # SGLang rebinds it in every module that has imported it
            for module in list(sys.modules.values()):
                for other, value in list(getattr(module, "__dict__", {}).items()):
                    if value is bound and not module.__name__.startswith("kvswap."):
                        setattr(module, other, hook.before)
        restored.append(hook.target)
    return restored[::-1]
