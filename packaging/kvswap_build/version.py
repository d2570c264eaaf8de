"""Writes the version, which stands in pyproject.toml, as numbers into a header. CMake does the same for
libkvswap."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write_header():
    version = re.search(r'^version = "(\d+)\.(\d+)\.(\d+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    text = (ROOT / "cmake/kvswap_version.h.in").read_text()
    for name, number in zip(("MAJOR", "MINOR", "PATCH"), version.groups(), strict=True):
        text = text.replace(f"@KVSWAP_VERSION_{name}@", number)
    target = ROOT / "csrc/kvswap_version.h"
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
