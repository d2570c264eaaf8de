"""The kvswap command.

Exit status: 0 done, 1 wrong bytes, 2 the command or its input is not right, 3 the device failed, 130 interrupted.
Results go to the standard output, everything else to the standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from kvswap._files_command import add_files
from kvswap.replay.errors import UsageError
from kvswap.replay.units import parse_size

if TYPE_CHECKING:
    from kvswap import _C, testing
    from kvswap.bench import handlers, table
    from kvswap.bench.plot import Result as BenchResult
    from kvswap.replay import geometry
    from kvswap.replay.report import Report
    from kvswap.replay.settings import Settings, Sizes
    from kvswap.replay.trace import Trace

EXIT_OK, EXIT_WRONG_BYTES, EXIT_USAGE, EXIT_DEVICE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
PATHS = ("auto", "dma", "strided", "burst", "kernel", "direct")
# Small enough that the demo's trace overflows both tiers; blocks large enough that there is something to watch.
_DEMO_BLOCKS = {"gpu": 128, "host": 512}
_DEMO_BLOCK_NBYTES = {"cuda": 2 << 20, "host": 512 << 10}

_Number = TypeVar("_Number", int, float)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _fail(EXIT_USAGE, str(error))
    except KeyboardInterrupt:
        return _fail(EXIT_INTERRUPTED, "interrupted")
    except BrokenPipeError:  # the reader of our output has gone: not worth a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except (TimeoutError, MemoryError) as error:
        return _fail(EXIT_DEVICE, str(error) or "out of memory")
    except Exception as error:
        if not _is_expected(error):
            raise
        return _fail(EXIT_DEVICE, str(error))


def _is_expected(error: Exception) -> bool:
    """A device's failure: no traceback. Imported late: the extension is not needed to say that arguments are wrong."""
    from kvswap import _C

    return isinstance(error, _C.Error)


def _fail(status: int, message: str) -> int:
    print(f"kvswap: {message}", file=sys.stderr)
    return status


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvswap",
        description="Moves paged KV-cache blocks between GPU and host memory.",
        epilog="Exit status: 0 done, 1 wrong bytes, 2 wrong usage or trace, 3 device error, 130 interrupted.",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_info(commands)
    _add_bench(commands)
    _add_calibrate(commands)
    _add_replay(commands)
    _add_demo(commands)
    _add_manager(commands)
    add_files(commands)
    return parser


