"""`kvswap manager`: run, status, drain."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from typing import Any

from kvswap.commands.output import document, for_person
from kvswap.commands.parser import add_json
from kvswap.fastdeploy.manager import arguments, places
from kvswap.replay.errors import UsageError

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add `manager` to the commands of kvswap."""
    parser = commands.add_parser(
        "manager",
        help="swap an engine's cache blocks from a process beside it, as FastDeploy's cache transfer manager does",
    )
    own = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run = own.add_parser("run", help="run a rank until SIGTERM; takes FastDeploy's options")
    arguments.add_run(run)
    run.set_defaults(run=_run)
    status = own.add_parser("status", help="state, ranks and tasks of a running manager")
    arguments.add_place(status)
    add_json(status)
    status.add_argument("--timeout", type=float, default=5.0, metavar="S", help="time limit for an answer (5)")
    status.set_defaults(run=_status)
    drain = own.add_parser("drain", help="take no more tasks, and return when none is under way")
    arguments.add_place(drain)
    drain.add_argument("--undo", action="store_true", help="take tasks again")
    drain.add_argument("--timeout", type=float, default=60.0, metavar="S", help="time limit (60)")
    add_json(drain)
    drain.set_defaults(run=_drain)


def _need_packages() -> None:
    try:
        import msgspec
        import zmq
    except ImportError as error:
        raise UsageError(f"kvswap manager needs {error.name}: pip install 'kvswap[manager]'") from None
    assert msgspec and zmq


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(record.created, 6), "level": record.levelname.lower(), "message": record.getMessage()}
        line.update(getattr(record, "task", {}))
        return json.dumps(line)


def _log_to_stderr(settings: arguments.Settings) -> None:
    handler = logging.StreamHandler()
    text = logging.Formatter(f"%(asctime)s %(levelname)s rank {settings.layout.rank}: %(message)s")
    handler.setFormatter(_JsonLines() if settings.log_format == "json" else text)
    logger = logging.getLogger("kvswap.manager")
    logger.addHandler(handler)
    logger.setLevel(settings.log_level.upper())
    logger.propagate = False


def _run(args: argparse.Namespace) -> int:
    _need_packages()
    from kvswap.fastdeploy.manager import process

    try:
        settings = arguments.settings_of(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not settings.mps:
        arguments.disable_kernels()
    _log_to_stderr(settings)
    return process.run(settings)


def _client(args: argparse.Namespace) -> Any:
    """A client of a running manager. By itself a client waits for a manager to start."""
    _need_packages()
    from kvswap.fastdeploy.client import Client

    directory = arguments.place_of(args)
    places.check_running(directory)
    return Client(directory)


def _status(args: argparse.Namespace) -> int:
    with document(args, "manager status") as out:
        with _client(args) as client:
            found = client.status(args.timeout)
        for_person(args).text(_as_text(found), hang=10)
        out.write(found)
    return 0


def _as_text(found: dict[str, Any]) -> str:
    state = found["state"] + (", ready" if found["ready"] else f", not ready: {found['why_not']}")
    lines = [
        f"state     {state}",
        f"tasks     {found['under_way']} under way of {found['queue_limit']}, {found['done']} done, "
        f"{found['failed']} failed, {found['undelivered']} results undelivered",
        f"caches    {found['layout']}",
    ]
    if found["last_failure"]:
        lines.append(f"failure   {found['last_failure']}")
    for rank in found["ranks"]:
        where = f"process {rank['pid']}, " if rank["here"] else ""
        late = f", {rank['overdue']} overdue" if rank["overdue"] else ""
        lines.append(f"rank {rank['rank']:<4} {where}{rank['phase']}, {rank['tasks']} tasks{late}, "
                     f"generation {rank['generation']}, heard {rank['silent']:.1f} s ago")  # fmt: skip
    return "\n".join(lines)


def _drain(args: argparse.Namespace) -> int:
    with document(args, "manager drain") as out:
        begin = time.monotonic()
        with _client(args) as client:
            client.drain(args.timeout, undo=args.undo)
        seconds = time.monotonic() - begin
        done = "takes tasks again" if args.undo else f"drained in {seconds:.1f} s; --undo takes tasks again"
        print(done, file=sys.stderr)
        out.write({"draining": not args.undo, "seconds": seconds})
    return 0
