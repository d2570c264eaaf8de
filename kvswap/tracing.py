"""NVTX ranges for Nsight, and OpenTelemetry spans. While both are off, a traced call tests one flag.

Traced are all calls that submit transfers: swap_blocks_batch, the swap_cache functions, move_blocks,
OffloadMap.submit (the handlers of kvswap.offload and so vLLM's), FileStore.store, load and delete. A handler's job has
a range of its own.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

from kvswap import _C
from kvswap._log import logger
from kvswap._switches import switch

__all__ = ["flush", "nvtx", "opentelemetry"]

_logger = logger("kvswap.tracing")

_End: TypeAlias = Callable[[Any, Any], object]  # result or None, type of the exception or None
_Begin: TypeAlias = Callable[[str], "_End | None"]

_LOOK_AT = 64  # number of the oldest spans that a traced call checks
_MOST_PENDING = 4096  # limit of spans whose transfers run; beyond it the oldest span ends without an outcome

_sinks: dict[str, _Begin] = {}


def _set(name: str, begin: _Begin | None) -> None:
    if begin is None:
        _sinks.pop(name, None)
    else:
        _sinks[name] = begin
    begins = tuple(_sinks.values())
    _C._set_trace_hook(None if not begins else begins[0] if len(begins) == 1 else _both(begins))


def _safely(call: Callable[..., Any], *args: Any) -> Any:
    """Call one sink. An exception is logged, so that the other sinks are called too."""
    try:
        return call(*args)
    except Exception:
        _logger.exception("a trace of a call was lost")
        return None


def _both(begins: tuple[_Begin, ...]) -> _Begin:
    def begin(what: str) -> _End:
        ends = [_safely(each, what) for each in begins]

        def end(result: Any, error: Any) -> None:
            for each in reversed(ends):
                if each is not None:
                    _safely(each, result, error)

        return end

    return begin


# -- NVTX -------------------------------------------------------------------------------------------------------------


def _push_and_pop() -> tuple[Callable[[str], object], Callable[[], object]] | None:
    """Functions of torch if torch uses a GPU, else of the package nvtx. Only the process itself imports torch."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    if importlib.util.find_spec("nvtx") is not None:
        module = importlib.import_module("nvtx")
        return module.push_range, module.pop_range
    return None


class _Nvtx:
    """Ranges on the calling thread. Nsight Systems shows the copies and kernels of a range as its GPU part."""

    def __init__(self, push: Callable[[str], object], pop: Callable[[], object]) -> None:
        self._push, self._pop = push, pop

    def begin(self, what: str) -> _End:
        self._push(f"kvswap.{what}")
        return self._end

    def _end(self, result: Any, error: Any) -> None:
        del result, error
        self._pop()

    @contextmanager
    def range(self, name: str) -> Any:
        self._push(name)
        try:
            yield
        finally:
            self._pop()


_nvtx: _Nvtx | None = None


def nvtx(on: bool = True) -> None:
    """Put an NVTX range round each call that submits transfers, or stop that.

    On by default under Nsight (NVTX_INJECTION64_PATH is set) and with KVSWAP_NVTX=1; off with KVSWAP_NVTX=0.

    kvswap.Error: neither torch with a GPU nor the package nvtx is there.
    """
    global _nvtx
    found = _push_and_pop() if on else None
    if on and found is None:
        raise _C.Error("NVTX ranges need torch on a GPU, imported before, or the package nvtx: pip install nvtx")
    _nvtx = None if found is None else _Nvtx(*found)
    _set("nvtx", None if _nvtx is None else _nvtx.begin)


def nvtx_range(name: Callable[[], str]) -> AbstractContextManager[Any]:
    """A range of a handler's own, if NVTX is on."""
    return nullcontext() if _nvtx is None else _nvtx.range(name())


def start_from_environment() -> None:
    """When kvswap is imported. torch may be imported later: what makes the ranges is looked for at the first call."""

    # Profilers set the variable, and so does compute-sanitizer: without KVSWAP_NVTX=1 missing ranges are no fault.
    level = logging.WARNING if switch("KVSWAP_NVTX") else logging.INFO

    def first(what: str) -> _End | None:
        try:
            nvtx()
        except _C.Error as error:
            _logger.log(level, "no NVTX ranges: %s", str(error))  # a kept record would hold the frames of the error
            _set("nvtx", None)
        return None if _nvtx is None else _nvtx.begin(what)

    if wanted_by_environment():
        _set("nvtx", first)


def wanted_by_environment() -> bool:
    """Whether the process runs under Nsight or KVSWAP_NVTX asks for ranges."""
    asked = switch("KVSWAP_NVTX")
    return bool(os.environ.get("NVTX_INJECTION64_PATH")) if asked is None else asked


