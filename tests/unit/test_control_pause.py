"""Pause, resume and drain over a scheduler with a fake worker."""

import pytest
from operated import LONG, Operated, refusal

from llmserve.runtime.messages import (
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    DrainReqInput,
    DrainReqOutput,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetLoadReqInput,
    GetLoadReqOutput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    PingReqInput,
    UpdateWeightReqInput,
)
from llmserve.runtime.server.admin import PauseBody


def test_pause_that_retracts_frees_all_memory_and_loses_nothing() -> None:
    harness = Operated()
    harness.start_running("a", "b")
    prompt = [1, 2, 3, 4, 5, 6]
    assert harness.ask(PauseGenerationReqInput(mode="retract")) == PauseGenerationReqOutput(retracted=2)
    shown = harness.scheduler.snapshots.metrics()
    assert (shown.asked_retractions_total, shown.retractions_total) == (2, 0), "memory is not short"
    assert harness.scheduler.kv.used == 0
    assert isinstance(harness.ask(FlushCacheReqInput()), FlushCacheReqOutput)
    steps = harness.ask(PingReqInput())
    for _ in range(20):
        harness.turn()
    assert harness.ask(PingReqInput()) == steps
    assert steps.state == "paused"  # type: ignore[attr-defined]
    harness.send("c", [3] * 6)
    assert harness.ask(ContinueGenerationReqInput()) == ContinueGenerationReqOutput(resumed=3)
    harness.run()
    assert harness.output("a") == harness.expected(prompt, LONG)
    assert [harness.finish(rid).type for rid in "abc"] == ["length"] * 3
    harness.check_empty()


def test_a_change_of_the_state_is_told_at_once() -> None:
    """A turn takes 0.01 s here, and metrics come twice a second."""
    harness = Operated()
    harness.start_running("a")
    assert harness.metrics[-1].state == "ready"
    harness.call(PauseGenerationReqInput(mode="drain"))
    harness.turn()
    assert harness.metrics[-1].state == "paused"
    harness.call(ContinueGenerationReqInput())
    harness.turn()
    assert harness.metrics[-1].state == "ready"


def test_pause_that_drains_lets_what_runs_end_and_nothing_else_start() -> None:
    harness = Operated()
    harness.start_running("a")
    client = harness.call(PauseGenerationReqInput(mode="drain"))
    harness.turn()
    harness.send("b", [9] * 6)
    harness.run()
    assert harness.answer(client) == PauseGenerationReqOutput()
    assert harness.finish("a") == FinishReason(type="length")
    assert harness.rows("b") == []
    harness.ask(ContinueGenerationReqInput())
    harness.run()
    assert harness.finish("b") == FinishReason(type="length")


def test_pause_that_aborts_ends_what_runs() -> None:
    harness = Operated(max_running_requests=1)
    harness.start_running("a")
    harness.send("b", [9] * 6)
    harness.turn()
    assert harness.ask(PauseGenerationReqInput(mode="abort")) == PauseGenerationReqOutput(aborted=1)
    assert harness.finish("a").type == "abort"
    assert harness.ask(ContinueGenerationReqInput()) == ContinueGenerationReqOutput(resumed=1)
    harness.run()
    assert harness.finish("b") == FinishReason(type="length")


def test_a_pause_whose_caller_gives_up_leaves_things_as_they_were() -> None:
    harness = Operated()
    harness.start_running("a")
    assert refusal(harness.ask(PauseGenerationReqInput(mode="drain"), timeout_s=0.05)) == (
        "timeout",
        "not done in time: pausing (1 running)",
    )
    assert harness.scheduler.state == "ready"
    harness.run()
    assert isinstance(harness.ask(PauseGenerationReqInput()), PauseGenerationReqOutput)


def test_resume_cancels_a_pause_that_is_not_there_yet() -> None:
    harness = Operated()
    harness.start_running("a")
    client = harness.call(PauseGenerationReqInput(mode="drain"))
    harness.turn()
    harness.ask(ContinueGenerationReqInput(), turns=1)
    harness.turn()
    assert refusal(harness.heard(client)[-1]) == ("failed", "resumed meanwhile")
    assert harness.scheduler.state == "ready"


@pytest.mark.parametrize("mode", ["drain", "retract", "abort"])
def test_resume_of_what_is_not_paused_and_pause_of_what_is(mode: PauseMode) -> None:
    harness = Operated()
    assert harness.ask(ContinueGenerationReqInput()) == ContinueGenerationReqOutput(resumed=0)
    for _ in range(2):
        assert harness.ask(PauseGenerationReqInput(mode=mode)) == PauseGenerationReqOutput()
    assert harness.scheduler.state == "paused"
    harness.ask(ContinueGenerationReqInput())
    assert harness.scheduler.state == "ready"


def test_drain_refuses_what_comes_and_finishes_what_is_there() -> None:
    harness = Operated(max_running_requests=1)
    harness.start_running("a")
    harness.send("b", [9] * 6)
    harness.turn()
    assert harness.ask(DrainReqInput()) == DrainReqOutput(running=1, waiting=1)
    harness.send("c", [8] * 6)
    harness.run()
    assert (harness.finish("c").type, harness.finish("c").status) == ("error", 503)
    assert [harness.finish(rid).type for rid in "ab"] == ["length", "length"]
    load = harness.ask(GetLoadReqInput())
    assert isinstance(load, GetLoadReqOutput)
    assert (load.state, load.running, load.waiting) == ("draining", 0, 0)
    harness.ask(ContinueGenerationReqInput())
    harness.send("d", [7] * 6)
    harness.run()
    assert (harness.finish("d").type, harness.scheduler.state) == ("length", "ready")


def test_a_pause_and_a_drain_exclude_each_other() -> None:
    """Together they would keep clients waiting for answers that never come."""
    harness = Operated()
    harness.start_running("a")
    harness.ask(PauseGenerationReqInput())
    assert refusal(harness.ask(DrainReqInput())) == ("busy", "it is paused, so that nothing would end: resume it first")
    harness.ask(ContinueGenerationReqInput())
    harness.ask(DrainReqInput())
    for mode in ("drain", "retract", "abort"):
        paused = harness.ask(PauseGenerationReqInput(mode=mode))
        assert refusal(paused) == ("busy", "it is draining: resume it first")
    harness.run()
    assert harness.finish("a") == FinishReason(type="length")


def test_a_pause_keeps_what_runs_unless_told_otherwise() -> None:
    """Over both doors, as an update of the weights does."""
    modes = {PauseGenerationReqInput().mode, UpdateWeightReqInput(model_path="m").mode, PauseBody().mode}
    assert modes == {"retract"}
