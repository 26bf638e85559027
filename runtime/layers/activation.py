"""The gated activations of an MLP, by the name that a ModelConfig gives them."""

from collections.abc import Callable

from torch import Tensor

from llmserve.runtime.ops import gelu_tanh_and_mul, silu_and_mul

GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
"""[T, 2 * I], gate before up, to [T, I]."""
