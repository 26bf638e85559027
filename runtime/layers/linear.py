"""Linear layers, split over tensor-parallel ranks by their outputs (column-parallel) or their inputs (row-parallel)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmserve.runtime.distributed.collectives import all_reduce
from llmserve.runtime.distributed.groups import Group
from llmserve.runtime.layers.weight import LinearWeight, PlainWeight, Slot, Slots
from llmserve.runtime.ops import linear


@dataclass(frozen=True)
class Rows:
    """This rank's rows [start, start + count) of the `total` rows that a checkpoint's tensor has."""

    total: int
    start: int
    count: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.count)


def split_rows(total: int, group: Group) -> Rows:
    """An even split. Raises ValueError when there is none."""
    if total % group.size:
        raise ValueError(f"{total} rows cannot be split over {group.size} ranks")
    count = total // group.size
    return Rows(total, group.rank * count, count)


def split_heads(heads: int, head_dim: int, group: Group) -> Rows:
    """The rows of this rank's attention heads. With fewer heads than ranks, neighbouring ranks hold the same head."""
    if heads % group.size and group.size % heads:
        raise ValueError(f"{heads} heads cannot be split over {group.size} ranks")
    if heads >= group.size:
        return split_rows(heads * head_dim, group)
    return Rows(heads * head_dim, group.rank * heads // group.size * head_dim, head_dim)


class ColumnParallelLinear:
    """Several projections of one input as one: a rank has `parts[name].count` of the outputs of each."""

    def __init__(
        self, in_features: int, parts: Mapping[str, Rows], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.in_features = in_features
        self.parts = parts
        self.out_features = sum(rows.count for rows in parts.values())
        self.weight = LinearWeight((self.out_features, in_features), dtype, device, mixes=True)
        self.bias = PlainWeight((self.out_features,), dtype, device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, the parts' counts side by side]."""
        return linear(x, self.weight.value, self.bias.value if self.bias else None)

    def slots(self) -> Slots:
        offset = 0
        for name, rows in self.parts.items():
            part, into = (rows.slice,), (slice(offset, offset + rows.count),)
            yield f"{name}.weight", Slot(self.weight, (rows.total, self.in_features), part, into)
            if self.bias:
                yield f"{name}.bias", Slot(self.bias, (rows.total,), part, into)
            offset += rows.count


class RowParallelLinear:
    """A projection whose input is split over the ranks: each adds its partial sum, and all have the whole output."""

    def __init__(
        self,
        columns: Rows,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> None:
        self.columns = columns
        self.out_features = out_features
        self.group = group
        self.weight = LinearWeight((out_features, columns.count), dtype, device)
        self.bias = PlainWeight((out_features,), dtype, device) if bias else None

    @property
    def partial_bias(self) -> PlainWeight | None:
        """What this rank adds to its partial sum: the first one adds the bias for all."""
        return self.bias if self.group.rank == 0 else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, columns.count] to [T, out_features]."""
        bias = self.partial_bias.value if self.partial_bias else None
        return all_reduce(linear(x, self.weight.value, bias), self.group)

    def slots(self) -> Slots:
        part = (slice(None), self.columns.slice)
        yield "weight", Slot(self.weight, (self.out_features, self.columns.total), part)
        if self.bias:
            yield "bias", Slot(self.bias, (self.out_features,))
