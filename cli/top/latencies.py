"""Latencies of the last minute: percentiles from the growth of histograms over a window."""

from collections import deque

from llmserve.cli.top.snapshot import Latency, Quantiles
from llmserve.runtime.messages import Histogram, HttpMetrics

WINDOW_S = 60.0
"""The window of quantiles and of the hit rate."""
SHORT_S = 5.0
"""With a window below this and fewer than FEW tokens in it, quantiles are over the time since the start."""
FEW = 5


class Latencies:
    """The front's metrics within the window, in order of time."""

    def __init__(self) -> None:
        self._http: deque[HttpMetrics] = deque()

    def __len__(self) -> int:
        return len(self._http)

    def add(self, sample: HttpMetrics) -> None:
        if self._http and sum(sample.e2e.counts) < sum(self._http[-1].e2e.counts):
            self._http.clear()
        self._http.append(sample)
        # The newest sample older than the window is kept as the start of the window.
        while len(self._http) > 1 and self._http[1].time <= sample.time - WINDOW_S:
            self._http.popleft()

    def clear(self) -> None:
        self._http.clear()

    @property
    def newest(self) -> HttpMetrics:
        return self._http[-1]

    def latency(self, now: float, tokens: Histogram, before: Histogram) -> Latency:
        """The latencies at `now`. Inter-token times come from the schedulers: `tokens` now, `before` at the start of
        the window.
        """
        newest = self.newest
        old: HttpMetrics | None = self._http[0]
        if newest.time - self._http[0].time < SHORT_S and sum(tokens.counts) - sum(before.counts) < FEW:
            old = None
        return Latency(
            window_s=min(WINDOW_S, now - old.time) if old else 0.0,
            ttft=quantiles(newest.ttft, old.ttft if old else None),
            itl=quantiles(tokens, before if old else None),
            e2e=quantiles(newest.e2e, old.e2e if old else None),
            queue=quantiles(newest.queue, old.queue if old else None),
        )


def quantiles(histogram: Histogram, since: Histogram | None = None) -> Quantiles:
    """p50, p95 and p99 of the observations after `since`, interpolated linearly within a bucket like Prometheus'
    histogram_quantile().

    A quantile above the last bound is given as that bound.
    """
    old = since.counts if since is not None and since.bounds == histogram.bounds else (0,) * len(histogram.counts)
    counts = [new - before for new, before in zip(histogram.counts, old, strict=True)]
    count = sum(counts)
    if count <= 0:
        return Quantiles()

    def at(share: float) -> float:
        rank = share * count
        below, low = 0, 0.0
        for bound, number in zip(histogram.bounds, counts, strict=False):
            if below + number >= rank and number:
                return low + (bound - low) * (rank - below) / number
            below, low = below + number, bound
        return low

    return Quantiles(count=count, p50=at(0.50), p95=at(0.95), p99=at(0.99))
