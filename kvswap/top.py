"""kvswap top: live rates of a running process, which has called kvswap.metrics.serve() or has KVSWAP_TOP=1."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from kvswap.commands.parser import positive
from kvswap.replay.errors import UsageError
from kvswap.replay.units import format_size

__all__ = ["add", "rates", "view"]

_HOW = "start it with KVSWAP_TOP=1 in its environment, or call kvswap.metrics.serve() in it"
_SHORTEST = 0.1  # seconds between two answers


def add(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "top",
        help="what a running process moves: GB/s, queues, failures, files, host pools",
        description="Shows what a running process of this user moves, until Ctrl-C. The process must show itself: "
        + _HOW,
    )
    parser.add_argument(
        "pid", nargs="?", type=positive, metavar="PID", help="the process; needed if several show themselves"
    )
    parser.add_argument("--list", action="store_true", help="list the processes that show themselves, and end")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between views (default 1)")
    parser.add_argument("--once", action="store_true", help="one view, over one interval, and end")
    parser.add_argument("--json", action="store_true", help="write JSON, a line a view")
    parser.set_defaults(run=_run)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not _SHORTEST <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {_SHORTEST:g} to 3600")
    return value


_SNAPSHOT = {"pid", "command", "monotonic", "devices", "files"}


# -- processes --------------------------------------------------------------------------------------------------------


def _processes() -> list[dict[str, Any]]:
    """The snapshots of the processes that answer."""
    from kvswap import _C, _top_socket

    found = []
    for pid, path in _top_socket.sockets().items():
        if pid != os.getpid():
            with contextlib.suppress(OSError, _C.Error):
                answer = _top_socket.ask(path)
                if answer.get("pid") == pid and set(answer) >= _SNAPSHOT:  # another version may answer otherwise
                    found.append(answer)
    return found


def _list(args: argparse.Namespace) -> int:
    rows = [
        {
            "pid": each["pid"],
            "devices": [device["device"] for device in each["devices"]],
            "bytes": sum(path["size"]["sum"] for device in each["devices"] for path in device["paths"]),
            "command": each["command"],
        }
        for each in _processes()
    ]
    if args.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        devices = " ".join(row["devices"]) or "-"
        print(f"{row['pid']:>8}  {_plain(devices):<16} {format_size(row['bytes']):>9}  {_plain(row['command'])[:80]}")
    if not rows:
        print(f"no process of this user shows itself: {_HOW}", file=sys.stderr)
    return 0


def _choose(pid: int | None) -> Any:
    """The path of the process's socket. UsageError: there is none, or several."""
    from kvswap import _top_socket

    there = _top_socket.sockets()
    there.pop(os.getpid(), None)
    if pid is not None:
        if pid not in there:
            known = ", ".join(map(str, there)) or "none"
            raise UsageError(f"process {pid} does not show itself (those that do: {known}): {_HOW}")
        return there[pid]
    alive = [each["pid"] for each in _processes()]
    if len(alive) != 1:
        what = (
            f"processes {', '.join(map(str, alive))} show themselves: name one" if alive else "no process shows itself"
        )
        raise UsageError(what if alive else f"{what}: {_HOW}")
    return there[alive[0]]


# -- rates ------------------------------------------------------------------------------------------------------------


