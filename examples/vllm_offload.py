"""Serve a long prompt three times with vLLM; the third time its KV cache comes from host memory, moved by kvswap.

    pip install vllm /path/to/kvswap
    python examples/vllm_offload.py --model meta-llama/Llama-3.1-8B-Instruct --cpu-gib 16

The same configuration on the command line of `vllm serve` is in docs/vllm.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--cpu-gib", type=float, default=16.0, help="host memory for KV blocks, of all ranks together")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--words", type=int, default=6000, help="length of the prompt")
    args = parser.parse_args()

    try:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        print("this example needs vLLM and a GPU: pip install vllm", file=sys.stderr)
        return 2

    transfer = KVTransferConfig(
        kv_connector="KVSwapConnector",
        kv_connector_module_path="kvswap.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"cpu_bytes_to_use": int(args.cpu_gib * 2**30)},
    )
    llm = LLM(args.model, tensor_parallel_size=args.tensor_parallel_size, kv_transfer_config=transfer)
    prompt = "Sum up this text. " + " ".join(f"Sentence {i} says nothing new." for i in range(args.words // 5))
    params = SamplingParams(max_tokens=16, temperature=0.0)

    first = timed("computed", llm, prompt, params)
    timed("from the GPU's own cache", llm, prompt, params)  # and what was computed goes out to the host meanwhile
    llm.reset_prefix_cache()  # the GPU's; the host's blocks stay
    again = timed("from host memory", llm, prompt, params)
    assert again == first, "the answer changed"
    return 0


def timed(what: str, llm: Any, prompt: str, params: Any) -> str:
    begin = time.perf_counter()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    text = str(output.outputs[0].text)
    print(f"{what:26} {time.perf_counter() - begin:7.3f} s  {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())
