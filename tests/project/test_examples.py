"""Each example runs from the command line, alone, in seconds, checks its own bytes, and leaves nothing behind."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builds import CORE, with_archive
from conftest import ROOT, elsewhere, run_python

from kvswap import _doctor_config

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
    with subprocess.Popen(
        [sys.executable, "-W", "error", example, "--device", device_name],
        cwd=tmp_path,
        env=elsewhere(KVSWAP_LOG="error")["env"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            out, errors = running.communicate(timeout=240)
        finally:
            running.kill()  # an example that does not end in that time
    assert running.returncode == 0, out + errors
    assert out.strip() and not errors
    assert list(tmp_path.iterdir()) == [] and not Path(f"/dev/shm/kvswap.example-{running.pid}").exists()


def test_the_example_of_vllm_says_what_it_needs() -> None:
    done = run_python(
        f"""
        import runpy, sys
        sys.modules["vllm"], sys.argv[1:] = None, []
        runpy.run_path({str(ROOT / "examples" / "vllm_offload.py")!r}, run_name="__main__")
        """
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "this example needs vLLM and a GPU: pip install vllm\n"


def test_the_list_of_examples_has_each_of_them() -> None:
    listed = re.findall(r"^\| \[`(\w+)\.py`\]\(\.\./examples/\1\.py\) \|", page("examples"), re.MULTILINE)
    assert sorted(listed) == [example.stem for example in EXAMPLES]
    shown = re.findall(r"^<!-- source: \.\./examples/(\w+)\.py -->$", page("examples"), re.MULTILINE)
    assert sorted(shown) == [example.stem for example in EXAMPLES]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_program_to_start_with_in_c_runs(core: Callable[[str], Path], tmp_path: Path) -> None:
    """Its command, with the sources that it finds compiled already."""
    found = re.search(
        r"<!-- program -->\n```c\n(.*?)^```\n.*?```sh\n(.*?)^```$", page("start/c"), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    (tmp_path / "program.c").write_text(found[1], encoding="utf-8")
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    begin, listing, end = re.split(r"\$\((find csrc .*?)\)", found[2])
    listed = run(tmp_path, "bash", "-c", listing.replace("csrc ", "csrc/ ", 1)).splitlines()
    assert sorted((tmp_path / name).resolve() for name in listed) == CORE
    archive = core("address,undefined") / "libcore.a"
    command = begin.replace("-O2", "-fsanitize=address,undefined") + str(archive) + end
    assert run(tmp_path, "bash", "-euo", "pipefail", "-c", command) == "2 blocks moved\n"


@pytest.mark.slow
def test_the_transfer_manager_in_c_plus_plus_runs(prefix: Path, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: .ci/run has one")
    parts = re.findall(r"<!-- cpp: \w+ -->\n```cpp\n(.*?)```", page("trtllm"), re.DOTALL)
    assert len(parts) == 2
    (tmp_path / "program.cpp").write_text("\n".join(parts), encoding="utf-8")
    flags = ["-Wall", "-Wextra", "-Werror", "-std=c++17", f"-I{ROOT / 'csrc'}"]
    run(tmp_path, compiler, *flags, "-c", "program.cpp", "-o", "program.o")
    run(tmp_path, compiler, "-o", "program", "program.o", *with_archive(prefix))
    assert run(tmp_path, "./program") == "block 5 is block 3\n"


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


CONTAINER = ROOT / "examples" / "vllm_container"


def test_what_the_compose_file_names_is_there() -> None:
    text = (CONTAINER / "compose.yaml").read_text()
    mounted = re.findall(r"^ +- (\.\S+?):/\S+:ro$", text, re.MULTILINE)
    assert len(mounted) == 5 and [name for name in mounted if not (CONTAINER / name).is_file()] == []
    assert (CONTAINER / re.findall(r"context: (\S+)", text)[0] / re.findall(r"dockerfile: (\S+)", text)[0]).is_file()
    published = re.findall(r'^ +- "(\S+:\d+:\d+)"$', text, re.MULTILINE)
    assert len(published) == 2 and all(port.startswith("127.0.0.1:") for port in published)
    port = re.findall(r'KVSWAP_METRICS_PORT: "0\.0\.0\.0:(\d+)"', text)[0]
    assert f"vllm:{port}" in (CONTAINER / "prometheus.yml").read_text() and f":{port}:" not in text


def test_the_compose_file_has_a_configuration_that_kvswap_takes(tmp_path: Path) -> None:
    text = re.sub(r"\$\{CPU_BYTES:-(\d+)\}", r"\1", (CONTAINER / "compose.yaml").read_text())
    given = " ".join(re.findall(r"--kv-transfer-config\n +- >-\n((?: {8}.*\n)+)", text)[0].split())
    (tmp_path / "config.json").write_text(given)
    found = _doctor_config.read(str(tmp_path / "config.json"))
    assert (found.engine.name, found.wrong, found.ignored) == ("vLLM", "", [])
    assert found.host_nbytes == 32 << 30


def test_the_files_of_the_containers_are_yaml() -> None:
    yaml = pytest.importorskip("yaml", reason="the docs' extra brings it, which .ci/run installs")
    for path in CONTAINER.rglob("*.y*ml"):
        assert yaml.safe_load(path.read_text()), path
    services = yaml.safe_load((CONTAINER / "compose.yaml").read_text())["services"]
    assert services.keys() == {"vllm", "prometheus", "grafana"}
