"""Prompts of a seed, and whether an answer is the one that the server gives without offloading, alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.models import BLOCK, VOCABULARY
from serving.regimes import Regime

ENDINGS = 3  # prompts that begin alike


@dataclass
class Answer:
    """Tokens, the logarithm of each one's probability, and, if asked for, how far behind the second best was."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """One of vLLM's choices, whole or a part of a stream."""
        self.tokens += choice["token_ids"] or []
        if (found := choice["logprobs"]) is None:
            return
        self.logprobs += found["token_logprobs"]
        for best in found["top_logprobs"]:
            first, *rest = sorted(best.values(), reverse=True)
            self.margins.append(first - rest[0] if rest else float("inf"))


@dataclass(frozen=True)
class Difference:
    """at: the first token that is another, or whose probability is; or where one answer ended."""

    at: int
    what: str


def difference(reference: Answer, got: Answer, length: int, tolerance: float) -> Difference | None:
    """None: `got` is the reference's first `length` tokens."""
    for at in range(length):
        if at >= len(got.tokens):
            return Difference(at, f"{len(got.tokens)} of {length} tokens")
        if got.tokens[at] != reference.tokens[at]:
            return Difference(at, f"token {got.tokens[at]} for {reference.tokens[at]}")
        off = abs(got.logprobs[at] - reference.logprobs[at])
        if not off <= tolerance:
            return Difference(at, f"a logarithm of the probability {off:.2g} off")
    return None if len(got.tokens) == length else Difference(length, f"{len(got.tokens)} of {length} tokens")


def farthest(reference: Answer, got: Answer) -> float:
    """The largest difference of the logarithms of the tokens' probabilities."""
    return max((abs(a - b) for a, b in zip(got.logprobs, reference.logprobs, strict=False)), default=0.0)


def certain(reference: Answer, tolerance: float) -> bool:
    """Whether rounding below the tolerance cannot change a token: both of a margin's sides may be off by it."""
    return all(margin > 2 * tolerance for margin in reference.margins)


def prompts(made: Regime, seed: int) -> list[list[int]]:
    """Prompts that share beginnings, which take twice the GPU's cache. Every third is of whole blocks: the first turn
    of a conversation."""
    drawn = np.random.default_rng([seed, 19])
    found = []
    for _ in range(-(-2 * made.gpu_blocks * BLOCK // made.length)):
        begin = drawn.integers(3, VOCABULARY, made.length).tolist()
        for number in range(ENDINGS):
            length = made.length + int(drawn.integers(1, made.length // 2))
            if number == 0:
                length = -(-length // BLOCK) * BLOCK
            found.append(begin + drawn.integers(3, VOCABULARY, length - made.length).tolist())
    return found


def has_next(prompt: list[int], made: Regime) -> bool:
    """Whether a conversation goes on: it does, once."""
    return len(prompt) % BLOCK == 0 and len(prompt) < made.length * 3 // 2 + BLOCK


def next_turn(prompt: list[int], answer: Answer) -> list[int]:
    """The prompt that begins with the first turn and its answer, whose last token may end a block."""
    return prompt + answer.tokens + prompt[: BLOCK // 2 + 1]
