"""`kvswap remote keygen|serve|stat`: a node of the remote tier, and what is asked of nodes."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvswap.replay.errors import UsageError, of_system
from kvswap.replay.units import format_size

from .output import document, for_person
from .parser import EXIT_DEVICE, EXIT_OK, Commands, Parser, add_json, duration, positive, some_size

if TYPE_CHECKING:
    from kvswap.remote import Node, Secret, Server

_HANG = 22


def add(commands: Commands[Parser]) -> None:
    parser = commands.add_parser("remote", help="serve blocks to other nodes by NIXL, and ask nodes what they hold")
    own = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    keygen = own.add_parser("keygen", help="make a key pair in a new file, and print its public key")
    keygen.add_argument("file", metavar="FILE", type=Path, help="a new file; it gets mode 0600")
    keygen.set_defaults(run=_keygen)
    _add_serve(own)
    stat = own.add_parser("stat", help="what each node of a list holds")
    stat.add_argument("nodes", metavar="NODES", type=Path, help="a file of nodes: HOST:PORT PUBLIC-KEY [NAME] a line")
    stat.add_argument("--key", metavar="FILE", type=Path, required=True, help="the key pair of a client")
    stat.add_argument("--timeout", metavar="S", type=duration, default=2.0, help="limit for all answers (2)")
    add_json(stat)
    stat.set_defaults(run=_stat)


def _add_serve(own: Commands[Parser]) -> None:
    serve = own.add_parser("serve", help="run a node until SIGTERM; prints its line for a file of nodes")
    serve.add_argument(
        "--bind", metavar="HOST:PORT", required=True, help="address of the control messages; port 0: any"
    )
    serve.add_argument("--block", metavar="SIZE", type=some_size, required=True, help="bytes of a block")
    serve.add_argument("--blocks", metavar="N", type=positive, required=True, help="blocks of memory")
    serve.add_argument("--key", metavar="FILE", type=Path, required=True, help="the node's key pair")
    serve.add_argument("--clients", metavar="FILE", type=Path, required=True, help="public keys of clients, one a line")
    serve.add_argument("--name", metavar="NAME", default="", help="by which blocks are placed (default: the address)")
    serve.add_argument("--directory", metavar="DIR", type=Path, help="keep blocks in the files of this directory, too")
    serve.add_argument("--capacity", metavar="SIZE", type=some_size, help="limit of the bytes of these files")
    serve.set_defaults(run=_serve)


@contextlib.contextmanager
def _input() -> Iterator[None]:
    """What is wrong with a file that the user names is wrong input, and so is a package that is missing."""
    from kvswap import _C

    try:
        yield
    except OSError as error:
        raise UsageError(of_system(error)) from None
    except (ValueError, _C.Error) as error:
        raise UsageError(str(error)) from None


def read_key(path: str | Path) -> Secret:
    """A key pair. UsageError."""
    from kvswap.remote import read_secret
    from kvswap.remote._secrets import need_curve

    with _input():
        need_curve()
        return read_secret(path)


def read_nodes(path: str | Path) -> list[Node]:
    """A file of nodes. UsageError."""
    from kvswap.remote import parse_nodes

    with _input():
        return parse_nodes(Path(path).read_text(), str(path))


def _keygen(args: argparse.Namespace) -> int:
    from kvswap.remote import new_secret, write_secret

    with _input():
        pair = new_secret()
    write_secret(args.file, pair)
    print(pair.public)
    return EXIT_OK


def _serve(args: argparse.Namespace) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    if (args.directory is None) != (args.capacity is None):
        raise UsageError("--directory and --capacity go together")
    server, pair = _open(args)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        print(f"{server.address} {pair.public} {args.name}".rstrip(), flush=True)
        server.run()
    finally:
        server.close()
    return EXIT_OK


def _open(args: argparse.Namespace) -> tuple[Server, Secret]:
    import os
    import secrets
    import socket
    import sys

    from kvswap.remote import Server
    from kvswap.remote._agent import NixlAgent
    from kvswap.remote._secrets import read_allowed

    pair = read_key(args.key)
    with _input():
        allowed = read_allowed(args.clients)
    if not allowed:
        raise UsageError(f"{args.clients} has no public key: no client could connect")
    agent = NixlAgent(f"kvswap-node-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}", serve=True)
    for handler in logging.getLogger("nixl").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return (
        Server(
            args.bind,
            args.block,
            args.blocks,
            pair,
            allowed,
            agent,
            directory=args.directory,
            capacity=args.capacity,
        ),
        pair,
    )


def _stat(args: argparse.Namespace) -> int:
    pair, nodes = read_key(args.key), read_nodes(args.nodes)
    show = for_person(args)
    with document(args, "remote stat") as out:
        found = _ask(nodes, pair, args.timeout)
        for each in found:
            show(f"{each['node']:<{_HANG - 2}}  {_line(each)}", hang=_HANG)
        out.write({"nodes": found})
    return EXIT_OK if all(each["up"] for each in found) else EXIT_DEVICE


def _ask(nodes: list[Node], pair: Secret, seconds: float) -> list[dict[str, Any]]:
    """From all nodes at once."""
    from kvswap import _C
    from kvswap.remote._link import Link
    from kvswap.remote._messages import GetStats

    end = time.monotonic() + seconds
    link = Link(pair, 0, lambda *_: None, lambda *_: None)
    try:
        peers = link.connect(nodes)
        while time.monotonic() < end and not all(peer.welcome for peer in peers):
            time.sleep(0.01)
        found = []
        for peer in peers:
            row: dict[str, Any] = {"node": peer.node.placed_by, "address": peer.node.address, "up": False}
            try:
                row.update(link.answer(peer, link.ask(peer, GetStats), max(end, time.monotonic() + 0.5)).numbers)
                row["up"] = True
            except _C.Error as error:
                row["error"] = str(error)
            found.append(row)
    finally:
        link.close()
    return found


def _line(row: dict[str, Any]) -> str:
    if not row["up"]:
        return str(row["error"])
    nbytes = row["blocks"] * row["block_nbytes"]
    files = f", {row['files']['blocks']:,} in files" if row["files"] else ""
    return (
        f"{row['blocks']:,} of {row['slots']:,} slots, {format_size(nbytes)}{files}; stored {row['stored']:,}, "
        f"located {row['located']:,}, missed {row['missed']:,}, evicted {row['evicted']:,}, damaged {row['damaged']:,}"
    )
