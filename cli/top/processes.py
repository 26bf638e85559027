"""The processes of an instance as they report themselves, and the bubbles of the ranks.

All times are in seconds; `time` and `now` are Unix times.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from llmserve.cli.top.snapshot import Process
from llmserve.runtime.messages import ProcessInfo, SchedulerMetrics

BUBBLE_S = 10.0
"""The window of the ranks' bubbles; their reports are up to a second old."""
ORDER = {"main": 0, "scheduler": 1, "detokenizer": 2}

Rank = tuple[int, int, int, int]
"""dp_rank, pp_rank, tp_rank and pid: pids alone are not unique where ranks are on several machines."""


def rank_of(process: ProcessInfo) -> Rank:
    return process.dp_rank, process.pp_rank, process.tp_rank, process.pid


class Work(NamedTuple):
    """The work of a replica's ranks up to `time`, in seconds since their start."""

    time: float
    active_s: float
    busy_s: dict[Rank, float]


class Processes:
    """The latest report of each process, and of each rank the work in the last BUBBLE_S."""

    def __init__(self) -> None:
        self._reports: dict[Rank, tuple[ProcessInfo, float]] = {}
        """By process: its latest report, and the time of its last sign of life."""
        self._work: dict[int, deque[Work]] = {}
        """By replica, for those of several ranks."""

    def add(self, processes: Iterable[ProcessInfo], time: float) -> None:
        for process in processes:
            self._reports[rank_of(process)] = (process, time - process.silent_s)

    def add_work(self, sample: SchedulerMetrics) -> None:
        if len(sample.processes) > 1:
            work = self._work.setdefault(sample.dp_rank, deque())
            work.append(Work(sample.time, sample.active_s, {rank_of(p): p.busy_s for p in sample.processes}))
            while len(work) > 1 and work[1].time <= sample.time - BUBBLE_S:
                work.popleft()

    def remove(self, processes: Iterable[ProcessInfo]) -> None:
        for process in processes:
            self._reports.pop(rank_of(process), None)

    def clear(self) -> None:
        self._reports.clear()
        self._work.clear()

    def silence_s(self, role: str, now: float) -> float:
        """How long ago the quietest process with this role gave its last sign of life; 0 if there is none."""
        return max((now - seen for info, seen in self._reports.values() if info.role == role), default=0.0)

    def rows(self, now: float) -> tuple[Process, ...]:
        rows = sorted(
            self._reports.values(),
            key=lambda seen: (ORDER.get(seen[0].role, 3), seen[0].dp_rank, seen[0].pp_rank, seen[0].tp_rank),
        )
        return tuple(
            Process(
                role=info.role,
                pid=info.pid,
                tp_rank=info.tp_rank,
                pp_rank=info.pp_rank,
                dp_rank=info.dp_rank,
                rss_bytes=info.rss_bytes,
                cpu_percent=info.cpu_percent,
                heartbeat_age_s=max(0.0, now - seen),
                dropped_messages=info.dropped_messages,
                weight_bytes=info.weight_bytes,
                bubble=self._bubble(info),
            )
            for info, seen in rows
        )

    def _bubble(self, process: ProcessInfo) -> float | None:
        """The fraction of the replica's active time in which a rank did not work; None if it is not known."""
        work, rank = self._work.get(process.dp_rank), rank_of(process)
        if not work or rank not in work[0].busy_s or rank not in work[-1].busy_s:
            return None
        active_s = work[-1].active_s - work[0].active_s
        busy_s = work[-1].busy_s[rank] - work[0].busy_s[rank]
        return min(1.0, max(0.0, 1 - busy_s / active_s)) if active_s > 0 else None
