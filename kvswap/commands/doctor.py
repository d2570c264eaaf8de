"""`kvswap doctor`: whether kvswap would work here, what would make it slow, and the cure of each."""

from __future__ import annotations

import argparse

from kvswap.replay.errors import UsageError, of_system

from .output import document, for_person
from .parser import Commands, Parser, add_json

_HANG = 21  # where the text of a line begins
_STATUS = """\
exit status:
  0  nothing to mend
  1  warnings: it works, slower or with less than it could
  2  it would not work, or wrong usage"""


def add(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine for an engine with kvswap: each warning with its cure",
        description="Checks driver, kernels, io_uring, limits, memory, engines and a configuration, in ten seconds at "
        "most. Opens no device and writes nothing.",
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="check this too: JSON of vLLM's --kv-transfer-config, SGLang's --hicache-storage-backend-extra-config or "
        "LMCache's --l2-adapter",
    )
    parser.add_argument("--gpu", action="store_true", help="open the GPUs too (makes a CUDA context on each)")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from kvswap import _doctor, _doctor_config

    try:
        given = None if args.config is None else _doctor_config.read(args.config)
    except OSError as error:
        raise UsageError(f"--config {of_system(error)}") from None
    except ValueError as error:
        raise UsageError(f"--config {error}") from None
    with document(args, "doctor") as out:
        found = _doctor.examine(_doctor.Asked(given, args.gpu))
        show = for_person(args)
        for line in found.to_lines():
            show(line, hang=_HANG)
        out.write(found.to_dict())
    return found.status
