"""What ranks say to each other, counted. Without a process group each returns its argument, so that model code reads
the same with one rank.

The bytes that are counted are those of the whole tensor that a call sums, gathers or passes on, on each rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from llmserve.runtime.distributed.groups import Group


class RankLost(Exception):
    """Another rank is gone, or has not answered in time: no collective will succeed any more."""


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, in place."""
    if group.process_group is not None:
        _call(group, "all_reduce", x.nbytes, distributed.all_reduce, x)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """The ranks' tensors side by side in rank order: [..., n] becomes [..., n * size]."""
    if group.process_group is None:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size)]
    whole = x.nbytes * group.size
    _call(group, "all_gather", whole, distributed.all_gather, parts, x.contiguous())
    return torch.cat(parts, -1)


def broadcast(x: Tensor, group: Group, operation: str = "broadcast") -> Tensor:
    """Rank 0's values, in place in the others' `x`; counted as `operation`."""
    if group.process_group is not None:
        _call(group, operation, x.nbytes, distributed.broadcast, x, group_src=0)
    return x


def least(value: int, group: Group, device: torch.device) -> int:
    """The smallest of the ranks' values."""
    return _agree(value, group, device, distributed.ReduceOp.MIN)


def total(value: int, group: Group, device: torch.device) -> int:
    """The sum of the ranks' values."""
    return _agree(value, group, device, distributed.ReduceOp.SUM)


def _agree(value: int, group: Group, device: torch.device, operation: "distributed.ReduceOp.RedOpType") -> int:
    if group.process_group is None:
        return value
    x = torch.tensor([value], dtype=torch.int64, device=device)
    _call(group, "all_reduce", x.nbytes, distributed.all_reduce, x, operation)
    return int(x.item())


def send(x: Tensor, to: int, group: Group, operation: str = "send", tag: int = 0) -> distributed.Work:
    """Begins to send `x`, which must stay as it is until the work is done."""
    work: distributed.Work = _call(group, operation, x.nbytes, distributed.isend, x, group_dst=to, tag=tag)
    return work


def receive(x: Tensor, source: int, group: Group, operation: str = "recv", tag: int = 0) -> Tensor:
    """Fills `x` with what `source` sends under `tag`."""
    _call(group, operation, x.nbytes, distributed.recv, x, group_src=source, tag=tag)
    return x


def finish(work: distributed.Work) -> None:
    """Waits until a `send` is done."""
    try:
        work.wait()
    except RuntimeError as error:
        raise RankLost(_first_line(error)) from error


def _call(group: Group, operation: str, nbytes: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    group.counts.add(operation, nbytes)
    try:
        return function(*args, group=group.process_group, **options)
    except RuntimeError as error:
        raise RankLost(_first_line(error)) from error


def _first_line(error: RuntimeError) -> str:
    """Of torch's message, which goes on with a stack of C++ functions."""
    return str(error).split("\n")[0]
