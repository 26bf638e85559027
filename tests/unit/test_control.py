"""The operators' verbs over a scheduler with a fake worker: envelopes, abort, flush, and what shows the load."""

import math

import pytest
from operated import LONG, Operated, refusal

from llmserve.runtime.engine.batch import int32_bytes
from llmserve.runtime.messages import (
    PROTOCOL_VERSION,
    AbortReqInput,
    AbortReqOutput,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetLoadReqInput,
    GetLoadReqOutput,
    GetStatusReqInput,
    GetStatusReqOutput,
    ListRequestsReqInput,
    ListRequestsReqOutput,
    PauseGenerationReqInput,
    PingReqInput,
    PingReqOutput,
)
from llmserve.runtime.scheduler.snapshot import SHOWN_REQUESTS
from llmserve.runtime.wire import encode

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
