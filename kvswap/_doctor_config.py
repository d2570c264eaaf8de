"""A configuration for kvswap doctor: which engine's it is, what kvswap would refuse in it, what it needs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvswap import _options
from kvswap._engines import LMCACHE, SGLANG, VLLM, Engine

MOST_NBYTES = 1 << 20
_TIERS = {"FileTier": _options.FILE_TIER, "RemoteTier": _options.REMOTE_TIER}
_STORAGES = {"FileStorage": _options.FILE_STORAGE, "RemoteStorage": _options.REMOTE_STORAGE}
_OF_TIER = ("type", "module_path", "locality")  # keys of vLLM's


@dataclass
class Configuration:
    """What a file asks for.

    engine: whose options it has. host_nbytes: of host memory. lend: the name of the engines that lend each other their
    links; empty: it does not lend. replicas: of those with one host pool. stores: directories of files, with the most
    bytes that they take. wrong: why kvswap would refuse it; empty: it would not. ignored: log lines about keys.
    """

    engine: Engine
    host_nbytes: int = 0
    lend: str = ""
    replicas: str = ""
    stores: list[tuple[str, int]] = field(default_factory=list)
    wrong: str = ""
    ignored: list[str] = field(default_factory=list)


def read(name: str) -> Configuration:
    """ValueError: the file is not JSON, or no engine's configuration of kvswap. OSError: it cannot be read."""
    with open(name, "rb") as file:
        text = file.read(MOST_NBYTES + 1)
    if len(text) > MOST_NBYTES:
        raise ValueError(f"{name} has more than {MOST_NBYTES >> 20} MiB")
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} is not an object of JSON")
    for engine, is_one, check in _KINDS:
        if is_one(given):
            found = Configuration(engine)
            with _heard(found.ignored):
                try:
                    check(given, found)
                except ValueError as error:
                    found.wrong = str(error)
            return found
    raise ValueError(
        f"{name} is none of these: vLLM's --kv-transfer-config, SGLang's --hicache-storage-backend-extra-config, "
        "LMCache's --l2-adapter"
    )


@contextmanager
def _heard(lines: list[str]) -> Iterator[None]:
    """Takes the warnings of kvswap._options."""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("kvswap.options")
    propagates, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagates


def _check_vllm(given: Mapping[str, Any], found: Configuration) -> None:
    from kvswap.vllm import _handler, _together

    extra = given.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ValueError("kv_connector_extra_config is not an object of options")
    _handler.options_of(extra)
    host = extra.get("cpu_bytes_to_use", 0)
    if isinstance(host, bool) or not isinstance(host, int) or host < 0:
        raise ValueError(
            f'"cpu_bytes_to_use" of kv_connector_extra_config is {host!r}; vLLM takes a whole number of bytes'
        )
    found.host_nbytes = host
    lend = _handler.lend_of(extra)
    found.lend, found.replicas = lend[0] if lend else "", _handler.replicas_of(extra) or ""
    tiers = extra.get("secondary_tiers") or []
    if not isinstance(tiers, list) or not all(isinstance(tier, Mapping) for tier in tiers):
        raise ValueError("secondary_tiers of kv_connector_extra_config is not a list of objects")
    for tier in tiers:
        known = _TIERS.get(str(tier.get("type")))
        if known is not None:
            options = {key: value for key, value in tier.items() if key not in _OF_TIER}
            _add_store(_options.read(options, known, f'the entry "{tier["type"]}" of secondary_tiers'), found)
    named = given.get("kv_connector"), given.get("kv_connector_module_path")
    _together.check(extra, named == ("KVSwapConnector", "kvswap.vllm"))


def _check_sglang(given: Mapping[str, Any], found: Configuration) -> None:
    known = _STORAGES.get(str(given.get("class_name")))
    if known is None:
        raise ValueError(f'"class_name" is {given.get("class_name")!r}; it is one of {", ".join(_STORAGES)}')
    if given.get("interface_v1") != 1:
        raise ValueError('"interface_v1": 1 is missing')
    _add_store(_options.read(given, known, "the storage backend's extra config", theirs=_options.OF_SGLANG), found)


def _check_lmcache(given: Mapping[str, Any], found: Configuration) -> None:
    _add_store(_options.read(given.get("adapter_params"), _options.FILE_STORAGE, "adapter_params"), found)


def _add_store(options: dict[str, Any], found: Configuration) -> None:
    if "directory" in options:
        places = options["directory"]
        places = places if isinstance(places, list) else [places]
        found.stores += [(place, options["capacity"] // len(places)) for place in places]


_KINDS = (
    (VLLM, lambda given: "kv_connector" in given, _check_vllm),
    (SGLANG, lambda given: given.get("module_path") == "kvswap.sglang", _check_sglang),
    (LMCACHE, lambda given: given.get("module_path") == "kvswap.lmcache", _check_lmcache),
)
