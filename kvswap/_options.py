"""Options that reach kvswap as JSON of an engine's configuration, read strictly.

A table of options has a line for each: its name, the values that it takes, its default. read() returns the value of
each, or raises a ValueError that names the option, the value and what is allowed. A key that is nearly an option's name
is refused. Other unknown keys are ignored, and one warning of the process names them.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvswap._log import logger

_log = logger("kvswap.options")
_MISSPELT = 2  # edits, at most, between an option's name and a key that is refused as a misspelling of it
_MOST_NBYTES = (1 << 63) - 1
_MOST_SHOWN = 120  # characters of a wrong value
_UNITS = {f"{letter}{i}B": (1024 if i else 1000) ** n for n, letter in enumerate("KMGTP", 1) for i in ("", "i")}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)(B|kB|[KMGTP]i?B)", re.ASCII)
_warned: set[tuple[str, str]] = set()  # place and key; guarded by _warning
_warning = threading.Lock()

NEEDED: Any = object()  # the default of an option that has none


class NotAllowedError(Exception):
    """The value is not one that the option takes."""


@dataclass(frozen=True)
class Option:
    """One option.

    allowed: completes "it is ...". take: from a value of JSON the one to use; NotAllowedError. default: used as it is;
    where it is None, null is allowed.
    """

    name: str
    allowed: str
    take: Callable[[Any], Any]
    default: Any = NEEDED


def _only(value: Any, holds: bool) -> Any:
    if not holds:
        raise NotAllowedError
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def flag(name: str, default: Any = NEEDED) -> Option:
    """A boolean. Texts and numbers are refused: "false" would count as true."""
    return Option(name, "true or false", lambda value: _only(value, isinstance(value, bool)), default)


def count(name: str, least: int, most: int, default: Any = NEEDED) -> Option:
    """A whole number of a range."""
    allowed = f"a whole number from {least} to {most}"
    return Option(name, allowed, lambda value: _only(value, _whole(value) and least <= value <= most), default)


def counts(name: str, what: str, default: Any = NEEDED) -> Option:
    """A list of different whole numbers, 0 or more."""

    def take(value: Any) -> tuple[int, ...]:
        given = _only(value, isinstance(value, list | tuple) and all(_whole(each) and each >= 0 for each in value))
        return tuple(_only(sorted(given), len(set(given)) == len(given)))

    return Option(name, f"a list of {what}, whole numbers from 0 on, each once", take, default)


def number(name: str, allowed: str, holds: Callable[[float], bool], default: Any = NEEDED) -> Option:
    """A finite number for which holds() is true."""

    def take(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NotAllowedError
        try:
            read = float(value)
        except OverflowError:
            raise NotAllowedError from None
        return float(_only(read, math.isfinite(read) and holds(read)))

    return Option(name, allowed, take, default)


def size(name: str, default: Any = NEEDED) -> Option:
    """A whole number of bytes, or a text with a unit. Units without "B" are refused: they may mean 1000 or 1024."""

    def take(value: Any) -> int:
        if isinstance(value, str):
            found = _SIZE.fullmatch(value)
            if found is None:
                raise NotAllowedError
            nbytes = Fraction(found[1]) * {"B": 1, "kB": 1000, **_UNITS}[found[2]]
            value = int(_only(nbytes, nbytes.denominator == 1))
        return int(_only(value, _whole(value) and 1 <= value <= _MOST_NBYTES))

    return Option(name, 'a whole number of bytes above 0, or a text such as "500GiB" or "500GB"', take, default)


def text(name: str, default: Any = NEEDED) -> Option:
    """A text, empty ones included."""
    return Option(name, "a text", lambda value: _only(value, isinstance(value, str)), default)


def choice(name: str, choices: Collection[str], default: Any = NEEDED) -> Option:
    """One of some texts."""
    known = frozenset(choices)
    return Option(
        name,
        f"one of {', '.join(choices)}",
        lambda value: _only(value, isinstance(value, str) and value in known),
        default,
    )


def _path(value: Any) -> str:
    """A relative path would mean another place in each process of an engine that has its own working directory."""
    if not isinstance(value, str | os.PathLike):
        raise NotAllowedError
    name = os.fspath(value)
    if not isinstance(name, str) or "\0" in name:
        raise NotAllowedError
    name = os.path.expanduser(name)
    return str(_only(name, os.path.isabs(name)))


_PATH = "an absolute path, or one that begins with ~"


def path(name: str, what: str, default: Any = NEEDED) -> Option:
    """The path of `what`, made absolute."""
    return Option(name, f"the path of {what}: {_PATH}", _path, default)


def paths(name: str, what: str, default: Any = NEEDED) -> Option:
    """One path of `what`, or a list of different ones; a list of one is that path."""

    def take(value: Any) -> str | list[str]:
        if not isinstance(value, list | tuple):
            return _path(value)
        found = [_path(each) for each in value]
        places = {os.path.normpath(each) for each in found}
        _only(found, bool(found) and len(places) == len(found))
        return found if len(found) > 1 else found[0]

    return Option(name, f"the path of {what}, or a list of different paths on several disks: {_PATH}", take, default)


def _distance(a: str, b: str) -> int:
    """How many characters have to be inserted, removed or replaced to make one of the other; more than 2 may be 3."""
    if abs(len(a) - len(b)) > _MISSPELT:
        return _MISSPELT + 1
    row = list(range(len(b) + 1))
    for i, of_a in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, of_b in enumerate(b, 1):
            before, row[j] = row[j], min(before + (of_a != of_b), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def _meant(key: str, names: Iterable[str]) -> str | None:
    """The option that a key is a misspelling of."""
    plain = key.casefold().replace("-", "_")
    near = min(((_distance(plain, name), name) for name in names), default=(_MISSPELT + 1, ""))
    return near[1] if near[0] <= _MISSPELT else None


def _value(option: Option, given: Mapping[str, Any], where: str) -> Any:
    value = given.get(option.name, option.default)
    if option.default is NEEDED and (option.name not in given or value is None):
        raise ValueError(f'{where} needs "{option.name}": {option.allowed}')
    if option.name not in given or (value is None and option.default is None):
        return option.default
    try:
        return option.take(value)
    except NotAllowedError:
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        null = ", or null" if option.default is None else ""
        raise ValueError(f'"{option.name}" of {where} is {shown}; it is {option.allowed}{null}') from None


def read(
    given: Any, options: Iterable[Option], where: str, *, theirs: Collection[str] | None = (), prefix: str | None = None
) -> dict[str, Any]:
    """The value of each option, by name.

    given: the JSON object, or None for an empty one. where: what messages call it.
    theirs: keys of the engine in the same object. None: any other key may be the engine's, and there is no warning.
    prefix: no key but an option's begins with it.
    ValueError: see the module.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"{where} is of type {type(given).__name__}; it is an object of options")
    known = {option.name: option for option in options}
    given = {str(key): value for key, value in (given or {}).items()}
    unknown = sorted(given.keys() - known.keys() - set(theirs or ()))
    for key in unknown:
        meant = _meant(key, known)
        if meant is not None:
            raise ValueError(f'{where} has "{key}", which kvswap does not know: is "{meant}" meant?')
        if prefix is not None and key.startswith(prefix):
            raise ValueError(f'{where} has "{key}"; of kvswap\'s options there are {", ".join(sorted(known))}')
    if theirs is not None:
        _warn(unknown, known, where)
    return {name: _value(option, given, where) for name, option in known.items()}


