"""Streams and events of a host device, by the names of torch.cuda, for SGLang's copies without a GPU: what is queued on
them runs beside the caller, in no order but what streams and events make, as on a GPU."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import kvswap

PATIENCE = 120.0


def streams_of(device: Any) -> Any:
    """What SGLang calls its device_module."""

    class Stream:
        def __init__(self, *given, **options):
            self.own = kvswap.Stream(device)
            self.handle = self.own.handle

        def __cuda_stream__(self):
            return self.own.__cuda_stream__()

        def synchronize(self):
            self.own.synchronize(PATIENCE)

        def wait_event(self, event):
            event.wait(self)

        def wait_stream(self, other):
            if not isinstance(other, Stream):  # torch.cpu's, whose work has ended when the call returns
                return
            event = Event()
            event.record(other)
            event.wait(self)

    class Event:
        def __init__(self, enable_timing=False, **options):
            self.own = kvswap.Event(device, timing=enable_timing)

        def record(self, stream=None):
            self.own.record((stream or current_stream()).own)

        def wait(self, stream=None):
            self.own.wait((stream or current_stream()).own)

        def query(self):
            return self.own.query()

        def synchronize(self):
            self.own.synchronize(PATIENCE)

        def elapsed_time(self, other):
            return self.own.elapsed_time(other.own) * 1e3

    used = [Stream()]

    def current_stream(device=None):
        return used[-1]

    @contextmanager
    def stream(chosen):
        used.append(chosen)
        try:
            yield
        finally:
            used.pop()

    return SimpleNamespace(
        Stream=Stream, Event=Event, current_stream=current_stream, stream=stream, __name__="sglang_streams"
    )
