"""The operations that decoder layers are made of. Each has a reference in torch (reference.py), which says what it is.

Where the CPU and a compiler allow, native kernels take over (csrc/); the results are the same but for rounding.
"""

from torch import Tensor

from llmserve.runtime.ops import reference
from llmserve.runtime.ops.packed import PackedWeight
from llmserve.runtime.ops.reference import add_rms_norm, apply_rotary, gelu_tanh_and_mul, rms_norm, silu_and_mul

__all__ = [
    "PackedWeight",
    "add_rms_norm",
    "apply_rotary",
    "gelu_tanh_and_mul",
    "linear",
    "rms_norm",
    "silu_and_mul",
]


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]; [..., N]."""
    return reference.linear(x, weight.unpack() if isinstance(weight, PackedWeight) else weight, bias)
