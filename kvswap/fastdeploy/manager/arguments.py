"""The command line: the options of FastDeploy's older and newer managers, and kvswap's own."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvswap.fastdeploy.manager import places
from kvswap.fastdeploy.manager.layout import ITEM_NBYTES, Layout

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


def _at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        if most is not None and number > most:
            raise argparse.ArgumentTypeError(f"{number} is more than {most}")
        return number

    convert.__name__ = "int"  # argparse: "invalid int value"
    return convert


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not a time of more than 0 and up to 86400 seconds")
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


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return found


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a manager, for all commands."""
    group = parser.add_argument_group("which manager")
    group.add_argument(
        "--cache_queue_port",
        type=_at_least(0, places.MOST_PORT),
        default=9923,
        metavar="PORT",
        help="names the manager, as it names FastDeploy's queue; no port is opened (default: 9923)",
    )
    group.add_argument(
        "--local_data_parallel_id",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="tells the managers of data-parallel engines apart (default: 0)",
    )
    group.add_argument(
        "--socket_dir",
        type=Path,
        metavar="DIR",
        help="folder of the socket, mode 700; default: kvswap/manager-PORT.N in $XDG_RUNTIME_DIR",
    )


def place_of(args: argparse.Namespace) -> Path:
    found: Path | None = args.socket_dir
    return found.absolute() if found else places.default_directory(args.cache_queue_port, args.local_data_parallel_id)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_place(parser)
    _add_model(parser.add_argument_group("the model's caches, by FastDeploy's options"))
    _add_refused(parser.add_argument_group("FastDeploy's options that are refused or ignored"))
    _add_own(parser.add_argument_group("kvswap's own"))


def _add_model(group: Any) -> None:
    count = _at_least(1)
    group.add_argument("--rank", type=_at_least(0), default=0, help="rank, from 0; rank 0 distributes tasks")
    group.add_argument("--mp_num", type=count, default=1, help="ranks of the model (tensor parallel)")
    group.add_argument("--device_id", type=_at_least(0), default=0, help="the GPU of this rank")
    group.add_argument("--num_layers", type=count, default=1, help="layers of the model")
    group.add_argument(
        "--key_cache_shape",
        type=_shape,
        default=(),
        metavar="B,H,T,D",
        help="num_blocks,kv_heads,block_size,head_dim of the key caches (newer FastDeploy)",
    )
    group.add_argument(
        "--value_cache_shape", type=_shape, default=(), metavar="B,H,T,D", help="for the value caches; empty: keys only"
    )
    group.add_argument("--num_gpu_blocks", type=count, default=1, help="blocks on the GPU (older FastDeploy)")
    group.add_argument("--kv_num_head", type=count, default=1, help="number of key and value heads (older)")
    group.add_argument("--block_size", type=count, default=64, help="tokens in a block (older)")
    group.add_argument("--head_dim", type=count, default=1, help="size of a head (older)")
    group.add_argument(
        "--bytes_per_layer_per_block",
        type=count,
        default=None,
        help="bytes of a block of keys, or of values; checked against the shape (older)",
    )
    group.add_argument("--num_cpu_blocks", type=_at_least(0), default=4, help="blocks in host memory; 0: none")
    group.add_argument(
        "--cache_dtype",
        default="bfloat16",
        choices=sorted(ITEM_NBYTES),
        help="element type of the caches; block_wise_fp8: bytes, with scale tensors beside them",
    )
    group.add_argument(
        "--default_dtype",
        default="bfloat16",
        choices=sorted(set(ITEM_NBYTES) - {"block_wise_fp8"}),
        help="of the scales",
    )
    group.add_argument(
        "--speculative_config",
        type=_json_object,
        default={},
        metavar="JSON",
        help="JSON; num_extra_cache_layer and num_gpu_block_expand_ratio are used",
    )
    group.add_argument(
        "--create_cache_tensor",
        action="store_true",
        help="create the GPU caches and export them; default: attach to the engine's",
    )


