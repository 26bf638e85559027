"""Vitals: whether a scheduler is alive and makes progress, judged by the metrics that it sends.

The caller passes the time: `now` is time.monotonic() in seconds.
"""

from llmserve.runtime.messages import SchedulerMetrics

SILENCE_S = 5.0
"""A live scheduler sends metrics every second. After this time without any, its requests are considered to hang."""
LONG_STEPS = 3
"""A scheduler may be silent, or make no step, for this many times its longest recent step, if that is longer."""
FORGETTING = 0.99
"""The longest step decays by this factor with each report, so to about half in a minute."""


class Vitals:
    """The times at which one scheduler last reported and last made progress."""

    def __init__(self, now: float) -> None:
        self.heard = now
        """When metrics last arrived."""
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
        """What is wrong with the scheduler, as a phrase to follow its name; empty when nothing is."""
        limit = max(SILENCE_S, LONG_STEPS * self._longest_step_s)
        if now - self.heard > limit:
            return f"has not been heard of for {now - self.heard:.0f} s"
        if now - self.moved > limit:
            return f"has made no step for {now - self.moved:.0f} s"
        return ""


def made_progress(before: SchedulerMetrics | None, now: SchedulerMetrics) -> bool:
    """Whether a scheduler made progress between two reports: it made a step, or it is alive with nothing to run.

    A scheduler that is paused, or compiles the grammars that its requests wait for, has nothing to run, unless a step
    is still under way.
    """
    if before is None or now.steps_total != before.steps_total:
        return True
    held = now.state == "paused" or now.compiling > 0
    idle = now.running + now.waiting == 0 or (held and not now.in_step_s)
    return idle and now.time > before.time
