"""Finds out which ranks are gone, after a collective has failed."""

from datetime import timedelta

import torch
from torch import distributed

from llmserve.runtime.distributed.groups import Group

PROBE_TAG = 99
PROBE_S = 1.0


def find_gone(group: Group) -> list[int]:
    """The ranks of a gloo group that have no connection to this one any more. A failed collective does not name
    them.
    """
    return [rank for rank in range(group.size) if rank != group.rank and not _reachable(rank, group)]


def _reachable(rank: int, group: Group) -> bool:
    """Whether a message that nobody receives can be sent, which it can while there is a connection."""
    try:
        probe = torch.zeros(1, dtype=torch.uint8)
        work = distributed.isend(probe, group=group.process_group, group_dst=rank, tag=PROBE_TAG)
        if work is not None:
            work.wait(timedelta(seconds=PROBE_S))
    except RuntimeError:
        return False
    return True