def rates(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Rates between two snapshots of one process."""
    seconds = max(1e-9, now["monotonic"] - before["monotonic"])
    old = {(device["device"], *_key(path)): path for device in before["devices"] for path in device["paths"]}
    paths = [
        _path_rate(device["device"], path, old.get((device["device"], *_key(path))), seconds)
        for device in now["devices"]
        for path in device["paths"]
    ]
    stores = {store["directory"]: store for store in before["files"]}
    files = [_file_rate(store, stores.get(store["directory"]), seconds) for store in now["files"]]
    return {"seconds": seconds, "paths": paths, "files": files}


def _key(path: dict[str, Any]) -> tuple[str, str]:
    return path["direction"], path["path"]


def _path_rate(device: str, now: dict[str, Any], old: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    def grown(read: Callable[[dict[str, Any]], float]) -> float:
        return float(read(now) - (read(old) if old is not None else 0))

    count = grown(lambda path: sum(path["size"]["buckets"]))
    duration, queue = grown(lambda path: path["duration"]["sum"]), grown(lambda path: path["queue"]["sum"])
    return {
        "device": device,
        "direction": now["direction"],
        "path": now["path"],
        "gbps": grown(lambda path: path["size"]["sum"]) / seconds / 1e9,
        "transfers_per_second": count / seconds,
        "mean_seconds": duration / count if count else 0.0,
        "mean_queue_seconds": queue / count if count else 0.0,
        "failed": grown(lambda path: sum(path["failed"].values())),
        "total_bytes": now["size"]["sum"],
        "total_failed": now["failed"],
    }


def _file_rate(now: dict[str, Any], old: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    def speed(key: str) -> float:
        grown = now[key] - (old[key] if old is not None else 0)
        return float(grown * now["block_bytes"] / seconds / 1e9)

    return {"directory": now["directory"], "store_gbps": speed("stored"), "load_gbps": speed("loaded")}


# -- the view ---------------------------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    """The text without control characters: it comes from another process."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"


def _failures(failed: dict[str, int]) -> str:
    return ", ".join(f"{count} {_plain(kind)}" for kind, count in failed.items()) or "0"


Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # title, columns, rows; text columns come first


def _moving(change: dict[str, Any]) -> Table:
    columns = ("device", "direction", "path", "GB/s", "transfers/s", "mean", "queued", "in all", "failed in all")
    rows: list[tuple[str, ...]] = [
        (
            _plain(path["device"]),
            path["direction"],
            path["path"],
            f"{path['gbps']:.2f}",
            f"{path['transfers_per_second']:.0f}",
            _time(path["mean_seconds"]) if path["transfers_per_second"] else "-",
            _time(path["mean_queue_seconds"]) if path["transfers_per_second"] else "-",
            format_size(path["total_bytes"]),
            _failures(path["total_failed"]),
        )
        for path in change["paths"]
    ]
    return "transfers", columns, rows


def _queues(now: dict[str, Any]) -> Table:
    columns = ("device", "direction", "priority", "unfinished", "bytes", "fullest lane", "oldest")
    rows: list[tuple[str, ...]] = [
        (
            _plain(device["device"]) + (" LOST" if device["lost"] else ""),
            lanes["direction"],
            lanes["priority"],
            f"{lanes['unfinished']}",
            format_size(lanes["bytes"]),
            f"{lanes['fullest']} of {lanes['limit']}",
            _time(lanes["oldest_seconds"]) if lanes["unfinished"] else "-",
        )
        for device in now["devices"]
        for lanes in device["lanes"]
    ]
    return "queues", columns, rows


def _files(now: dict[str, Any], change: dict[str, Any]) -> Table:
    columns = ("directory", "store GB/s", "load GB/s", "blocks", "on disk", "unfinished", "failed")
    rows: list[tuple[str, ...]] = [
        (
            _plain(store["directory"]),
            f"{rate['store_gbps']:.2f}",
            f"{rate['load_gbps']:.2f}",
            f"{store['blocks']}",
            format_size(store["file_bytes"]),
            f"{store['unfinished_stores']} + {store['unfinished_loads']}",
            f"{sum(each['failed'] for each in store['operations'])}",
        )
        for store, rate in zip(now["files"], change["files"], strict=True)
    ]
    return "files", columns, rows


def _pools(now: dict[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            _plain(pool["device"]),
            "shared" if pool["shared"] else "private",
            pool["state"],
            f"{pool['blocks']}",
            format_size(pool["bytes"]),
            "yes" if pool["pinned"] else "no",
        )
        for pool in now["host_pools"]
    ]
    return "host pools", ("device", "kind", "state", "blocks", "size", "pinned"), rows


def _jobs(now: dict[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            _plain(jobs["device"]),
            jobs["direction"],
            f"{sum(jobs['duration']['buckets'])}",
            f"{jobs['unfinished']}",
            format_size(jobs["bytes"]),
            f"{jobs['stalls']}",
            f"{jobs['failed']}",
        )
        for jobs in now["handlers"]
    ]
    return "offloading jobs", ("device", "direction", "done", "unfinished", "bytes", "stalls", "failed"), rows


def view(now: dict[str, Any], change: dict[str, Any]) -> tuple[str, list[Table]]:
    """A title, and the tables that have rows."""
    rank = f", rank {_plain(now['rank'])}" if now["rank"] else ""
    title = f"process {now['pid']}{rank}: {_plain(now['command'])[:80]}"
    tables = [_moving(change), _queues(now), _jobs(now), _files(now, change), _pools(now)]
    return title, [table for table in tables if table[2]]


def _as_text(title: str, tables: list[Table]) -> str:
    lines = [title]
    for name, columns, rows in tables:
        widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
        lines += ["", name]
        for row in (columns, *rows):
            lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if not tables:
        lines.append("no device is open")
    return "\n".join(lines)


class _Plain:
    """Plain text. On a terminal each view replaces the last one."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._clear = out, "\x1b[H\x1b[2J" if out.isatty() else ""

    def show(self, title: str, tables: list[Table]) -> None:
        print(self._clear + _as_text(title, tables), end="\n" if self._clear else "\n\n", file=self._out, flush=True)


class _Rich:
    """Tables of rich. Each view replaces the last one."""

    def __init__(self) -> None:
        self._live = importlib.import_module("rich.live").Live(auto_refresh=False)
        self._live.start()

    def show(self, title: str, tables: list[Table]) -> None:
        table_class = importlib.import_module("rich.table").Table
        text = importlib.import_module("rich.text").Text
        group = importlib.import_module("rich.console").Group
        made = [text(title, style="bold")]
        for name, columns, rows in tables:
            table = table_class(title=name, title_justify="left", box=None, pad_edge=False)
            for column in columns:
                table.add_column(column, style="cyan" if column == "GB/s" else None)
            for row in rows:
                table.add_row(*map(text, row))
            made.append(table)
        self._live.update(group(*made), refresh=True)

    def close(self) -> None:
        self._live.stop()


@contextlib.contextmanager
def _screen(as_json: bool) -> Iterator[Callable[[dict[str, Any], dict[str, Any]], None]]:
    if as_json:
        yield _print_json
    elif sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        rich = _Rich()
        try:
            yield lambda now, change: rich.show(*view(now, change))
        finally:
            rich.close()
    else:
        plain = _Plain(sys.stdout)
        yield lambda now, change: plain.show(*view(now, change))


# -- the command ------------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    from kvswap import _C, _top_socket

    if args.list:
        return _list(args)
    path = _choose(args.pid)
    try:
        before = _top_socket.ask(path)
    except OSError as error:
        raise _C.Error(f"{path} does not answer: {error}") from None
    with _screen(args.json) as show:
        while True:
            time.sleep(args.interval)
            try:
                now = _top_socket.ask(path)
            except (FileNotFoundError, ConnectionError):
                print(f"process {before['pid']} has ended", file=sys.stderr)
                return 0
            except OSError as error:
                raise _C.Error(f"process {before['pid']} does not answer: {error}") from None
            try:
                show(now, rates(before, now))
            except (LookupError, TypeError, AttributeError, ValueError):
                raise _C.Error(f"{path} did not answer as this kvswap does: is it of another version?") from None
            if args.once:
                return 0
            before = now


def _print_json(now: dict[str, Any], change: dict[str, Any]) -> None:
    print(json.dumps({"pid": now["pid"], "time": now["time"], "rates": change, "snapshot": now}), flush=True)
