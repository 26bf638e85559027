"""PackedWeight: a linear layer's weight in the order in which a kernel reads it, at an address that never changes."""

import torch
from torch import Tensor

from llmserve.runtime.ops import native

_arena = native.Arena()


class PackedWeight:
    """The weight [N, K] of a linear layer. `copy_` replaces its values in place, so a weight swap is a copy.

    `panels`: `data` is laid out for the native kernels (csrc/gemm.h); else it is the plain weight.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.device = weight.device
        words = 4 // weight.dtype.itemsize or 1
        self.panels = native.usable(weight.contiguous()) and self.in_features % words == 0
        rows = -(-self.out_features // native.PANEL) * native.PANEL if self.panels else self.out_features
        if self.panels:
            self.data = _arena.empty((rows, self.in_features), weight.dtype)
        else:
            self.data = torch.empty((rows, self.in_features), dtype=weight.dtype, device=weight.device)
        self.descriptor = native.Weight(self.data.data_ptr(), self.out_features, self.in_features, 0)
        self.copy_(weight)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def copy_(self, weight: Tensor) -> None:
        """Takes the values of `weight` [N, K]."""
        if self.panels:
            native.pack(weight.contiguous(), self.data)
        else:
            self.data.copy_(weight)

    def unpack(self) -> Tensor:
        """The plain weight [N, K]; not to be written to."""
        return native.unpack(self.data, self.out_features) if self.panels else self.data

    def rows(self, ids: Tensor) -> Tensor:
        """The rows that ids [n] name, [n, K]: an embedding whose table is also the head's weight."""
        return native.gather_rows(self.descriptor, ids, self.dtype) if self.panels else self.data[ids]
