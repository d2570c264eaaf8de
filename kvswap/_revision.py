"""Which weights a model is: the commit of a repository, or a digest of a local folder. Reads files, asks no network."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"(?:^|/)([^/]*)/?snapshots/([0-9a-f]{40})(?:/|$)")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".npz", ".msgpack", ".tensors"}
_CONFIGURATION = {  # what changes the numbers of a model; tokenizers do not, as keys are of tokens
    "config.json", "params.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
    "adapter_config.json", "kv_cache_scales.json",
}  # fmt: skip
_MOST_CONFIGURATION = 16 << 20
DUMMY = "dummy"
_FROM_FOLDER = {  # load formats of vLLM and SGLang that read the model's folder
    "auto", "hf", "pt", "safetensors", "fastsafetensors", "instanttensor", "npcache", "mistral", "gguf", "bitsandbytes",
    "sharded_state", "presharded", "runai_streamer", "runai_streamer_sharded", "layered", "flash_rl", "expert_pack",
}  # fmt: skip
_DEPTH = 2  # of folders in a model's folder: parts of a model may have one each
_ELSEWHERE = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")  # repositories are not huggingface's
_NO = ("", "0", "false", "no")


class Weights(NamedTuple):
    """model: what it is called. revision: None: it is not known."""

    model: str
    revision: str | None


def weights_of(
    model: str,
    revision: str | None = None,
    *,
    cache: str | None = None,
    load_format: Any = "auto",
    read: str | None = None,
) -> Weights:
    """Of a model as an engine is given it: a repository's name, or a path.

    revision: the engine's own option: a commit, branch or tag. cache: the engine's folder of downloads. load_format:
    the engine's. Without weights that are read (dummy) a folder is known by its configuration; with those that do not
    come from it nothing is known. read: the commit of the configuration that the engine has read, before the weights.
    """
    path = Path(model).expanduser()
    snapshot = _SNAPSHOT.search(str(path)) or _SNAPSHOT.search(os.path.realpath(path))
    dummy = format_of(load_format) == DUMMY
    if snapshot is not None:
        called, found = snapshot[1].removeprefix("models--").replace("--", "/"), snapshot[2]
    elif path.exists():
        called, found = path.resolve().name, _digest(path, any_weights=dummy)
    elif revision is not None and _COMMIT.fullmatch(revision):
        called, found = model, revision
    else:
        called, found = model, _commit(model, revision or "main", cache) or read
    moved = read is not None and found not in (None, read)  # the repository, while the engine started
    from_it = dummy or format_of(load_format) in _FROM_FOLDER
    return Weights(called, found if from_it and not moved else None)


def format_of(load_format: Any) -> str:
    """The name of an engine's load format, which may be a member of an enum."""
    return str(getattr(load_format, "value", load_format) or "auto").lower()


def _commit(model: str, revision: str, cache: str | None) -> str | None:
    """The commit of a repository in huggingface's cache, which the engine has just read it from."""
    if model.count("/") > 1 or any(os.environ.get(name, "0").lower() not in _NO for name in _ELSEWHERE):
        return None
    repository = model.partition(":")[0]  # a file of it may follow, as in org/model:Q4_K_M
    for place in _caches(cache):
        folder = place / f"models--{repository.replace('/', '--')}"
        try:
            commit = (folder / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            continue
        if _COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir():
            return commit
    return None


def _caches(cache: str | None) -> list[Path]:
    """Where huggingface_hub keeps repositories; a folder that the engine names comes first and is the only one."""
    if cache:
        return [Path(cache).expanduser()]
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface"
    )
    return [Path(named or os.path.join(home, "hub")).expanduser()]


def _digest(path: Path, *, any_weights: bool) -> str | None:
    """Of a folder's configuration and of the names, sizes and times of its weight files; None: it has none of these."""
    digest = hashlib.sha256(b"kvswap folder 1")
    found = any_weights
    try:
        for each in sorted(_files(path, _DEPTH)) if path.is_dir() else [path]:
            about = each.stat()
            name = str(each.relative_to(path)) if each != path else each.name
            if each.suffix in _WEIGHTS or each == path:
                found = True
                digest.update(f"\n{name!r} {about.st_size} {about.st_mtime_ns}".encode())
            elif each.name in _CONFIGURATION or each.suffix == ".py":
                with open(each, "rb") as file:
                    text = file.read(_MOST_CONFIGURATION)
                digest.update(f"\n{name!r} {about.st_size} ".encode() + hashlib.sha256(text).digest())
    except OSError:
        return None
    return f"folder {digest.hexdigest()[:32]}" if found else None


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """The regular files; hidden folders are those of git and of downloads."""
    for each in folder.iterdir():
        if each.is_file():
            yield each
        elif depth > 1 and each.is_dir() and not each.name.startswith("."):
            yield from _files(each, depth - 1)
