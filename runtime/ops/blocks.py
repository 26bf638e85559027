"""Weights in the blocks of a GGUF file: which kinds of block the kernels read as they are (csrc/quantized.h).

How other kinds become numbers is models/gguf_tensors.py's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_INPUTS = 32
"""Neighbouring inputs of one output that make a block."""


class BlockFormat(NamedTuple):
    """A kind of block: llama.cpp's ggml-common.h."""

    number: int
    """GGML's, and the kernels'."""
    block_bytes: int
    halves: int
    """float16 numbers that a block begins with: its scale, and the least value in Q4_1."""

    def row_bytes(self, inputs: int) -> int:
        return inputs // BLOCK_INPUTS * self.block_bytes


BLOCK_FORMATS = {number: BlockFormat(number, *rest) for number, rest in {2: (18, 1), 3: (20, 2), 8: (34, 1)}.items()}
"""Q4_0, Q4_1 and Q8_0, by GGML's number."""


@dataclass(frozen=True)
class Blocks:
    """A weight [N, K], or some of its rows, as a file holds it: uint8 [N, bytes of a row]."""

    data: Tensor
    format: BlockFormat

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.data.shape
        return rows, row_bytes // self.format.block_bytes * BLOCK_INPUTS

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
        return bool(torch.isfinite(blocks[:, : 2 * self.format.halves].contiguous().view(torch.float16)).all())
