"""An engine's process, as the comparison sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from serving.configurations import remove_shared


class Failed(Exception):
    """The process has ended, has reported an error, or does not answer."""


class Process:
    """A child with an engine, which starts at once; ready() waits for it."""

    def __init__(
        self,
        name: str,
        regime: str,
        overrides: dict[str, Any],
        folder: Path,
        module: str = "serving.child",
        gpu: int | None = None,
    ) -> None:
        """gpu: the only one that the engine sees; None: it sees all."""
        self.name = name
        self.log = folder / f"log-{regime}-{name.replace(':', '_')}{f'-gpu{gpu}' if gpu else ''}.txt"
        self._descriptor, theirs = os.pipe()
        self._answers = os.fdopen(self._descriptor)
        command = [sys.executable, "-m", module, name, regime, json.dumps(overrides), str(folder), str(theirs)]
        with self.log.open("w") as file:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, text=True, pass_fds=(theirs,),
                start_new_session=True, env=os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}),
            )  # fmt: skip
        os.close(theirs)

    def ready(self, limit: float) -> dict[str, Any]:
        """What the engine says of itself once it is there."""
        return self._answer(limit)

    def ask(self, phase: str, limit: float, **arguments: Any) -> dict[str, Any]:
        """Run a phase: its record under "record", and "took_s"."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"phase": phase, **arguments}) + "\n")
            self._child.stdin.flush()
        except OSError as gone:
            raise Failed(f"{self.name} has ended") from gone
        return self._answer(limit)

    def _answer(self, limit: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, limit))
        line = self._answers.readline() if ready else ""
        if not line:
            raise Failed(f"{self.name} " + ("has ended" if ready else f"has not answered within {limit:.0f} s"))
        made: dict[str, Any] = json.loads(line)
        if "error" in made:
            raise Failed(f"{self.name}: {made['error']}")
        return made

    def end(self) -> None:
        """Kill it, and wait until its memory is free, that in /dev/shm as well."""
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(30)
        remove_shared(self._child.pid)
        self._answers.close()
        if self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])[-3500:]


class Clock:
    """A time limit."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def share(self, part: float) -> Clock:
        """A clock for this part of the time that is left."""
        return Clock(part * self.left())
