"""PackedWeight: a linear layer's weight in the order in which a kernel reads it."""

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from llmserve.runtime.ops import native
from llmserve.runtime.ops.blocks import BlockFormat, Blocks

_arena = native.Arena()


def takes_blocks(format: BlockFormat, inputs: int, dtype: torch.dtype) -> bool:
    """Whether a weight with so many inputs, of a model of `dtype` on the CPU, can stay in a file's blocks."""
    return dtype == torch.bfloat16 and inputs % format.block_inputs == 0 and native.library() is not None


class PackedWeight:
    """The weight [N, K] of a linear layer, of values or of blocks. `exchange` makes it another one.

    `panels`: `data` is laid out for the native kernels (csrc/gemm.h, or csrc/quantized.h if there is a `format`), which
    find it through the descriptor, whose address never changes. Else it is the plain weight, which it keeps.
    """

    def __init__(self, weight: Tensor | Blocks, rest: "PackedWeight | None" = None) -> None:
        """`rest`: the outputs after those of `weight`, in another block format; `weight` then is blocks and fills its
        last panel.
        """
        rows, self.in_features = weight.shape
        self.out_features: int = rows + (rest.out_features if rest else 0)
        self.rest = rest
        self.format: BlockFormat | None = None
        padded = -(-rows // native.PANEL) * native.PANEL
        if isinstance(weight, Blocks):
            self.dtype, self.device, self.format, self.panels = torch.bfloat16, weight.data.device, weight.format, True
            self.data = _arena.empty((padded, weight.format.row_bytes(self.in_features)), torch.uint8)
        else:
            self.dtype, self.device = weight.dtype, weight.device
            words = 4 // weight.dtype.itemsize or 1
            self.panels = native.usable(weight.contiguous()) and self.in_features % words == 0
            if self.panels:
                self.data = _arena.empty((padded, self.in_features), weight.dtype)
            else:
                self.data = weight.contiguous()
        self.descriptor = native.Weight(outputs=self.out_features, inputs=self.in_features)
        self._describe()
        if isinstance(weight, Blocks):
            native.pack_blocks(weight.format.number, weight.data.contiguous(), self.data, self.in_features)
        elif self.panels:
            native.pack(weight.contiguous(), self.data)

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts())

    @property
    def block_bytes(self) -> int:
        """Bytes of its blocks in a GGUF file; 0 if it holds values."""
        return sum(
            (part.out_features - (part.rest.out_features if part.rest else 0)) * part.format.row_bytes(self.in_features)
            for part in self.parts()
            if part.format
        )

    def parts(self) -> "Iterator[PackedWeight]":
        """Its parts, each with one format: itself without its rest, then the parts of the rest."""
        yield self
        if self.rest:
            yield from self.rest.parts()

    def exchange(self, other: "PackedWeight") -> None:
        """Makes this the other weight, of the same shape, and the other what this was.

        If both have the same format and no rest, the data is exchanged in place. Otherwise the memory is, which only
        kernels that use the descriptor may know.
        """
        if self.format == other.format and not self.rest and not other.rest:
            old = self.data.clone()
            self.data.copy_(other.data)
            other.data = old
        else:
            self.data, other.data = other.data, self.data
            self.format, other.format = other.format, self.format
            self.rest, other.rest = other.rest, self.rest
        self._describe()
        other._describe()

    def _describe(self) -> None:
        self.descriptor.data = self.data.data_ptr()
        self.descriptor.format = self.format.number if self.format else 0
        self.descriptor.rest = ctypes.addressof(self.rest.descriptor) if self.rest else None

    def part(self, first: int, count: int) -> native.Weight:
        """The descriptor of `count` outputs from `first` on, where a panel begins; good until the next exchange.

        The weight must have no rest.
        """
        address = self.data[first:].data_ptr()
        return native.Weight(address, count, self.in_features, self.descriptor.format)

    def unpack(self) -> Tensor:
        """The plain weight [N, K], blocks rounded to the dtype; not to be written to."""
        if not self.panels:
            return self.data
        if self.format:
            return self.rows(torch.arange(self.out_features))
        return native.unpack(self.data, self.out_features)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows that ids [n] name, [n, K]: an embedding whose table is also the head's weight."""
        return native.gather_rows(self.descriptor, ids, self.dtype) if self.panels else self.data[ids]
