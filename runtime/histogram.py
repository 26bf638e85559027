"""Histograms of observations since the start: recording them, and adding those of several processes."""

from bisect import bisect_left
from collections.abc import Iterable

from llmserve.runtime.messages import Histogram

COARSE = (1, 1.5, 2, 3, 5, 7.5)
"""The bounds per decade that are exported to Prometheus, where each bucket is a stored time series."""
FINE = (1, 1.1, 1.2, 1.35, 1.5, 1.65, 1.8, 2, 2.2, 2.4, 2.7, 3, 3.3, 3.6, 4, 4.5, 5, 5.5, 6, 6.7, 7.5, 8.2, 9)
"""The bounds per decade that are recorded, about a tenth apart, so that percentiles have an error of a few percent."""


def buckets(low: int, high: int, steps: tuple[float, ...] = FINE) -> tuple[float, ...]:
    """Bucket bounds in seconds, from 10**low to 10**high."""
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
    """The sum of histograms with the same bounds; those without bounds are empty and are ignored."""
    found = [histogram for histogram in histograms if histogram.bounds]
    if not found:
        return Histogram()
    return Histogram(
        bounds=found[0].bounds,
        counts=tuple(map(sum, zip(*(histogram.counts for histogram in found), strict=True))),
        sum=sum(histogram.sum for histogram in found),
    )
