"""benchmarks/serving/server.py without vLLM: its prompts, comparison, report, and clients on a stand-in of a server."""

# mypy: ignore-errors

from __future__ import annotations

import json
import random
import socketserver
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from conftest import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "serving").exists(), reason="a source package has no benchmarks"
)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def choice(tokens, logprobs=None, best=None):
    made = {"token_ids": tokens, "logprobs": None}
    if logprobs is not None:
        made["logprobs"] = {"token_logprobs": logprobs, "top_logprobs": best or [{"a": x} for x in logprobs]}
    return made


def answer(tokens, logprobs):
    from serving.answers import Answer

    made = Answer()
    made.add(choice(tokens, logprobs))
    return made


class TestAnswers:
    def test_where_answers_differ(self):
        from serving.answers import difference

        reference = answer([5, 6, 7], [-1.0, -2.0, -3.0])
        assert difference(reference, answer([5, 6], [-1.0, -2.00001]), 2, 1e-4) is None
        assert difference(reference, answer([5, 9], [-1.0, -2.0]), 2, 1e-4).at == 1
        assert difference(reference, answer([5, 6], [-1.0, -2.001]), 2, 1e-4).at == 1
        assert difference(reference, answer([5, 6], [-1.0, float("nan")]), 2, 1e-4).at == 1
        assert difference(reference, answer([5], [-1.0]), 2, 1e-4).what == "1 of 2 tokens"
        assert difference(reference, answer([5, 6, 7], [-1.0, -2.0, -3.0]), 2, 1e-4).what == "3 of 2 tokens"

    def test_an_answer_of_parts(self):
        made = answer([5], [-1.0])
        made.add(choice([6], [-2.0], [{"a": -2.0, "b": -2.5}]))
        assert made.tokens == [5, 6] and made.logprobs == [-1.0, -2.0] and made.margins == [float("inf"), 0.5]

    def test_what_rounding_may_change_is_not_asked(self):
        from serving.answers import certain

        made = answer([5, 6], [-1.0, -2.0])
        made.margins = [0.5, 0.3]
        assert certain(made, 0.1) and not certain(made, 0.15)

    def test_prompts_take_twice_the_gpus_cache(self):
        from serving.answers import ENDINGS, has_next, next_turn, prompts
        from serving.models import BLOCK
        from serving.regimes import REGIMES

        made = REGIMES["toy"]
        found = prompts(made, 0)
        assert found == prompts(made, 0) != prompts(made, 1)
        beginnings = {tuple(prompt[: made.length]) for prompt in found}
        assert len(found) == ENDINGS * len(beginnings) and len(beginnings) * made.length >= 2 * made.gpu_blocks * BLOCK
        first = [prompt for prompt in found if has_next(prompt, made)]
        assert len(first) >= len(beginnings)
        second = next_turn(first[0], answer([7] * 2 * made.decode_tokens, []))
        assert second[: len(first[0])] == first[0] and not has_next(second, made)
        assert (len(first[0]) + 2 * made.decode_tokens) % BLOCK == 0  # the answer's last token ends a block
        assert max(map(len, (*found, second))) + 2 * made.decode_tokens <= made.max_len


