"""PackedWeight: a linear layer's weight in the order in which a kernel reads it, at an address that never changes."""

import torch
from torch import Tensor


class PackedWeight:
    """The weight [N, K] of a linear layer. `copy_` replaces its values in place, so a weight swap is a copy."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.device = weight.device
        self.data = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.copy_(weight)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def copy_(self, weight: Tensor) -> None:
        """Takes the values of `weight` [N, K]."""
        self.data.copy_(weight)

    def unpack(self) -> Tensor:
        """The plain weight [N, K]; not to be written to."""
        return self.data
