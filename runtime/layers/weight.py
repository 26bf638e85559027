"""A weight's life: loaded part by part, committed for the kernels to read, exchanged by a swap.

`load -> finalize`: values are written to `staged` in their final form, and `commit` makes them the active ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmserve.runtime.ops import PackedWeight


class Weight(ABC):
    """One tensor as the kernels read it. The address of its `value` never changes after the first commit."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._committed = False
        self._staged: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def staged(self) -> Tensor:
        """Where the next values are written, [*shape]; not initialised."""
        if self._staged is None:
            self._staged = torch.empty(self.shape, dtype=self.dtype, device=self.device)
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
    def _first(self, values: Tensor) -> None:
        """Makes `value`."""

    @abstractmethod
    def _exchange(self, values: Tensor) -> Tensor:
        """Overwrites `value` in place and returns what it was."""


class PlainWeight(Weight):
    """A weight that is read as the tensor it is."""

    value: Tensor

    def _first(self, values: Tensor) -> None:
        self.value = values

    def _exchange(self, values: Tensor) -> Tensor:
        old = self.value.clone()
        self.value.copy_(values)
        return old


class LinearWeight(Weight):
    """The matrix [N, K] of a linear layer, packed as its kernel reads it."""

    value: PackedWeight

    def _first(self, values: Tensor) -> None:
        self.value = PackedWeight(values)

    def _exchange(self, values: Tensor) -> Tensor:
        old = self.value.unpack().clone()
        self.value.copy_(values)
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

    def load(self, tensor: Tensor) -> None:
        """Stages this rank's part of `tensor`, which has `shape` and any floating dtype."""
        target = self.weight.staged()[self.into]
        target.copy_(tensor[self.part])
        if self.plus:
            target.add_(self.plus)


Slots = Iterator[tuple[str, Slot]]
"""Checkpoint names, relative to the layer that yields them, and their slots."""


def join(name: str, slots: Slots) -> Slots:
    """The slots of a part called `name`."""
    return ((f"{name}.{rest}" if rest else name, slot) for rest, slot in slots)
