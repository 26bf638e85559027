"""Observations since the start, by bucket: what a process counts, and what several have counted together."""

from bisect import bisect_left
from collections.abc import Iterable

from llmserve.runtime.messages import Histogram

STEPS = (1, 1.5, 2, 3, 5, 7.5)


def buckets(low: int, high: int) -> tuple[float, ...]:
    """Six bounds a decade in seconds, from 10**low to 10**high: fine enough to read a percentile from."""
    return (*(float(f"{step}e{decade}") for decade in range(low, high) for step in STEPS), 10.0**high)


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
