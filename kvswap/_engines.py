"""The serving engines that kvswap is for: which releases, and whether one is installed here. Imports none of them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

Release = tuple[int, ...]


@dataclass(frozen=True)
class Engine:
    """One engine.

    packages: names under which it is installed. module: what Python imports. ours: kvswap's module for it. releases:
    those that it works with, for a person. ranges: the same, first and last, of as many numbers as count; empty: any.
    plugin: (group of its plugin hook, variable that names the plugins that it loads).
    """

    name: str
    packages: tuple[str, ...]
    module: str
    ours: str
    releases: str
    ranges: tuple[tuple[Release, Release], ...]
    plugin: tuple[str, str] | None = None

    def installed(self) -> str | None:
        """The release that is installed here."""
        for package in self.packages:
            with contextlib.suppress(metadata.PackageNotFoundError):
                return metadata.version(package)
        return None

    def takes(self, release: str) -> bool:
        """Whether kvswap works with that release, as far as is known."""
        numbers = tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", release)[0])))
        return not self.ranges or any(low <= numbers[: len(low)] <= high for low, high in self.ranges)

    def loads_plugin(self) -> bool:
        """Whether the engine's own variable lets it load kvswap's plugin."""
        names = os.environ.get(self.plugin[1]) if self.plugin else None
        return names is None or "kvswap" in names.split(",")

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Around imports of the engine: where they fail for it, ImportError in one sentence."""
        try:
            yield
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != self.module:
                raise
            found = self.installed()
            here = f"{found} is installed here, without {error.name}" if found else "none is installed here"
            raise ImportError(f"{self.ours} requires {self.name} {self.releases}; {here}") from None


VLLM = Engine(
    "vLLM",
    ("vllm",),
    "vllm",
    "kvswap.vllm",
    "0.26 or 0.30 to 0.33",
    (((0, 26), (0, 26)), ((0, 30), (0, 33))),
    ("vllm.general_plugins", "VLLM_PLUGINS"),
)
SGLANG = Engine(
    "SGLang",
    ("sglang",),
    "sglang",
    "kvswap.sglang",
    "0.5.23",
    (((0, 5, 23), (0, 5, 23)),),
    ("sglang.srt.plugins", "SGLANG_PLUGINS"),
)
LMCACHE = Engine("LMCache", ("lmcache",), "lmcache", "kvswap.lmcache", "0.5.6", (((0, 5, 6), (0, 5, 6)),))
ENGINES = (
    VLLM,
    SGLANG,
    LMCACHE,
    Engine("TensorRT-LLM", ("tensorrt_llm", "tensorrt-llm"), "tensorrt_llm", "kvswap.trtllm", "of any release", ()),
    Engine(
        "FastDeploy",
        ("fastdeploy-gpu", "fastdeploy"),
        "fastdeploy",
        "kvswap.fastdeploy",
        "2.0 or newer",
        (((2,), (99,)),),
    ),
)
