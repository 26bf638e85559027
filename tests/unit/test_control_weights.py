"""Updates of the weights: when the new ones serve, and when the old ones stay."""

import time

import pytest
from operated import LONG, refusal
from updated import Updated

from instances import PATIENCE_S, wait_until
from llmserve.runtime.config import ConfigError
from llmserve.runtime.messages import (
    ContinueGenerationReqInput,
    FinishReason,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    PauseMode,
    RpcProgress,
    UpdateWeightReqInput,
    UpdateWeightReqOutput,
)


def test_an_update_reads_the_format_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Updated(monkeypatch)
    assert refusal(harness.update("/models/new", load_format="gguf"))[0] == "failed"
    harness.check_old_serves()
    assert isinstance(harness.update("/models/new.gguf", load_format="gguf"), UpdateWeightReqOutput)


@pytest.mark.parametrize("mode", ["drain", "retract", "abort"])
def test_an_update_pauses_commits_flushes_and_goes_on(monkeypatch: pytest.MonkeyPatch, mode: PauseMode) -> None:
    harness = Updated(monkeypatch, max_running_requests=1)
    harness.send("before", [5] * 20)
    harness.run()
    assert harness.scheduler.kv.cached > 0
    harness.start_running("a")
    harness.send("b", [9] * 6)
    harness.swap.may_read.clear()  # reads until the test lets it, so that "a" still runs then
    client = harness.call(UpdateWeightReqInput(model_path="/models/new", mode=mode))
    harness.turn()
    harness.swap.may_read.set()
    while (answer := harness.answer(client)) is None:
        time.sleep(0.002)
        harness.turn()
    assert isinstance(answer, UpdateWeightReqOutput)
    assert (answer.old_version, answer.new_version, answer.bytes, answer.differences) == (1, 2, 300, ())
    assert 0 <= answer.paused_s < answer.seconds
    assert harness.scheduler.weight_version == 2
    assert (harness.swap.serving, harness.swap.staged) == ("/models/new", "")
    assert harness.scheduler.kv.cached == 0
    harness.run()
    assert harness.finish("a").type == ("abort" if mode == "abort" else "length")
    assert harness.finish("b").type == "length"
    shown = harness.scheduler.snapshots.metrics()
    assert (shown.asked_retractions_total, shown.retractions_total) == (mode == "retract", 0), "memory is not short"
    if mode == "retract":
        assert harness.output("a") == harness.expected([1, 2, 3, 4, 5, 6], LONG)
    harness.check_empty()


def test_steps_go_on_while_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Updated(monkeypatch)
    harness.start_running("a")
    harness.swap.may_read.clear()
    client = harness.call(UpdateWeightReqInput(model_path="/models/new"))
    while harness.scheduler.table.running:
        harness.turn()
    assert harness.answer(client) is None
    assert harness.finish("a") == FinishReason(type="length")
    harness.clock += 1.0
    harness.turn()
    assert harness.heard(client)[-1] == RpcProgress(stage="reading", done=0.0, total=300.0, unit="bytes")
    assert refusal(harness.ask(FlushCacheReqInput())) == ("busy", "an update of the weights is under way already")
    assert refusal(harness.ask(ContinueGenerationReqInput()))[0] == "busy"
    harness.swap.may_read.set()
    while harness.answer(client) is None:
        harness.turn()
    assert harness.swap.serving == "/models/new"


def test_an_update_that_does_not_fit_is_refused_with_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Updated(monkeypatch)
    harness.swap.differing = [f"layer {i}: shape [2], the model has [3]" for i in range(7)]
    code, text = refusal(harness.update())
    assert code == "failed"
    assert text.splitlines() == [
        "the checkpoint differs from the model that runs:",
        *harness.swap.differing[:5],
        "and 2 more, which a dry run tells",
    ]
    harness.check_old_serves()


