"""The ranks that one model is split over, and this process's place among them. collectives.py has the collectives."""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed


@dataclass(frozen=True)
class Group:
    """This process's place among the ranks of one kind of parallelism. With size 1 every collective is a no-op."""

    rank: int = 0
    size: int = 1
    process_group: distributed.ProcessGroup | None = None


@dataclass(frozen=True)
class Topology:
    """Tensor-parallel ranks hold slices of the same layers, pipeline ranks hold different layers."""

    tp: Group = Group()
    pp: Group = Group()


def init_topology(rank: int, tp_size: int, pp_size: int, init_method: str, device: str, timeout_s: float) -> Topology:
    """Joins the tp_size * pp_size ranks at `init_method` (tcp://HOST:PORT); rank = pp_rank * tp_size + tp_rank.

    Every rank must call it. nccl joins CUDA devices, gloo CPUs. A collective that takes longer than `timeout_s` raises.
    """
    world = tp_size * pp_size
    if world == 1:
        return Topology()
    distributed.init_process_group(
        "nccl" if torch.device(device).type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    tp_ranks = [[stage * tp_size + i for i in range(tp_size)] for stage in range(pp_size)]
    pp_ranks = [[stage * tp_size + i for stage in range(pp_size)] for i in range(tp_size)]
    return Topology(tp=_join(tp_ranks, rank), pp=_join(pp_ranks, rank))


def _join(groups: list[list[int]], rank: int) -> Group:
    """Makes every group, which all ranks must do in the same order, and returns this rank's."""
    mine = Group()
    for ranks in groups:
        if len(ranks) > 1:
            handle = distributed.new_group(ranks)
            if rank in ranks:
                mine = Group(ranks.index(rank), len(ranks), handle)
    return mine