def _warn(unknown: Iterable[str], known: Iterable[str], where: str) -> None:
    with _warning:
        new = [key for key in unknown if (where, key) not in _warned]
        _warned.update((where, key) for key in new)
    if new:
        listed = ", ".join(new), where, ", ".join(sorted(known))
        _log.warning("kvswap does not know %s of %s and ignores it; of kvswap's options there are %s", *listed)


# -- options that several engines' configurations share ---------------------------------------------------------------

FILES = (  # of a kvswap.files.FileStore
    paths("directory", "kvswap's files"),
    size("capacity"),
    choice("durability", ("none", "flush", "fsync"), "none"),
    choice("engine", ("auto", "threads", "io_uring"), "auto"),
    count("depth", 1, 256, None),
    count("queue", 1, 65536, None),
)
SHARED_FILES = (*FILES, flag("buffered", False), flag("shared", True))  # of kvswap._shared_files.SharedFiles

IDENTITY = (  # of a kvswap.identity.Said
    text("revision", None),
    text("weight_version", None),
    text("name", None),
    flag("unversioned", False),
)

REMOTE = (  # of a kvswap.remote.RemoteStore
    Option(
        "master", "HOST:PORT of mooncake_master", lambda value: _only(value, isinstance(value, str) and ":" in value)
    ),
    path("secret", "a file of at least 16 bytes", None),
    count("replicas", 1, 64, 1),
    count("threads", 4, 256, 8),
    count("queue", 1, 65536, 128),
    number("timeout", "a number of seconds above 0", lambda seconds: seconds > 0, 10.0),
    size("staging_nbytes", None),
    text("hostname", None),
    text("metadata", "P2PHANDSHAKE"),
    text("protocol", "tcp"),
    text("devices", ""),
)
FILE_TIER = (*FILES, *IDENTITY, flag("enable_kv_events", False))  # of vLLM's FileTier
REMOTE_TIER = (*REMOTE, *IDENTITY)  # of its RemoteTier
FILE_STORAGE = (*SHARED_FILES, *IDENTITY)  # of SGLang's FileStorage, LMCache's FileConnector
REMOTE_STORAGE = (*REMOTE, *IDENTITY)  # of SGLang's RemoteStorage
OF_SGLANG = {  # SGLang's own keys beside them
    "backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "allocator", "file_storage_path",
    "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
}  # fmt: skip
