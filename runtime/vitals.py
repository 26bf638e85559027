"""Whether a scheduler lives and works, judged by the metrics that it sends.

`now` is in seconds of time.monotonic, given by the caller.
"""

from llmserve.runtime.messages import SchedulerMetrics

SILENCE_S = 5.0
"""A scheduler that lives sends metrics every second; after this time without any, requests there hang."""
LONG_STEPS = 3
"""It may also be silent, or make no step, for this many times the longest step of late."""
FORGETTING = 0.99
"""How much of the longest step is remembered from one report to the next: half after a minute."""


class Vitals:
    """The signs of life of one scheduler."""

    def __init__(self, now: float) -> None:
        self.heard = now
        """When metrics came last."""
        self.moved = now
        """When it was last seen to make progress."""
        self._longest_step_s = 0.0
        self._latest: SchedulerMetrics | None = None

    def take(self, metrics: SchedulerMetrics, now: float) -> None:
        self.heard = now
        self._longest_step_s = max(metrics.step_s, self._longest_step_s * FORGETTING)
        if made_progress(self._latest, metrics):
            self.moved = now
        self._latest = metrics

    def fault(self, now: float) -> str:
        """What is wrong with it, in words that follow its name; empty when nothing is."""
        limit = max(SILENCE_S, LONG_STEPS * self._longest_step_s)
        if now - self.heard > limit:
            return f"has not been heard of for {now - self.heard:.0f} s"
        if now - self.moved > limit:
            return f"has made no step for {now - self.moved:.0f} s"
        return ""


def made_progress(before: SchedulerMetrics | None, now: SchedulerMetrics) -> bool:
    """Whether a scheduler that sent `before`, then `now`, works: it made a step, or lives and has nothing that may run.

    A pause excuses it only where no step is under way.
    """
    if before is None or now.steps_total != before.steps_total:
        return True
    idle = now.running + now.waiting == 0 or (now.state == "paused" and not now.in_step_s)
    return idle and now.time > before.time
