"""The counters of all replicas over the last minutes: rates, growth over a window, and values per second."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec

from llmserve.runtime.histogram import added
from llmserve.runtime.messages import Histogram, SchedulerMetrics

RATE_S = 3.0
"""The window of rates: short enough to show a change, long enough to be readable."""
HISTORY_S = 300


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of all replicas together at one time (Unix seconds)."""

    time: float
    running: int
    waiting: int
    kv_used: int
    kv_cached: int
    steps: int
    prefill: int
    decode: int
    cached: int
    prompt: int
    requests: int
    evicted: int
    retractions: int
    asked_retractions: int
    itl: Histogram


class History:
    """Totals in order of time, over the last HISTORY_S seconds."""

    def __init__(self) -> None:
        self._totals: deque[Totals] = deque()

    def __len__(self) -> int:
        return len(self._totals)

    def add(self, replicas: Iterable[SchedulerMetrics], time: float) -> None:
        """Adds the totals of all replicas at `time`."""
        self._totals.append(total(replicas, time))
        while self._totals[0].time < time - HISTORY_S - 1:
            self._totals.popleft()

    def clear(self) -> None:
        self._totals.clear()

    @property
    def newest(self) -> Totals:
        return self._totals[-1]

    def before(self, time: float) -> Totals:
        """The newest totals at or before `time`, else the oldest ones."""
        place = bisect_right(self._totals, time, key=lambda totals: totals.time)
        return self._totals[max(0, place - 1)]

    def rates(self, now: float) -> Callable[[Callable[[Totals], int]], float]:
        """A function from a counter to its growth per second over the last RATE_S seconds."""
        newest, before = self._totals[-1], self.before(now - RATE_S)
        elapsed = newest.time - before.time
        return lambda counter: (counter(newest) - counter(before)) / elapsed if elapsed > 0 else 0.0

    def curves(self, now: float) -> dict[str, tuple[float, ...]]:
        """Gauges and rates per second: each second has the last totals that came before its end."""
        if not self._totals:
            return {}
        first = self._totals[0].time
        seconds = min(HISTORY_S, int(now - first))
        marks = [self.before(now - back) for back in range(seconds, -1, -1)]
        pairs = list(pairwise(marks))

        def grown(counter: Callable[[Totals], int]) -> tuple[float, ...]:
            return tuple(float(counter(b) - counter(a)) for a, b in pairs)

        return {
            "running": tuple(float(mark.running) for mark in marks[1:]),
            "waiting": tuple(float(mark.waiting) for mark in marks[1:]),
            "kv_used": tuple(float(mark.kv_used) for mark in marks[1:]),
            "prefill": grown(lambda t: t.prefill),
            "decode": grown(lambda t: t.decode),
            "requests": grown(lambda t: t.requests),
        }


def total(replicas: Iterable[SchedulerMetrics], time: float) -> Totals:
    parts = list(replicas)
    return Totals(
        time=time,
        running=sum(r.running for r in parts),
        waiting=sum(r.waiting for r in parts),
        kv_used=sum(r.kv_tokens_used for r in parts),
        kv_cached=sum(r.kv_tokens_cached for r in parts),
        steps=sum(r.steps_total for r in parts),
        prefill=sum(r.prefill_tokens_total for r in parts),
        decode=sum(r.decode_tokens_total for r in parts),
        cached=sum(r.cached_tokens_total for r in parts),
        prompt=sum(r.prompt_tokens_total for r in parts),
        requests=sum(r.requests_total for r in parts),
        evicted=sum(r.evicted_tokens_total for r in parts),
        retractions=sum(r.retractions_total for r in parts),
        asked_retractions=sum(r.asked_retractions_total for r in parts),
        itl=added(r.itl for r in parts),
    )
