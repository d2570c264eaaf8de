"""Makes the small trace that ships with the package, kvswap/data/demo_trace.jsonl.gz, always the same to the byte.

It is a made-up hour of chat in the Mooncake format: conversations begin with one of a few system prompts, often go on
with a document that others ask about too, and grow turn by turn while the reader thinks; each turn sends the whole
conversation again. Prefix blocks come back after seconds (still in the GPU tier), after minutes (by then in the host
tier) or never.

    python benchmarks/make_demo_trace.py [OUTPUT]
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

SEED = 20250220
CHATS = 130
BLOCK_TOKENS = 512
HOUR_MS = 3_600_000
DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "kvswap" / "data" / "demo_trace.jsonl.gz"


@dataclass(order=True)
class Turn:
    """The next request of a chat."""

    timestamp: int
    chat: int
    left: int = field(compare=False)
    tokens: int = field(compare=False)  # of the conversation so far
    blocks: list[object] = field(compare=False)


class Ids:
    """Hands out block ids in the order of first use, as the published traces do."""

    def __init__(self) -> None:
        self._ids: dict[object, int] = {}

    def __call__(self, key: object) -> int:
        return self._ids.setdefault(key, len(self._ids))


def first_turns(rng: random.Random) -> list[Turn]:
    """Every chat's first request: a system prompt, perhaps a document, a question."""
    prompts = [rng.randint(1, 4) for _ in range(5)]
    documents = [rng.randint(4, 24) for _ in range(12)]
    turns = []
    for chat in range(CHATS):
        prompt = rng.choices(range(5), weights=(8, 4, 2, 1, 1))[0]
        shared: list[object] = [("prompt", prompt, i) for i in range(prompts[prompt])]
        if rng.random() < 0.6:
            document = min(int(rng.expovariate(0.35)), 11)
            shared += [("document", prompt, document, i) for i in range(documents[document])]
        tokens = len(shared) * BLOCK_TOKENS + int(rng.lognormvariate(6.3, 0.9))
        turns.append(Turn(rng.randrange(HOUR_MS), chat, rng.randint(1, 7), tokens, shared))
    return turns


def requests(rng: random.Random) -> list[dict[str, object]]:
    """All requests by time."""
    ids = Ids()
    queue = first_turns(rng)
    heapq.heapify(queue)
    out = []
    while queue:
        turn = heapq.heappop(queue)
        need = -(-turn.tokens // BLOCK_TOKENS)
        own: list[object] = [("own", turn.chat, i) for i in range(len(turn.blocks), need)]
        keys = turn.blocks + own
        # The last block is partly filled: a longer conversation has another block there.
        hashes = [ids(key) for key in keys[:-1]] + [ids((keys[-1], turn.tokens))]
        output = min(2000, 1 + int(rng.lognormvariate(5.6, 0.8)))
        out.append(
            {
                "timestamp": turn.timestamp,
                "input_length": turn.tokens,
                "output_length": output,
                "hash_ids": hashes,
            }
        )
        if turn.left > 1:
            later = turn.timestamp + 3000 + int(rng.expovariate(1 / 90_000))
            tokens = turn.tokens + output + int(rng.lognormvariate(6.0, 1.0))
            heapq.heappush(queue, Turn(later, turn.chat, turn.left - 1, tokens, keys[: turn.tokens // BLOCK_TOKENS]))
    return out


def write(output: Path) -> None:
    text = "".join(json.dumps(request) + "\n" for request in requests(random.Random(SEED)))
    with output.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.write(text.encode())


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_OUTPUT)
