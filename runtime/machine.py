"""The cores and the memory that this process may use, within the limits of its container. Imports no torch."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import psutil

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where a process in a container sees the limits of its control group (version 2)."""


class Memory(NamedTuple):
    """Bytes of the machine, or of the container."""

    available: int
    total: int


def cores() -> int:
    """The CPU cores that this process may use: those of its affinity, or fewer if its container has a quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (CONTROL_GROUP / "cpu.max").read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # there is no quota
        return allowed


def memory() -> Memory:
    """What can still be allocated, and the size.

    Of a container's memory, a cached file that was not used lately, such as a checkpoint that has been read, counts as
    available.
    """
    whole = psutil.virtual_memory()
    try:
        limit, used = (int((CONTROL_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        statistics = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines())
        left = max(0, limit - used + int(statistics["inactive_file"]))
    except (OSError, ValueError, KeyError):  # there is no limit
        return Memory(whole.available, whole.total)
    return Memory(min(whole.available, left), min(whole.total, limit))
