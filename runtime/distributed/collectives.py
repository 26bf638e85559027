"""The collectives of tensor parallelism. With one rank each returns its argument, so that model code reads the same."""

import torch
from torch import Tensor, distributed

from llmserve.runtime.distributed.groups import Group


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, in place."""
    if group.size > 1:
        distributed.all_reduce(x, group=group.process_group)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """The ranks' tensors side by side in rank order: [..., n] becomes [..., n * size]."""
    if group.size == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size)]
    distributed.all_gather(parts, x.contiguous(), group=group.process_group)
    return torch.cat(parts, -1)


def broadcast(x: Tensor, group: Group) -> Tensor:
    """Rank 0's values, in place in the others' `x`."""
    if group.size > 1:
        distributed.broadcast(x, group_src=0, group=group.process_group)
    return x