class StandIn(BaseHTTPRequestHandler):
    """Answers each prompt with the numbers from its first on. mode: what is wrong."""

    mode = "right"
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def address_string(self):
        return "socket"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = [body["prompt"][0] + i for i in range(body["max_tokens"])]
        if self.mode == "other":
            tokens[-1] += 1
        if self.mode == "hang":
            self.server.over.wait(PATIENCE)
            return
        parts = (
            [choice([token], [-1.0]) for token in tokens] if body["stream"] else [choice(tokens, [-1.0] * len(tokens))]
        )
        events = [json.dumps({"choices": [part]}).encode() for part in parts]
        text = events[0]
        if body["stream"]:
            ends = [] if self.mode == "broken" else [b"[DONE]"]
            text = b"".join(b"data: " + event + b"\n\n" for event in events + ends)
        self.send_response(500 if self.mode == "error" else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class SocketServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_):
        """A client went away."""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """The tally of requests to a stand-in of this mode."""
    from serving.clients import Load

    server = SocketServer(str(tmp_path / "socket"), StandIn)
    server.over = threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def asked(mode, count=40, limit=PATIENCE):
        monkeypatch.setattr(StandIn, "mode", mode)
        prompts = [([begin] * 3, answer(list(range(begin, begin + 12)), [-1.0] * 12)) for begin in (5, 50)]
        load, drawn = Load(tmp_path / "socket", prompts, 1e-4, limit), random.Random(1)
        monkeypatch.setattr("serving.clients.time.sleep", lambda _: None)
        went = [load.one(drawn) for _ in range(count)]
        return load.run(0, 0.0, 0), went

    yield asked
    server.over.set()
    server.shutdown()
    thread.join(PATIENCE)
    server.server_close()


class TestClients:
    def test_right_answers(self, ask):
        tally, went = ask("right")
        assert all(went) and tally.requests == 40 and not tally.wrong
        assert tally.whole and tally.streams and tally.aborted

    def test_another_token_is_found(self, ask):
        tally, _ = ask("other")
        assert tally.whole + tally.streams <= len(tally.differ) and not tally.hung + tally.refused
        assert "for 5" in "".join(tally.differ)

    def test_an_answer_that_does_not_come_hangs(self, ask):
        tally, went = ask("hang", count=3, limit=0.1)
        assert len(tally.hung) == went.count(False) > 0 and "no end after" in tally.hung[0]

    @pytest.mark.parametrize("mode", ["error", "broken"])
    def test_errors_are_no_answers(self, ask, mode):
        tally, went = ask(mode)
        assert len(tally.refused) == went.count(False) > 0 and not tally.differ

    def test_no_server(self, tmp_path):
        from serving.clients import Load

        load = Load(tmp_path / "socket", [([5], answer([5], [-1.0]))], 1e-4, PATIENCE)
        assert not load.one(random.Random(0)) and "FileNotFoundError" in load.run(0, 0.0, 0).refused[0]

    def test_metrics(self):
        from serving.clients import samples

        assert samples('# HELP a b\na{x="1 2"} 3.0\na{x="2"} 4.0\nb 1e3\n') == {"a": 7.0, "b": 1000.0}


class TestReport:
    def test_what_the_log_tells(self):
        from serving.server import Log

        text = (
            "(x) WARNING Recovered from KV load failure: 3 request(s) rescheduled (1 tokens affected).\n"
            "a load failed beside the model: 2 request(s) are computed again\n"
            "store 7 failed, its 12 blocks are dropped: injected\nTraceback (most recent call last):\n"
        )
        assert Log.count(text) == Counter(recomputed=5, stores_dropped=12, errors=1)

    def test_a_part_in_a_line(self):
        from serving.clients import Tally
        from serving.server import line

        tally = Tally(whole=2, streams=1)
        tally.add(Tally(aborted=1, differ=["a"], off=1e-6))
        text = line(tally, Counter(external_prefix_cache_queries=200, external_prefix_cache_hits=50), Counter())
        assert text.startswith("4 requests (1 streams, 1 given up), 0 tokens, 1 differ, 0 hang") and "25% from" in text

    def test_faults_are_kvswaps(self):
        from serving.server import PARTS

        import kvswap
        from kvswap import testing

        device = kvswap.Device("host:0")
        for part in PARTS.values():
            if part.fault:
                kind, action, options = part.fault
                with testing.fault(device, kind, action, **{**options, "nth": 10**9}):
                    pass

    def test_the_servers_caches_are_of_float32(self):
        from serving.regimes import REGIMES
        from serving.server_process import in_float32

        assert in_float32(REGIMES["toy"]).cpu_gib == 2 * REGIMES["toy"].cpu_gib