def test_a_dry_run_reports_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Updated(monkeypatch)
    harness.swap.differing = ["config: num_layers is 3, the model has 2"]
    answer = harness.update(dry_run=True)
    assert isinstance(answer, UpdateWeightReqOutput)
    assert (answer.old_version, answer.new_version) == (1, 1)
    assert answer.differences == ("config: num_layers is 3, the model has 2",)
    harness.swap.differing = []
    answer = harness.update(dry_run=True)
    assert isinstance(answer, UpdateWeightReqOutput)
    assert answer.differences == ()
    harness.check_old_serves()


@pytest.mark.parametrize("error", [ConfigError("shard 2 is damaged"), OSError("disk"), MemoryError(), ValueError("x")])
def test_a_failed_read_leaves_the_old_weights(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    harness = Updated(monkeypatch)
    harness.start_running("a")
    harness.swap.fail_stage = error
    code, text = refusal(harness.update())
    assert code == "failed"
    assert text.endswith("; the old weights serve on")
    harness.check_old_serves()
    harness.run()
    assert harness.finish("a") == FinishReason(type="length")
    assert refusal(harness.update("/missing/model"))[1] == "/missing/model does not exist; the old weights serve on"
    harness.swap.fail_stage = None
    assert isinstance(harness.update(), UpdateWeightReqOutput)


def test_a_failed_commit_leaves_the_old_weights_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Updated(monkeypatch)
    harness.start_running("a")
    harness.swap.fail_commit = MemoryError("no room")
    assert refusal(harness.update()) == ("failed", "the exchange failed (no room); the old weights serve on")
    harness.check_old_serves()
    harness.run()
    assert harness.finish("a") == FinishReason(type="length")


def test_a_caller_who_leaves_cancels_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Updated(monkeypatch)
    harness.swap.may_read.clear()
    client = harness.call(UpdateWeightReqInput(model_path="/models/new"))
    harness.turn()
    harness.transport.gone.add(client)
    harness.clock += 1.0
    harness.turn()
    assert not harness.server.pending
    wait_until(
        lambda: harness.control._updates._staging is not None and harness.control._updates._staging.ended,
        PATIENCE_S,
        "the end of the reading",
    )
    harness.check_old_serves()
    harness.swap.may_read.set()
    assert isinstance(harness.update(), UpdateWeightReqOutput)


def test_a_caller_who_leaves_at_the_last_moment_cancels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two reports of progress, when everything has been read and nothing runs."""
    harness = Updated(monkeypatch)
    harness.swap.may_read.clear()
    client = harness.call(UpdateWeightReqInput(model_path="/models/new"))
    harness.turn()
    harness.swap.may_read.set()
    wait_until(
        lambda: harness.control._updates._staging is not None and harness.control._updates._staging.ended,
        PATIENCE_S,
        "the end of the reading",
    )
    harness.transport.gone.add(client)
    while harness.server.pending:
        harness.turn()
    harness.check_old_serves()


def test_a_deadline_while_it_pauses_cancels_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Updated(monkeypatch)
    harness.start_running("a")
    harness.swap.may_read.clear()
    client = harness.call(UpdateWeightReqInput(model_path="/models/new", mode="drain"), timeout_s=0.2)
    harness.turn()
    harness.swap.may_read.set()
    wait_until(lambda: harness.swap.staged != "", PATIENCE_S, "the end of the reading")
    while harness.answer(client) is None:
        harness.turn()
    assert refusal(harness.heard(client)[-1]) == ("timeout", "not done in time: pausing (1 running)")
    harness.check_old_serves()
    harness.run()
    assert harness.finish("a") == FinishReason(type="length")


def test_an_update_while_paused_leaves_it_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Updated(monkeypatch)
    harness.start_running("a")
    harness.ask(PauseGenerationReqInput(mode="retract"))
    assert isinstance(harness.update(mode="drain"), UpdateWeightReqOutput)
    assert harness.scheduler.pause_mode == "retract"
    assert harness.scheduler.state == "paused"
    harness.ask(ContinueGenerationReqInput())
    harness.run()
    assert harness.finish("a") == FinishReason(type="length")


def has_read(harness: Updated) -> bool:
    """Whether the thread that reads has ended."""
    staging = harness.control._updates._staging
    return staging is not None and staging.ended
