"""FrontMetrics: what the front counts and times, the clients' view of the service.

The schedulers' own numbers come as SchedulerMetrics (schedulers.py); server/prometheus.py shows all of them.
"""

import time
from typing import Literal

from llmserve.runtime.histogram import Recorder, buckets
from llmserve.runtime.messages import HttpMetrics, ProcessInfo

Outcome = Literal["stop", "length", "abort", "error", "rejected", "unavailable"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "abort", "error", "rejected", "unavailable")


class FrontMetrics:
    """Outcomes and latencies (in seconds) as the front sees them, per choice of a request.

    `ttft` is from the arrival of a request to the first token of a choice, `e2e` to its end, `queue` to its first step.
    The time between tokens is measured by the scheduler: the front receives several tokens at once, and all of them
    when a request is not streamed.
    """

    def __init__(self) -> None:
        self._outcomes: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self.ttft = Recorder(buckets(-3, 2))
        self.e2e = Recorder(buckets(-2, 3))
        self.queue = Recorder(buckets(-4, 3))

    def count_outcome(self, outcome: Outcome, times: int = 1) -> None:
        """`rejected`: the request can never be served; `unavailable`: it cannot be served now."""
        self._outcomes[outcome] += times

    def snapshot(self, processes: tuple[ProcessInfo, ...] = (), routed: dict[str, int] | None = None) -> HttpMetrics:
        return HttpMetrics(
            time=time.time(),
            outcomes=dict(self._outcomes),
            ttft=self.ttft.snapshot(),
            e2e=self.e2e.snapshot(),
            queue=self.queue.snapshot(),
            processes=processes,
            routed=routed or {},
        )
