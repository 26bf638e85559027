"""A weight's life: loaded part by part, committed for the kernels to read, exchanged by a swap.

`load -> finalize`: values, or a file's blocks, are written to what is staged in their final form, and `commit` makes
them the active ones. What is staged beside active values lies in the CPU's memory: a GPU's is full of KV pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmserve.runtime.ops import BLOCK_INPUTS, BlockFormat, Blocks, PackedWeight, takes_blocks

Staged = Tensor | Blocks | PackedWeight
"""What the next values are, or what a swap has replaced."""


class Weight(ABC):
    """One tensor as the kernels read it. What they hold of its `value` stays valid after the first commit."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._committed = False
        self._staged: Staged | None = None

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def staged(self) -> Tensor:
        """Where the next values are written, [*shape]; not initialised."""
        if not isinstance(self._staged, Tensor):
            device = torch.device("cpu") if self._committed else self.device
            self._staged = torch.empty(self.shape, dtype=self.dtype, device=device)
        return self._staged

    def commit(self) -> None:
        """Exchanges the staged values with the active ones, so that a second commit brings the old ones back."""
        if self._staged is None:
            raise RuntimeError("a weight was committed before it was staged")
        self._staged = self._exchange(self._staged) if self._committed else self._first(self._staged)
        self._committed = True

    def discard(self) -> None:
        """Frees the staged values."""
        self._staged = None

    @abstractmethod
    def _first(self, values: Staged) -> None:
        """Makes `value`."""

    @abstractmethod
    def _exchange(self, values: Staged) -> Staged:
        """Exchanges `value` and returns what it was."""


class PlainWeight(Weight):
    """A weight that is read as the tensor it is."""

    value: Tensor

    def _first(self, values: Staged) -> None:
        assert isinstance(values, Tensor)
        self.value = values

    def _exchange(self, values: Staged) -> Tensor:
        assert isinstance(values, Tensor)
        return _exchange(self.value, values)


class LinearWeight(Weight):
    """The matrix [N, K] of a linear layer, packed as its kernel reads it."""

    value: PackedWeight

    @property
    def nbytes(self) -> int:
        format = self.value.format if self._committed else None
        return self.shape[0] * format.row_bytes(self.shape[1]) if format else super().nbytes

    def staged_blocks(self, format: BlockFormat) -> Tensor:
        """Where the next blocks are written, uint8 [N, bytes of a row]; not initialised."""
        if not isinstance(self._staged, Blocks):
            shape = self.shape[0], format.row_bytes(self.shape[1])
            self._staged = Blocks(torch.empty(shape, dtype=torch.uint8, device=self.device), format)
        assert self._staged.format == format
        return self._staged.data

    def _first(self, values: Staged) -> None:
        self.value = values if isinstance(values, PackedWeight) else PackedWeight(values)

    def _exchange(self, values: Staged) -> Staged:
        if isinstance(values, Tensor) and self.device.type != "cpu":
            return _exchange(self.value.data, values)
        other = values if isinstance(values, PackedWeight) else PackedWeight(values)
        self.value.exchange(other)
        return other


def _exchange(value: Tensor, values: Tensor) -> Tensor:
    """Makes `value` what `values` are, and returns what it was, where `values` lie."""
    old = value.to(values.device, copy=True)
    value.copy_(values)
    return old


@dataclass(frozen=True)
class Slot:
    """Where one tensor of a checkpoint goes: its full shape there, and which part of it enters where."""

    weight: Weight
    shape: tuple[int, ...]
    part: tuple[slice, ...] = ()
    """This rank's part of the tensor; () is all of it."""
    into: tuple[slice, ...] = ()
    """Where in the weight it goes."""
    plus: float = 0.0
    """What is added to every value (gemma's norms)."""

    def takes_blocks(self) -> bool:
        """Whether a tensor in such blocks can enter as it is."""
        return isinstance(self.weight, LinearWeight) and takes_blocks(self.weight.shape[1], self.weight.dtype)

    @property
    def whole_blocks(self) -> bool:
        """Whether this rank's part of a tensor in blocks is made of whole ones."""
        return all(inputs.start % BLOCK_INPUTS == inputs.stop % BLOCK_INPUTS == 0 for inputs in self.part[1:])

    def own(self, values: Tensor | Blocks) -> Tensor | Blocks:
        """This rank's part of a tensor, which has `shape`; of `whole_blocks` where it is in blocks."""
        return values.part(*self.part) if isinstance(values, Blocks) else values[self.part]

    def load(self, own: Tensor | Blocks) -> None:
        """Stages this rank's part of a tensor, which has any floating dtype, or is in blocks where it `takes` them."""
        if isinstance(own, Blocks):
            assert isinstance(self.weight, LinearWeight)
            self.weight.staged_blocks(own.format)[self.into].copy_(own.data)
            return
        target = self.weight.staged()[self.into]
        target.copy_(own)
        if self.plus:
            target.add_(self.plus)


Slots = Iterator[tuple[str, Slot]]
"""Checkpoint names, relative to the layer that yields them, and their slots."""


def join(name: str, slots: Slots) -> Slots:
    """The slots of a part called `name`."""
    return ((f"{name}.{rest}" if rest else name, slot) for rest, slot in slots)
