"""`kvswap replay TRACE` and `kvswap demo`: a serving trace, with real blocks that are moved and verified."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from kvswap.replay.errors import UsageError

from .output import Document, document, for_person
from .parser import (
    EXIT_DEVICE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_WRONG_BYTES,
    PATHS,
    Commands,
    Parser,
    add_device,
    add_json,
    add_plot,
    complain,
    count,
    duration,
    open_device,
    positive,
    size,
)

if TYPE_CHECKING:
    from kvswap import _C, testing
    from kvswap.replay import geometry
    from kvswap.replay.settings import Settings, Sizes
    from kvswap.replay.trace import Trace

_FAULTS = "copy: fail, skip; code: spoil; call (of the driver): fail, lose, delay"
# Both tiers are smaller than the demo's trace, and its blocks are large enough that the run takes a second or more.
_DEMO_BLOCKS = {"gpu": 128, "host": 512}
_DEMO_BLOCK_NBYTES = {"cuda": 2 << 20, "host": 512 << 10}
_HANG = 26  # where the values of the closing table begin


def add(commands: Commands[Parser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="replay the small trace that ships with kvswap: a first try",
        usage="%(prog)s [options]",
        description="Replays the trace that ships with kvswap through tiers so small that blocks leave and come back.",
    )
    _add_tiers(demo)
    _add_run_options(demo)
    demo.set_defaults(run=_demo)
    replay = commands.add_parser(
        "replay",
        usage="%(prog)s [options] TRACE",
        help="replay a serving trace through GPU, host and file tiers, moving and verifying real blocks",
        description="Replays a trace in the Mooncake format (JSON lines, plain or gzip) at full speed.",
    )
    replay.add_argument("trace", metavar="TRACE", help="the trace; - for the standard input")
    add_geometry(replay, scaled="2MiB on a GPU, else 64KiB")
    _add_tiers(replay)
    _add_run_options(replay)
    replay.set_defaults(run=_replay)


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    tiers = parser.add_argument_group(
        "tiers", "The least recently used block leaves first. Computed blocks are also stored to the host tier."
    )
    add_tier(tiers, "gpu", "size of the GPU tier in blocks")
    add_tier(tiers, "host", "size of the host tier in blocks")
    tiers.add_argument(
        "--codec",
        metavar="NAME",
        help="code the blocks of the host tier, and those of the file tier: exact, mxfp8 or fp4. --host-bytes then has "
        "room for more blocks",
    )
    tiers.add_argument(
        "--file-tier", metavar="DIR", help="a third tier, in files: blocks that leave the host tier are stored there"
    )
    tiers.add_argument("--file-blocks", type=positive, metavar="N", help="size of the file tier in blocks")


def add_tier(group: argparse._ArgumentGroup, tier: str, what: str, default: int | None = None) -> None:
    """A tier's size, in blocks or bytes: tier_blocks() reads it."""
    either = group.add_mutually_exclusive_group()
    either.add_argument(f"--{tier}-blocks", type=count, metavar="N", default=default, help=what)
    either.add_argument(
        f"--{tier}-bytes",
        type=size,
        metavar="SIZE",
        help="the same in bytes of blocks that are not scaled: 8GiB or 8G is 8 x 1024^3, 8GB is 8 x 1000^3",
    )


def tier_blocks(args: argparse.Namespace, tier: str, full: geometry.Geometry) -> int | None:
    """The size that was asked for. Bytes are those of full blocks: a scaled run has as many as the real model."""
    blocks: int | None = getattr(args, f"{tier}_blocks")
    nbytes: int | None = getattr(args, f"{tier}_bytes")
    if nbytes is None:
        return blocks
    from kvswap.replay.settings import host_nbytes

    of_one = host_nbytes(full, getattr(args, "codec", None)) if tier == "host" else full.full_nbytes
    if 0 < nbytes < of_one:
        from kvswap.replay.units import format_size

        raise UsageError(
            f"--{tier}-bytes {format_size(nbytes)} holds no block: one of {full.name} has "
            f"{format_size(of_one)}, also where it is scaled down to move fewer bytes"
        )
    return nbytes // of_one


