"""What a scheduler's metrics say of whether it works."""

import msgspec
import pytest

from llmserve.runtime.messages import SchedulerMetrics
from llmserve.runtime.vitals import Vitals, made_progress

BEFORE = SchedulerMetrics(
    time=100.0,
    dp_rank=0,
    state="ready",
    weight_version=1,
    uptime_s=1.0,
    steps_total=7,
    running=1,
    waiting=0,
    kv_tokens_total=0,
    kv_tokens_used=0,
    kv_tokens_cached=0,
    prefill_tokens_total=0,
    decode_tokens_total=0,
    cached_tokens_total=0,
    prompt_tokens_total=0,
    requests_total=0,
    evicted_tokens_total=0,
    retractions_total=0,
)


@pytest.mark.parametrize(
    ("changes", "works"),
    [
        ({}, False),  # nothing has been heard since
        ({"time": 101.0}, False),  # it lives, but does not get on with what it has
        ({"time": 101.0, "steps_total": 8}, True),
        ({"time": 101.0, "running": 0}, True),
        ({"time": 101.0, "running": 0, "waiting": 3}, False),
        ({"time": 101.0, "running": 0, "waiting": 3, "state": "paused"}, True),  # an operator wants it so
        ({"time": 101.0, "state": "paused", "in_step_s": 9.0}, False),  # the pause waits for a step that hangs
        ({"time": 101.0, "running": 0, "waiting": 3, "compiling": 1}, True),
        ({"time": 101.0, "compiling": 1, "in_step_s": 9.0}, False),
        ({"running": 0}, False),  # an idle scheduler says at least that it lives
    ],
)
def test_what_counts_as_progress(changes: dict[str, object], works: bool) -> None:
    assert made_progress(BEFORE, msgspec.structs.replace(BEFORE, **changes)) is works
    assert made_progress(None, BEFORE)


def test_silence_is_told_before_a_lack_of_steps() -> None:
    vitals = Vitals(1000.0)
    vitals.take(BEFORE, 1000.0)
    assert vitals.fault(1005.0) == ""
    assert vitals.fault(1006.0) == "has not been heard of for 6 s"
    vitals.take(BEFORE, 1006.0)
    assert vitals.fault(1007.0) == "has made no step for 7 s"
    vitals.take(msgspec.structs.replace(BEFORE, steps_total=8, step_s=7.0), 1007.0)
    assert vitals.fault(1027.0) == "", "its steps are long"
    assert vitals.fault(1029.0) == "has not been heard of for 22 s"
