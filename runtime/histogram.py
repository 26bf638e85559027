"""Observations since the start, by bucket: what a process counts, and what several have counted together."""

from bisect import bisect_left
from collections.abc import Iterable

from llmserve.runtime.messages import Histogram

COARSE = (1, 1.5, 2, 3, 5, 7.5)
"""The bounds of a decade that Prometheus is given: each bucket is a series that somebody stores."""
FINE = (1, 1.1, 1.2, 1.35, 1.5, 1.65, 1.8, 2, 2.2, 2.4, 2.7, 3, 3.3, 3.6, 4, 4.5, 5, 5.5, 6, 6.7, 7.5, 8.2, 9)
"""Those that are counted by, a tenth apart: a percentile is read from them with an error of a few percent."""


def buckets(low: int, high: int, steps: tuple[float, ...] = FINE) -> tuple[float, ...]:
    """Bounds in seconds, from 10**low to 10**high."""
    return (*(float(f"{step}e{decade}") for decade in range(low, high) for step in steps), 10.0**high)


class Recorder:
    """Observations since the start, by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> Histogram:
        return Histogram(bounds=self._bounds, counts=tuple(self._counts), sum=self._sum)


def added(histograms: Iterable[Histogram]) -> Histogram:
    """What all have counted together. Their bounds are the same, but for those that have none and no observation."""
    found = [histogram for histogram in histograms if histogram.bounds]
    if not found:
        return Histogram()
    return Histogram(
        bounds=found[0].bounds,
        counts=tuple(map(sum, zip(*(histogram.counts for histogram in found), strict=True))),
        sum=sum(histogram.sum for histogram in found),
    )
