"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
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


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(page: Path) -> list[str]:
    """Those that need no GPU and are whole."""
    found: list[str] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [example for example in found if "import numpy" in example and "torch" not in example]


def test_there_are_examples() -> None:
    assert {page.name for page in PAGES if examples(page)} >= {"README.md", "order.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_the_examples_run(page: Path) -> None:
    for example in examples(page):
        exec(compile(example, page.name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_links_lead_somewhere_and_nothing_is_left_to_fill_in(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert re.findall(r"@[A-Z]+@", text) == []


@pytest.mark.slow
def test_the_c_command_builds_a_program(tmp_path: Path) -> None:
    command = re.search(r"`(gcc [^`]*program\.c[^`]*)`", README)
    assert command is not None
    (tmp_path / "program.c").write_text(PROGRAM, encoding="utf-8")
    line = command[1].replace("program.c", shlex.quote(str(tmp_path / "program.c")))
    binary = tmp_path / "program"
    subprocess.run(f"{line} -O0 -o {shlex.quote(str(binary))}", shell=True, cwd=ROOT, check=True, timeout=300)
    assert subprocess.run([binary], timeout=60, check=False).returncode == 0
