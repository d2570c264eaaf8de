"""`kvswap calibrate`: measures what each path costs on this machine, and stores it."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from kvswap.replay.errors import UsageError

from .output import Document, document, for_person
from .parser import EXIT_OK, Commands, Parser, add_device, add_json, duration, open_device

if TYPE_CHECKING:
    from kvswap import _C, calibrate
    from kvswap.replay.progress import Progress

_TOGETHER_SECONDS = 2.0  # of the command's time, where there are several GPUs


def add(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure what transfers cost on this machine, for the choice of paths",
        description="Measures each path, direction and size on a GPU, every byte verified, and stores what they cost: "
        "by GPU, driver and version in the user's cache folder, or in the file that KVSWAP_CALIBRATION names.",
    )
    add_device(parser)
    parser.add_argument("--seconds", type=duration, default=10.0, metavar="S", help="time for all of it (default 10)")
    parser.add_argument("--output", metavar="FILE", help="store it in this file instead; with --show, show this file")
    parser.add_argument("--show", action="store_true", help="measure nothing: show what is stored")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    deadline = time.monotonic() + args.seconds  # opening the device is part of the time
    with document(args, "calibrate") as out:
        return _show(args, out) if args.show else _calibrate(args, deadline, out)


def refuse_host_device(device: _C.Device) -> None:
    if device.kind == "host":
        raise UsageError(
            f"calibrate measures a GPU, and {device.name} is a host device, which needs no calibration; "
            "name a GPU with --device cuda:N (kvswap info lists them)"
        )


def devices_together(device: _C.Device) -> list[str]:
    """Devices whose links are measured at once: all GPUs that this process sees."""
    from kvswap import _C

    return [f"cuda:{i}" for i in range(_C._cuda_count()[0])] if device.kind == "cuda" else [device.name]


def _measure(device: _C.Device, deadline: float, progress: Progress) -> calibrate.Result:
    """The costs of the device; then, where there are several, what their links reach together."""
    from kvswap import _C, calibrate

    names = devices_together(device)
    several = len(names) > 1
    result = calibrate.calibrate(device, deadline - _TOGETHER_SECONDS if several else deadline, progress)
    if several:
        try:
            devices = [_C.Device(name) for name in names]
        except (_C.Error, MemoryError) as error:
            result.together_note = f"{', '.join(names)} were not measured at once: {error}"
        else:
            calibrate.measure_together(result, devices, progress)
    return result


def _earlier(path: str) -> _C._Costs | None:
    from kvswap import _C

    try:
        return _C._costs_read(path)
    except (IndexError, ValueError):  # there is none, or it cannot be used
        return None


def _calibrate(args: argparse.Namespace, deadline: float, out: Document) -> int:
    from kvswap import _C, calibrate
    from kvswap.replay.progress import Progress

    calibrate.check_environment()
    device = open_device(args.device)
    refuse_host_device(device)
    path = _path(args, device)
    calibrate.check_writable(path)
    progress = Progress(sys.stderr)
    try:
        result = _measure(device, deadline, progress)
    finally:
        progress.clear()
    before = _earlier(path)
    if before is not None:
        calibrate.keep_together(result, before)
    show = for_person(args)
    show.text(calibrate.summary(result))
    try:
        _C._costs_write(path, result.costs, _what(device))
    except ValueError as error:
        raise UsageError(f"it could not be stored: {error}") from None
    show(f"stored in {path}")
    out.write({**result.to_dict(), "file": path})
    return EXIT_OK


def _show(args: argparse.Namespace, out: Document) -> int:
    from kvswap import _C, calibrate

    device = None if args.output else open_device(args.device)
    path = args.output if device is None else _path(args, device)
    try:
        costs, where, file = _C._costs_read(path), path, path
    except IndexError:
        if device is None:
            raise UsageError(f"--output {path}: there is no such file") from None
        costs, where, file = _C._costs_of(device), f"built in, since there is no {path}", None
    except ValueError as error:
        raise UsageError(str(error)) from None
    show = for_person(args)
    show.text(calibrate.table(costs))
    show(where)
    out.write({"costs": costs, "file": file})
    return EXIT_OK


def _what(device: _C.Device) -> str:
    from kvswap import _C

    return _C._costs_what(device.info["name"], device.info["driver"])


def _path(args: argparse.Namespace, device: _C.Device) -> str:
    from kvswap import _C

    try:
        return args.output or _C._costs_path(_what(device))
    except IndexError as error:
        raise UsageError(str(error)) from None
