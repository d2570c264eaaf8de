"""What codecs do to a trained model's answers: keys and values of a prompt are stored and loaded through a coded pool,
and the model goes on from them, greedily.

Each prompt's cache is stored and loaded once without a codec and once with each, and every answer is made token by
token from what came back. Printed are blocks whose bytes differ from what was stored, and how many tokens of an
answer, and how many answers, are those without a codec. Needs torch and transformers, and gguf for a .gguf file.

    python benchmarks/codec_answers.py MODEL [--file NAME.gguf] [--prompts 24] [--tokens 64]
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

import kvswap
from kvswap.codecs import CODECS, Coding

BLOCK = 16  # tokens
LIMIT = 60.0

Bytes = npt.NDArray[np.uint8]


class Tier:
    """A coded pool for each tensor of a model's cache, beside the memory that stands for the GPU's."""

    def __init__(self, device: Any, tensors: int, blocks: int, page: int, codec: str | None) -> None:
        coding = Coding(page, codec) if codec else None
        nbytes = coding.coded_nbytes if coding else page
        self.memory = device.alloc(tensors * blocks * page), device.alloc(tensors * blocks * nbytes, host=True)
        self.cache = np.asarray(self.memory[0]).view(np.uint8).reshape(tensors, blocks, page)
        host_ptr = self.memory[1].ptr
        self.gpu_pools: list[kvswap.Pool] = []
        self.host_pools: list[kvswap.Pool] = []
        for i in range(tensors):
            ours: Any = {"group": self.gpu_pools[0]} if self.gpu_pools else {}
            theirs: Any = {"group": self.host_pools[0]} if self.host_pools else {}
            self.gpu_pools.append(kvswap.Pool(device, self.memory[0].ptr + i * blocks * page, blocks, page, **ours))
            at = host_ptr + i * blocks * nbytes
            self.host_pools.append(kvswap.Pool(device, at, blocks, nbytes, coding=coding, **theirs))

    def there_and_back(self, values: Bytes) -> Bytes:
        """Blocks of all tensors, stored, forgotten and loaded."""
        ids = np.arange(values.shape[1])
        self.cache[:] = values
        kvswap.move_blocks(self.gpu_pools, self.host_pools, ids, ids).wait(LIMIT)
        self.cache[:] = 0xFF
        kvswap.move_blocks(self.host_pools, self.gpu_pools, ids, ids).wait(LIMIT)
        return np.array(self.cache)


def blocks_of(cache: Any) -> Bytes:
    """Keys and values of each layer, a block of all heads for each 16 tokens, as bytes."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    rows = torch.stack([tensor[0].transpose(0, 1) for tensor in tensors])  # tokens, heads, channels
    found: Bytes = rows.contiguous().view(torch.int16).numpy().view(np.uint8)
    return found.reshape(len(tensors), rows.shape[1] // BLOCK, -1)


def cache_of(blocks: Bytes, like: Any) -> Any:
    """The inverse: a cache with these keys and values."""
    heads, channels = like.layers[0].keys.shape[1], like.layers[0].keys.shape[3]
    rows = torch.from_numpy(blocks.view(np.int16).copy()).view(torch.bfloat16)
    rows = rows.view(len(blocks), -1, heads, channels).transpose(1, 2)
    made = transformers.DynamicCache()
    for layer in range(len(blocks) // 2):
        made.update(rows[2 * layer][None], rows[2 * layer + 1][None], layer)
    return made


def answer(model: Any, cache: Any, last: torch.Tensor, tokens: int) -> list[int]:
    """Greedily, from the prompt's last token on."""
    found: list[int] = []
    with torch.inference_mode():
        for _ in range(tokens):
            last = model(last, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
            found.append(int(last))
    return found


def same_tokens(one: list[int], other: list[int]) -> int:
    """How many at the beginning agree."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name that transformers knows")
    parser.add_argument("--file", help="a .gguf file in it")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--length", type=int, default=512, help="of a prompt, in tokens: a multiple of 16")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    options = parser.parse_args()
    where: Any = {"gguf_file": options.file} if options.file else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, **where)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, **where)
    model = model.to(torch.bfloat16).eval()
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    numbers = tokenizer(text, return_tensors="pt").input_ids[0]
    device = kvswap.Device("host:0")
    tiers: dict[str | None, Tier] = {}
    answers: dict[str | None, list[list[int]]] = {}
    differ: dict[str | None, int] = {}
    blocks = 0
    for prompt in range(options.prompts):
        own = numbers[prompt * (options.length + 1) :][: options.length + 1][None]
        with torch.inference_mode():
            cache = model(own[:, :-1], use_cache=True).past_key_values
        stored = blocks_of(cache)
        blocks += stored.shape[1]
        for codec in (None, *CODECS):
            if codec not in tiers:
                tiers[codec] = Tier(device, len(stored), stored.shape[1], stored.shape[2], codec)
            back = tiers[codec].there_and_back(stored)
            differ[codec] = differ.get(codec, 0) + int((back != stored).any(axis=(0, 2)).sum())
            answers.setdefault(codec, []).append(answer(model, cache_of(back, cache), own[:, -1:], options.tokens))
    for codec, given in answers.items():
        same = [same_tokens(one, other) for one, other in zip(answers[None], given, strict=True)]
        whole = sum(count == options.tokens for count in same)
        row = {"codec": codec or "none", "blocks": blocks, "blocks that differ": differ[codec]}
        row |= {"answers": len(given), "the same": whole, "tokens before the first other": sum(same) / len(same)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
