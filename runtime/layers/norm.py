"""RMSNorm, also together with the residual addition before it."""

import torch
from torch import Tensor

from llmserve.runtime.layers.weight import PlainWeight, Slot, Slots
from llmserve.runtime.ops import add_rms_norm, rms_norm


class RMSNorm:
    """x / rms(x) * weight; with `plus_one` the checkpoint holds weight - 1 (gemma).

    The weight is kept in float32, which is exact where the checkpoint's 1 + w would be rounded in bfloat16.
    """

    def __init__(self, size: int, eps: float, device: torch.device, plus_one: bool = False) -> None:
        self.eps = eps
        self.plus_one = plus_one
        self.weight = PlainWeight((size,), torch.float32, device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        return rms_norm(x, self.weight.value, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual."""
        return add_rms_norm(x, residual, self.weight.value, self.eps)

    def slots(self) -> Slots:
        yield "weight", Slot(self.weight, self.weight.shape, plus=1.0 if self.plus_one else 0.0)
