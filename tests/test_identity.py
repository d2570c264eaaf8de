"""What the bytes of a stored block mean: two identities agree where the bytes do, and only there."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

from kvswap import _options, identity
from kvswap._revision import weights_of
from kvswap.files import FileStore
from kvswap.identity import FIELDS, Identity, Said, folder

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40
FOUND: dict[str, Any] = {
    "model": "org/model",
    "revision": COMMIT,
    "kv_format": "fp8_e4m3",
    "ranks": "whole",
    "hash": "sha256",
}


def made(said: Said | None = None, engine: str = "vllm", **changes: Any) -> Identity:
    return Identity(engine, {**FOUND, **changes}, said or Said())


# -- the type ---------------------------------------------------------------------------------------------------------


def test_the_same_values_are_one_identity() -> None:
    one, two = made(), Identity("vllm", dict(reversed(FOUND.items())))
    assert one.text == two.text and one.digest == two.digest and len(one.digest) == 32
    assert one.layout(4096) == two.layout(4096) and not one.own
    assert json.loads(one.text)["kv_format"] == "fp8_e4m3"


@pytest.mark.parametrize("name", [field.name for field in FIELDS if field.name not in ("engine", "name")])
def test_each_field_counts(name: str) -> None:
    assert made(**{name: "another"}).digest != made().digest
    assert made(**{name: "another"}).layout(4096) != made().layout(4096)


@pytest.mark.parametrize("said", [Said(revision="two"), Said(weight_version="two"), Said(name="two")])
def test_what_the_configuration_says_counts(said: Said) -> None:
    assert made(said).digest not in (made().digest, made(Said("one", "one", "one")).digest)
    assert made(said, engine="sglang").digest != made(said).digest


def test_a_revision_that_is_said_replaces_the_engines() -> None:
    assert made(Said(revision="seven")).digest == made(Said(revision="seven"), revision=OTHER).digest
    assert made(Said(revision="seven")).source("revision") == "configuration"
    assert made().source("revision") == "engine" and made().source("draft") == "unknown"


@pytest.mark.parametrize("name", ["revision", "kv_format", "ranks", "hash"])
def test_without_a_needed_field_it_is_this_processes_own(name: str, caplog: pytest.LogCaptureFixture) -> None:
    one, two = made(**{name: None}), made(**{name: None})
    assert one.own and one.unknown == (name,)
    assert one.digest != two.digest and folder("d", one.layout(64)) != folder("d", two.layout(64))
    with caplog.at_level(logging.WARNING):
        one.warn(logging.getLogger("test"), "the tier's JSON")
        made().warn(logging.getLogger("test"), "the tier's JSON")
    assert len(caplog.records) == 1 and "no other process and no later one finds them" in caplog.text


def test_what_says_which_weights() -> None:
    for said in (Said(revision="r"), Said(weight_version="w"), Said(name="n"), Said(unversioned=True)):
        one, two = made(said, revision=None), made(said, revision=None)
        assert not one.own and one.digest == two.digest
    assert made(Said(unversioned=True), kv_format=None).own, "that says nothing of the format"
    assert not Identity("lmcache", {}, Said(name="n")).own and Identity("lmcache", {}).own


def test_a_served_name_counts_where_nothing_else_names_the_weights() -> None:
    def served(name: str, said: Said, **changes: Any) -> bytes:
        return made(said, served_name=name, **changes).digest

    assert served("prod", Said()) == served("canary", Said())
    for said in (Said(revision="r"), Said(weight_version="w")):
        assert served("prod", said, model=None, revision=None) == served("canary", said, model=None, revision=None)
    for said in (Said(unversioned=True), Said(name="n")):
        assert served("prod", said, model=None, revision=None) != served("canary", said, model=None, revision=None)


def test_long_values_fit_and_still_count() -> None:
    layers = [f"model.layers.{i}.self_attn" for i in range(500)]
    one, two = made(layers=layers), made(layers=[*layers[:-1], "model.layers.499.mlp"])
    assert one.digest != two.digest
    full = {field.name: ["x" * 500, field.name] for field in FIELDS if field.name not in ("engine", "name")}
    every, changed = Identity("vllm", full), Identity("vllm", {**full, "rope": ["x" * 500, "y"]})
    assert len(every.text) < 3000 and every.digest != changed.digest


def test_fields_that_there_are_none_of_are_refused() -> None:
    with pytest.raises(ValueError, match="no such field of an identity: port"):
        made(port=8000)


def test_options() -> None:
    given = {"directory": "/d", "capacity": 1 << 20, "revision": "r", "name": "", "unversioned": True}
    options = _options.read(given, (*_options.FILES, *_options.IDENTITY), "the tier")
    assert Said.pop(options) == Said("r", None, None, True) and options.keys() == {o.name for o in _options.FILES}
    assert Said.pop(_options.read({}, _options.IDENTITY, "the tier")) == Said()
    for wrong in ({"revision": 7}, {"name": 1}, {"weight_version": ["a"]}, {"unversioned": "false"}):
        with pytest.raises(ValueError, match=f'"{next(iter(wrong))}" of the tier'):
            _options.read(wrong, _options.IDENTITY, "the tier")
    with pytest.raises(ValueError, match='is "revision" meant'):
        _options.read({"revison": "r"}, _options.IDENTITY, "the tier")


def test_stores_of_two_identities_do_not_meet(tmp_path: Path) -> None:
    block = np.arange(4096, dtype=np.uint8)
    one, two = made().layout(4096), made(kv_format="fp8_e5m2").layout(4096)
    with FileStore(folder(tmp_path, one), one, capacity=1 << 20) as store:
        store.store([b"key"], [block]).wait(10)
    with FileStore(folder(tmp_path, two), two, capacity=1 << 20) as store:
        assert store.contains([b"key"]) == [False]
    with FileStore(folder(tmp_path, one), one, capacity=1 << 20) as store:
        assert store.contains([b"key"]) == [True]
    stat = subprocess.run(
        [sys.executable, "-m", "kvswap", "files", "stat", str(tmp_path)], check=True, capture_output=True, text=True
    ).stdout
    assert len(re.findall(r"kv format +fp8_e", stat)) == 2 and len(re.findall(rf"revision +{COMMIT}", stat)) == 2


def test_the_table_of_the_docs_is_the_codes() -> None:
    """`python -m kvswap.identity` prints it."""
    assert identity.table() in (ROOT / "docs" / "files.md").read_text(encoding="utf-8")


# -- which weights ----------------------------------------------------------------------------------------------------


def cached(home: Path, commit: str, refs: str = "main") -> Path:
    """A repository in huggingface's cache."""
    place = home / "models--org--model"
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / refs).write_text(commit)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HUGGINGFACE_HUB_CACHE", "VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_snapshots_path_and_its_repository_are_one(hub: Path) -> None:
    assert weights_of("org/model") == ("org/model", None)
    snapshot = cached(hub, COMMIT)
    for model in (str(snapshot), f"{snapshot}/", "org/model", f"/elsewhere/models--org--model/snapshots/{COMMIT}"):
        assert weights_of(model) == ("org/model", COMMIT)
    (hub / "link").symlink_to(snapshot)
    assert weights_of(str(hub / "link")) == ("org/model", COMMIT)