def add_geometry(parser: argparse.ArgumentParser, *, scaled: str) -> None:
    """scaled: the default of --bytes-per-block, for people."""
    from kvswap.replay import geometry

    group = parser.add_argument_group(
        "geometry of a block", "A model by name, or by --layers, --kv-heads and --head-dim."
    )
    names = ", ".join(geometry.names())
    group.add_argument("--model", metavar="NAME", help=f"one of {names} (default llama-3.1-8b)")
    group.add_argument("--layers", type=positive, metavar="N", help="layers of the model")
    group.add_argument("--kv-heads", type=positive, metavar="N", help="key and value heads of a layer")
    group.add_argument("--head-dim", type=positive, metavar="N", help="elements of a head")
    group.add_argument("--dtype-bytes", type=positive, metavar="N", default=2, help="bytes of an element (default 2)")
    group.add_argument("--kv", type=int, choices=(1, 2), default=2, help="2: keys and values (default); 1: one latent")
    tokens = geometry.BLOCK_TOKENS
    group.add_argument(
        "--block-tokens", type=positive, metavar="N", default=tokens, help=f"tokens of a block (default {tokens})"
    )
    group.add_argument(
        "--bytes-per-block",
        type=_block_size,
        metavar="SIZE",
        help=f"scale the geometry down to about this; 'full' does not scale it (default {scaled})",
    )
    group.add_argument("--allow-tiny", action="store_true", help="accept a --bytes-per-block under 64KiB")


def _block_size(text: str) -> int | str:
    return text if text == "full" else size(text)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    add_device(group)
    group.add_argument(
        "--path", choices=PATHS, metavar="PATH", default="auto", help=f"one of {', '.join(PATHS)} (default auto)"
    )
    group.add_argument("--in-flight", type=positive, metavar="N", default=8, help="requests at a time (default 8)")
    group.add_argument("--requests", type=positive, metavar="N", help="replay the first N requests")
    group.add_argument("--seconds", type=duration, metavar="S", help="admit no request after S seconds")
    group.add_argument("--seed", type=count, default=0, metavar="N", help="of block ids and block bytes (default 0)")
    add_json(group)
    add_plot(group)
    group.add_argument(
        "--fault",
        metavar="KIND:ACTION:EVERY",
        help=f"inject faults: copy:skip:10000 skips 1 copy in 10,000; {_FAULTS}. With --codec code takes copy's place",
    )


def _replay(args: argparse.Namespace) -> int:
    from kvswap.replay import geometry, settings

    # All that can be wrong with the arguments or the trace is found before the device is opened.
    full = full_geometry(args)
    block_nbytes: int | None = full.full_nbytes if args.bytes_per_block == "full" else args.bytes_per_block
    if block_nbytes is not None:
        geometry.scale(full, block_nbytes, allow_tiny=args.allow_tiny)
    _check(args)
    with document(args, "replay") as out:
        trace = read_head(args.trace, args.requests)
        device = open_device(args.device)
        shape = settings.choose_geometry(full, device.kind, block_nbytes, allow_tiny=args.allow_tiny)
        sizes = settings.choose_sizes(
            shape.block_nbytes,
            settings.room(device),
            *(tier_blocks(args, tier, full) for tier in ("gpu", "host")),
        )
        return _run(args, trace, device, _settings(args, shape, sizes), out)


def _demo(args: argparse.Namespace) -> int:
    from kvswap.replay import geometry, settings

    _check(args)
    with document(args, "demo") as out:
        with as_file(files("kvswap") / "data" / "demo_trace.jsonl.gz") as path:
            trace = read_head(str(path), args.requests)
        device = open_device(args.device)
        full = geometry.named("llama-3.1-8b")
        shape = geometry.scale(full, _DEMO_BLOCK_NBYTES[device.kind])
        asked = {tier: tier_blocks(args, tier, full) for tier in _DEMO_BLOCKS}
        gpu, host = (_DEMO_BLOCKS[tier] if blocks is None else blocks for tier, blocks in asked.items())
        sizes = settings.choose_sizes(shape.block_nbytes, settings.room(device), gpu, host)
        return _run(args, trace, device, _settings(args, shape, sizes), out)


def _check(args: argparse.Namespace) -> None:
    """What can be known before a device is opened, and long before a plot is drawn."""
    if args.plot is not None:
        from kvswap.replay import plot

        plot.require(args.plot)
    if args.fault is not None:
        kind = _fault_parts(args.fault)[0]
        if (kind == "copy" and args.codec is not None) or (kind == "code" and args.codec is None):
            raise UsageError(f"--fault {args.fault} would never happen: coded blocks have faults of kind code")
    if args.codec is not None:
        from kvswap.replay.settings import check_codec

        check_codec(args.codec)
        if getattr(args, "dtype_bytes", 2) != 2:
            raise UsageError(f"--codec {args.codec} codes bf16: --dtype-bytes {args.dtype_bytes} is another type")
    if (args.file_tier is None) != (args.file_blocks is None):
        raise UsageError("--file-tier DIR and --file-blocks N go together")
    if args.file_tier is not None and Path(args.file_tier).exists() and not Path(args.file_tier).is_dir():
        raise UsageError(f"--file-tier {args.file_tier}: it is a file; name a directory")


