"""Wrong usage, as opposed to a device's failure: the command ends with exit status 2."""

from __future__ import annotations

import tempfile
from pathlib import Path


class UsageError(ValueError):
    """The command cannot be carried out as asked. The message is for a person."""


class TraceError(UsageError):
    """A line of a trace is malformed; the message begins with file and line number."""


def of_system(error: OSError) -> str:
    """What the system says, for a person: the file, and the reason."""
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename is not None else what


def check_writable(option: str, name: str) -> None:
    """UsageError unless a file of that name can be written. Makes and changes no file."""
    path = Path(name)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a directory; name a file")
        if path.exists():
            with path.open("ab"):
                return
        with tempfile.TemporaryFile(dir=path.parent):
            return
    except OSError as error:
        raise UsageError(f"{option} {name}: {error.strerror or error}") from None
