"""kvswap's log: what is left out, where it goes, and under another program's logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import run_python

import kvswap
from kvswap import _log, _switches, tracing

pytestmark = pytest.mark.not_sanitized("Python only")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the limits see."""
    now = [100.0]
    monkeypatch.setattr(_log.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """The logger "kvswap", put back afterwards."""
    logger = logging.getLogger("kvswap")
    kept = logger.parent, logger.level, list(logger.handlers)
    yield logger
    logger.parent = kept[0]
    logger.setLevel(kept[1])
    logger.handlers[:] = kept[2]


def test_what_comes_too_often_is_counted(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    logger = _log.logger("kvswap.test.often")
    assert _log.logger("kvswap.test.often") is logger and len(logger.filters) == 1
    with caplog.at_level(logging.INFO, "kvswap"):
        for second in range(70):
            clock[0] = 100.0 + second
            logger.error("job %d failed", second)
            logger.info("job %d goes on", second)
            if second == 30:
                logger.error("another kind")
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    first = [f"job {i} failed" for i in range(10)]
    again = ["job 60 failed (50 more like this were left out)", *(f"job {i} failed" for i in range(61, 70))]
    assert errors == [*first, "another kind", *again]
    assert sum(record.levelno == logging.INFO for record in caplog.records) == 70


def test_under_another_programs_logger(ours: logging.Logger) -> None:
    theirs, seen = logging.Logger("theirs", logging.WARNING), []  # type: ignore[var-annotated]
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    theirs.addHandler(handler)
    logging.Logger.manager.loggerDict["kvswap-test-theirs"] = theirs
    ours.handlers.clear()
    ours.setLevel(logging.NOTSET)
    _log.into("kvswap-test-theirs")
    logging.getLogger("kvswap.vllm").warning("one")
    logging.getLogger("kvswap.vllm").info("below their level")
    assert [record.getMessage() for record in seen] == ["one"]


def test_a_program_that_has_set_it_up_keeps_it(ours: logging.Logger) -> None:
    parent = ours.parent
    ours.setLevel(logging.ERROR)
    _log.into("kvswap-test-others")
    assert ours.parent is parent


def test_a_level_that_there_is_not_is_a_warning(ours: logging.Logger) -> None:
    before = list(ours.handlers)
    with pytest.warns(UserWarning, match="KVSWAP_LOG is 'loud'; it is one of debug, info"):
        _log.to_stderr("loud")
    assert ours.handlers == before


def test_a_line_has_time_level_and_process(ours: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    _log.to_stderr("info")
    logging.getLogger("kvswap.offload").info("hello")
    line = capsys.readouterr().err
    assert " INFO [" in line and line.endswith("] kvswap.offload: hello\n")


def test_a_switch_is_0_or_1(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(_switches, "_warned", set())
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    for value, expected in (("1", True), ("0", False), ("", None), ("off", None), ("no", None)):
        monkeypatch.setenv("KVSWAP_TOP", value)
        monkeypatch.setenv("KVSWAP_NVTX", value)
        assert _switches.switch("KVSWAP_TOP") is expected
        assert tracing.wanted_by_environment() == bool(expected), value
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"KVSWAP_{name} is 'off'; it is 0 or 1. It counts as not set" for name in ("TOP", "NVTX")]


def test_wrong_switches_do_not_break_the_import() -> None:
    done = run_python(
        """
        import threading
        from kvswap import tracing
        assert threading.active_count() == 1 and not tracing._sinks
        """,
        KVSWAP_TOP="false",
        KVSWAP_NVTX="false",
        KVSWAP_RACECHECK="no",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line.split()[0] for line in lines] == ["KVSWAP_RACECHECK", "KVSWAP_TOP", "KVSWAP_NVTX"]
    assert "It counts as 1: set it to 0 or unset it" in lines[0]


def test_info_says_once_which_kvswap_opens_which_device() -> None:
    script = """
        import kvswap
        for name in ("host:0", "host:1", "host:0", "host:1"):
            kvswap.Device(name)
    """
    lines = [line for line in run_python(script, KVSWAP_LOG="info").stderr.splitlines() if " opens host:" in line]
    folder = Path(kvswap.__file__).parent
    assert [line.rpartition(": ")[0].split()[-1] for line in lines] == ["host:0", "host:1"]
    assert all(f"kvswap {kvswap.__version__} in {folder} opens" in line for line in lines)
    assert all(line.endswith("; paths dma, strided, burst, kernel, direct") for line in lines)
    assert "opens" not in run_python(script, KVSWAP_LOG="warning").stderr
