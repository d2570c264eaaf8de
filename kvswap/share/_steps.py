"""When an engine is idle, so that its process may register memory for others (_lend.py)."""

from __future__ import annotations

import time
from typing import Any

from kvswap import _C

IDLE = 0.1  # seconds without a step
_STUCK = 10.0  # a step that has not ended after so long was given up


class Steps:
    """Whether the model computes. One thread calls begin() and end() around a step, another one is_idle()."""

    def __init__(self) -> None:
        self._device: _C.Device | None = None
        self._last = 0.0
        self._running = False
        self._event: _C.Event | None = None  # recorded at the end of the last step; None: nothing to wait for
        self._stream: Any = None  # a callable that returns the model's stream

    def attach(self, device: _C.Device, stream: Any) -> None:
        """stream: a callable that returns the model's stream; None from it: there is none."""
        self._device, self._stream = device, stream

    def begin(self) -> None:
        """A step begins, or goes on."""
        self._running, self._last = True, time.monotonic()

    def end(self) -> None:
        """The step is queued: it ends when the model's stream has come so far."""
        stream = self._stream() if self._stream is not None else None
        if stream is not None:
            event = self._event or _C.Event(self._device)
            event.record(stream)
            self._event = event
        self._running, self._last = False, time.monotonic()

    def is_idle(self) -> bool:
        """No step runs, and none has for some time."""
        since = time.monotonic() - self._last
        if since < (_STUCK if self._running else IDLE):
            return False
        return self._event is None or self._event.query()
