"""In the place of vLLM's compiled modules, where a source package is run on a GPU: vllm_pack.py puts it there.

vLLM's CUDA platform imports them, and asks one which kinds of product it has while it looks at a model's class. No
model runs, so all answers are no. Nothing of the offloading layer is in them but swap_blocks_batch, which is kvswap's
here.
"""

# mypy: ignore-errors

import torch

for _name in (
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
):
    setattr(torch.ops._C, _name, lambda *_: False)
