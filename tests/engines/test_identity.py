"""What the bytes of a stored block mean: two identities agree where the bytes do, and only there."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Some
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, elsewhere

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
        [sys.executable, "-m", "kvswap", "files", "stat", str(tmp_path)],
        **elsewhere(),
        check=True,
        capture_output=True,
        text=True,
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
    assert weights_of("org/model:Q4_K_M") == ("org/model:Q4_K_M", OTHER)
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


@pytest.mark.parametrize("load_format", ["tensorizer", "remote_instance", "ipc_cache", "a_plugins_own"])
def test_weights_from_elsewhere(hub: Path, tmp_path: Path, load_format: str) -> None:
    snapshot = cached(hub, COMMIT)
    for model, called in ((str(snapshot), "org/model"), ("org/model", "org/model"), (str(local(tmp_path / "m")), "m")):
        assert weights_of(model, load_format=load_format) == (called, None)
        assert weights_of(model, load_format=Some(value="safetensors")).revision is not None


def test_a_repository_that_moved_while_the_engine_started(hub: Path) -> None:
    cached(hub, COMMIT)
    assert weights_of("org/model", read=COMMIT).revision == COMMIT
    assert weights_of("org/model", read=OTHER).revision is None
    assert weights_of("org/elsewhere", read=OTHER).revision == OTHER


def test_what_has_no_weights_has_no_revision(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weights_of(str(tmp_path)).revision is None
    assert weights_of(str(tmp_path), load_format="dummy").revision is not None
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert weights_of(str(file)).revision is not None
    assert weights_of("s3://bucket/model").revision is None
    assert weights_of("/no/such/folder").revision is None


# -- vLLM, with stand-ins of its objects' attributes; tests/integration/vllm_identity.py has the real ones -------------


class VllmConfig(Some):
    """kvswap looks for this name."""


class KVCacheConfig(Some):
    """As this one."""


def vllm_objects(home: Path) -> tuple[Any, Any, Any]:
    """VllmConfig, KVCacheConfig and OffloadingSpec of 0.33."""
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    snapshot = str(cached(home, COMMIT))
    hf_config = Some(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, _commit_hash=None)
    vllm_config = VllmConfig(
        model_config=Some(
            model=snapshot, revision=None, model_weights="", dtype="torch.bfloat16", use_mla=False, quantization=None,
            quantization_config=None, hf_config=hf_config, hf_text_config=hf_config, hf_overrides={},
            hf_config_path=None, code_revision=None, model_class_overrides={}, max_model_len=4096,
            served_model_name="served",
        ),
        cache_config=Some(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", kv_cache_dtype_skip_layers=[], block_size=16,
            mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", kv_cache_layout="LBNHC", calculate_kv_scales=False,
            gpu_memory_utilization=0.9,
        ),
        load_config=Some(load_format="auto", download_dir=None),
        attention_config=Some(backend=None, backend_per_kind={}, indexer_kv_dtype="auto"),
        parallel_config=Some(
            cp_kv_cache_interleave_size=1, tensor_parallel_size=1, pipeline_parallel_size=1,
            prefill_context_parallel_size=1, decode_context_parallel_size=1, rank=0,
        ),
        scheduler_config=Some(max_num_seqs=16),
        speculative_config=None,
        use_v2_model_runner=False,
        kv_transfer_config=Some(engine_id="engine"),
    )  # fmt: skip
    spec = Some(block_size=16, num_kv_heads=4, head_size=64, dtype="torch.bfloat16", sliding_window=None)
    cache = KVCacheConfig(
        num_blocks=8,
        kv_cache_groups=[Some(layer_names=layers, kv_cache_spec=spec)],
        kv_cache_tensors=[Some(size=8 << 16, layers=layers, layer_stride=8 << 14, block_stride=1 << 14, offset=0)],
    )
    offloading = Some(
        config=Some(
            engine_id="engine",
            groups=[Some(tokens_per_block=16, layer_names=layers)],
            parallel=Some(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0),
            model=Some(name=snapshot, dtype="bfloat16"),
            cache=Some(tokens_per_hash=16, blocks_per_chunk=1),
            replicated_layout=False,
            canonical_layout=False,
            kv_cache_layout="LBNHC",
        ),
        blocks_per_chunk=1,
    )
    return vllm_config, cache, offloading


VLLM_DIFFERENT: list[tuple[str, str, Any]] = [
    ("revision", "vllm.model_config.model", f"/hub/models--org--model/snapshots/{OTHER}"),
    ("model", "vllm.model_config.model", f"/hub/models--org--another/snapshots/{COMMIT}"),
    ("weights", "vllm.load_config.load_format", "dummy"),
    ("dtype", "vllm.model_config.dtype", "torch.float16"),
    ("kv_format", "vllm.cache_config.cache_dtype", "fp8_e4m3"),
    ("kv_format", "vllm.cache_config.cache_dtype", "fp8_e5m2"),
    ("kv_format", "vllm.cache_config.kv_cache_dtype_skip_layers", ["0"]),
    ("kv_format", "vllm.cache_config.mamba_ssm_cache_dtype", "float32"),
    ("kv_format", "vllm.attention_config.indexer_kv_dtype", "fp8"),
    ("quantization", "vllm.model_config.quantization", "fp8"),
    ("quantization", "vllm.model_config.quantization_config", {"activation_scheme": "static"}),
    ("rope", "vllm.model_config.hf_text_config.rope_parameters", {"rope_type": "default", "rope_theta": 1e6}),
    ("overrides", "vllm.model_config.hf_overrides", {"rope_theta": 1e6}),
    ("overrides", "vllm.model_config.hf_config_path", "/other"),
    ("overrides", "vllm.model_config.code_revision", OTHER),
    ("mla", "vllm.model_config.use_mla", True),
    ("layout", "spec.config.kv_cache_layout", "LBHNC"),
    ("layout", "spec.by_blocks", True),
    ("layout", "cache.kv_cache_tensors.0.block_stride", 1 << 16),
    ("layout", "cache.kv_cache_tensors.0.layers", ["model.layers.1"]),
    ("backend", "vllm.attention_config.backend", Some(name="FLASHINFER")),
    ("backend", "vllm.attention_config.backend_per_kind", {"mamba": Some(name="MAMBA2")}),
    ("tokens", "spec.config.groups.0.tokens_per_block", 32),
    ("tokens", "spec.config.cache.tokens_per_hash", 8),
    ("tokens", "spec.blocks_per_chunk", 2),
    ("layers", "spec.config.groups.0.layer_names", ["model.layers.0"]),
    ("layers", "cache.kv_cache_groups.0.kv_cache_spec.sliding_window", 1024),
    ("layers", "cache.kv_cache_groups.0.kv_cache_spec.num_kv_heads", 8),
    ("layers", "cache.kv_cache_groups.0.kv_cache_spec.dtype", "torch.uint8"),
    ("ranks", "spec.config.parallel.tp_size", 2),
    ("ranks", "spec.config.parallel.pp_size", 2),
    ("ranks", "spec.config.parallel.dcp_size", 2),
    ("ranks", "spec.config.parallel.pcp_size", 2),
    ("hash", "vllm.cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    ("draft", "vllm.speculative_config", Some(
        method="eagle3", quantization=None, kv_cache_dtype=None, draft_load_config=None,
        draft_model_config=Some(model=f"/hub/models--org--draft/snapshots/{OTHER}", revision=None))),
]  # fmt: skip
VLLM_SHARED: list[tuple[str, Any]] = [
    ("vllm.model_config.served_model_name", "prod"),
    ("vllm.model_config.max_model_len", 8192),
    ("vllm.scheduler_config.max_num_seqs", 256),
    ("vllm.cache_config.gpu_memory_utilization", 0.5),
    ("vllm.kv_transfer_config.engine_id", "engine"),
    ("vllm.load_config.load_format", "safetensors"),
    ("vllm.speculative_config", Some(method="ngram", draft_model_config=Some(model="m"))),
    ("cache.num_blocks+", 16),
]


def changed(roots: dict[str, Any], path: str, value: Any) -> None:
    thing: Any = roots
    *most, last = path.split(".")
    for name in most:
        thing = thing[name] if isinstance(thing, dict) else thing[int(name)] if name.isdigit() else getattr(thing, name)
    setattr(thing, last, value)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of changes to make: the identity. Frames have the configuration, as those of vLLM's functions do."""
    from kvswap.vllm import _identity

    utils: Any = ModuleType("vllm.v1.core.kv_cache_utils")
    utils.DEFAULT_NONE_HASH_SEED = "vllm-none-hash"
    core: Any = ModuleType("vllm.v1.core")
    core.kv_cache_utils = utils
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.core", core)
    for name in ("PYTHONHASHSEED", "VLLM_KV_CACHE_LAYOUT", "VLLM_ATTENTION_BACKEND"):
        monkeypatch.delenv(name, raising=False)

    def make(changes: dict[str, Any] | None = None, said: Said | None = None, *, hidden: bool = False) -> Identity:
        vllm_config, kv_cache_config, spec = vllm_objects(tmp_path)
        for path, value in (changes or {}).items():
            if path == "cache.num_blocks+":  # all that follows from it
                kv_cache_config.num_blocks = value
                kv_cache_config.kv_cache_tensors[0].layer_stride = value << 14
            else:
                changed({"vllm": vllm_config, "cache": kv_cache_config, "spec": spec}, path, value)
        if hidden:
            del vllm_config, kv_cache_config
        return _identity.identity_of(spec, said or Said())

    make.utils = utils  # type: ignore[attr-defined]
    return make