# -- OpenTelemetry ----------------------------------------------------------------------------------------------------


class _Pending:
    """The span of a call, and its transfers."""

    def __init__(self, span: Any, began_ns: int, transfers: tuple[Any, ...]) -> None:
        self.span, self.began_ns, self.transfers = span, began_ns, transfers

    def finish(self, failed: Any) -> None:
        """Call when all transfers have ended. The span ends at the end of the last one."""
        seconds = 0.0
        errors = []
        for transfer in self.transfers:
            took = transfer.duration if isinstance(transfer, _C.Transfer) else transfer.elapsed
            seconds = max(seconds, took or 0.0)
            errors += [transfer.error] if transfer.error is not None else []
        self.span.set_attribute("kvswap.bytes", sum(transfer.nbytes for transfer in self.transfers))
        self.span.set_attribute("kvswap.blocks", sum(transfer.num_blocks for transfer in self.transfers))
        first = self.transfers[0]
        if isinstance(first, _C.Transfer):
            self.span.set_attribute("kvswap.device", first.device.name)
            self.span.set_attribute("kvswap.path", first.path)
            self.span.set_attribute("kvswap.device_seconds", sum(each.elapsed or 0.0 for each in self.transfers))
        if errors:
            self.span.record_exception(errors[0])
            self.span.set_status(failed, str(errors[0]))
        self.span.end(self.began_ns + int(seconds * 1e9))


class _Spans:
    """A span a call: from the call to the end of its transfers, below the caller's current span."""

    def __init__(self, tracer: Any, failed: Any) -> None:
        self._tracer, self._failed = tracer, failed
        self._lock = threading.Lock()
        self._pending: deque[_Pending] = deque()  # guarded by _lock

    def begin(self, what: str) -> _End:
        self.flush(_LOOK_AT)
        began_ns = time.time_ns()
        span = self._tracer.start_span(f"kvswap.{what}", start_time=began_ns)

        def end(result: Any, error: Any) -> None:
            transfers = result[0] if isinstance(result, tuple) else (result,) if result is not None else ()
            if error is not None:
                span.set_status(self._failed, error.__name__)
            if not transfers:  # refused, or a call that waited for its transfer
                span.end()
                return
            with self._lock:
                self._pending.append(_Pending(span, began_ns, transfers))
                lost = self._pending.popleft() if len(self._pending) > _MOST_PENDING else None
            if lost is not None:
                lost.span.end()

        return end

    def flush(self, most: int = _MOST_PENDING) -> None:
        """End the spans of transfers that have ended, among the `most` oldest spans."""
        with self._lock:
            oldest = list(itertools.islice(self._pending, most))
        # without the lock: done() drops objects that transfers held, and their destructors may run any code
        ended = [each for each in oldest if all(transfer.done() for transfer in each.transfers)]
        self._finish(ended)

    def _finish(self, those: list[_Pending]) -> None:
        for each in those:
            with self._lock:
                if each not in self._pending:  # another thread has it
                    continue
                self._pending.remove(each)
            _safely(each.finish, self._failed)

    def end(self) -> None:
        """End all spans, those of transfers that run too."""
        with self._lock:
            left, self._pending = list(self._pending), deque()
        for each in left:
            _safely(each.span.end)


_spans: _Spans | None = None


def opentelemetry(tracer: Any = None, *, on: bool = True) -> None:
    """Make an OpenTelemetry span of each call that submits transfers, or stop that.

    tracer: None: get_tracer("kvswap") of the global provider. The span begins with the call, is a child of the caller's
      current span, and ends when its transfers did. It is handed to the exporter by the next traced call after that, by
      flush(), or at exit.

    kvswap.Error: the package opentelemetry-api is not there.
    """
    global _spans
    flush()
    if not on:
        if _spans is not None:
            _spans.end()
        _spans = None
        _set("opentelemetry", None)
        return
    try:
        api = importlib.import_module("opentelemetry.trace")
    except ImportError:
        raise _C.Error("spans need OpenTelemetry: pip install opentelemetry-api") from None
    failed = api.StatusCode.ERROR
    _spans = _Spans(tracer or api.get_tracer("kvswap", _C.__version__), failed)
    _set("opentelemetry", _spans.begin)
    atexit.unregister(flush)
    atexit.register(flush)  # now: before the provider's shutdown, which was registered when it was made


def flush() -> None:
    """End the spans of transfers that have ended. Never blocks."""
    spans = _spans
    if spans is not None:
        spans.flush()


def _forget() -> None:
    """In the child of a fork: the pending spans are the parent's."""
    global _spans
    if _spans is not None:
        _spans = _Spans(_spans._tracer, _spans._failed)
        _set("opentelemetry", _spans.begin)


os.register_at_fork(after_in_child=_forget)
