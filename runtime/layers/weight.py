"""A weight's life: loaded part by part, committed for the kernels to read, exchanged by a swap.

`load -> finalize`: values, or a file's blocks, are written to what is staged in their final form, and `commit` makes
them the active ones. What is staged beside active values lies in the CPU's memory: a GPU's is full of KV pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmserve.runtime.ops import BlockFormat, Blocks, PackedWeight, takes_blocks
from llmserve.runtime.ops.native import PANEL

Staged = Tensor | Blocks | dict[int, Blocks] | PackedWeight
"""The next values, or what a swap has replaced. A dict holds blocks of several formats by their first rows."""


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
    """The matrix [N, K] of a linear layer, packed as its kernel reads it.

    `mixes`: whether the tensors merged into it may keep different block formats.
    """

    value: PackedWeight

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, mixes: bool = False
    ) -> None:
        super().__init__(shape, dtype, device)
        self.mixes = mixes

    @property
    def nbytes(self) -> int:
        return (self._committed and self.value.block_bytes) or super().nbytes

    def staged_blocks(self, format: BlockFormat) -> Tensor:
        """Where the next blocks are written, uint8 [N, bytes of a row]; not initialised."""
        if not isinstance(self._staged, Blocks):
            shape = self.shape[0], format.row_bytes(self.shape[1])
            self._staged = Blocks(torch.empty(shape, dtype=torch.uint8, device=self.device), format)
        assert self._staged.format == format
        return self._staged.data

    def takes_parts(self, firsts: Iterable[int]) -> bool:
        """Whether tensors whose first rows here are `firsts` may keep different block formats."""
        return self.mixes and all(first % PANEL == 0 for first in firsts)

    def stage_apart(self, first: int, blocks: Blocks) -> None:
        """Stages the tensor that fills the rows from `first` on, for a weight with several block formats."""
        if not isinstance(self._staged, dict):
            self._staged = {}
        self._staged[first] = Blocks(blocks.data.clone(), blocks.format)

    def _first(self, values: Staged) -> None:
        self.value = _packed(values)

    def _exchange(self, values: Staged) -> Staged:
        if isinstance(values, Tensor) and self.device.type != "cpu":
            return _exchange(self.value.data, values)
        other = _packed(values)
        self.value.exchange(other)
        return other


def _packed(values: Staged) -> PackedWeight:
    if isinstance(values, PackedWeight):
        return values
    if not isinstance(values, dict):
        return PackedWeight(values)
    last, *others = sorted(values, reverse=True)
    packed = PackedWeight(values[last])
    for first in others:
        packed = PackedWeight(values[first], packed)
    return packed


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

    def takes_blocks(self, format: BlockFormat) -> bool:
        """Whether a tensor in such blocks can enter as it is."""
        return isinstance(self.weight, LinearWeight) and takes_blocks(format, self.weight.shape[1], self.weight.dtype)

    def whole_blocks(self, format: BlockFormat) -> bool:
        """Whether this rank's part of a tensor in such blocks is made of whole ones."""
        size = format.block_inputs
        return all(inputs.start % size == inputs.stop % size == 0 for inputs in self.part[1:])

    def own(self, values: Tensor | Blocks) -> Tensor | Blocks:
        """This rank's part of a tensor, which has `shape`; of `whole_blocks` where it is in blocks."""
        return values.part(*self.part) if isinstance(values, Blocks) else values[self.part]

    @property
    def first_row(self) -> int:
        """The first row of the weight that it fills."""
        return self.into[0].start if self.into else 0

    def load(self, own: Tensor | Blocks, apart: bool = False) -> None:
        """Stages this rank's part of a tensor, which has any floating dtype, or is in blocks where it `takes` them.

        `apart`: other tensors of the weight have other block formats.
        """
        if isinstance(own, Blocks):
            assert isinstance(self.weight, LinearWeight)
            if apart:
                self.weight.stage_apart(self.first_row, own)
            else:
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