@pytest.mark.parametrize(("field", "path", "value"), VLLM_DIFFERENT)
def test_vllm_each_field(vllm: Any, field: str, path: str, value: Any) -> None:
    before, after = vllm(), vllm({path: value})
    assert not before.own and not after.own
    assert before.fields.get(field) != after.fields.get(field) and before.digest != after.digest


def test_vllm_both_fp8_formats(vllm: Any) -> None:
    formats = ["fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "auto"]
    assert len({vllm({"vllm.cache_config.cache_dtype": name}).digest for name in formats}) == len(formats)


@pytest.mark.parametrize(("path", "value"), VLLM_SHARED)
def test_vllm_what_does_not_change_bytes(vllm: Any, path: str, value: Any) -> None:
    assert vllm({path: value}).digest == vllm().digest


def test_vllm_mla_is_whole_on_each_rank(vllm: Any) -> None:
    mla = {"vllm.model_config.use_mla": True}
    two = {"spec.config.parallel.tp_size": 2}
    assert vllm({**mla, **two, "spec.config.replicated_layout": True}).digest == vllm(mla).digest
    assert vllm({**mla, **two}).digest != vllm(mla).digest, "a copy for each rank"


def test_vllm_what_is_not_known(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (
        {"vllm.model_config.model": "org/other"},
        {"vllm.model_config.model_weights": "s3://bucket"},
        {"vllm.load_config.load_format": "tensorizer"},
        {"vllm.model_config.hf_config._commit_hash": OTHER},  # the repository moved while vLLM started
        {"vllm.speculative_config": Some(method="eagle", draft_model_config=Some(model="org/draft", revision=None))},
    ):
        assert vllm(own).unknown == ("revision",) and not vllm(own, Said(revision="r")).own
    assert vllm({"vllm.model_config.model": "org/m", "vllm.model_config.hf_config._commit_hash": OTHER}).own is False
    assert vllm({"vllm.cache_config.prefix_caching_hash_algo": "xxhash"}).unknown == ("hash",)
    monkeypatch.delattr(vllm.utils, "DEFAULT_NONE_HASH_SEED")  # 0.26
    assert vllm().unknown == ("hash",)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    first = vllm()
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert not first.own and vllm().digest != first.digest


def test_vllm_without_its_configuration(vllm: Any) -> None:
    """A tier that a program makes by itself."""
    hidden = vllm(hidden=True)
    assert not hidden.own and hidden.fields["kv_format"] == "bfloat16" and hidden.fields["revision"] == COMMIT
    for field, path, value in VLLM_DIFFERENT:
        if path.startswith("spec."):
            assert vllm({path: value}, hidden=True).fields.get(field) != hidden.fields.get(field)
    mla = {"spec.config.parallel.tp_size": 2, "spec.config.replicated_layout": True}
    assert vllm(mla, hidden=True).digest == hidden.digest


def test_vllm_scales_of_run_time(vllm: Any) -> None:
    scales = {"vllm.cache_config.calculate_kv_scales": True}
    assert vllm(scales).storable, "the cache has no scales"
    assert not vllm({**scales, "vllm.cache_config.cache_dtype": "fp8"}).storable


# -- SGLang, likewise; tests/integration/sglang_identity.py has the real ones ------------------------------------------

SGLANG_DIFFERENT: list[tuple[str, str, Any]] = [
    ("revision", "model.model_path", f"/hub/models--org--model/snapshots/{OTHER}"),
    ("model", "model.model_path", f"/hub/models--org--another/snapshots/{COMMIT}"),
    ("weights", "model.load_format", "dummy"),
    ("weight_version", "serving.weight_version", "step-2"),
    ("dtype", "model.dtype", "float16"),
    ("kv_format", "model.kv_cache_dtype", "fp8_e4m3"),
    ("kv_format", "model.kv_cache_dtype", "fp8_e5m2"),
    ("kv_format", "model.qsa_indexer_dtype", "fp8_e4m3"),
    ("kv_format", "pool.dtype", "torch.uint8"),
    ("kv_format", "pool.temporal_dtype", "torch.float32"),
    ("kv_scales", "model.quantization_param_path", "/no/such/scales.json"),
    ("quantization", "model.quantization", "fp8"),
    ("overrides", "model.json_model_override_args", '{"rope_theta": 1e6}'),
    ("overrides", "model.model_config_parser", "mistral"),
    ("layout", "pool.layout", "page_head"),
    ("layout", "pool.storage_format_tag", "unified-token-major"),
    ("backend", "exec.attention_backend", "fa3"),
    ("backend", "exec.kernel", Some(decode_attention_backend="flashinfer")),
    ("tokens", "pool.page_size", 32),
    ("layers", "pool.layer_num", 3),
    ("layers", "pool.start_layer", 2),
    ("layers", "pool.head_num", 8),
    ("mla", "config.is_mla_model", True),
    ("ranks", "config.tp_size", 2),
    ("ranks", "config.pp_size", 2),
    ("ranks", "config.attn_cp_size", 2),
    ("draft", "spec", Some(speculative_algorithm="EAGLE", speculative_draft_model_revision=None,
        speculative_draft_model_path=f"/hub/models--org--draft/snapshots/{OTHER}")),
]  # fmt: skip
SGLANG_SHARED: list[tuple[str, Any]] = [
    ("config.model_name", "canary"),
    ("config.dp_rank", 3),
    ("config.enable_storage_metrics", True),
    ("model.load_format", "safetensors"),
    ("serving.weight_version", "default"),
    ("pool.size", 1 << 20),
    ("spec", Some(speculative_algorithm="NGRAM")),
    ("lora", Some(lora_paths=[f"x=/hub/models--org--x/snapshots/{OTHER}"])),
]


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of changes to make: the identity of a pool's pages."""
    from kvswap.sglang import _identity

    runtime: Any = ModuleType("sglang.srt.runtime_context")
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", runtime)
    snapshot = str(cached(tmp_path, COMMIT))

    def make(
        changes: dict[str, Any] | None = None,
        said: Said | None = None,
        *,
        published: bool = True,
        replicated: bool = False,
    ) -> Identity:
        roots: dict[str, Any] = {
            "model": Some(
                model_path=snapshot, revision=None, load_format="auto", download_dir=None, dtype="bfloat16",
                kv_cache_dtype="auto", qsa_indexer_dtype="auto", quantization=None, quantization_param_path=None,
                json_model_override_args="{}", model_config_parser="auto",
            ),
            "exec": Some(attention_backend=None, kernel=None),
            "spec": Some(speculative_algorithm=None),
            "serving": Some(weight_version="default"),
            "lora": Some(lora_paths=None),
            "pool": Some(dtype="torch.bfloat16", layout="page_first", page_size=16, layer_num=2, head_num=4, size=4096),
            "config": Some(
                model_name="prod", tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
                is_mla_model=False, dp_rank=0, enable_storage_metrics=False,
            ),
        }  # fmt: skip
        for path, value in (changes or {}).items():
            if "." in path:
                changed(roots, path, value)
            else:
                roots[path] = value
        bags = {name: roots[name] for name in ("model", "exec", "spec", "serving", "lora")} if published else {}
        context = Some(config_bag=bags.__getitem__, is_config_namespace_published=bags.__contains__)
        runtime.get_context = lambda: context
        ranks = _identity.ranks_of(roots["config"], replicated=replicated)
        return _identity.identity_of(roots["config"], "kv", roots["pool"], [64, 64], said or Said(), ranks=ranks)

    return make


@pytest.mark.parametrize(("field", "path", "value"), SGLANG_DIFFERENT)
def test_sglang_each_field(sglang: Any, field: str, path: str, value: Any) -> None:
    before, after = sglang(), sglang({path: value})
    assert not before.own and not after.own
    assert before.fields.get(field) != after.fields.get(field) and before.digest != after.digest


@pytest.mark.parametrize(("path", "value"), SGLANG_SHARED)
def test_sglang_what_does_not_change_bytes(sglang: Any, path: str, value: Any) -> None:
    assert sglang({path: value}).digest == sglang().digest


def test_sglang_formats_in_bytes(sglang: Any) -> None:
    formats = ["fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16", "auto"]
    made = [sglang({"model.kv_cache_dtype": name, "pool.dtype": "torch.uint8"}) for name in formats]
    assert len({identity.digest for identity in made}) == len(formats) and not any(each.own for each in made)
    said = Said(revision="r")
    assert sglang({"pool.dtype": "torch.uint8"}, said, published=False).unknown == ("kv_format",)
    assert not sglang({"pool.dtype": "torch.float16"}, said, published=False).own


def test_sglang_mla_is_whole_on_each_rank(sglang: Any) -> None:
    ranks = [{"config.tp_size": size, "config.tp_rank": rank} for size, rank in ((1, 0), (2, 0), (2, 1))]
    assert len({sglang(each, replicated=True).digest for each in ranks}) == 1
    assert len({sglang(each).digest for each in ranks}) == 3


def test_sglang_what_is_not_known(sglang: Any, tmp_path: Path) -> None:
    for own in (
        {"model.model_path": "org/other"},
        {"lora": Some(lora_paths=["x=org/adapter"])},
        {"spec": Some(speculative_algorithm="EAGLE3", speculative_draft_model_path="org/draft")},
    ):
        assert sglang(own).unknown == ("revision",) and not sglang(own, Said(revision="r")).own
    assert sglang(published=False).unknown == ("revision",)
    for said in (Said(revision="r"), Said(weight_version="w")):
        one, two = (sglang({"config.model_name": name}, said, published=False) for name in ("prod", "canary"))
        assert one.digest == two.digest
    for said in (Said(name="n"), Said(unversioned=True)):
        one, two = (sglang({"config.model_name": name}, said, published=False) for name in ("prod", "canary"))
        assert one.digest != two.digest and not one.own


def test_sglang_an_adapter_whose_weights_are_replaced(sglang: Any, tmp_path: Path) -> None:
    adapter = local(tmp_path / "adapter")
    with_it = {"lora": Some(lora_paths=[{"lora_name": "x", "lora_path": str(adapter)}])}
    before = sglang(with_it)
    assert before.digest == sglang(with_it).digest != sglang().digest
    (adapter / "model-00001.safetensors").write_bytes(b"others")
    assert sglang(with_it).digest != before.digest


def test_sglang_scales(sglang: Any, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    made = []
    for text in ('{"a": 1}', '{"a": 2}', ' {"a": 1} '):
        path.write_text(text)
        made.append(sglang({"model.quantization_param_path": str(path)}).digest)
    assert made[0] == made[2] != made[1]


def test_sglang_without_its_configuration(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that has none, or a process that may not read it."""
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", None)
    made = sglang(said=Said(revision="r"), published=False)
    assert not made.own and "model" not in made.fields
