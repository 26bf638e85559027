"""Collectives and point-to-point operations between ranks, with counts. All raise RankLost.

Without a process group a collective returns its argument, so that model code is the same with one rank. Groups with
shared memory use that, others torch.distributed. Each rank counts the bytes of the whole tensor that is summed,
gathered or passed on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from llmserve.runtime.distributed.errors import RankLost
from llmserve.runtime.distributed.groups import Group
from llmserve.runtime.ops import native

SMALL_BYTES = 1 << 16


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sums `x` over the ranks, in place."""
    if group.process_group is not None:
        if group.shared is not None and x.dtype in native.DTYPES:
            group.counts.add("all_reduce", x.nbytes)
            own = x.contiguous()
            group.shared.all_reduce(own)
            x.copy_(own)
        elif x.nbytes <= SMALL_BYTES and x.device.type == "cpu" and group.size > 1:
            group.counts.add("all_reduce", x.nbytes)
            _exchange(x, group)
        else:
            _call(group, "all_reduce", x.nbytes, distributed.all_reduce, x)
    return x


def _exchange(x: Tensor, group: Group) -> None:
    """all_reduce for small tensors: each rank sends its tensor to every other rank and adds all up in rank order.

    gloo's own all_reduce hands each call to a thread and proceeds in rounds: for the tensors of a decode step it takes
    two to five times as long (0.33 instead of 0.14 ms on two ranks, 2.3 instead of 0.4 ms on three).
    """
    others = [rank for rank in range(group.size) if rank != group.rank]
    own, handle = x.contiguous(), group.process_group
    try:
        sent = [distributed.isend(own, group_dst=rank, group=handle) for rank in others]
        parts = {rank: torch.empty_like(own) for rank in others}
        for rank, part in parts.items():
            distributed.recv(part, group_src=rank, group=handle)
        for work in sent:
            if work is not None:
                work.wait()
    except RuntimeError as error:
        raise RankLost(_first_line(error)) from error
    parts[group.rank] = own
    total = parts[0].clone()
    for rank in range(1, group.size):
        total += parts[rank]
    x.copy_(total)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Concatenates the ranks' tensors [..., n] in rank order to [..., n * size]."""
    if group.process_group is None:
        return x
    if group.shared is not None:
        group.counts.add("all_gather", x.nbytes * group.size)
        return torch.cat(tuple(group.shared.all_gather(x.contiguous())), -1)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size)]
    whole = x.nbytes * group.size
    _call(group, "all_gather", whole, distributed.all_gather, parts, x.contiguous())
    return torch.cat(parts, -1)


def broadcast(x: Tensor, group: Group, operation: str = "broadcast") -> Tensor:
    """Copies rank 0's values into the others' `x`, which must be contiguous; counted as `operation`."""
    if group.shared is not None:
        group.counts.add(operation, x.nbytes)
        group.shared.broadcast(x)
    elif group.process_group is not None:
        _call(group, operation, x.nbytes, distributed.broadcast, x, group_src=0)
    return x


def pass_over(nbytes: int, group: Group, device: torch.device, operation: str = "broadcast") -> None:
    """Takes part in a broadcast of `nbytes` bytes that this rank, which is not rank 0, does not need."""
    if group.shared is not None:
        group.counts.add(operation, nbytes)
        group.shared.pass_over(nbytes)
    else:
        broadcast(torch.empty(nbytes, dtype=torch.uint8, device=device), group, operation)


def least(value: int, group: Group, device: torch.device) -> int:
    """The smallest of the ranks' values."""
    return min(_values(value, group, device))


def total(value: int, group: Group, device: torch.device) -> int:
    """The sum of the ranks' values."""
    return sum(_values(value, group, device))


def _values(value: int, group: Group, device: torch.device) -> list[int]:
    return list(map(int, all_gather(torch.tensor([value], dtype=torch.int64, device=device), group).tolist()))


def send(x: Tensor, to: int, group: Group, operation: str = "send", tag: int = 0) -> distributed.Work | None:
    """Begins to send `x`, which must not change until the returned work is done (see `finish`). None: it is done."""
    if group.shared is not None:
        group.counts.add(operation, x.nbytes)
        group.shared.send(x, to, tag)
        return None
    work: distributed.Work = _call(group, operation, x.nbytes, distributed.isend, x, group_dst=to, tag=tag)
    return work


def receive(x: Tensor, source: int, group: Group, operation: str = "recv", tag: int = 0) -> Tensor:
    """Receives into `x` what `source` sends with `tag`."""
    if group.shared is not None:
        group.counts.add(operation, x.nbytes)
        group.shared.receive(x, source, tag)
        return x
    _call(group, operation, x.nbytes, distributed.recv, x, group_src=source, tag=tag)
    return x


def finish(work: distributed.Work | None) -> None:
    """Waits until a `send` is done."""
    try:
        if work is not None:
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
    """The first line of torch's message, which continues with a C++ stack trace."""
    return str(error).split("\n")[0]
