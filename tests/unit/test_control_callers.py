"""Callers who leave, wait too long, or ask too much."""

import pytest
from operated import LONG, Operated, refusal

from llmserve.runtime.messages import (
    AbortReqInput,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    ListRequestsReqInput,
    ListRequestsReqOutput,
    PingReqInput,
    PingReqOutput,
    RpcProgress,
)
from llmserve.runtime.scheduler.rpc import MAX_PENDING


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


def make_pings_take(harness: Operated, seconds: float, of_others: float = 0.0) -> None:
    """`of_others`: how much of the time other programs have the core."""
    ping = harness.control.ping

    def slow_ping(request: PingReqInput) -> PingReqOutput:
        harness.clock += seconds
        harness.preempted += of_others
        return ping(request)

    harness.control._verbs[PingReqInput] = slow_ping


def test_a_flood_takes_its_share_of_the_time_and_no_more() -> None:
    """Each call costs 1 ms and a turn 10 ms besides: of 20 turns, calls may have 2 % of the time, and the credit."""
    harness = Operated()
    harness.start_running("a")
    make_pings_take(harness, 0.001)
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


def test_a_call_is_not_charged_for_the_time_that_other_programs_take() -> None:
    harness = Operated()
    harness.start_running("a")
    make_pings_take(harness, 1.0, of_others=1.0)
    assert isinstance(harness.ask(PingReqInput(), turns=1), PingReqOutput)
    assert isinstance(harness.ask(ListRequestsReqInput(), turns=1), ListRequestsReqOutput)


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
    make_pings_take(harness, 1.0)
    for _ in range(3):
        harness.call(PingReqInput())
    harness.send("a", [1, 2, 3], params=LONG)
    harness.turn()
    assert not harness.transport.calls
    assert isinstance(harness.ask(ListRequestsReqInput(), turns=1), ListRequestsReqOutput)
