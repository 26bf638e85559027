"""The operators' verbs over a scheduler with a fake worker: what they do, what they refuse, and what they cost."""

import math
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from operated import LONG, Operated, refusal

from llmserve.runtime.config import ConfigError
from llmserve.runtime.engine.batch import int32_bytes
from llmserve.runtime.messages import (
    PROTOCOL_VERSION,
    AbortReqInput,
    AbortReqOutput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    DrainReqInput,
    DrainReqOutput,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetLoadReqInput,
    GetLoadReqOutput,
    GetStatusReqInput,
    GetStatusReqOutput,
    ListRequestsReqInput,
    ListRequestsReqOutput,
    Message,
    MetricsInput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    PingReqInput,
    PingReqOutput,
    RpcProgress,
    SubscribeMetricsReqInput,
    SubscribeMetricsReqOutput,
    UpdateWeightReqInput,
    UpdateWeightReqOutput,
)
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.ports import ipc_address
from llmserve.runtime.scheduler.rpc import MAX_PENDING
from llmserve.runtime.scheduler.snapshot import SHOWN_REQUESTS
from llmserve.runtime.server.admin import PauseBody
from llmserve.runtime.watchers import MAX_WATCHERS
from llmserve.runtime.wire import Poller, Pull, encode

# ---- envelopes -----------------------------------------------------------------------------------------------------


def test_ping_counts_steps() -> None:
    harness = Operated()
    assert harness.ask(PingReqInput()) == PingReqOutput(step=0, state="ready")
    harness.start_running("a", turns=3)
    assert harness.ask(PingReqInput(), turns=1) == PingReqOutput(step=3, state="ready")


def test_another_protocol_is_told_so_before_its_body_is_read() -> None:
    harness = Operated()
    client = harness.call_body(b"from the future", protocol=PROTOCOL_VERSION + 1)
    harness.turn()
    assert refusal(harness.heard(client)[0]) == (
        "protocol",
        f"the instance speaks protocol {PROTOCOL_VERSION}, the caller {PROTOCOL_VERSION + 1}",
    )


@pytest.mark.parametrize("body", [b"", b"x", encode(PingReqOutput(step=1, state="ready"))])
def test_a_body_that_is_no_request_is_told_so(body: bytes) -> None:
    harness = Operated()
    client = harness.call_body(body)
    harness.turn()
    assert refusal(harness.heard(client)[0])[0] == "invalid"
    assert isinstance(harness.ask(PingReqInput()), PingReqOutput)


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan, math.inf, 1e9])
def test_a_deadline_must_make_sense(timeout_s: float) -> None:
    harness = Operated()
    assert refusal(harness.ask(PingReqInput(), timeout_s))[0] == "invalid"


