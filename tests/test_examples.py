"""Each example runs from the command line, alone, in seconds, checks its own bytes, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"vllm_offload": ["vllm"]}  # an engine and its model: docs/vllm.md says where it was run
NEEDS_ON_A_GPU = {"fastdeploy_ops": ["torch"], "offload_jobs": ["torch"], "trtllm_connector": ["torch"]}


def test_there_are_examples_and_each_checks_what_it_did() -> None:
    assert len(EXAMPLES) > 10
    for example in EXAMPLES:
        text = example.read_text(encoding="utf-8")
        assert text.startswith('"""') and "assert " in text and len(text.splitlines()) <= 130, example.name


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.stem))
def test_the_example_runs(example: Path, device_name: str, tmp_path: Path) -> None:
    if example.stem in NEEDS:
        for need in NEEDS[example.stem]:
            pytest.importorskip(need)
        pytest.skip("needs a model: run it by hand, as its docstring says")
    for need in NEEDS_ON_A_GPU.get(example.stem, []) if device_name.startswith("cuda") else []:
        pytest.importorskip(need)
    before = shared_pools()
    path = os.pathsep.join(entry for entry in (str(ROOT), os.environ.get("PYTHONPATH")) if entry)
    done = subprocess.run(
        [sys.executable, "-W", "error", example, "--device", device_name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "KVSWAP_LOG": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() and not done.stderr
    assert list(tmp_path.iterdir()) == [] and not [name for name in shared_pools() - before if "example-" in name]


def shared_pools() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def test_the_list_of_examples_has_each_of_them() -> None:
    listed = re.findall(r"^\| \[`(\w+)\.py`\]\(\.\./examples/\1\.py\) \|", page("examples"), re.MULTILINE)
    assert sorted(listed) == [example.stem for example in EXAMPLES]
    shown = re.findall(r"^<!-- source: \.\./examples/(\w+)\.py -->$", page("examples"), re.MULTILINE)
    assert sorted(shown) == [example.stem for example in EXAMPLES]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