def _add_refused(group: Any) -> None:
    group.add_argument("--splitwise_role", default="mixed", help="only mixed")
    group.add_argument("--enable_splitwise", type=int, default=0, help="only 0")
    group.add_argument("--protocol", default="ipc", help="only ipc")
    group.add_argument("--kvcache_storage_backend", default=None, help="none is served")
    group.add_argument(
        "--routing_replay_config",
        type=_json_object,
        default={},
        metavar="JSON",
        help="accepted only with enable_routing_replay off: routing data is not moved",
    )
    for name in (
        "rdma_port",
        "pod_ip",
        "engine_worker_queue_port",
        "engine_pid",
        "ipc_suffix",
        "max_model_len",
        "write_policy",
        "model_path",
    ):
        group.add_argument(f"--{name}", default=None, help="accepted and ignored")


def _add_own(group: Any) -> None:
    group.add_argument("--device", default=None, metavar="NAME", help="cuda:N or host:N, instead of --device_id")
    group.add_argument(
        "--slab",
        action="store_true",
        help="with --create_cache_tensor: one allocation for all layers, which the copy engine moves "
        "faster; FastDeploy's segments cannot express offsets, so kvswap's client must attach",
    )
    group.add_argument(
        "--mps", action="store_true", help="the engine and this process share the GPU by MPS: kernels may be used"
    )
    group.add_argument(
        "--keep_swap_space",
        action="store_true",
        help="keep host memory when caches are cleared (FD_ENABLE_SWAP_SPACE_CLEARING=0)",
    )
    group.add_argument(
        "--queue_limit",
        type=_at_least(1),
        default=1024,
        help="limit of tasks under way of all clients; beyond it QueueFull is raised",
    )
    for name, default, what in (
        ("rank_timeout", 5.0, "a rank without a message for this long counts as dead"),
        ("task_timeout", 60.0, "a task that takes longer is reported failed"),
        ("step_timeout", 300.0, "limit of each rank's step when clearing, restoring or attaching"),
        ("stop_timeout", 30.0, "how long tasks under way may take after SIGTERM"),
    ):
        group.add_argument(f"--{name}", type=_seconds, default=default, metavar="S", help=f"{what} ({default:g})")
    group.add_argument(
        "--metrics_port",
        type=_at_least(1, places.MOST_PORT),
        default=None,
        metavar="PORT",
        help="serve Prometheus metrics on 127.0.0.1, PORT + rank (needs prometheus_client)",
    )
    group.add_argument("--log_format", choices=("text", "json"), default="text", help="log format; one line a task")
    group.add_argument(
        "--log_level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="level of the log (info); debug adds why a step failed",
    )


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
    if args.routing_replay_config.get("enable_routing_replay"):
        raise ValueError("--routing_replay_config: enable_routing_replay is on, but experts' choices are not moved")


def _layout(args: argparse.Namespace) -> Layout:
    key_shape = args.key_cache_shape or (args.num_gpu_blocks, args.kv_num_head, args.block_size, args.head_dim)
    value_shape = args.value_cache_shape if args.key_cache_shape else key_shape
    if args.value_cache_shape and not args.key_cache_shape:
        raise ValueError("--value_cache_shape goes with --key_cache_shape")
    if value_shape and value_shape[0] != key_shape[0]:
        raise ValueError(f"--value_cache_shape has {value_shape[0]} blocks, --key_cache_shape {key_shape[0]}")
    extra = args.speculative_config.get("num_extra_cache_layer", 0)
    ratio = args.speculative_config.get("num_gpu_block_expand_ratio", 1)
    if isinstance(extra, bool) or not isinstance(extra, int) or extra < 0:
        raise ValueError(f"--speculative_config: num_extra_cache_layer is {extra!r}, no number of layers")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1000:
        raise ValueError(f"--speculative_config: num_gpu_block_expand_ratio is {ratio!r}, no ratio")
    layout = Layout(
        rank=args.rank,
        device_id=args.device_id,
        num_layers=args.num_layers,
        key_shape=key_shape,
        value_shape=value_shape,
        cache_dtype=args.cache_dtype,
        scale_dtype=args.default_dtype,
        num_extra_layers=extra,
        extra_blocks=max(1, int(key_shape[0] * ratio)) if extra else 0,
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
        "device": args.device or "",
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
