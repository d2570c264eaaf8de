"""`kvswap simulate TRACE`: what a serving trace asks of many nodes, on links and tiers that are only counted."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .output import document, for_person
from .parser import EXIT_OK, Commands, Parser, add_json, count, duration, positive, some_size
from .replay import add_geometry, add_tier, full_geometry, read_head, tier_blocks

if TYPE_CHECKING:
    from kvswap.simulate.settings import Settings

_HANG = 25  # where the values of the closing table begin
_NODES_PER_COPY = 20


def add(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "simulate",
        usage="%(prog)s [options] TRACE",
        help="simulate a serving trace on many nodes: tiers, links, failures",
        description="Runs a trace in the Mooncake format through the replay's tiers on many nodes that share a tier. "
        "No block moves: links are busy for as long as its bytes would take.",
    )
    parser.add_argument("trace", metavar="TRACE", help="the trace; - for the standard input")
    add_geometry(parser, scaled="full")
    _add_nodes(parser)
    _add_shared(parser)
    _add_traffic(parser)
    run = parser.add_argument_group("the run")
    run.add_argument("--requests", type=positive, metavar="N", help="the first N requests of the trace")
    run.add_argument("--seed", type=count, default=0, metavar="N", help="of the copies' times (default 0)")
    add_json(run)
    parser.set_defaults(run=_simulate)


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("nodes", "Rates are bytes a second in each direction: 50GB is 50 x 1000^3.")
    group.add_argument("--nodes", type=positive, default=10, metavar="N", help="nodes that serve (default 10)")
    group.add_argument("--gpus", type=positive, default=8, metavar="N", help="GPUs of a node, one engine (default 8)")
    add_tier(group, "gpu", "blocks of a node's GPU tier (2500)", 2500)
    add_tier(group, "host", "blocks of a node's host tier (4000)", 4000)
    group.add_argument("--gpu-link", type=some_size, default=50 * 10**9, metavar="RATE", help="of a GPU (50GB)")
    group.add_argument("--nics", type=positive, default=1, metavar="N", help="NICs of a node (1)")
    group.add_argument("--nic", type=some_size, default=50 * 10**9, metavar="RATE", help="of a NIC (50GB)")
    group.add_argument("--disk", type=some_size, default=12 * 10**9, metavar="RATE", help="of a node's files (12GB)")
    group.add_argument("--rack", type=positive, default=0, metavar="N", help="nodes a rack (default: all in one)")
    group.add_argument("--uplink", type=some_size, default=0, metavar="RATE", help="of a rack (default: no limit)")
    group.add_argument("--rtt", type=duration, default=200e-6, metavar="S", help="of a control message (0.0002)")
    group.add_argument("--latency", type=duration, default=20e-6, metavar="S", help="of a transfer (0.00002)")
    group.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="WHAT",
        help="3@600: node 3 dies at 600 s of the clock; 3@600+120: and is back 120 s later; rack0@600: a rack",
    )


def _add_shared(parser: argparse.ArgumentParser) -> None:
    from kvswap.simulate.settings import LISTS, STORES

    group = parser.add_argument_group("the tier that nodes share", "As kvswap.remote: rendezvous hashing over a list.")
    group.add_argument("--pool-blocks", type=count, default=4000, metavar="N", help="memory for it on each node (4000)")
    group.add_argument("--file-blocks", type=count, default=0, metavar="N", help="files behind that (default 0)")
    group.add_argument("--store-nodes", type=count, default=0, metavar="N", help="nodes that have it instead (0)")
    group.add_argument("--replicas", type=positive, default=1, metavar="N", help="nodes that hold each block (1)")
    group.add_argument("--lists", choices=LISTS, default="all", help="a client's list of nodes: all, or its rack")
    group.add_argument(
        "--stores", choices=STORES, default="computed", help="computed blocks, or those that leave the host tier"
    )


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    from kvswap.simulate.settings import ROUTES

    group = parser.add_argument_group("traffic", "Copies of the trace, each a service with blocks of its own.")
    group.add_argument("--copies", type=positive, metavar="N", help="of the trace (default: one for 20 nodes)")
    group.add_argument("--common", type=_share, default=0.0, metavar="SHARE", help="of references, common to all (0)")
    group.add_argument("--shift", type=_seconds, default=60.0, metavar="S", help="copies begin within (60)")
    group.add_argument("--speed", type=duration, default=1.0, metavar="X", help="requests come X times as fast (1)")
    group.add_argument("--in-flight", type=positive, metavar="N", help="no times: so many at a time on each node")
    group.add_argument(
        "--route", choices=ROUTES, default="turn", help="nodes in turn (default), or where the prefix was served"
    )


def _share(text: str) -> float:
    value = _seconds(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"not a share, 0 to 1: {text!r}")
    return value


def _seconds(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else duration(text)


def _simulate(args: argparse.Namespace) -> int:
    from kvswap.replay.progress import Progress
    from kvswap.simulate.report import opening
    from kvswap.simulate.run import simulate
    from kvswap.simulate.traffic import Traffic

    settings = settings_of(args)
    with document(args, "simulate") as out:
        trace = read_head(args.trace, args.requests)
        show = for_person(args)
        show.text(opening(trace, settings, Traffic(trace, settings)), hang=12)
        progress = Progress(sys.stderr)
        try:
            report = simulate(trace, settings, lambda done, total: progress(done, total, "requests"))
        finally:
            progress.clear()
        show.text(report.to_text(), hang=_HANG)
        out.write(report.to_dict())
    return EXIT_OK


def settings_of(args: argparse.Namespace) -> Settings:
    from kvswap.replay import geometry
    from kvswap.simulate.settings import Settings, parse_failure

    shape = full = full_geometry(args)
    if args.bytes_per_block not in (None, "full"):
        shape = geometry.scale(full, args.bytes_per_block, allow_tiny=args.allow_tiny)
    same = (
        "nodes store_nodes gpus nics pool_blocks file_blocks gpu_link nic disk rack uplink rtt "
        "latency lists replicas stores common shift speed route in_flight seed"
    )
    sizes: dict[str, Any] = {f"{tier}_blocks": tier_blocks(args, tier, full) for tier in ("gpu", "host")}
    return Settings(
        geometry=shape,
        copies=args.copies or max(1, args.nodes // _NODES_PER_COPY),
        **sizes,
        failures=tuple(parse_failure(text) for text in args.fail),
        **{name: getattr(args, name) for name in same.split()},
    )
