"""What a process uses of the machine: its memory, and its share of the CPUs."""

import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

INTERVAL_S = 0.4
"""CPU time comes in ticks of 10 ms: over less time than this the share would be noise."""


class Usage(NamedTuple):
    rss_bytes: int
    cpu_percent: float
    """Of one core, since the last look that was not just before; 0 at the first."""


class Meter:
    """Looks at one process. Several may ask at any time without making each other's answer worse."""

    def __init__(self, process: psutil.Process, now: Callable[[], float] = time.monotonic) -> None:
        """Raises psutil.Error, as `read` does, when the process is gone."""
        self.pid = process.pid
        self._process = process
        self._now = now
        self._looked = now(), self._cpu_s()
        self._cpu_percent = 0.0

    def read(self) -> Usage:
        now, (before, cpu_before_s) = self._now(), self._looked
        if now - before >= INTERVAL_S:
            cpu_s = self._cpu_s()
            self._looked = now, cpu_s
            self._cpu_percent = 100 * (cpu_s - cpu_before_s) / (now - before)
        return Usage(self._process.memory_info().rss, self._cpu_percent)

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)
