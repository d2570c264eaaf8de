"""What the bytes of a stored block mean. Two engines find each other's blocks if, and only if, their identities agree.

    identity = Identity("vllm", {"model": "org/model", "revision": commit, "kv_format": "fp8_e4m3", ...}, said)
    layout = identity.layout(block_nbytes)     # what a store's files hold
    folder(directory, layout)                  # where that store is

FIELDS is the table of what counts. Each value comes from the engine or from the tier's configuration (Said); what
neither can tell is unknown. If a field that is needed is unknown, the identity is this process's own: a random value
takes its place, so that no other process, and no later one, finds the blocks. What does not change a block's bytes is
no field: ports, shares of memory, limits of requests, the name under which a model is served.

`python -m kvswap.identity` prints the table of docs/files.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvswap.codecs import Coding
from kvswap.files import Layout

__all__ = ["FIELDS", "RUN_TIME", "Field", "Identity", "Said", "digest_of", "folder", "forget", "in_words", "table"]

RUN_TIME = "run time"  # kv_scales that the engine computes when it runs: no store

_VERSION = 1  # of the fields: a store of another version finds none of these blocks
_MOST_VALUE = 96  # bytes of a value as JSON; of a longer one its begin and a digest
_MOST_TEXT = 2900  # what a store's files have room for, less what a store of several directories adds
_FOLDER_DIGITS = 12


class Field(NamedTuple):
    """A row of the table. vllm, sglang, lmcache: where the value comes from; empty: not a field there."""

    name: str
    meaning: str
    vllm: str = ""
    sglang: str = ""
    lmcache: str = ""
    needed: bool = False  # unknown: the identity is this process's own


FIELDS = (
    Field("engine", "whose keys and pages these are", "`vllm`", "`sglang`", "`lmcache`"),
    Field("model", "repository, or last part of a folder's path; not the served name", "`model`", "`model_path`"),
    Field(
        "revision",
        "commit of the repository or of a snapshot's path; of another folder a digest of its configuration and of the "
        "names, sizes and times of its weight files",
        "the model's folder; `revision` of the tier replaces it",
        "the same",
        "`revision` of the adapter",
        needed=True,
    ),
    Field(
        "weight_version",
        "what replaced those weights in place",
        "`weight_version` of the tier",
        "the same, or SGLang's own at the start",
        "the same",
    ),
    Field("name", "what the operator tells apart", "`name` of the tier", "the same", "the same"),
    Field("weights", "`dummy`: not those of the model", "`load_format`", "`load_format`"),
    Field("dtype", "in what the model computes", "`dtype`", "`dtype`"),
    Field(
        "kv_format",
        "what the numbers of a page are, as the engine names it: `fp8_e4m3` is not `fp8_e5m2`",
        "`kv_cache_dtype`, layers that it leaves out, dtypes of states",
        "`kv_cache_dtype`, dtype of the host pool",
        needed=True,
    ),
    Field(
        "kv_scales",
        "scales of the KV, if they are not in the checkpoint; computed at run time: nothing is stored",
        "`calculate_kv_scales`",
        "digest of the file of `quantization_param_path`",
    ),
    Field("quantization", "of the weights", "method and its configuration", "method"),
    Field("rope", "positions, as the engine takes them", "`rope_parameters`, `max_model_len` of LongRoPE"),
    Field(
        "overrides",
        "what changes the model's configuration or code",
        "`hf_overrides`, `hf_config_path`, `code_revision`, ...",
        "`json_model_override_args`, ...",
    ),
    Field(
        "layout",
        "order of layers, blocks, heads and tokens: LBHNC, LBNHC, cross-layer, `page_first`, ...",
        "`kv_cache_layout`, canonical format, places of the layers' caches",
        "layout, pieces and format of the host pool",
    ),
    Field("backend", "attention backend, where it is chosen: the inside of a page is its own", "`attention_config`",
          "`attention_backend`"),
    Field("tokens", "of a block, of a hash, of a stored chunk", "groups", "`page_size`"),
    Field(
        "layers",
        "layers of each group, and what each keeps: heads, sizes, windows",
        "groups and their specs",
        "shape of the host pool",
    ),
    Field("mla", "a latent instead of heads", "`use_mla`", "kind of the host pool"),
    Field(
        "ranks",
        "which part this is, of TP, PP, DCP and PCP; `whole`: all, as each rank has of MLA",
        "parallel sizes",
        "ranks and sizes",
        needed=True,
    ),
    Field("draft", "the draft model, whose pages are stored beside", "`speculative_config`", "`speculative_...`"),
    Field("lora", "digest of adapters that keys name by name and path only", "", "`lora_paths`"),
    Field("hash", "algorithm and seed of keys", "algorithm, `PYTHONHASHSEED`", "`sha256`", needed=True),
    Field("pool", "which of several host pools", "", "name and kind"),
    Field("replica", "whose files, if they have one writer", "", "`dp_rank`, with `shared: false`"),
    Field("codec", "how bytes are coded", "`raw`", "`raw`", "`raw`"),
    Field("codec_version", "of the codec", "`1`", "`1`", "`1`"),
)  # fmt: skip
_NAMES = {field.name: field for field in FIELDS}


_SAID = ("revision", "weight_version", "name")


class Said(NamedTuple):
    """What the tier's configuration says. Each but unversioned is a field."""

    revision: str | None = None
    weight_version: str | None = None
    name: str | None = None
    unversioned: bool = False  # the model's name stands for its weights

    @classmethod
    def pop(cls, options: dict[str, Any]) -> Said:
        """Of options that kvswap._options.IDENTITY has read; they are taken out. An empty text counts as none."""
        found = {name: options.pop(name, None) or None for name in _SAID}
        return cls(**found, unversioned=options.pop("unversioned", False))

    @property
    def weights(self) -> bool:
        """Whether it says which weights the blocks are of."""
        return bool(self.revision or self.weight_version or self.name)


