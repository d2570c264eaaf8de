"""FastDeploy's own cache managers on kvswap's ops: fastdeploy_managers.py says how. Their sources are not kept here.

FASTDEPLOY_SOURCE=/where/it/is/unpacked pytest tests/integration/test_their_manager.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_their_managers() -> None:
    if "FASTDEPLOY_SOURCE" not in os.environ:
        pytest.skip("needs FastDeploy's sources: set FASTDEPLOY_SOURCE to an unpacked one, or several with : between")
    sources = os.environ["FASTDEPLOY_SOURCE"].split(os.pathsep)
    script = Path(__file__).with_name("fastdeploy_managers.py")
    done = subprocess.run([sys.executable, str(script), *sources], stdout=subprocess.PIPE, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout
