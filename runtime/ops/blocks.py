"""Weights in the blocks of a GGUF file: which kinds of block the kernels read as they are (csrc/quantized.h).

How other kinds become numbers is models/gguf_tensors.py's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class BlockFormat(NamedTuple):
    """A kind of block: llama.cpp's ggml-common.h."""

    number: int
    """GGML's, and the kernels'."""
    block_inputs: int
    """Neighbouring inputs of one output that make a block."""
    block_bytes: int
    halves: slice
    """The bytes of its float16 numbers: a scale, and what is the unit of the least values where it has them."""

    def row_bytes(self, inputs: int) -> int:
        return inputs // self.block_inputs * self.block_bytes


BLOCK_FORMATS = {
    format.number: format
    for format in (
        BlockFormat(2, 32, 18, slice(0, 2)),  # Q4_0
        BlockFormat(3, 32, 20, slice(0, 4)),  # Q4_1
        BlockFormat(8, 32, 34, slice(0, 2)),  # Q8_0
        BlockFormat(12, 256, 144, slice(0, 4)),  # Q4_K
        BlockFormat(13, 256, 176, slice(0, 4)),  # Q5_K
        BlockFormat(14, 256, 210, slice(208, 210)),  # Q6_K
    )
}
"""By GGML's number."""


@dataclass(frozen=True)
class Blocks:
    """A weight [N, K], or some of its rows, as a file holds it: uint8 [N, bytes of a row]."""

    data: Tensor
    format: BlockFormat

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.data.shape
        return rows, row_bytes // self.format.block_bytes * self.format.block_inputs

    def part(self, rows: slice = slice(None), inputs: slice | None = None) -> "Blocks":
        """Some rows and inputs, which begin and end with a block."""
        row_bytes = self.format.row_bytes
        columns = slice(None) if inputs is None else slice(row_bytes(inputs.start), row_bytes(inputs.stop))
        return Blocks(self.data[rows, columns], self.format)

    def split(self, rows: list[int]) -> list["Blocks"]:
        return [Blocks(part, self.format) for part in torch.split(self.data, rows)]

    def finite(self) -> bool:
        """Whether all weights are: whether the scales and least values are."""
        blocks = self.data.view(-1, self.format.block_bytes)
        return bool(torch.isfinite(blocks[:, self.format.halves].contiguous().view(torch.float16)).all())