class _Version(argparse.Action):
    """Asks the extension for its version only when asked for it."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from kvswap import _C

        print(f"kvswap {_C.__version__}")
        parser.exit()


_Commands = argparse._SubParsersAction


def _add_info(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("info", help="versions, devices, and which paths work on them or why not")
    parser.add_argument("--open", action="store_true", help="open the devices too (makes a CUDA context on each)")
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(run=_info)


def _info(args: argparse.Namespace) -> int:
    from kvswap import info

    found = info.collect(open_devices=args.open)
    print(found.to_json() if args.json else found.to_text())
    return EXIT_OK


def _add_bench(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure how fast blocks move, and what that costs; every byte is verified",
        description="Measures kvswap's paths, and what others do by hand, on the shapes of a model's cache; beside a "
        "load with --load; path auto against all others with --regret.",
    )
    from kvswap.bench.loads import KINDS
    from kvswap.bench.methods import METHODS
    from kvswap.bench.shapes import FAMILIES, LAYOUTS

    _add_device(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--load", choices=KINDS, help="run this beside the copies; measure its slow-down and their speed")
    what.add_argument(
        "--regret", action="store_true", help="draw shapes at random; measure how far auto is from the best"
    )
    what.add_argument(
        "--handlers", action="store_true", help="vLLM's job queue: kvswap's beside vLLM's ways, on models' caches"
    )
    what.add_argument("--list", action="store_true", help="list the cases of the table and end")
    parser.add_argument("--quick", action="store_true", help="fewer bytes, sizes and repeats: whether it works")
    parser.add_argument(
        "--bytes",
        type=_some_size,
        metavar="SIZE",
        help="bytes a case (1GiB on a GPU; with --load and --regret 256MiB; less on a host device)",
    )
    parser.add_argument("--repeats", type=_positive, metavar="N", help="the median of so many runs (default 3)")
    _add_choice(parser, "--shape", FAMILIES | LAYOUTS, "this shape (--load: default all from 64x32k on)")
    parser.add_argument(
        "--size", type=_some_size, action="append", metavar="SIZE", help="only blocks of this size; may be given again"
    )
    _add_choice(parser, "--direction", {"D2H": None, "H2D": None}, "this direction")
    _add_choice(parser, "--method", METHODS, "this method")
    parser.add_argument(
        "--pairs", type=_positive, metavar="N", help="--load: windows with and without copies (default 6)"
    )
    parser.add_argument("--seconds", type=_duration, metavar="S", help="--load: length of a window (default 0.2)")
    parser.add_argument("--draws", type=_positive, metavar="N", help="--regret: number of shapes (default 200)")
    parser.add_argument(
        "--seed", type=_count, metavar="N", help="--regret: of the shapes (default: another every time)"
    )
    parser.add_argument("--json", metavar="FILE", help="write JSON; - for the standard output")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the result (needs matplotlib: kvswap[plot])")
    parser.set_defaults(run=_bench)


def _add_choice(parser: argparse.ArgumentParser, option: str, choices: Iterable[str], what: str) -> None:
    names = list(choices)
    parser.add_argument(
        option,
        choices=names,
        action="append",
        metavar="NAME",
        help=f"only {what}; may be given again: {', '.join(names)}",
    )


# Options of `kvswap bench` that only some of its three measurements have.
_BENCH_OPTIONS = {
    "the table": ("repeats", "shape", "size", "direction"),
    "--load": ("pairs", "seconds", "shape", "size", "direction"),
    "--regret": ("draws", "seed"),
    "--handlers": ("repeats", "pairs", "seconds", "direction"),
}


def _bench(args: argparse.Namespace) -> int:
    from kvswap.replay.check import WrongBytes

    _check_bench(args)
    if args.list:
        return _list_bench(args)
    with _json_file(args.json) as write:
        out = sys.stderr if args.json == "-" else sys.stdout
        run = _bench_run(args, open_device(args.device))
        try:
            result = run(lambda line: print(line, file=out, flush=True))
        except WrongBytes as error:
            return _fail(EXIT_WRONG_BYTES, str(error))
        write(result.to_dict())
    if args.plot is not None:
        from kvswap.bench import plot

        with _writing_plot(args.plot):
            plot.draw(result, args.plot)
    return EXIT_OK


def _check_bench(args: argparse.Namespace) -> None:
    """What an option is for is known before a device is opened."""
    what = "--load" if args.load else "--regret" if args.regret else "--handlers" if args.handlers else "the table"
    for option in sorted({option for options in _BENCH_OPTIONS.values() for option in options}):
        if getattr(args, option) is not None and option not in _BENCH_OPTIONS[what]:
            owners = " and ".join(owner for owner, options in _BENCH_OPTIONS.items() if option in options)
            raise UsageError(f"--{option} is for {owners}, not for {what}")
    if args.handlers and (args.method or args.bytes or args.plot):
        raise UsageError("--handlers has methods and sizes of its own, and no plot")
    _check_plot(args)


def _bench_run(args: argparse.Namespace, device: _C.Device) -> Callable[[Callable[[str], None]], BenchResult]:
    from kvswap.bench import beside, handlers, regret, table

    if args.handlers:
        return partial(handlers.run, _handlers_plan(args, device))
    common = {"quick": args.quick, "nbytes": args.bytes, "methods": args.method}
    if args.load:
        where = {"families": args.shape, "sizes": args.size, "directions": args.direction}
        load = beside.plan(device, args.load, pairs=args.pairs, seconds=args.seconds, **where, **common)
        return partial(beside.run, load)
    if args.regret:
        seed = secrets.randbits(32) if args.seed is None else args.seed
        return partial(regret.run, regret.plan(device, seed, draws=args.draws, **common))
    return partial(table.run, _table_plan(args, device))


def _handlers_plan(args: argparse.Namespace, device: _C.Device) -> handlers.Plan:
    from kvswap.bench import handlers

    return handlers.plan(
        device,
        quick=args.quick,
        repeats=args.repeats,
        pairs=args.pairs,
        seconds=args.seconds,
        directions=args.direction,
    )


def _table_plan(args: argparse.Namespace, device: _C.Device) -> table.Plan:
    from kvswap.bench import table

    return table.plan(
        device,
        quick=args.quick,
        nbytes=args.bytes,
        repeats=args.repeats,
        families=args.shape,
        sizes=args.size,
        directions=args.direction,
        methods=args.method,
    )


def _list_bench(args: argparse.Namespace) -> int:
    from kvswap.bench import table

    for case in table.cases(_table_plan(args, open_device(args.device))):
        print(f"{case.key}: {case.description}")
    return EXIT_OK


def _add_calibrate(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure what transfers take on this machine, and store it for the choice of paths",
        description="Measures each path, direction and size, every byte verified, and stores what they take: by GPU, "
        "driver and version in the user's cache folder, or where KVSWAP_CALIBRATION says.",
    )
    _add_device(parser)
    parser.add_argument("--seconds", type=_duration, default=10.0, metavar="S", help="how long, in all (default 10)")
    parser.add_argument("--output", metavar="FILE", help="store it here instead")
    parser.add_argument("--show", action="store_true", help="measure nothing: show what is stored")
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    import time

    deadline = time.monotonic() + args.seconds  # which opening the device counts towards

    from kvswap import _C, calibrate
    from kvswap.replay.check import WrongBytes

    if args.show:
        return _show_calibration(args)
    calibrate.check_environment()
    device = open_device(args.device)
    path = _calibration_path(args, device)
    calibrate.check_writable(path)
    reporter = calibrate.Reporter(sys.stderr)
    try:
        result = calibrate.calibrate(device, deadline, reporter)
    except WrongBytes as error:
        return _fail(EXIT_WRONG_BYTES, str(error))
    finally:
        reporter.close()
    print(calibrate.summary(result))
    try:
        _C._costs_write(path, result.costs, _C._costs_what(device))
    except ValueError as error:
        raise UsageError(f"it could not be stored: {error}") from None
    print(f"stored in {path}")
    return EXIT_OK


def _show_calibration(args: argparse.Namespace) -> int:
    from kvswap import _C, calibrate

    path = args.output or _calibration_path(args, open_device(args.device))
    try:
        costs, where = _C._costs_read(path), path
    except IndexError:
        if args.output is not None:
            raise UsageError(f"--output {path}: there is no such file") from None
        costs, where = _C._costs_read(None), f"built in, for there is no {path}"
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(calibrate.table(costs))
    print(where)
    return EXIT_OK


def _calibration_path(args: argparse.Namespace, device: _C.Device) -> str:
    from kvswap import _C

    try:
        return args.output or _C._costs_path(_C._costs_what(device))
    except IndexError as error:
        raise UsageError(str(error)) from None


def _add_replay(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "replay",
        help="replay a serving trace through a GPU and a host tier, moving and verifying real blocks",
        description="Replays a trace in the Mooncake format (JSON lines, plain or gzip) as fast as it can.",
    )
    parser.add_argument("trace", metavar="TRACE", help="the trace; - for the standard input")
    _add_geometry(parser)
    _add_tiers(parser)
    _add_run_options(parser)
    parser.set_defaults(run=_replay)


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    tiers = parser.add_argument_group("tiers (least recently used out first, written through to the host tier)")
    for tier in ("gpu", "host"):
        size = tiers.add_mutually_exclusive_group()
        size.add_argument(f"--{tier}-blocks", type=_count, metavar="N", help=f"size of the {tier} tier in blocks")
        size.add_argument(f"--{tier}-bytes", type=_size, metavar="SIZE", help="the same in bytes, such as 8GiB")
    tiers.add_argument(
        "--file-tier", metavar="DIR", help="a third tier in files there: takes what leaves the host tier"
    )
    tiers.add_argument("--file-blocks", type=_positive, metavar="N", help="size of the file tier in blocks")


def _add_geometry(parser: argparse.ArgumentParser) -> None:
    from kvswap.replay import geometry

    group = parser.add_argument_group("geometry of a block")
    names = ", ".join(geometry.names())
    group.add_argument("--model", metavar="NAME", help=f"a model by name: {names} (default llama-3.1-8b)")
    group.add_argument("--layers", type=_positive, metavar="N", help="or by numbers: layers,")
    group.add_argument("--kv-heads", type=_positive, metavar="N", help="key/value heads,")
    group.add_argument("--head-dim", type=_positive, metavar="N", help="elements a head,")
    group.add_argument("--dtype-bytes", type=_positive, metavar="N", default=2, help="bytes an element (default 2),")
    group.add_argument("--kv", type=int, choices=(1, 2), default=2, help="2: keys and values (default); 1: one latent")
    tokens = geometry.BLOCK_TOKENS
    group.add_argument("--block-tokens", type=_positive, metavar="N", default=tokens, help=f"default {tokens}")
    group.add_argument(
        "--bytes-per-block",
        metavar="SIZE",
        help="scale the geometry down to about this; 'full' keeps it as it is (default 2MiB on a GPU, else 64KiB)",
    )
    group.add_argument("--allow-tiny", action="store_true", help="take a --bytes-per-block under 64KiB")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    _add_device(group)
    group.add_argument("--path", choices=PATHS, default="auto", help="how blocks are copied (default auto)")
    group.add_argument("--in-flight", type=_positive, metavar="N", default=8, help="requests at a time (default 8)")
    group.add_argument("--requests", type=_positive, metavar="N", help="replay the first N requests")
    group.add_argument("--seconds", type=_duration, metavar="S", help="admit no request after so many seconds")
    group.add_argument("--seed", type=_count, default=0, metavar="N", help="of block ids and block bytes (default 0)")
    group.add_argument("--json", metavar="FILE", help="write the result as JSON; - for the standard output")
    group.add_argument("--plot", metavar="FILE.png", help="draw the result (needs matplotlib: kvswap[plot])")
    group.add_argument("--fault", metavar="KIND:ACTION:EVERY", help="for tests: copy:skip:10000 skips 1 copy in 10,000")


def _add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", metavar="NAME", help="cuda:N or host:N (default: a GPU if there is one)")


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="replay the small trace that ships with kvswap",
        description="Replays the trace that ships with kvswap through tiers so small that blocks leave and come back.",
    )
    _add_tiers(parser)
    _add_run_options(parser)
    parser.set_defaults(run=_demo)


def _add_manager(commands: _Commands[argparse.ArgumentParser]) -> None:
    from kvswap.fastdeploy.manager.command import add_commands

    add_commands(commands)


def _replay(args: argparse.Namespace) -> int:
    from kvswap.replay import geometry, settings

    # Everything that can be wrong with the command or the trace comes before the device is opened.
    full = _full_geometry(args)
    block_nbytes: int | None = None
    if args.bytes_per_block is not None:
        block_nbytes = full.full_nbytes if args.bytes_per_block == "full" else parse_size(args.bytes_per_block)
        geometry.scale(full, block_nbytes, allow_tiny=args.allow_tiny)
    _check_plot(args)
    with _json_file(args.json) as write:
        trace = _read_trace(args.trace, args.requests)
        device = open_device(args.device)
        shape = settings.choose_geometry(full, device.kind, block_nbytes, allow_tiny=args.allow_tiny)
        sizes = settings.choose_sizes(
            shape.block_nbytes,
            settings.room(device),
            _blocks(args.gpu_blocks, args.gpu_bytes, shape.block_nbytes),
            _blocks(args.host_blocks, args.host_bytes, shape.block_nbytes),
        )
        return _run(args, trace, device, _settings(args, shape, sizes), write)


def _demo(args: argparse.Namespace) -> int:
    from importlib.resources import as_file, files

    from kvswap.replay import geometry, settings

    _check_plot(args)
    with _json_file(args.json) as write:
        with as_file(files("kvswap") / "data" / "demo_trace.jsonl.gz") as path:
            trace = _read_trace(str(path), args.requests)
        device = open_device(args.device)
        shape = geometry.scale(geometry.named("llama-3.1-8b"), _DEMO_BLOCK_NBYTES[device.kind])
        room = settings.room(device)
        gpu = _blocks(args.gpu_blocks, args.gpu_bytes, shape.block_nbytes)
        host = _blocks(args.host_blocks, args.host_bytes, shape.block_nbytes)
        gpu, host = (asked or _DEMO_BLOCKS[tier] for asked, tier in ((gpu, "gpu"), (host, "host")))
        sizes = settings.choose_sizes(shape.block_nbytes, room, gpu, host)
        return _run(args, trace, device, _settings(args, shape, sizes), write)


def _full_geometry(args: argparse.Namespace) -> geometry.Geometry:
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
    )


def _read_trace(path: str, requests: int | None) -> Trace:
    """The whole file is validated even when only its head is replayed."""
    from kvswap.replay.trace import read_trace

    trace = read_trace(path)
    return trace if requests is None else trace.head(requests)


def _check_plot(args: argparse.Namespace) -> None:
    if args.plot is not None:
        from kvswap.replay import plot

        plot.require(args.plot)


def open_device(name: str | None) -> _C.Device:
    """A name that is no device's is the person's mistake; a device that does not open is not."""
    from kvswap import _C

    try:
        return _C.Device(name)
    except (ValueError, IndexError) as error:
        raise UsageError(str(error)) from None


def _run(
    args: argparse.Namespace, trace: Trace, device: _C.Device, settings: Settings, write: Callable[[object], None]
) -> int:
    from kvswap.replay.check import WrongBytes
    from kvswap.replay.progress import Progress
    from kvswap.replay.report import opening
    from kvswap.replay.run import Replay

    out = sys.stderr if args.json == "-" else sys.stdout
    replay = Replay(trace, settings, device)
    report = replay.report
    print(opening(trace, settings, report), file=out, flush=True)
    progress = Progress(sys.stderr)
    status = EXIT_OK
    failure: str | None = None
    try:
        with _fault(args.fault, device):
            replay.run(progress.update, progress.memory)
    except WrongBytes as error:
        status, failure = EXIT_WRONG_BYTES, str(error)
    except TimeoutError as error:
        status, failure = EXIT_DEVICE, f"no answer from {device.name} within {settings.wait_limit:g} s ({error})"
    except Exception as error:
        if not _is_expected(error):
            raise
        status, failure = EXIT_DEVICE, str(error)
    finally:
        progress.clear()
    if report.ended == "interrupted":
        status, failure = EXIT_INTERRUPTED, "interrupted: what follows is what was done until then"
    if failure is not None:
        _fail(status, failure)
    print(report.to_text(), file=out, flush=True)
    write(report.to_dict())
    _plot(args, report)
    return status


def _plot(args: argparse.Namespace, report: Report) -> None:
    if args.plot is not None:
        from kvswap.replay import plot

        with _writing_plot(args.plot):
            plot.draw(report, args.plot)


@contextlib.contextmanager
def _writing_plot(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--plot {name}: {error.strerror or error}") from None


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
    if len(parts) == 3 and parts[2].isascii() and parts[2].isdigit() and int(parts[2]) > 0:
        kind, action = testing.parse_kind(parts[0]), testing.parse_action(parts[1])
        if kind is not None and action is not None:
            return kind, action, int(parts[2])
    raise UsageError(f"--fault takes KIND:ACTION:EVERY, such as copy:skip:10000, not {text!r}")


@contextlib.contextmanager
def _json_file(name: str | None) -> Iterator[Callable[[object], None]]:
    """Gives a function that writes the document. That it can be written is found out before anything runs."""
    import json

    if name is None:
        yield lambda document: None
        return
    if name == "-":
        yield lambda document: print(json.dumps(document, indent=2))
        return
    path = Path(name)
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"--json {name}: {error.strerror or error}") from None
    written = False

    def write(document: object) -> None:
        nonlocal written
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        written = True

    try:
        yield write
    finally:
        if not written and not existed:
            path.unlink(missing_ok=True)


def _blocks(blocks: int | None, nbytes: int | None, block_nbytes: int) -> int | None:
    return blocks if nbytes is None else nbytes // block_nbytes


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _some_size(text: str) -> int:
    size = _size(text)
    if size == 0:
        raise argparse.ArgumentTypeError(f"not a size above 0: {text!r}")
    return size


def _at_least(convert: Callable[[str], _Number], text: str, least: _Number, what: str) -> _Number:
    try:
        value = convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not {what}: {text!r}") from None
    if not least <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"not {what}: {text!r}")
    return value


def _positive(text: str) -> int:
    return _at_least(int, text, 1, "a whole number above 0")


def _count(text: str) -> int:
    return _at_least(int, text, 0, "a whole number, 0 or more")


def _duration(text: str) -> float:
    return _at_least(float, text, 1e-9, "a number of seconds above 0")