def test_a_fault_in_a_verb_fails_that_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Operated()
    monkeypatch.setattr(harness.scheduler.snapshots, "load", lambda: 1 // 0)
    assert refusal(harness.ask(GetLoadReqInput())) == (
        "failed",
        "internal error (ZeroDivisionError); the instance's log has more",
    )
    assert isinstance(harness.ask(PingReqInput()), PingReqOutput)


def test_an_answer_that_is_too_large_is_an_error() -> None:
    harness = Operated()
    harness.send("a", [1, 2, 3], user="u" * (70 << 20))
    harness.turn()
    code, text = refusal(harness.ask(ListRequestsReqInput()))
    assert code == "failed"
    assert "above the limit" in text


def test_control_messages_of_the_pipeline_have_the_same_verbs() -> None:
    harness = Operated()
    harness.start_running("a")
    harness.inbox.append(GetLoadReqInput())
    harness.inbox.append(FlushCacheReqInput())  # refused, which goes to the log
    harness.turn()
    assert [type(reply) for reply in harness.replies] == [GetLoadReqOutput]
    harness.run()
    harness.inbox.append(FlushCacheReqInput())
    harness.run()
    assert [type(reply) for reply in harness.replies[1:]] == [FlushCacheReqOutput]


# ---- abort ---------------------------------------------------------------------------------------------------------


def test_abort_answers_after_the_memory_is_back() -> None:
    harness = Operated(depth=2)
    harness.start_running("a", "b")
    used = harness.scheduler.kv.used
    client = harness.call(AbortReqInput(rids=("a", "nobody"), message="stopped by hand"))
    while harness.answer(client) is None:
        harness.turn()
        if harness.answer(client) is not None:
            assert "a" not in harness.scheduler.table.groups
            assert harness.scheduler.kv.used < used
    assert harness.answer(client) == AbortReqOutput(aborted=("a",), not_found=("nobody",))
    assert harness.finish("a") == FinishReason(type="abort", message="stopped by hand")
    harness.run()
    assert harness.finish("b") == FinishReason(type="length")
    harness.check_empty()


def test_abort_takes_two_turns_at_most() -> None:
    harness = Operated()
    harness.start_running("a")
    assert harness.ask(AbortReqInput(rids=("a",)), turns=2) == AbortReqOutput(aborted=("a",))


def test_a_queued_request_is_aborted_without_a_step_for_it() -> None:
    harness = Operated(max_running_requests=1)
    harness.start_running("a")
    harness.send("b", [9] * 6)
    harness.turn()
    assert harness.ask(AbortReqInput(rids=("b",))) == AbortReqOutput(aborted=("b",))
    harness.run()
    assert not any(row.token_ids == int32_bytes([9] * 6) for plan in harness.worker.plans for row in plan.rows)
    assert harness.finish("b").type == "abort"


def test_rids_match_exactly_and_a_prefix_only_on_request() -> None:
    harness = Operated()
    harness.start_running("1", "10", "11", "2")
    assert harness.ask(AbortReqInput(rids=("1",))) == AbortReqOutput(aborted=("1",))
    assert harness.ask(AbortReqInput(rids=("",))) == AbortReqOutput(aborted=(), not_found=("",))
    assert harness.ask(AbortReqInput()) == AbortReqOutput(aborted=())
    assert [request.rid for request in harness.scheduler.table] == ["10", "11", "2"]
    assert harness.ask(AbortReqInput(prefix="1")) == AbortReqOutput(aborted=("10", "11"))
    assert [request.rid for request in harness.scheduler.table] == ["2"]


def test_abort_of_the_unknown_the_finished_and_twice() -> None:
    harness = Operated()
    harness.start_running("a")
    twice = [harness.call(AbortReqInput(rids=("a", "a"))) for _ in range(2)]
    harness.run()
    assert [harness.answer(client) for client in twice] == [AbortReqOutput(aborted=("a",))] * 2
    assert harness.ask(AbortReqInput(rids=("a", "never"))) == AbortReqOutput(aborted=(), not_found=("a", "never"))


def test_abort_by_age_and_of_everything() -> None:
    harness = Operated()
    harness.start_running("old")
    harness.clock += 10
    harness.send("new", [7] * 6, params=LONG)
    harness.turn()
    assert harness.ask(AbortReqInput(older_than_s=5.0)) == AbortReqOutput(aborted=("old",))
    assert harness.ask(AbortReqInput(everything=True)) == AbortReqOutput(aborted=("new",))
    harness.run()
    harness.check_empty()


def test_all_choices_of_a_request_end() -> None:
    harness = Operated()
    harness.send("a", [1, 2, 3], params=LONG, n=3)
    for _ in range(3):
        harness.turn()
    assert harness.ask(AbortReqInput(rids=("a",))) == AbortReqOutput(aborted=("a",))
    assert [harness.finish("a", index).type for index in range(3)] == ["abort"] * 3


def test_abort_works_while_paused() -> None:
    harness = Operated()
    harness.start_running("a")
    harness.ask(PauseGenerationReqInput(mode="retract"))
    assert harness.ask(AbortReqInput(rids=("a",))) == AbortReqOutput(aborted=("a",))
    harness.check_empty()


# ---- flush ---------------------------------------------------------------------------------------------------------


def test_flush_frees_what_is_cached_and_says_how_much() -> None:
    harness = Operated()
    harness.send("a", list(range(1, 31)))
    harness.run()
    cached = harness.scheduler.kv.cached
    assert cached > 0
    answer = harness.ask(FlushCacheReqInput())
    assert answer == FlushCacheReqOutput(
        pages_freed=cached, bytes_freed=cached * harness.worker.info.bytes_per_page, aborted=()
    )
    harness.send("b", list(range(1, 31)))
    harness.run()
    assert harness.rows("b")[-1].cached_tokens == 0


def test_flush_while_busy_is_refused_with_the_counts() -> None:
    harness = Operated(max_running_requests=2)
    harness.start_running("a", "b")
    harness.send("c", [9] * 6)
    harness.turn()
    assert refusal(harness.ask(FlushCacheReqInput())) == (
        "busy",
        "2 running, 1 waiting: wait for them (--wait, wait_s) or abort them (--abort, abort)",
    )
    harness.run()
    assert {harness.finish(rid).type for rid in "abc"} == {"length"}


def test_flush_waits_and_meanwhile_a_second_one_is_refused() -> None:
    harness = Operated()
    harness.start_running("a")
    first = harness.call(FlushCacheReqInput(wait_s=60.0))
    harness.turn()
    assert refusal(harness.ask(FlushCacheReqInput(), turns=1)) == ("busy", "a flush is under way already")
    assert harness.answer(first) is None
    harness.run()
    assert isinstance(harness.answer(first), FlushCacheReqOutput)
    assert harness.finish("a") == FinishReason(type="length")
    assert isinstance(harness.ask(FlushCacheReqInput()), FlushCacheReqOutput)


def test_flush_waits_no_longer_than_asked() -> None:
    harness = Operated()
    harness.start_running("a")
    began = harness.clock
    code, text = refusal(harness.ask(FlushCacheReqInput(wait_s=0.1)))
    assert (code, text[:20]) == ("busy", "1 running, 0 waiting")
    assert 0.1 <= harness.clock - began < 0.15


@pytest.mark.parametrize("depth", [1, 2])  # with two, what ends is in a step still when more could start
def test_flush_with_abort_ends_what_runs_even_while_more_arrives(depth: int) -> None:
    harness = Operated(depth=depth)
    harness.start_running("a", "b")
    client = harness.call(FlushCacheReqInput(abort=True))
    number = 0
    while harness.answer(client) is None:
        harness.send(f"new{number}", [number, 8, 8, 8])
        number += 1
        harness.turn()
        assert number < 10
    answer = harness.answer(client)
    assert isinstance(answer, FlushCacheReqOutput)
    assert set(answer.aborted) >= {"a", "b"}
    harness.run()
    ends = [harness.finish(f"new{count}").type for count in range(number)]
    assert ends[-1] == "length"
    harness.check_empty()


@pytest.mark.parametrize("wait_s", [-1.0, math.nan])
def test_flush_refuses_a_wait_without_sense(wait_s: float) -> None:
    harness = Operated()
    assert refusal(harness.ask(FlushCacheReqInput(wait_s=wait_s)))[0] == "invalid"
    assert isinstance(harness.ask(FlushCacheReqInput()), FlushCacheReqOutput)


# ---- pause, resume, drain ------------------------------------------------------------------------------------------


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


# ---- looking -------------------------------------------------------------------------------------------------------


def test_load_and_requests_show_what_runs_and_waits() -> None:
    harness = Operated(max_running_requests=1)
    harness.start_running("a")
    harness.send("b", [9] * 6, user="eve", text="the prompt")
    harness.turn()
    load, shown = harness.ask(GetLoadReqInput(), turns=1), harness.ask(ListRequestsReqInput(), turns=1)
    assert isinstance(load, GetLoadReqOutput)
    assert (load.running, load.waiting, load.kv_tokens_total) == (1, 1, 64 * 4)
    assert harness.scheduler.snapshots.metrics().max_running == 1
    assert load.kv_tokens_used > 0
    assert isinstance(shown, ListRequestsReqOutput)
    assert [(info.rid, info.state, info.user, info.text) for info in shown.requests] == [
        ("a", "decode", "", ""),
        ("b", "waiting", "eve", ""),
    ]
    shown = harness.ask(ListRequestsReqInput(show_text=True), turns=1)
    assert isinstance(shown, ListRequestsReqOutput)
    assert shown.requests[1].text == "the prompt"


def test_metrics_show_the_first_requests_and_the_list_shows_all() -> None:
    harness = Operated()
    for number in range(SHOWN_REQUESTS + 40):
        harness.send(f"r{number}", [number % 7 + 1] * 3, params=LONG)
    for _ in range(8):
        harness.turn()
    assert len(harness.scheduler.snapshots.metrics().requests) == SHOWN_REQUESTS
    listed = harness.ask(ListRequestsReqInput())
    assert isinstance(listed, ListRequestsReqOutput)
    assert len(listed.requests) == SHOWN_REQUESTS + 40


def test_status_shows_the_options_and_this_process() -> None:
    harness = Operated(served_model_names=("x", "y"), max_running_requests=3)
    status = harness.ask(GetStatusReqInput())
    assert isinstance(status, GetStatusReqOutput)
    assert (status.model, status.weight_version, status.state) == ("/models/fake", 1, "ready")
    assert (status.kv_bytes_total, status.page_size) == (64 * 4 * 8, 4)
    assert (status.options["max_running_requests"], status.options["served_model_names"]) == (3, ["x", "y"])
    assert (status.options["max_model_len"], status.options["max_total_tokens"]) == (
        harness.worker.info.max_model_len,
        256,
    )
    assert {"max_model_len", "max_total_tokens", "load_format"} <= set(status.chosen)
    assert "max_running_requests" not in status.chosen
    assert [process.role for process in status.processes] == ["main", "scheduler"]
    assert all(process.pid > 0 and process.rss_bytes > 0 for process in status.processes)


# ---- weights -------------------------------------------------------------------------------------------------------


class FakeSwap:
    """`serving` and `staged` are paths. A staging reads one of `parts` tensors each time it may."""

    def __init__(self) -> None:
        self.serving, self.staged, self.parts = "/models/fake", "", 3
        self.differing: list[str] = []
        self.fail_stage: Exception | None = None
        self.fail_commit: Exception | None = None
        self.may_read = threading.Event()
        self.may_read.set()
        self.quiet: Callable[[], bool] = lambda: True

    def differences(self, new: Checkpoint) -> list[str]:
        return self.differing

    def stage(self, new: Checkpoint, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> int:
        for part in range(self.parts):
            progress(part * 100, self.parts * 100)
            while not self.may_read.wait(0.001):
                if cancelled():
                    return 0
            if self.fail_stage is not None:
                raise self.fail_stage
        self.staged = new.path
        return self.parts * 100

    def commit(self) -> None:
        assert self.quiet(), "a commit while a step may run"
        assert self.staged
        if self.fail_commit is not None:
            raise self.fail_commit
        self.serving, self.staged = self.staged, ""

    def discard(self) -> None:
        self.staged = ""


class Updated(Operated):
    """With weights that can be exchanged; any path but one that begins with /missing is a checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: object):
        super().__init__(**options)  # type: ignore[arg-type]
        self.swap = FakeSwap()
        self.swap.quiet = lambda: self.scheduler.quiet and self.scheduler.kv.used == 0
        self.worker.swap = self.swap  # type: ignore[attr-defined]
        monkeypatch.setattr("llmserve.runtime.models.hub.resolve", self.resolve)

    @staticmethod
    def resolve(path: str, load_format: str) -> Checkpoint:
        if path.startswith("/missing"):
            raise ConfigError(f"{path} does not exist")
        if load_format == "gguf" and not path.endswith(".gguf"):
            raise ConfigError(f"{path} is not a .gguf file")
        return cast(Checkpoint, SimpleNamespace(path=path))

    def update(self, path: str = "/models/new", **fields: Any) -> Message:
        """The answer to an update; turns go on while the thread reads."""
        client = self.call(UpdateWeightReqInput(model_path=path, **fields))
        deadline = time.monotonic() + 10
        while (answer := self.answer(client)) is None:
            assert time.monotonic() < deadline
            self.turn()
            time.sleep(0.001)
        return answer

    def check_old_serves(self) -> None:
        status = self.ask(GetStatusReqInput())
        assert isinstance(status, GetStatusReqOutput)
        assert (status.model, status.weight_version, status.state) == ("/models/fake", 1, "ready")
        assert (self.swap.serving, self.swap.staged) == ("/models/fake", "")


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
    wait_for(lambda: harness.control._updates._staging is not None and harness.control._updates._staging.ended)
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
    wait_for(lambda: harness.control._updates._staging is not None and harness.control._updates._staging.ended)
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
    wait_for(lambda: harness.swap.staged != "")
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


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- watchers ------------------------------------------------------------------------------------------------------


def test_a_lease_pushes_metrics_until_it_ends(tmp_path: Path) -> None:
    harness = Operated(tmp_path)
    pull = Pull(ipc_address(tmp_path / "watch-1"), MetricsInput)
    request = SubscribeMetricsReqInput(endpoint="watch-1", lease_s=5.0)
    assert harness.ask(request) == SubscribeMetricsReqOutput(lease_s=5.0)
    assert harness.forwarded == [request]
    harness.watchers.offer(harness.scheduler.snapshots.metrics())
    Poller(pull).wait(5.0)
    assert pull.recv() is not None
    harness.clock += 4.0
    assert harness.ask(request) == SubscribeMetricsReqOutput(lease_s=5.0)  # renewed
    harness.clock += 4.0
    harness.watchers.offer(harness.scheduler.snapshots.metrics())
    assert len(harness.watchers) == 1
    harness.clock += 2.0
    harness.watchers.offer(harness.scheduler.snapshots.metrics())
    assert len(harness.watchers) == 0
    pull.close()


def test_a_watcher_that_has_left_is_forgotten_before_its_lease_ends(tmp_path: Path) -> None:
    """It took its socket's file away; what it no longer gets does not count as dropped."""
    harness = Operated(tmp_path)
    pull = Pull(ipc_address(tmp_path / "watch-1"), MetricsInput)
    harness.ask(SubscribeMetricsReqInput(endpoint="watch-1", lease_s=60.0))
    pull.close()
    (tmp_path / "watch-1").unlink()
    harness.watchers.offer(harness.scheduler.snapshots.metrics())
    assert len(harness.watchers) == 0
    assert harness.watchers.dropped == 0


def test_a_watcher_that_does_not_read_is_dropped_from_and_delays_nothing(tmp_path: Path) -> None:
    harness = Operated(tmp_path)
    pull = Pull(ipc_address(tmp_path / "watch-1"), MetricsInput)
    harness.ask(SubscribeMetricsReqInput(endpoint="watch-1", lease_s=60.0))
    metrics = harness.scheduler.snapshots.metrics()
    slowest, offered = 0.0, 0
    while not harness.watchers.dropped:
        offered += 1
        began = time.perf_counter()
        harness.watchers.offer(metrics)
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 0.1
    assert offered < 1000, "they wait in memory"
    harness.watchers.close()
    pull.close()


@pytest.mark.parametrize(
    "endpoint",
    ["", "tokenizer.sock", "rpc.sock", "watch-/../x", "../watch-1", "/tmp/watch-1", "tcp://1.2.3.4:5", "watch-nobody"],
)
def test_an_endpoint_is_a_watchers_socket_in_the_directory_or_refused(tmp_path: Path, endpoint: str) -> None:
    directory = tmp_path / "instance"
    (directory / "watch-").mkdir(parents=True)
    for path in (directory / "tokenizer.sock", directory / "rpc.sock", directory / "x", tmp_path / "watch-1"):
        with socket.socket(socket.AF_UNIX) as one_of_others:
            one_of_others.bind(str(path))
    harness = Operated(directory)
    assert refusal(harness.ask(SubscribeMetricsReqInput(endpoint=endpoint)))[0] == "invalid"
    assert harness.forwarded == []


def test_leases_are_bounded_in_time_and_number(tmp_path: Path) -> None:
    harness = Operated(tmp_path)
    pulls = [Pull(ipc_address(tmp_path / f"watch-{i}"), MetricsInput) for i in range(MAX_WATCHERS + 1)]
    answers = [
        harness.ask(SubscribeMetricsReqInput(endpoint=f"watch-{i}", lease_s=1e9)) for i in range(MAX_WATCHERS + 1)
    ]
    assert answers[:-1] == [SubscribeMetricsReqOutput(lease_s=60.0)] * MAX_WATCHERS
    assert refusal(answers[-1])[0] == "invalid"
    for lease_s in (0.0, -1.0, math.nan):
        assert refusal(harness.ask(SubscribeMetricsReqInput(endpoint="watch-0", lease_s=lease_s)))[0] == "invalid"
    harness.watchers.close()
    for pull in pulls:
        pull.close()


# ---- those who leave, wait too long, or ask too much -----------------------------------------------------------------


def test_a_verb_is_not_begun_for_a_caller_who_has_left() -> None:
    harness = Operated()
    harness.start_running("a")
    client = harness.call(AbortReqInput(rids=("a",)))
    harness.transport.gone.add(client)
    harness.run()
    assert harness.finish("a") == FinishReason(type="length")
    assert not harness.server.pending


def test_a_wait_ends_when_its_caller_leaves() -> None:
    harness = Operated()
    harness.start_running("a")
    client = harness.call(FlushCacheReqInput(wait_s=100.0))
    harness.turn()
    assert harness.server.pending
    harness.transport.gone.add(client)
    harness.clock += 1.0
    harness.turn()
    assert not harness.server.pending
    assert isinstance(harness.ask(FlushCacheReqInput(wait_s=100.0)), FlushCacheReqOutput)


def test_waiting_callers_hear_of_it_now_and_then() -> None:
    harness = Operated()
    harness.start_running("a")
    client = harness.call(FlushCacheReqInput(wait_s=100.0))
    harness.run()
    seconds = LONG.max_new_tokens * 0.01
    progress = harness.heard(client)[:-1]
    assert 1 <= len(progress) <= 2 + seconds / 0.25
    assert progress[-1] == RpcProgress(stage="waiting", done=1.0, unit="running")


def test_the_number_of_calls_under_way_is_bounded() -> None:
    harness = Operated(max_running_requests=1)
    harness.start_running("a")
    # Aborts of a request whose step never ends, as far as they can see.
    harness.scheduler.table.running[0].in_flight += 1
    clients = [harness.call(AbortReqInput(rids=("a",))) for _ in range(MAX_PENDING + 1)]
    for _ in range(50):
        harness.turn()
    assert refusal(harness.heard(clients[-1])[-1])[0] == "busy"
    assert isinstance(harness.ask(PingReqInput(), turns=50), PingReqOutput)
    harness.scheduler.table.running[0].in_flight -= 1
    harness.run()
    assert all(harness.answer(client) is not None for client in clients)


def test_a_flood_takes_its_share_of_the_time_and_no_more() -> None:
    """Each call costs 1 ms and a turn 10 ms besides: of 20 turns, calls may have 2 % of the time, and the credit."""
    harness = Operated()
    harness.start_running("a")
    ping = harness.control.ping

    def slow_ping(request: PingReqInput) -> PingReqOutput:
        harness.clock += 0.001
        return ping(request)

    harness.control._verbs[PingReqInput] = slow_ping
    for _ in range(10_000):
        harness.call(PingReqInput())
    began, before = harness.clock, len(harness.transport.calls)
    for _ in range(20):
        harness.turn()
    answered = before - len(harness.transport.calls)
    assert 8 <= answered <= 5 + 1 + (harness.clock - began) * 0.02 / 0.001
    assert harness.scheduler.table.running  # the request runs all the while
    harness.run()
    assert harness.finish("a") == FinishReason(type="length")
    assert not harness.transport.calls  # and with nothing to run they are all answered
    harness.start_running("b", turns=1)
    assert isinstance(harness.ask(PingReqInput(), turns=1), PingReqOutput)  # what was idle time has cost no credit


def test_a_flood_of_bad_frames_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the socket finds 1 ms of bad frames: it is looked at as often as that fits into the share."""
    harness = Operated()
    harness.start_running("a")
    looks = 0

    def recv() -> None:
        nonlocal looks
        looks += 1
        harness.clock += 0.001

    monkeypatch.setattr(harness.transport, "recv", recv)
    began = harness.clock
    for _ in range(20):
        harness.turn()
    assert 8 <= looks <= 5 + 1 + (harness.clock - began) * 0.02 / 0.001


def test_what_was_idle_time_is_not_charged_to_those_who_call_when_work_begins() -> None:
    harness = Operated()
    ping = harness.control.ping

    def slow_ping(request: PingReqInput) -> PingReqOutput:
        harness.clock += 1.0
        return ping(request)

    harness.control._verbs[PingReqInput] = slow_ping
    for _ in range(3):
        harness.call(PingReqInput())
    harness.send("a", [1, 2, 3], params=LONG)
    harness.turn()
    assert not harness.transport.calls
    assert isinstance(harness.ask(ListRequestsReqInput(), turns=1), ListRequestsReqOutput)
