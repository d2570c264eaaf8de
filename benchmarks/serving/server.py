"""Whether a real HTTP server answers the same with offloading as without, under load and with faults in its copies.

    PYTHONPATH=benchmarks python3 -m serving.server --configs none,kvswap,kvswap-overlap --seconds 180

A server without offloading answers each prompt first, alone. Then each configuration's server runs parts of --seconds,
with clients that send the same prompts at once, some whole, some as streams, some given up half-way. After a part its
requests have to be gone, and its GPU blocks free. Exit status 1: an answer differs, a request hangs or is refused, or a
copy that was left out in silence never showed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import answers, clients, configurations
from serving.__main__ import overrides_of
from serving.clients import Tally
from serving.options import parser_of
from serving.regimes import REGIMES, regime
from serving.server_process import SOCKET

START = 300.0  # seconds that a server may take to start


@dataclass(frozen=True)
class Part:
    """fault: of kvswap.testing, and its options; None: no fault."""

    what: str
    fault: tuple[str, str, dict[str, Any]] | None = None


PARTS = {
    "calm": Part("no fault"),
    "copies": Part("every 40th copy is refused", ("copy", "fail", {"every": 40})),
    "calls": Part("every 150th call to the driver is refused", ("call", "fail", {"every": 150})),
    "delays": Part("every 50th call to the driver returns 0.2 s late", ("call", "delay", {"every": 50, "delay": 0.2})),
    "skipped": Part("one copy is left out in silence, which has to show", ("copy", "skip", {})),
    "lost": Part("the device is lost", ("call", "lose", {"nth": 2000})),
}


class Log:
    """What a server has written since the last look."""

    PATTERNS = {
        "recomputed": re.compile(r"Recovered from KV load failure: (\d+)|failed beside the model: (\d+) request"),
        "stores_dropped": re.compile(r"store \d+ failed, its (\d+) blocks are dropped"),
        "errors": re.compile(r"Traceback"),
    }

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def take(self) -> Counter[str]:
        """By name of a pattern: the sum of its numbers, or how many lines have it."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        self._at += len(text)
        return self.count(text.decode(errors="replace"))

    @classmethod
    def count(cls, text: str) -> Counter[str]:
        """take()'s, of a text."""
        found: Counter[str] = Counter()
        for name, pattern in cls.PATTERNS.items():
            for match in pattern.finditer(text):
                found[name] += next((int(number) for number in match.groups() if number), 1)
        return found


