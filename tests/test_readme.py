"""What the README and the docs show works as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

PROGRAM = """
#include <stdio.h>
#include <string.h>
#include "kvswap.h"

int main(void) {
  static char gpu[4096], cpu[4096];
  struct kvs_engine *engine;
  struct kvs_transfer *transfer;
  struct kvs_error err;
  int64_t from[] = {1, 3}, to[] = {2, 0};
  struct kvs_ids gpu_ids = {from, 8, 2}, cpu_ids = {to, 8, 2};
  struct kvs_tensor tensor = {.gpu = (uintptr_t)gpu, .cpu = (uintptr_t)cpu, .nbytes = 1024,
                              .gpu_blocks = 4, .cpu_blocks = 4};
  memset(gpu + 1024, 7, 1024);
  if (kvs_engine_open("host:0", &engine, &err) ||
      kvs_swap_cache(engine, &tensor, 1, &gpu_ids, &cpu_ids, KVS_D2H, NULL, &transfer, &err) ||
      kvs_transfer_wait(transfer, 60000000000, &err)) {
    fprintf(stderr, "%s\\n", err.message);
    return 1;
  }
  kvs_transfer_unref(transfer);
  kvs_engine_unref(engine);
  return memcmp(gpu + 1024, cpu + 2048, 1024) != 0;
}
"""


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^(?:<!-- (needs|fragment): (.*?) -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SNIPPETS = [
    pytest.param(*found, id=f"{page.name}-{number}")
    for page in PAGES
    for number, found in enumerate(SNIPPET.findall(page.read_text(encoding="utf-8")))
]


def test_every_snippet_is_found() -> None:
    assert sum(page.read_text(encoding="utf-8").count("```python") for page in PAGES) == len(SNIPPETS) > 10


@pytest.mark.parametrize(("mark", "what", "code"), SNIPPETS)
def test_the_snippet_runs_alone(mark: str, what: str, code: str, device_name: str) -> None:
    """A `fragment` shows a call among things of the reader's own, and says whose: it compiles."""
    program = compile(code, "snippet", "exec")
    if mark == "fragment":
        return
    for need in what.split():
        if need == "cuda" and not device_name.startswith("cuda"):
            pytest.skip("needs a GPU: run with --device cuda:0")
        if need != "cuda":
            pytest.importorskip(need)
    exec(program, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_links_lead_somewhere_and_nothing_is_left_to_fill_in(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert re.findall(r"@[A-Z]+@", text) == []


@pytest.mark.slow
def test_the_c_command_builds_a_program(tmp_path: Path) -> None:
    command = re.search(r"`(gcc [^`]*program\.c[^`]*)`", (ROOT / "docs" / "c.md").read_text(encoding="utf-8"))
    assert command is not None
    (tmp_path / "program.c").write_text(PROGRAM, encoding="utf-8")
    line = command[1].replace("program.c", shlex.quote(str(tmp_path / "program.c")))
    binary = tmp_path / "program"
    subprocess.run(f"{line} -O0 -o {shlex.quote(str(binary))}", shell=True, cwd=ROOT, check=True, timeout=300)
    assert subprocess.run([binary], timeout=60, check=False).returncode == 0
