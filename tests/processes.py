"""Another process for tests of what processes share: it runs what it is told, line by line."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conftest import PATIENCE, elsewhere

LOOP = """
import json, sys, traceback
names = {}
answers = sys.stdout
sys.stdout = sys.stderr
for line in sys.stdin:
    code = json.loads(line)
    try:
        try:
            answer = {"value": eval(compile(code, "<told>", "eval"), names)}
        except SyntaxError:
            exec(compile(code, "<told>", "exec"), names)
            answer = {"value": None}
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        answer = {"error": kinds, "text": str(error), "trace": traceback.format_exc()}
    print(json.dumps(answer, default=repr), file=answers, flush=True)
"""


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process cannot open any."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Failed(Exception):
    """What it was told raised: kinds are the names of the exception's classes, text its message."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer["trace"])
        self.kinds: list[str] = answer["error"]
        self.text: str = answer["text"]


class Process:
    """A Python of its own with the package under test; `do` runs code there and returns what an expression gives."""

    def __init__(self, code: str = "", **environment: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", LOOP],
            **elsewhere(**environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.do("import kvswap, numpy as np, os, gc\nfrom kvswap import _C, memory, testing")
        if code:
            self.do(code)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def tell(self, code: str) -> None:
        """Without waiting for the answer."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(textwrap.dedent(code).strip()) + "\n")
        self.popen.stdin.flush()

    def answer(self, timeout: float = PATIENCE) -> Any:
        assert self.popen.stdout is not None
        ready, _, _ = select.select([self.popen.stdout], [], [], timeout)
        assert ready, f"the other process did not answer within {timeout} s"
        line = self.popen.stdout.readline()
        assert line, f"the other process ended: {self.popen.wait(PATIENCE)}"
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer)
        return answer["value"]

    def do(self, code: str, timeout: float = PATIENCE) -> Any:
        self.tell(code)
        return self.answer(timeout)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(PATIENCE)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
