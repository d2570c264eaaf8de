"""kvswap's copies in a real SGLang without a GPU: streams of a host device, and SGLang's own plugin hook."""

# mypy: ignore-errors

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "stand_ins"))

from sglang.srt import plugins  # noqa: E402
from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache import l2_transfer  # noqa: E402
from sglang_streams import streams_of  # noqa: E402


def use_streams() -> None:
    """In SGLang's modules of the copies, in this process."""
    cache_controller.device_module = l2_transfer.device_module = streams_of("host:0")
    l2_transfer._timing_events_supported.cache_clear()


def load_plugins(**switches: str) -> None:
    """As SGLang does at the begin of each of its processes, with kvswap's switches. kvswap need not be installed."""
    os.environ.update(switches)
    group, folder = plugins.GENERAL_PLUGINS_GROUP, None
    if not any(found.value.startswith("kvswap") for found in entry_points(group=group)):
        folder = Path(tempfile.mkdtemp())
        sys.path.append(str(folder))
        metadata = folder / "kvswap_for_tests-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvswap-for-tests\nVersion: 0\n")
        text = (ROOT / "pyproject.toml").read_text()
        line = text[text.index(f'[project.entry-points."{group}"]') :].splitlines()[1]
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{line.partition('#')[0].replace(chr(34), '')}\n")
    plugins._plugins_loaded = False
    plugins.load_plugins()
    if folder:
        sys.path.remove(str(folder))
        shutil.rmtree(folder)