class Server:
    """A server_process of one configuration."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.folder = name, options.work / name.replace(":", "_")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket, self._path = self.folder / SOCKET, options.work / f"log-{self.folder.name}.txt"
        self.socket.unlink(missing_ok=True)
        overrides = json.dumps(overrides_of(options.set))
        command = [sys.executable, "-m", "serving.server_process", name, options.regime, overrides, str(self.folder)]
        with self._path.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        self.log = Log(self._path)

    def ready(self) -> None:
        """Wait until it answers; its weights are those of all others then. SystemExit: it does not."""
        if not _within(START, self._answers):
            raise SystemExit(f"{self.name}: no server; the end of its log is\n{self.tail()}")
        self.call("serving_scale_weights", 1.0)
        self.reset(external=True)
        self.log.take()

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise SystemExit(f"{self.name}: the server has ended; the end of its log is\n{self.tail()}")
        try:
            clients.exchange(self.socket, "GET", "/health", limit=5)
        except (OSError, clients.Refused):
            return False
        return True

    def call(self, method: str, *args: Any) -> list[Any]:
        """Of server_process.FaultyWorker."""
        return clients.call(self.socket, method, *args)

    def counts(self) -> Counter[str]:
        """vLLM's metrics and kvswap's jobs since the start."""
        found: Counter[str] = Counter()
        for rank in self.call("serving_jobs"):
            found.update(rank)
        metrics = clients.samples(clients.exchange(self.socket, "GET", "/metrics").decode())
        for name in ("external_prefix_cache_queries", "external_prefix_cache_hits", "num_preemptions"):
            found[name] = int(metrics.get(f"vllm:{name}_total", 0))
        for name in ("num_requests_running", "num_requests_waiting"):
            found[name] = int(metrics.get(f"vllm:{name}", 0))
        return found

    def reset(self, *, external: bool = False) -> bool:
        """Empty the GPU's prefix cache. False: its blocks are in use."""
        path = "/reset_prefix_cache" + ("?reset_external=true" if external else "")
        return bool(json.loads(clients.exchange(self.socket, "POST", path))["success"])

    def end(self) -> bool:
        """By SIGTERM. False: it had to be killed."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return True

    def fatal(self) -> str:
        """Where the engine ended, of its log: the last lines of its traceback."""
        text = self._path.read_text(errors="replace")
        return " / ".join(re.findall(r"^\(EngineCore.* ERROR .*?\] +(.*)", text, re.MULTILINE)[-4:])

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self._path.read_text(errors="replace").splitlines()[-25:])


def _within(seconds: float, done: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


class Run:
    """All servers, one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.made = options, regime(options.regime, overrides_of(options.set))
        self.asked: list[tuple[list[int], answers.Answer]] = []
        self.failed = False

    def say(self, text: str) -> None:
        """A line of the record."""
        print(text, flush=True)
        if self.options.out is not None:
            with (self.options.out / "server.txt").open("a") as file:
                file.write(text + "\n")

    def references(self, server: Server) -> None:
        """What the server says to each prompt alone; prompts whose tokens rounding may change are left out."""
        options, new, dropped = self.options, 2 * self.made.decode_tokens, 0
        waiting = answers.prompts(self.made, options.seed)
        while waiting:
            prompt, answer = waiting.pop(0), answers.Answer()
            body = clients.completion(prompt, new, best=2)
            answer.add(json.loads(clients.exchange(server.socket, "POST", "/v1/completions", body))["choices"][0])
            if not answers.certain(answer, options.tolerance):
                dropped += 1
                continue
            self.asked.append((prompt, answer))
            if answers.has_next(prompt, self.made):
                waiting.append(answers.next_turn(prompt, answer))
        tokens = sum(len(prompt) for prompt, _ in self.asked)
        self.say(
            f"{len(self.asked)} prompts of {tokens} tokens, answers of {new}; {dropped} left out, because a second "
            f"token is within {2 * options.tolerance:g} of the best"
        )

    def part(self, server: Server, name: str) -> None:
        """One part of a server, and its line."""
        part, load = PARTS[name], clients.Load(server.socket, self.asked, self.options.tolerance, self.options.limit)
        server.reset(external=True)  # so that each part stores
        begin, before = time.monotonic(), server.counts()
        if name == "skipped":
            tally, notes = self._skipped(server, load)
        else:
            if part.fault:
                server.call("serving_fault", *part.fault)
            tally, notes = load.run(self.options.clients, self.options.seconds, self.options.seed), []
            if part.fault and name != "lost":  # of a lost device nothing is left to end
                server.call("serving_fault")
            tally.hung += self._settle(server)
        seconds, after = time.monotonic() - begin, server.counts()
        after.subtract(before)
        self.say(f"{server.name}, {name} ({part.what}), {seconds:.0f} s: " + line(tally, after, server.log.take()))
        for text in notes + [f"  {text}" for text in tally.wrong[:10]]:
            self.say(text)
        if name != "skipped":
            self.failed |= bool(tally.wrong)

    def _skipped(self, server: Server, load: clients.Load) -> tuple[Tally, list[str]]:
        """One copy at a time, each beside a load of its own and from empty caches."""
        options, total, showed = self.options, Tally(), 0
        tries = max(1, round(options.seconds / options.slice))
        for number in range(tries):
            server.call("serving_fault", "copy", "skip", {"nth": 1 + 37 * number})
            tally = load.run(options.clients, options.slice, options.seed + number)
            server.call("serving_fault")
            hung = self._settle(server, external=True)
            showed += bool(tally.differ)
            tally.hung += hung
            total.add(tally)
        self.failed |= showed == 0 or bool(total.hung or total.refused)
        return total, [f"  {showed} of {tries} copies that were left out showed, in {len(total.differ)} answers"]

    def _settle(self, server: Server, *, external: bool = False) -> list[str]:
        """Wait until nothing runs and no GPU block is in use; what does not end."""
        gone = ("num_requests_running", "num_requests_waiting")
        if not _within(self.options.limit, lambda: not any(server.counts()[name] for name in gone)):
            return [f"after the load {server.counts()[gone[0]]} requests run and {server.counts()[gone[1]]} wait"]
        number = 0

        def free() -> bool:
            nonlocal number
            number += 1  # a short request: vLLM looks after transfers in its steps
            body = clients.completion([3 + number % 7] * 5, 3)
            clients.exchange(server.socket, "POST", "/v1/completions", body, self.options.limit)
            return server.reset(external=external)

        return [] if _within(self.options.limit, free) else ["after the load GPU blocks stay in use"]

    def server(self, name: str, parts: list[str]) -> None:
        """A configuration, from its start to its end."""
        server = Server(name, self.options)
        try:
            server.ready()
            if not self.asked:
                self.references(server)
            for part in parts:
                self.part(server, part)
        except (OSError, clients.Refused) as error:
            self.failed = True
            self.say(f"{name}: the server is gone ({error}); {server.fatal()}")
        finally:
            ended = server.end()
        if not ended:
            self.failed = True
            self.say(f"{name}: the server did not end within 60 s of SIGTERM")