_NOTHING = Said()


@dataclass(frozen=True)
class Identity:
    """What stored blocks mean. engine: vllm, sglang, lmcache, or a program's own.

    found: what the engine tells, by names of FIELDS; None: it cannot. served_name is taken as the model only where the
    model itself is unknown and nothing else says which weights these are. said: the configuration.
    """

    engine: str
    found: Mapping[str, Any]
    said: Said = _NOTHING
    random: str = ""  # of an identity that is this process's own; given only to make the same one again

    def __post_init__(self) -> None:
        wrong = self.found.keys() - _NAMES.keys() - {"served_name"}
        if wrong:
            raise ValueError(f"no such field of an identity: {', '.join(sorted(wrong))}")
        if not self.random:
            object.__setattr__(self, "random", secrets.token_hex(16))

    @cached_property
    def unknown(self) -> tuple[str, ...]:
        """Needed fields that nothing tells. If there is one, the identity is this process's own."""
        return tuple(field.name for field in FIELDS if field.needed and self._is_missing(field))

    def _is_missing(self, field: Field) -> bool:
        if field.name == "revision" and (self.said.weights or self.said.unversioned):
            return False
        return bool(getattr(field, self.engine, "")) and self.found.get(field.name) is None

    @property
    def own(self) -> bool:
        """Whether this process alone finds its blocks, and none after it."""
        return bool(self.unknown)

    @property
    def storable(self) -> bool:
        """False: with scales that are computed at run time stored numbers mean something else to each engine."""
        return self.found.get("kv_scales") != RUN_TIME

    @cached_property
    def fields(self) -> dict[str, Any]:
        """What is known, by name; what a store's files hold."""
        known = {name: self.found.get(name) for name in _NAMES}
        known |= {"engine": self.engine, "codec": known["codec"] or "raw", "codec_version": known["codec_version"] or 1}
        known |= {"name": self.said.name, "weight_version": self.said.weight_version or known["weight_version"]}
        known["revision"] = self.said.revision or known["revision"]
        if known["model"] is None and not (known["revision"] or known["weight_version"]):
            known["model"] = self.found.get("served_name")
        fields = {name: _short(value) for name, value in known.items() if value is not None}
        if self.own:
            fields["own"] = self.random
        return _fitting({"identity": _VERSION, **fields})

    def source(self, name: str) -> str:
        """Where the value of a field comes from: engine, configuration, or unknown."""
        if name in _SAID and getattr(self.said, name):
            return "configuration"
        return "engine" if name in self.fields else "unknown"

    @cached_property
    def text(self) -> str:
        """The fields as JSON, in the order of their names."""
        return self.layout(1).text

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that differ where the identities do."""
        return hashlib.sha256(self.text.encode()).digest()

    def layout(self, block_nbytes: int, coding: Coding | None = None) -> Layout:
        """Of a store of such blocks. coding: how they are coded, if they are."""
        return Layout(block_nbytes, coding=coding, **self.fields)

    def warn(self, log: logging.Logger, where: str) -> None:
        """Log what keeps blocks from being found, and what changes that, if anything does. where: of the options."""
        model = self.found.get("model") or self.found.get("served_name") or "the model"
        if not self.storable:
            text = "%s: scales of its KV are computed at run time: nothing is stored or found. Set %s"
            log.warning(text, model, "calculate_kv_scales to false, with scales in the checkpoint")
        elif self.own:
            unknown = " and ".join(f"its {_UNKNOWN[name][0]} is not known" for name in self.unknown)
            cure = ", and ".join(_UNKNOWN[name][1].format(where=where) for name in self.unknown)
            text = "%s: %s: stored blocks are this process's own, and no other process and no later one finds them. %s"
            log.warning(text, model, unknown, f"Set {cure}")


_UNKNOWN = {  # needed fields: what is not known, and what to set
    "revision": (
        "revision",
        '"revision" in {where} (or "weight_version", or "name"; or "unversioned": true if its weights never change)',
    ),
    "kv_format": ("KV format", "--kv-cache-dtype"),
    "ranks": ("parallel layout", "the engine's parallel sizes"),
    "hash": ("hash seed", "PYTHONHASHSEED, the same for all engines, or a cryptographic hash algorithm"),
}


def folder(directory: str | Path, layout: Layout) -> Path:
    """The store of that layout in a directory which engines of several identities share."""
    name = hashlib.sha256(f"{layout.block_nbytes} {layout.text}".encode()).hexdigest()
    return Path(directory, name[:_FOLDER_DIGITS])


def forget(layout: Layout, folders: Iterable[Path]) -> None:
    """After closing: remove the store if only this process could find it."""
    if "own" in layout.fields:
        for place in folders:
            shutil.rmtree(place, ignore_errors=True)


def in_words(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The fields of a store's layout for people, in the order of the table; empty: it has no identity."""
    if fields.get("identity") != _VERSION:
        return []
    rows = [(name.replace("_", " "), _words(fields[name])) for name in _NAMES if name in fields]
    if "own" in fields:
        rows.append(("found by", "the process alone that stored it: something above was unknown"))
    return rows


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    if isinstance(value, list):
        return " ".join(map(_words, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def digest_of(value: Any) -> str:
    """32 hexadecimal digits of anything that JSON can hold; of other objects their text."""
    return hashlib.sha256(_json(value).encode()).hexdigest()[:32]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _short(value: Any, most: int = _MOST_VALUE) -> Any:
    text = _json(value)
    if len(text) <= most:
        return json.loads(text)  # tuples are lists, keys are strings
    begin = value if isinstance(value, str) else text
    return f"{begin[: most - 48]}... sha256 {digest_of(value)}"


def _fitting(fields: dict[str, Any]) -> dict[str, Any]:
    """The longest values shortened further, until a store's files have room for them."""
    while len(_json(fields)) > _MOST_TEXT:
        longest = max(fields, key=lambda name: len(_json(fields[name])))
        fields[longest] = f"sha256 {digest_of(fields[longest])}"
    return fields


def table() -> str:
    """FIELDS as docs/files.md has them."""
    rows = ["| field | meaning | vLLM | SGLang | LMCache |", "|---|---|---|---|---|"]
    for field in FIELDS:
        name = f"`{field.name}`" + (" (needed)" if field.needed else "")
        rows.append(f"| {' | '.join((name, field.meaning, field.vllm, field.sglang, field.lmcache))} |")
    return "\n".join(row.replace("|  |", "| |").replace("|  |", "| |") for row in rows)


if __name__ == "__main__":
    print(table())
