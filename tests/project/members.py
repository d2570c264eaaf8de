"""What a class of the extension has."""

from __future__ import annotations

from typing import Any


def members_of(thing: type) -> dict[str, Any]:
    """A class's own, and those of its base in the extension."""
    own = [base for base in thing.__mro__ if base is thing or base.__module__ == "kvswap._C"]
    return {name: member for base in reversed(own) for name, member in vars(base).items()}