def line(tally: Tally, counts: Counter[str], log: Counter[str]) -> str:
    """A part's figures."""
    asked = max(1, counts["external_prefix_cache_queries"])  # what the GPU had not
    return (
        f"{tally.requests} requests ({tally.streams} streams, {tally.aborted} given up), {tally.tokens} tokens, "
        f"{len(tally.differ)} differ, {len(tally.hung)} hang, {len(tally.refused)} refused; slowest "
        f"{tally.slowest:.1f} s, probabilities {tally.off:.1g} off; of the prompt tokens that the GPU had not "
        f"{counts['external_prefix_cache_hits'] / asked:.0%} from the host, {counts['num_preemptions']} preemptions; "
        f"{counts['loads']} loads ({counts['failed_loads']} failed, {log['recomputed']} requests recomputed), "
        f"{counts['stores']} stores ({counts['failed_stores']} failed, {log['stores_dropped']} blocks dropped)"
        + (f"; {log['errors']} tracebacks in the log" if log["errors"] else "")
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = parser_of("serving.server", __doc__)
    add = parser.add_argument
    add("--configs", default="none,kvswap", help=f"of {', '.join(configurations.NAMES)}")
    add("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; none has the first alone")
    add("--seconds", type=float, default=180.0, help="of each part")
    add("--slice", type=float, default=12.0, help="seconds beside each copy that part skipped leaves out")
    add("--clients", type=int, default=6, help="requests at once")
    add("--limit", type=float, default=60.0, help="seconds after which a request hangs")
    add("--tolerance", type=float, default=1e-4, help="of the logarithm of a token's probability")
    add("--regime", default="toy", choices=[*REGIMES])
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="another value for a field of the regime")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="a folder, whose server.txt gets the record too")
    add("--work", type=Path, default=Path("/tmp/kvswap-serving/server"), help="logs, models and sockets")
    options = parser.parse_args()
    for name in options.parts.split(","):
        if name not in PARTS:
            raise SystemExit(f"no part {name!r}; there are {', '.join(PARTS)}")
    return options


def main() -> int:
    """All configurations; the reference is made first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended, in a session of its own
    options = parse()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    run, names, parts = Run(options), options.configs.split(","), options.parts.split(",")
    run.server("none", ["calm"] if "none" in names else [])
    for name in names:
        if name != "none":
            run.server(name, parts)
    run.say("something is wrong" if run.failed else "all answers are those without offloading, and none hangs")
    return int(run.failed)


if __name__ == "__main__":
    sys.exit(main())
