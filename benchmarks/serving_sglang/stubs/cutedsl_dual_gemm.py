"""In the place of SGLang's fused GEMM for Blackwell, which would import CUTLASS's Python on any GPU."""

from enum import IntEnum

MAX_DUAL_GEMM_DECODE_TOKENS = 16


class DualGemmQuantMode(IntEnum):
    """As SGLang numbers them."""

    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4


def can_use_dual_gemm(*args: object, **kwargs: object) -> bool:
    """On Blackwell alone."""
    return False
