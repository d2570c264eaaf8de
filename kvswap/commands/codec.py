"""`kvswap codec`: what the codecs do to given keys and values."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvswap.replay.errors import UsageError, of_system

from .output import Output, document, for_person
from .parser import EXIT_OK, Commands, Parser, add_json, add_names, add_plot, positive

if TYPE_CHECKING:
    from kvswap.codecs.measure import Report

_TOKENS, _MOST_TOKENS = 16384, 1 << 20  # of synthetic keys
_CODECS = ("exact", "mxfp8", "fp4")
_COLOURS = {"exact": "#2a7f62", "mxfp8": "#e0b050", "fp4": "#c0504d"}


def add(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "codec",
        help="what the codecs do to your keys and values: size, blocks that do not fit, errors",
        description="Codes keys and values by the CPU and prints sizes, escapes, the share of blocks that would not be "
        "stored, and errors, of the values and of attention's output. docs/codecs.md explains the codecs.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help=".npz or .safetensors with keys and values of shape (layers, heads, tokens, head_dim), "
        "their names beginning with k and v (default: synthetic ones)",
    )
    parser.add_argument("--block", type=positive, default=16, metavar="N", help="tokens of a block (default 16)")
    parser.add_argument(
        "--length",
        type=positive,
        action="append",
        metavar="N",
        help="tokens that attention reads; several times (default 1024, 4096, ... 131072 of those that there are)",
    )
    parser.add_argument(
        "--outliers", type=positive, default=1, metavar="N", help="synthetic: a key channel in 32 is N times as large"
    )
    add_names(parser, "--codec", _CODECS, "codecs")
    add_plot(parser)
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from kvswap.codecs import measure
    from kvswap.replay import plot

    if args.plot:
        plot.require(args.plot)
    lengths = args.length or measure.LENGTHS
    with document(args, "codec") as out:
        try:
            made = min(_MOST_TOKENS, max(args.length)) if args.length else _TOKENS
            data = measure.read(args.file) if args.file else measure.synthetic(args.outliers, made)
            reports = measure.measure(data, args.codec or _CODECS, tokens=args.block, lengths=lengths)
        except OSError as error:
            raise UsageError(of_system(error)) from None
        except ValueError as error:
            raise UsageError(str(error)) from None
        show = for_person(args)
        show(f"{data.name}: {data.kind}, layers x heads x tokens x head_dim: {' x '.join(map(str, data.keys.shape))}")
        _table(show, reports)
        advice = measure.recommend(reports)
        show.text(advice)
        if args.plot:
            _draw(reports, data.name, args.plot)
        found = [report._asdict() for report in reports]
        out.write({"file": args.file, "kind": data.kind, "shape": data.keys.shape, "block": args.block,
                   "codecs": found, "recommendation": advice})  # fmt: skip
    return EXIT_OK


def _table(show: Output, reports: list[Report]) -> None:
    show.header(
        f"{'codec':<8}{'size':>7}{'not stored':>12}{'escapes K, V':>19}{'error K, V':>18}  attention K, V, both"
    )
    for report in reports:
        escapes = ", ".join(f"{share:.3%}" for share in report.escapes.values()) if report.codec == "exact" else "-"
        error = ", ".join(f"{value:.4f}" for value in report.error.values())
        line = f"{report.codec:<8}{report.ratio:>7.3f}{report.not_stored:>12.2%}{escapes:>19}{error:>18}"
        for length, row in report.attention.items():
            show(f"{line}  {', '.join(f'{value:.4f}' for value in row.values())} at {length} tokens")
            line = " " * len(line)


def _draw(reports: list[Report], name: str, path: str | Path) -> None:
    """Errors by layer: of the values, and of attention with only that side coded."""
    import importlib

    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True)
    titles = ("relative error of the values", "relative error of attention's output")
    for axis, title, prefix in zip(axes, titles, ("", "attention_"), strict=True):
        for report in reports:
            for side, style in (("k", "-o"), ("v", "--s")):
                points = [row[prefix + side] for row in report.layers if prefix + side in row]
                if points and any(points):
                    axis.plot(points, style, color=_COLOURS[report.codec], label=f"{report.codec}, {side.upper()}")
        axis.set(xlabel="layer of the file", title=title, ylim=(0, None))
        if axis.lines:
            axis.legend()
    figure.suptitle(name)
    figure.savefig(path)