def test_a_repositorys_branch_moves(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(hub, COMMIT), cached(hub, OTHER)
    assert weights_of("org/model").revision == OTHER
    assert weights_of("org/model", "next").revision is None
    assert weights_of("org/model", COMMIT).revision == COMMIT
    cached(hub, COMMIT, "next")
    assert weights_of("org/model", "next").revision == COMMIT
    assert weights_of("org/model", cache=str(hub.parent)).revision is None
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert weights_of("org/model").revision is None


def local(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"rope_theta": 10000}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model-00001.safetensors").write_bytes(b"1" * 64)
    (path / "parts").mkdir()
    (path / "parts" / "more.safetensors").write_bytes(b"2" * 64)
    return path


def test_a_local_folder(tmp_path: Path) -> None:
    path = local(tmp_path / "model")
    first = weights_of(str(path))
    assert first.model == "model" and first.revision is not None
    assert weights_of(f"{path}/") == first
    path.rename(tmp_path / "moved")
    path = tmp_path / "moved"
    assert weights_of(str(path)).revision == first.revision, "where it is does not change the bytes"
    (path / "tokenizer.json").write_text("{ }")
    assert weights_of(str(path)).revision == first.revision, "keys are of tokens"

    changes: list[Any] = [
        lambda: (path / "config.json").write_text('{"rope_theta": 20000}'),
        lambda: (path / "model-00001.safetensors").write_bytes(b"1" * 65),
        lambda: os.utime(path / "model-00001.safetensors", ns=(1, 1)),
        lambda: (path / "parts" / "more.safetensors").write_bytes(b"2" * 65),
        lambda: (path / "model-00001.safetensors").rename(path / "model-00002.safetensors"),
        lambda: (path / "modeling.py").write_text("scale = 2"),
    ]
    seen = {first.revision}
    for change in changes:
        change()
        seen.add(weights_of(str(path)).revision)
    assert len(seen) == 1 + len(changes)


def test_what_has_no_weights_has_no_revision(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weights_of(str(tmp_path)).revision is None
    assert weights_of(str(tmp_path), any_weights=True).revision is not None
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert weights_of(str(file)).revision is not None
    assert weights_of("s3://bucket/model").revision is None
    assert weights_of("/no/such/folder").revision is None
