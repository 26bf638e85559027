"""The memory and CPU usage of a process."""

import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

INTERVAL_S = 0.4
"""The least time between two measurements: CPU time is counted in ticks of 10 ms."""


class Usage(NamedTuple):
    rss_bytes: int
    cpu_percent: float
    """100 is one core; over the time since the last measurement, at least INTERVAL_S. 0 at first."""


class Meter:
    """Measures one process. Callers may `read` as often as they like without disturbing each other."""

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
