"""What the programs' command lines share."""

from __future__ import annotations

import argparse
import json
from typing import Any


def parser_of(prog: str, text: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the first paragraph of a docstring, and ends with the others."""
    about, *more = (text or "").split("\n\n")
    return argparse.ArgumentParser(
        prog=prog,
        description=about,
        epilog="\n\n".join(more),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def values_of(texts: list[str], known: set[str] | None = None) -> dict[str, Any]:
    """NAME=VALUE, as JSON or as it is. SystemExit: the name is not known."""
    made = {}
    for text in texts:
        name, _, value = text.partition("=")
        if known is not None and name not in known:
            raise SystemExit(f"{text}: there are {', '.join(sorted(known))}")
        try:
            made[name] = json.loads(value)
        except ValueError:
            made[name] = value
    return made
