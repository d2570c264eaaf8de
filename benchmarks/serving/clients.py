"""HTTP requests to a server on a socket: whole, as a stream, and given up half-way, each within a time limit."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.answers import Answer, difference, farthest

HEADERS = {"Content-Type": "application/json"}


class Refused(Exception):
    """An answer that is none: another status than 200, or an error in a stream."""


class Connection(http.client.HTTPConnection):
    """To a socket's path, for one exchange that takes `limit` seconds at most."""

    def __init__(self, path: Path, limit: float) -> None:
        super().__init__("localhost", timeout=limit)
        self._path, self._end = str(path), time.monotonic() + limit

    def connect(self) -> None:
        """As HTTPConnection's, to the path."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def still(self) -> None:
        """The next part of an answer may take what is left. TimeoutError: nothing is."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer has not ended")
        if self.sock is not None:
            self.sock.settimeout(left)

    def send_json(self, method: str, path: str, body: Any = None) -> None:
        """A request."""
        self.request(method, path, None if body is None else json.dumps(body), HEADERS)


def exchange(socket_path: Path, method: str, path: str, body: Any = None, limit: float = 60.0) -> bytes:
    """An answer's body. Refused: it is none. OSError, TimeoutError: there is none."""
    connection = Connection(socket_path, limit)
    try:
        connection.send_json(method, path, body)
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise Refused(f"{path}: {response.status} {text[:300]!r}")
        return text
    finally:
        connection.close()


def call(socket_path: Path, method: str, *args: Any, limit: float = 60.0) -> list[Any]:
    """A method of server_process.FaultyWorker, in each worker."""
    body = {"method": method, "args": args}
    found: list[Any] = json.loads(exchange(socket_path, "POST", "/collective_rpc", body, limit))["results"]
    return found


def samples(text: str) -> dict[str, float]:
    """Prometheus' text: the sum of each metric over its labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def completion(prompt: list[int], new: int, *, stream: bool = False, best: int = 1) -> dict[str, Any]:
    """A request's body. best: how many tokens' probabilities to tell."""
    return {
        "prompt": prompt, "max_tokens": new, "temperature": 0.0, "ignore_eos": True, "stream": stream,
        "return_token_ids": True, "logprobs": best, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def choices(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Of a stream of events. Refused: one is an error, or the stream breaks off."""
    for line in lines:
        text = line.strip()
        if text == b"data: [DONE]":
            return
        if text:
            event = json.loads(text.removeprefix(b"data: "))
            if not event.get("choices"):
                raise Refused(f"a stream has {text[:300]!r}")
            yield event["choices"][0]
    raise Refused("a stream broke off")


@dataclass
class Tally:
    """What came of requests."""

    whole: int = 0
    streams: int = 0
    aborted: int = 0
    tokens: int = 0
    off: float = 0.0  # the largest difference of a logarithm of a token's probability
    differ: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds

    def add(self, other: Tally) -> None:
        """Its requests too."""
        self.whole, self.streams = self.whole + other.whole, self.streams + other.streams
        self.aborted, self.tokens = self.aborted + other.aborted, self.tokens + other.tokens
        self.off, self.slowest = max(self.off, other.off), max(self.slowest, other.slowest)
        self.differ += other.differ
        self.hung += other.hung
        self.refused += other.refused

    @property
    def requests(self) -> int:
        """All that came to an end, or were given up."""
        return self.whole + self.streams + self.aborted

    @property
    def wrong(self) -> list[str]:
        """What must not be."""
        return self.differ + self.hung + self.refused


class Load:
    """Clients that send prompts in random order, one request each at a time."""

    def __init__(self, path: Path, asked: list[tuple[list[int], Answer]], tolerance: float, limit: float) -> None:
        self._path, self._asked, self._tolerance, self._limit = path, asked, tolerance, limit
        self._lock = threading.Lock()
        self._tally = Tally()  # guarded by _lock

    def run(self, clients: int, seconds: float, seed: int) -> Tally:
        """For so long; each request that began comes to its end."""
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=self._client, args=(f"{seed}.{i}", end)) for i in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made, self._tally = self._tally, Tally()
        return made

    def _client(self, seed: str, end: float) -> None:
        drawn = random.Random(seed)
        while time.monotonic() < end and self.one(drawn):
            pass

    def one(self, drawn: random.Random) -> bool:
        """A request. False: it hung, or was refused."""
        number = drawn.randrange(len(self._asked))
        prompt, reference = self._asked[number]
        longest = len(reference.tokens)
        new = longest if drawn.random() < 0.3 else drawn.randint(1, min(8, longest))
        kind = drawn.choices(("whole", "stream", "aborted"), (0.5, 0.3, 0.2))[0]
        begin, name = time.monotonic(), f"prompt {number}, {new} tokens, {kind}"
        connection = Connection(self._path, self._limit)
        try:
            got, new = self._exchange(connection, kind, prompt, new, drawn)
        except TimeoutError:
            return self._note("hung", f"{name}: no end after {self._limit:.0f} s")
        except (OSError, http.client.HTTPException, Refused) as error:
            return self._note("refused", f"{name}: {error!r}")
        finally:
            connection.close()
        found = difference(reference, got, new, self._tolerance)
        with self._lock:
            tally = self._tally
            tally.whole, tally.streams = tally.whole + (kind == "whole"), tally.streams + (kind == "stream")
            tally.aborted, tally.tokens = tally.aborted + (kind == "aborted"), tally.tokens + len(got.tokens)
            tally.slowest = max(tally.slowest, time.monotonic() - begin)
            if found is None:
                tally.off = max(tally.off, farthest(reference, got))
            else:
                tally.differ.append(f"{name}: at token {found.at}, {found.what}")
        return True

    def _note(self, kind: str, what: str) -> bool:
        with self._lock:
            getattr(self._tally, kind).append(what)
        return False

    def _exchange(
        self, connection: Connection, kind: str, prompt: list[int], new: int, drawn: random.Random
    ) -> tuple[Answer, int]:
        """The answer, and the tokens that it has to have: those that came, of a request that is given up."""
        got = Answer()
        stream = kind == "stream" or (kind == "aborted" and drawn.random() < 0.5)
        connection.send_json("POST", "/v1/completions", completion(prompt, new, stream=stream))
        if kind == "aborted" and not stream:
            time.sleep(drawn.random() * 0.3)
            return got, 0
        response = connection.getresponse()
        if response.status != 200:
            raise Refused(f"{response.status} {response.read()[:300]!r}")
        if not stream:
            got.add(json.loads(response.read())["choices"][0])
            return got, new
        last = drawn.randrange(new) if kind == "aborted" else new
        for choice in choices(response):
            got.add(choice)
            if kind == "aborted" and len(got.tokens) >= last:
                return got, len(got.tokens)
            connection.still()
        return got, new
