"""The command line: the options of FastDeploy's older and newer managers, and kvswap's own."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvswap.commands.parser import count, duration, positive
from kvswap.fastdeploy.manager import places
from kvswap.fastdeploy.manager.layout import ITEM_NBYTES, Layout
from kvswap.fastdeploy.ops import device_kind

MOST_RANKS = 64


@dataclass(frozen=True)
class Settings:
    """The checked options of a rank."""

    layout: Layout
    ranks: int
    device: str
    directory: Path
    create: bool
    slab: bool
    mps: bool
    keep_swap_space: bool
    queue_limit: int
    rank_timeout: float
    task_timeout: float
    step_timeout: float
    stop_timeout: float
    metrics_port: int | None
    log_format: str
    log_level: str


def _port(text: str, least: int = 0) -> int:
    number = count(text)
    if not least <= number <= places.MOST_PORT:
        raise argparse.ArgumentTypeError(f"{number} is not from {least} to {places.MOST_PORT}")
    return number


def _shape(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        shape = tuple(int(extent) for extent in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1000,8,64,128") from None
    if len(shape) != 4 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be num_blocks,kv_heads,block_size,head_dim, each at least 1")
    return shape


def _json(text: str, name: str) -> Any:
    """The Struct of messages.py with that name. Without msgspec, which the command asks for later, None."""
    try:
        import msgspec

        from kvswap.fastdeploy.manager import messages
    except ImportError:
        return None
    try:
        return msgspec.json.decode(text, type=getattr(messages, name))
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_DTYPES = tuple(sorted(ITEM_NBYTES))
# Each option: its name, type (a tuple: choices), default, metavar, help.
_Options = Sequence[tuple[str, Any, Any, str | None, str]]

_PLACE: _Options = (
    ("cache_queue_port", _port, 9923, "PORT",
     "names the manager, as it names FastDeploy's queue; no port is opened (default: 9923)"),
    ("local_data_parallel_id", count, 0, "N", "tells the managers of data-parallel engines apart (default: 0)"),
    ("socket_dir", Path, None, "DIR",
     "folder of the socket, mode 700; default: kvswap/manager-PORT.N in $XDG_RUNTIME_DIR"),
)  # fmt: skip
_MODEL: _Options = (
    ("rank", count, 0, None, "rank, from 0; rank 0 distributes tasks"),
    ("mp_num", positive, 1, None, "ranks of the model (tensor parallel)"),
    ("device_id", count, 0, None, "the GPU of this rank"),
    ("num_layers", positive, 1, None, "layers of the model"),
    ("key_cache_shape", _shape, (), "B,H,T,D",
     "num_blocks,kv_heads,block_size,head_dim of the key caches (newer FastDeploy)"),
    ("value_cache_shape", _shape, (), "B,H,T,D", "for the value caches; empty: keys only"),
    ("num_gpu_blocks", positive, 1, None, "blocks on the GPU (older FastDeploy)"),
    ("kv_num_head", positive, 1, None, "number of key and value heads (older)"),
    ("block_size", positive, 64, None, "tokens in a block (older)"),
    ("head_dim", positive, 1, None, "size of a head (older)"),
    ("bytes_per_layer_per_block", positive, None, None,
     "bytes of a block of keys, or of values; checked against the shape (older)"),
    ("num_cpu_blocks", count, 4, None, "blocks in host memory; 0: none"),
    ("cache_dtype", _DTYPES, "bfloat16", None,
     "element type of the caches; block_wise_fp8: bytes, with scale tensors beside them"),
    ("default_dtype", tuple(name for name in _DTYPES if name != "block_wise_fp8"), "bfloat16", None, "of the scales"),
    ("speculative_config", functools.partial(_json, name="Speculative"), None, "JSON",
     "JSON; num_extra_cache_layer and num_gpu_block_expand_ratio are used"),
    ("create_cache_tensor", bool, False, None, "create and export the GPU caches; default: attach to the engine's"),
)  # fmt: skip
_REFUSED: _Options = (
    ("splitwise_role", str, "mixed", None, "only mixed"),
    ("enable_splitwise", int, 0, None, "only 0"),
    ("protocol", str, "ipc", None, "only ipc"),
    ("kvcache_storage_backend", str, None, None, "none is served"),
    ("routing_replay_config", functools.partial(_json, name="RoutingReplay"), None, "JSON",
     "accepted only with enable_routing_replay off: routing data is not moved"),
    *((name, str, None, None, "accepted and ignored") for name in (
        "rdma_port", "pod_ip", "engine_worker_queue_port", "engine_pid", "ipc_suffix", "max_model_len", "write_policy",
        "model_path")),
)  # fmt: skip
_OWN: _Options = (
    ("device", str, None, "NAME", "cuda:N or host:N, instead of --device_id"),
    ("slab", bool, False, None,
     "with --create_cache_tensor: one allocation for all layers, which the copy engine moves faster; FastDeploy's "
     "segments cannot express offsets, so kvswap's client must attach"),
    ("mps", bool, False, None, "the engine and this process share the GPU by MPS: kernels may be used"),
    ("keep_swap_space", bool, False, None,
     "keep host memory when caches are cleared (FD_ENABLE_SWAP_SPACE_CLEARING=0)"),
    ("queue_limit", positive, 1024, None, "limit of tasks under way of all clients; beyond it QueueFull is raised"),
    ("rank_timeout", duration, 5.0, "S", "a rank without a message for this long counts as dead (5)"),
    ("task_timeout", duration, 60.0, "S", "a task that takes longer is reported failed (60)"),
    ("step_timeout", duration, 300.0, "S", "limit of each rank's step when clearing, restoring or attaching (300)"),
    ("stop_timeout", duration, 30.0, "S", "how long tasks under way may take after SIGTERM (30)"),
    ("metrics_port", functools.partial(_port, least=1), None, "PORT",
     "serve Prometheus metrics on 127.0.0.1, PORT + rank (needs prometheus_client)"),
    ("log_format", ("text", "json"), "text", None, "log format; one line a task"),
    ("log_level", ("debug", "info", "warning", "error"), "info", None,
     "level of the log (info); debug adds why a step failed"),
)  # fmt: skip


def _add(parser: argparse.ArgumentParser, title: str, options: _Options) -> None:
    group = parser.add_argument_group(title)
    for name, kind, default, metavar, text in options:
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", help=text)
        elif isinstance(kind, tuple):
            group.add_argument(f"--{name}", choices=kind, default=default, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a manager, for all commands."""
    _add(parser, "which manager", _PLACE)


