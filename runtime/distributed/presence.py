"""Which ranks are gone, for who has just learned that one is."""

from datetime import timedelta

import torch
from torch import distributed

from llmserve.runtime.distributed.groups import Group

PROBE_TAG = 99
PROBE_S = 1.0


def find_gone(group: Group) -> list[int]:
    """The ranks of a group that is joined by gloo to which no connection is left: a failed collective names none."""
    return [rank for rank in range(group.size) if rank != group.rank and not _reachable(rank, group)]


def _reachable(rank: int, group: Group) -> bool:
    """By a message that nobody waits for: it goes while there is a connection, whatever the other rank is doing."""
    try:
        probe = torch.zeros(1, dtype=torch.uint8)
        work = distributed.isend(probe, group=group.process_group, group_dst=rank, tag=PROBE_TAG)
        if work is not None:
            work.wait(timedelta(seconds=PROBE_S))
    except RuntimeError:
        return False
    return True
