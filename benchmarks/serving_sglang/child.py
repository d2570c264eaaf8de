"""An engine's process: phases are asked for by lines of JSON on stdin, and answered on a descriptor of their own.

python3 -m serving_sglang.child WAY - OPTIONS FOLDER DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from serving.child import serve
from serving.engine import Request, prompt
from serving.phases import itl, ms

from serving_sglang import scheduler
from serving_sglang.ways import PAGE, TOY, Sizes, arguments, environment

LIMIT = 60.0  # seconds that a request, or a set of them, may take
WARM, TRUTH, STORED, DECODERS = range(1, 5)  # kinds of prompts: none shares a page with another
ANSWER = 16  # tokens


class Asked(Request):
    """A request, and how many of its prompt's tokens SGLang had, by place: device, host."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__("", tokens)
        self.details: dict[str, int] = {}
        self.grown = asyncio.Event()


class Phases:
    """Of one engine, in the order in which they are asked for."""

    def __init__(self, way: str, sizes: Sizes, folder: Path, more: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        class Whole(Engine):  # type: ignore[misc]  # SGLang may be missing when types are checked
            run_scheduler_process_func = staticmethod(scheduler.run)

        begin = time.perf_counter()
        self.engine = Whole(**arguments(way, sizes, folder, more))
        self.start_s = round(time.perf_counter() - begin, 1)
        self.sizes, self._decoders = sizes, 0
        self._answer = folder / f"answer-{os.getpid()}.json"
        self._look("scale_weights")

    def _look(self, call: str, **given: Any) -> Any:
        """A method of scheduler.Looks."""
        rpc = self.engine.collective_rpc
        rpc("serving_look", call=call, given=json.dumps(given), answer=str(self._answer))
        return json.loads(self._answer.read_text())

    def about(self) -> dict[str, Any]:
        """What SGLang chose."""
        import sglang
        import torch

        return {
            **self._look("about"), "sglang": sglang.__version__, "torch": torch.__version__, "start_s": self.start_s,
        }  # fmt: skip

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _request(self, tokens: list[int], new: int, request: Asked | None = None) -> Asked:
        request = request or Asked(tokens)
        params = {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True}
        request.begin = time.perf_counter()
        async for out in await self.engine.async_generate(input_ids=tokens, sampling_params=params, stream=True):
            now, made = time.perf_counter(), out["output_ids"]
            request.times += [now] * (len(made) - len(request.times))
            request.tokens = made
            request.grown.set()
            request.cached = out["meta_info"]["cached_tokens"]
            request.details = out["meta_info"].get("cached_tokens_details") or {}
        return request

    def _do(self, work: Any) -> Any:
        return self.engine.loop.run_until_complete(asyncio.wait_for(work, LIMIT))

    def _one(self, tokens: list[int], new: int) -> Asked:
        made: Asked = self._do(self._request(tokens, new))
        return made

    def _prompts(self, kind: int, count: int) -> list[list[int]]:
        return [prompt(kind, i, self.sizes.length) for i in range(count)]

    def _settle(self) -> None:
        limit = time.monotonic() + LIMIT
        while not self._look("settle"):
            if time.monotonic() > limit:
                raise TimeoutError("the scheduler does not come to rest")
            time.sleep(0.01)

    def _forget(self, overwrite: bool = False) -> None:
        self._settle()
        left = self._look("forget", overwrite=overwrite)
        if left:
            raise RuntimeError(f"the GPU keeps {left} tokens")

    # -- before measuring ---------------------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Kernels, and the first store and load."""
        for _ in range(2):
            self._one(prompt(WARM, 0, self.sizes.length), 8)
            self._forget(overwrite=True)
        return {}

    def truth(self) -> dict[str, Any]:
        """Sums of pages as computed, and as they came back from the host, twice. Between, the GPU's are overwritten."""
        prompts, found, made = self._prompts(TRUTH, self.sizes.truth), [], []
        for _ in range(3):
            made.append([self._one(tokens, ANSWER) for tokens in prompts])
            self._settle()
            found.append(self._look("sums", prompts=prompts))
            self._forget(overwrite=True)
        compared = [self._compare(found[0], after) for after in found[1:]]
        return {
            "blocks": [count for count, _ in compared], "differ": [wrong for _, wrong in compared],
            "distinct": len({page for each in found[0] for page in each}),
            "tokens_cached": [sum(request.cached for request in each) for each in made],
            "from_host": [sum(request.details.get("host", 0) for request in each) for each in made],
            "same_answers": [
                sum(a.tokens == b.tokens for a, b in zip(made[0], each, strict=True)) for each in made[1:]
            ],
            **self._look("take"),
        }  # fmt: skip

    def _compare(self, before: list[list[int]], after: list[list[int]]) -> tuple[int, int]:
        """Pages that came from the host, and how many of them differ: a prompt's last page is always computed."""
        whole = (self.sizes.length - 1) // PAGE
        pairs = [pair for a, b in zip(before, after, strict=True) for pair in zip(a[:whole], b[:whole], strict=True)]
        return len(pairs), sum(a != b for a, b in pairs)

    def skipped(self) -> dict[str, Any]:
        """A page that is left out of a load has to show in what truth() compares."""
        prompts = self._prompts(TRUTH, 1)
        self._forget(overwrite=True)
        self._one(prompts[0], 1)
        self._settle()
        before = self._look("sums", prompts=prompts)
        self._forget(overwrite=True)
        self._look("leave_out")
        self._one(prompts[0], 1)
        if not self._look("left_out"):
            raise RuntimeError("nothing was loaded")
        self._settle()
        blocks, differ = self._compare(before, self._look("sums", prompts=prompts))
        self._look("take")
        self._settle()
        self._look("clear")
        return {"blocks": blocks, "differ": differ}

    def store(self) -> dict[str, Any]:
        """The prompts that the later phases load, computed and stored one at a time."""
        self._settle()
        self._look("clear")
        done = [self._one(tokens, 1) for tokens in self._prompts(STORED, self.sizes.prompts)]
        self._settle()
        made = self._look("take")
        self.burst()  # kernels for several prompts are compiled
        return {"ttft_ms": ms([request.ttft for request in done]), **made}

    # -- measured again and again -------------------------------------------------------------------------------------

    def hits(self, repeat: int = 0) -> dict[str, Any]:
        """Prompts one at a time: when the host has them, and at once again, when the GPU has them (the floor)."""
        self._forget()
        self._look("take")
        first, again = [], []
        for i in range(self.sizes.hits):
            tokens = prompt(STORED, (repeat * self.sizes.hits + i) % self.sizes.prompts, self.sizes.length)
            first.append(self._one(tokens, 1))
            again.append(self._one(tokens, 1))
        return {
            "ttft_ms": ms([request.ttft for request in first]), "floor_ms": ms([request.ttft for request in again]),
            "cached": [request.details.get("host", 0) for request in first],
            "floor_cached": [request.details.get("device", 0) for request in again], **self._look("take"),
        }  # fmt: skip

    def burst(self, repeat: int = 0) -> dict[str, Any]:
        """All prompts at once."""
        del repeat
        self._forget()
        self._look("take")
        prompts = self._prompts(STORED, self.sizes.prompts)

        async def all_of_them() -> list[Asked]:
            return await asyncio.gather(*(self._request(tokens, ANSWER) for tokens in prompts))

        begin = time.perf_counter()
        done = self._do(all_of_them())
        seconds = time.perf_counter() - begin
        return {
            "seconds": round(seconds, 4), "tokens_per_s": round(sum(map(len, prompts)) / seconds),
            "ttft_ms": ms([request.ttft for request in done]), "cached": sum(request.cached for request in done),
            **self._look("take"),
        }  # fmt: skip

    def alone(self, repeat: int = 0) -> dict[str, Any]:
        """Decoding, with the stores that it makes itself."""
        del repeat
        return self._decode([])

    def loads(self, repeat: int = 0) -> dict[str, Any]:
        """Decoding beside requests that the host has. One begins with every few tokens of the decoders, so that all
        ways have as much to do: clients that wait for each other's answers fall into step with SGLang's scheduler, in
        one of several rhythms that differ by a half."""
        first = repeat * self.sizes.hits % self.sizes.prompts
        prompts = self._prompts(STORED, self.sizes.prompts)
        return self._decode(prompts[first:] + prompts[:first])

    def _decode(self, stream: list[list[int]]) -> dict[str, Any]:
        self._forget()
        self._look("take")
        made = self._do(self._decoding(stream))
        self._settle()
        return {**made, **self._look("take")}

    async def _decoding(self, stream: list[list[int]]) -> dict[str, Any]:
        sizes, requests = self.sizes, list[Asked]()
        for _ in range(sizes.decoders):
            self._decoders += 1
            requests.append(Asked(prompt(DECODERS, self._decoders, 8 * PAGE)))
        decoders = [
            asyncio.create_task(self._request(request.prompt, sizes.decode_tokens, request)) for request in requests
        ]
        while not all(request.times for request in requests) and not any(task.done() for task in decoders):
            await asyncio.sleep(0.001)
        begin = time.perf_counter()

        first, beside = requests[0], list[asyncio.Task[Asked]]()
        while stream and len(first.times) < sizes.decode_tokens:
            if len(first.times) >= sizes.pace * (len(beside) + 1):
                beside.append(asyncio.create_task(self._request(stream[len(beside) % len(stream)], 1)))
                continue
            first.grown.clear()
            await first.grown.wait()
        await asyncio.gather(*decoders)
        seconds = time.perf_counter() - begin
        done = await asyncio.gather(*beside)
        gaps = [b - a for request in requests for a, b in pairwise(request.times) if a >= begin]
        return {
            "itl_ms": itl(gaps), "seconds": round(seconds, 4), "streamed": len(done),
            "stream_ttft_ms": ms([request.ttft for request in done]),
            "cached": sum(request.details.get("host", 0) for request in done),
        }  # fmt: skip


def _start(way: str, given: dict[str, Any], folder: Path) -> tuple[Phases, dict[str, Any]]:
    os.environ.update(environment(way))
    sizes = TOY if given["toy"] else Sizes()
    if sizes.device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    phases = Phases(way, Sizes(**{**vars(sizes), **given["sizes"]}), folder, given["engine"])
    return phases, phases.about()


def main() -> None:
    """One of SGLang's engines."""
    way, _, options, folder, descriptor = sys.argv[1:]
    status = serve(int(descriptor), lambda: _start(way, json.loads(options), Path(folder)))
    os._exit(status)  # the parent ends the process group, and with it SGLang's other processes


if __name__ == "__main__":
    main()
