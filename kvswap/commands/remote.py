"""`kvswap remote check|clear`: whether Mooncake's nodes give back what they were given, and a new epoch."""

from __future__ import annotations

import argparse
import secrets
import time
from pathlib import Path
from typing import Any

from kvswap.replay.errors import UsageError, of_system
from kvswap.replay.units import format_size

from .output import document, for_person
from .parser import EXIT_DEVICE, EXIT_OK, Commands, Parser, add_json, duration

_HANG = 22
_NBYTES, _BLOCKS = 1 << 20, 16  # of the blocks that check moves


def add(commands: Commands[Parser]) -> None:
    parser = commands.add_parser("remote", help="blocks on other nodes, by Mooncake Store: check them, clear them")
    own = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = own.add_parser("check", help="store blocks of this command's own, load and compare them")
    add_json(check)
    check.set_defaults(run=_check)
    clear = own.add_parser("clear", help="begin a new epoch: no engine finds the blocks of an identity any more")
    clear.set_defaults(run=_clear)
    for each in (check, clear):
        each.add_argument("master", metavar="MASTER", help="HOST:PORT of mooncake_master")
    clear.add_argument("identity", metavar="IDENTITY", help="32 hexadecimal digits, which an engine's log has")
    for each in (check, clear):
        each.add_argument("--secret", metavar="FILE", type=Path, help="the secret of these engines, if they have one")
        each.add_argument("--timeout", metavar="S", type=duration, default=10.0, help="limit of each call (10)")


def _open(args: argparse.Namespace, **fields: Any) -> Any:
    from kvswap.files import Layout
    from kvswap.remote import RemoteStore

    try:
        return RemoteStore(args.master, Layout(_NBYTES, **fields), secret=args.secret, timeout=args.timeout)
    except OSError as error:
        raise UsageError(of_system(error)) from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check(args: argparse.Namespace) -> int:
    import numpy as np

    show = for_person(args)
    with (
        document(args, "remote check") as out,
        _open(args, use="kvswap remote check") as store,
    ):
        keys = [secrets.token_bytes(16) for _ in range(_BLOCKS)]
        blocks = np.frombuffer(secrets.token_bytes(_BLOCKS * _NBYTES), np.uint8).reshape(_BLOCKS, -1)
        found = np.zeros_like(blocks)
        row: dict[str, Any] = {"master": args.master, "blocks": _BLOCKS, "block_nbytes": _NBYTES}
        for name, move in (("stored", store.store), ("loaded", store.load)):
            transfer = move(keys, blocks if name == "stored" else found, range(_BLOCKS))
            while not transfer.done():
                time.sleep(0.001)
            row[name] = _BLOCKS - len(transfer.failed_positions)
            row[f"{name}_seconds"] = transfer.elapsed
            row.update({f"{name}_error": str(transfer.error)} if transfer.error else {})
        row["right"] = int((blocks == found).all(axis=1).sum())
        row["nodes"] = store.stats()["nodes"]
        out.write(row)
    for name in ("stored", "loaded"):
        why = f": {row[f'{name}_error']}" if f"{name}_error" in row else f", {row[f'{name}_seconds'] * 1e3:.1f} ms"
        show(f"{name:<{_HANG - 2}}  {row[name]} of {_BLOCKS} blocks of {format_size(_NBYTES)}{why}", hang=_HANG)
    show(f"{'right':<{_HANG - 2}}  {row['right']} of {row['loaded']}", hang=_HANG)
    for node, state in row["nodes"].items():
        show(f"{node:<{_HANG - 2}}  {state}", hang=_HANG)
    return EXIT_OK if row["right"] == _BLOCKS else EXIT_DEVICE


def _clear(args: argparse.Namespace) -> int:
    try:
        identity = bytes.fromhex(args.identity)
    except ValueError:
        identity = b""
    if len(identity) != 16:
        raise UsageError(f"IDENTITY {args.identity}: must be 32 hexadecimal digits, as in the engine's log")
    with _open(args) as store:
        store.clear(identity=identity)
    return EXIT_OK