def place_of(args: argparse.Namespace) -> Path:
    found: Path | None = args.socket_dir
    return found.absolute() if found else places.default_directory(args.cache_queue_port, args.local_data_parallel_id)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_place(parser)
    _add(parser, "the model's caches, by FastDeploy's options", _MODEL)
    _add(parser, "FastDeploy's options that are refused or ignored", _REFUSED)
    _add(parser, "kvswap's own", _OWN)


def _refuse(args: argparse.Namespace) -> None:
    served: Sequence[tuple[str, Any, str]] = (
        ("splitwise_role", "mixed", "splitting prefill from decode is not served"),
        ("enable_splitwise", 0, "splitting prefill from decode is not served"),
        ("protocol", "ipc", "caches are shared on one machine only"),
        ("kvcache_storage_backend", None, "there is no storage behind the host memory: leave it out"),
    )
    for name, value, why in served:
        given = getattr(args, name)
        if given != value:
            raise ValueError(f"--{name} {given}: {why}")
    if args.routing_replay_config is not None and args.routing_replay_config.enable_routing_replay:
        raise ValueError("--routing_replay_config: enable_routing_replay is on, but experts' choices are not moved")


def _layout(args: argparse.Namespace) -> Layout:
    key_shape = args.key_cache_shape or (args.num_gpu_blocks, args.kv_num_head, args.block_size, args.head_dim)
    value_shape = args.value_cache_shape if args.key_cache_shape else key_shape
    if args.value_cache_shape and not args.key_cache_shape:
        raise ValueError("--value_cache_shape goes with --key_cache_shape")
    if value_shape and value_shape[0] != key_shape[0]:
        raise ValueError(f"--value_cache_shape has {value_shape[0]} blocks, --key_cache_shape {key_shape[0]}")
    speculative = args.speculative_config
    extra = 0 if speculative is None else speculative.num_extra_cache_layer
    layout = Layout(
        rank=args.rank,
        device_id=args.device_id,
        num_layers=args.num_layers,
        key_shape=key_shape,
        value_shape=value_shape,
        cache_dtype=args.cache_dtype,
        scale_dtype=args.default_dtype,
        num_extra_layers=extra,
        extra_blocks=max(1, int(key_shape[0] * speculative.num_gpu_block_expand_ratio)) if extra else 0,
        num_cpu_blocks=args.num_cpu_blocks,
    )
    least, said = layout.caches()[0].block_nbytes, args.bytes_per_layer_per_block
    if said is not None and said < least:
        raise ValueError(f"--bytes_per_layer_per_block {said}: a block of the given shape has {least} bytes")
    return layout


def settings_of(args: argparse.Namespace) -> Settings:
    """Settings from the options. ValueError: the options contradict each other, or ask for a feature that is
    refused."""
    _refuse(args)
    if args.mp_num > MOST_RANKS or args.rank >= args.mp_num:
        raise ValueError(
            f"--rank {args.rank} --mp_num {args.mp_num}: ranks go from 0 to mp_num - 1, {MOST_RANKS} at most"
        )
    if args.slab and not args.create_cache_tensor:
        raise ValueError("--slab goes with --create_cache_tensor")
    other = {
        "layout": _layout(args),
        "ranks": args.mp_num,
        "device": args.device or f"{device_kind()}:{args.device_id}",
        "directory": place_of(args),
        "create": args.create_cache_tensor,
        "metrics_port": None if args.metrics_port is None else args.metrics_port + args.rank,
    }
    same = {field.name: getattr(args, field.name) for field in fields(Settings) if field.name not in other}
    return Settings(**other, **same)


def disable_kernels() -> None:
    """Restrict this process to the copy engine. Call before opening the device. Without MPS the GPU gives kernels of
    this process time slices of their own, in which the model's kernels stop."""
    named = [name for name in os.environ.get("KVSWAP_DISABLE", "").split(",") if name]
    os.environ["KVSWAP_DISABLE"] = ",".join(dict.fromkeys([*named, "kernel", "burst"]))
