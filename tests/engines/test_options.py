"""Options from engines' JSON: strict values, misspelt keys, keys of others."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvswap import _options
from kvswap._options import choice, count, flag, number, read, size, text

EXTREMES: list[Any] = [json.loads(each) for each in ("1e999", "NaN", "-1e999", "1e400", "[]", "{}", '""', "-0.0")]


@pytest.fixture(autouse=True)
def warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_options, "_warned", set())


def one(option: Any, value: Any) -> Any:
    return read({option.name: value}, [option], "the config")[option.name]


FLAG, COUNT, SIZE, TEXT = flag("shared", True), count("depth", 1, 256, None), size("capacity"), text("name", "")
SECONDS = number("timeout", "a number of seconds above 0", lambda seconds: seconds > 0, 5.0)
CHOICE = choice("engine", ("auto", "threads"), "auto")


@pytest.mark.parametrize(
    ("option", "good", "wrong"),
    [
        (FLAG, [True, False], ["false", "true", 0, 1, None, 0.0, *EXTREMES]),
        (COUNT, [1, 256, None], [0, 257, -1, 1.0, 2.5, "8", True, False, 10**400, *EXTREMES]),
        (SECONDS, [1, 0.5, 1e10], [0, -1, "5", True, None, 10**400, *EXTREMES]),
        (TEXT, ["", "x"], [None, 1, b"x", True, []]),
        (CHOICE, ["auto", "threads"], ["Auto", "", None, 0, ["auto"], {"auto": 1}, *EXTREMES]),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_values(option: Any, good: list[Any], wrong: list[Any]) -> None:
    for value in good:
        assert one(option, value) == value
    for value in wrong:
        with pytest.raises(ValueError) as caught:
            one(option, value)
        assert str(caught.value).startswith(f'"{option.name}" of the config is {value!r:.100}'[:110])
        assert option.allowed in str(caught.value)
    assert read({}, [option], "the config") == read(None, [option], "the config") == {option.name: option.default}


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (1, 1),
        (500 << 30, 500 << 30),
        (2**63 - 1, 2**63 - 1),
        ("500GiB", 500 << 30),
        ("500GB", 500 * 10**9),
        ("1.5TiB", 3 << 39),
        ("0.5KiB", 512),
        ("64kB", 64000),
        ("64KB", 64000),
        ("7B", 7),
        ("2PB", 2 * 10**15),
    ],
)
def test_sizes(given: Any, nbytes: int) -> None:
    found = one(SIZE, given)
    assert found == nbytes and type(found) is int


@pytest.mark.parametrize(
    "given",
    [
        *("500G", "500g", "500gb", "500Gb", "500Gib", "500", "GiB", "", "1e3GiB", "+5GB", "-5GB", "5GB ", "5 GB"),
        *("0GB", "0.3KiB", "1.5B", "0.1GiB", "1,5GiB", "1.GB", ".5GB", "9999999PiB", "9" * 5000 + "B"),
        *("\u0663GB", "\uff15GB", "1GB\n"),
        *(0, -1, 1.5, 5e11, True, False, 2**63, 10**400, b"5GB", None, *EXTREMES),
    ],
)
def test_sizes_that_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match='"capacity"') as caught:
        one(SIZE, given)
    assert '"500GiB"' in str(caught.value) and len(str(caught.value)) < 400


def test_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    option = _options.paths("directory", "kvswap's files")
    assert one(option, "/mnt/kv") == one(option, ["/mnt/kv"]) == "/mnt/kv"
    assert one(option, Path("/mnt/kv")) == "/mnt/kv"
    assert one(option, "~/kv") == str(tmp_path / "kv") and one(option, "~") == str(tmp_path)
    assert one(option, ["~/a", "/b"]) == one(option, ("~/a", "/b")) == [str(tmp_path / "a"), "/b"]
    wrong: list[Any] = ["", "kv", "./kv", "~nobody-here/kv", "$HOME/kv", "/mnt/\0kv", b"/mnt/kv", 3, True, None, {}]
    wrong += [[], [""], ["/a", ""], ["/a", "b"], ["/a", 3], [["/a"]], ["/a", "/a"], ["/a", "/b/../a/"]]
    for value in wrong:
        with pytest.raises(ValueError, match=r'"directory".*absolute path'):
            one(option, value)


def test_a_needed_option_that_is_missing_is_named() -> None:
    missing: list[dict[str, Any]] = [{}, {"capacity": None}]
    for given in missing:
        with pytest.raises(ValueError, match=r'the config needs "capacity": a whole number of bytes'):
            read(given, [SIZE, FLAG], "the config")
    others: list[Any] = [[], "{}", 3]
    for wrong in others:
        with pytest.raises(ValueError, match="the config is of type"):
            read(wrong, [FLAG], "the config")


@pytest.mark.parametrize("key", ["capcity", "capactiy", "Capacity", "CAPACITY", "capacity_", "capacit", "kapazity"])
def test_a_misspelt_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f'the config has "{key}".*is "capacity" meant'):
        read({key: 1, "capacity": 1}, [SIZE, FLAG], "the config")


def test_dashes_count_as_underscores() -> None:
    with pytest.raises(ValueError, match='is "enable_kv_events" meant'):
        read({"enable-kv-events": True}, [flag("enable_kv_events", False)], "the config")


def test_other_keys_are_ignored_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    given = {"sharded_by": 1, "prefetch_threshold": 2, "another": 3, 7: 8}
    for _ in range(3):
        assert read(given, [FLAG], "the config", theirs={"prefetch_threshold"}) == {"shared": True}
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "does not know 7, another, sharded_by of the config" in said and "there are shared" in said
    assert read({**given, "more": 1}, [FLAG], "the config", theirs={"prefetch_threshold"}) == {"shared": True}
    assert "does not know more of the config" in caplog.records[-1].getMessage()


def test_a_key_of_the_engine_may_resemble_one_of_kvswaps() -> None:
    assert read({"share": "yes"}, [FLAG], "the config", theirs={"share"}) == {"shared": True}
    with pytest.raises(ValueError, match='is "shared" meant'):
        read({"share": "yes"}, [FLAG], "the config")


def test_a_prefix_is_kvswaps_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The rest of vLLM's dictionary is vLLM's, which has other keys in each release."""
    known = [flag("kvswap_overlap", False)]
    assert read({"cpu_bytes_to_use": 5}, known, "the config", theirs=None, prefix="kvswap_") == {
        "kvswap_overlap": False
    }
    assert not caplog.records
    for wrong in ("kvswap_speed", "kvswap_overlp", "kvsap_overlap"):
        with pytest.raises(ValueError, match=f'has "{wrong}".*kvswap_overlap'):
            read({wrong: True}, known, "the config", theirs=None, prefix="kvswap_")


def test_each_engine_takes_the_options_of_the_files(tmp_path: Path) -> None:
    """The values that the options allow are those that FileStore takes."""
    from kvswap.files import FileStore, Layout

    ends: dict[str, list[Any]] = {
        "durability": ["none", "flush", "fsync"],
        "engine": ["auto", "threads"],
        "depth": [1, 256],
        "queue": [1, 65536],
    }
    for name, values in ends.items():
        for value in values:
            options = {"directory": os.fspath(tmp_path), "capacity": "64MiB", name: value}
            given = read(options, _options.FILES, "the config")
            FileStore(given.pop("directory"), Layout(4096), **given).close()
