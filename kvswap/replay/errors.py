"""What a person did wrong, as opposed to what a device did: ends a command with exit status 2."""


class UsageError(ValueError):
    """The command cannot be carried out as asked. The message is for a person."""


class TraceError(UsageError):
    """A line of a trace is malformed; the message begins with file and line number."""
