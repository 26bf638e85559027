"""The cores and the memory that this process may use, within the limits of its container. Imports no torch."""

import math
import os
from pathlib import Path

import psutil

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where a process in a container sees the limits of its control group (version 2)."""


def cores() -> int:
    """The CPU cores that this process may use: those of its affinity, or fewer if its container has a quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (CONTROL_GROUP / "cpu.max").read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # there is no quota
        return allowed


def available_memory() -> int:
    """The bytes that can still be allocated.

    Of a container's memory, a cached file that was not used lately, such as a checkpoint that has been read, counts as
    available.
    """
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((CONTROL_GROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        statistics = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines())
        return min(available, max(0, int(limit) - int(used) + int(statistics["inactive_file"])))
    except (OSError, ValueError, KeyError):  # there is no limit
        return available