def full_geometry(args: argparse.Namespace) -> geometry.Geometry:
    from kvswap.replay import geometry

    numbers = (args.layers, args.kv_heads, args.head_dim)
    if numbers == (None, None, None):
        return geometry.named(args.model or "llama-3.1-8b", block_tokens=args.block_tokens)
    if args.model is not None:
        raise UsageError("--model and a geometry by numbers exclude each other")
    if None in numbers:
        raise UsageError("a geometry by numbers needs --layers, --kv-heads and --head-dim")
    return geometry.custom(*numbers, dtype_nbytes=args.dtype_bytes, kv=args.kv, block_tokens=args.block_tokens)


def _settings(args: argparse.Namespace, shape: geometry.Geometry, sizes: Sizes) -> Settings:
    from dataclasses import replace

    from kvswap.replay.settings import Settings

    return Settings(
        geometry=shape,
        sizes=replace(sizes, file_blocks=args.file_blocks or 0),
        in_flight=args.in_flight,
        seconds=args.seconds,
        seed=args.seed,
        path=args.path,
        file_tier=args.file_tier,
        codec=args.codec,
    )


def read_head(path: str, requests: int | None) -> Trace:
    """The whole file is validated even when only its head is replayed."""
    from kvswap.replay.trace import read_trace

    trace = read_trace(path)
    return trace if requests is None else trace.head(requests)


def _run(args: argparse.Namespace, trace: Trace, device: _C.Device, settings: Settings, out: Document) -> int:
    from kvswap import _C
    from kvswap.replay.check import WrongBytes
    from kvswap.replay.progress import Progress
    from kvswap.replay.report import opening
    from kvswap.replay.run import Replay

    show = for_person(args)
    try:
        replay = Replay(trace, settings, device)
    except MemoryError:
        sizes = settings.sizes
        raise MemoryError(
            f"the lists of {sizes.gpu_blocks:,} GPU blocks, {sizes.host_blocks:,} host blocks and "
            f"{sizes.file_blocks:,} file blocks do not fit into memory: give --gpu-blocks, --host-blocks "
            "or --file-blocks a smaller number"
        ) from None
    report = replay.report
    show.text(opening(trace, settings, report), hang=12)
    progress = Progress(sys.stderr)
    status, failure = EXIT_OK, ""
    try:
        with _fault(args.fault, device):
            replay.run(progress.update, progress.memory)
    except WrongBytes as error:
        status, failure = EXIT_WRONG_BYTES, str(error)
    except TimeoutError as error:
        status, failure = EXIT_DEVICE, f"no answer from {device.name} within {settings.wait_limit:g} s ({error})"
    except _C.Error as error:
        status, failure = EXIT_DEVICE, str(error)
    finally:
        progress.clear()
    if report.ended == "interrupted":
        status, failure = EXIT_INTERRUPTED, "interrupted: the figures are of what was done until then"
    if status == EXIT_DEVICE:
        report.error = failure
    if failure:
        complain(failure)
    show.text(report.to_text(), hang=_HANG)
    out.write(report.to_dict())
    if args.plot is not None:
        from kvswap.replay import plot

        plot.draw(report, args.plot)
    return status


@contextlib.contextmanager
def _fault(text: str | None, device: _C.Device) -> Iterator[None]:
    """--fault copy:skip:10000: from the 10,000th copy on, every 10,000th is skipped."""
    if text is None:
        yield
        return
    from kvswap import testing

    kind, action, every = _fault_parts(text)
    with testing.fault(device, kind, action, every=every, nth=every):
        yield


def _fault_parts(text: str) -> tuple[testing.Kind, testing.Action, int]:
    from kvswap import testing

    parts = text.split(":")
    if len(parts) != 3:
        raise UsageError(
            f"--fault takes KIND:ACTION:EVERY, such as copy:skip:10000, not {text!r}; kinds and actions are {_FAULTS}"
        )
    kind, action = testing.parse_kind(parts[0]), testing.parse_action(parts[1])
    if kind is None:
        raise UsageError(f"--fault {text}: there is no kind {parts[0]!r}; kinds and their actions are {_FAULTS}")
    if action is None or action not in testing.ACTIONS_OF[kind]:
        actions = ", ".join(testing.ACTIONS_OF[kind])
        raise UsageError(f"--fault {text}: kind {kind} has no action {parts[1]!r}; its actions are {actions}")
    if not (parts[2].isascii() and parts[2].isdigit() and int(parts[2]) > 0):
        raise UsageError(f"--fault {text}: EVERY must be a whole number above 0, not {parts[2]!r}")
    return kind, action, int(parts[2])
