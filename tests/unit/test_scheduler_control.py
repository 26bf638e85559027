"""What ends, stops or empties things between steps: aborts, queue limits, pauses, drains, flushes; and metrics."""

import pytest
from fake_worker import FakeWorker
from scheduler_harness import Harness, prompt_of

from llmserve.runtime.cache.pages import IntegrityError
from llmserve.runtime.engine.batch import WorkerDied, int32_array
from llmserve.runtime.messages import AbortReqInput, FinishReason, PauseMode, SamplingParams

LONG = SamplingParams(temperature=0.0, max_new_tokens=50, ignore_eos=True)


def running(harness: Harness) -> list[str]:
    return [request.rid for request in harness.scheduler.table.running]


def waiting(harness: Harness) -> list[str]:
    return [request.rid for request in harness.scheduler.table.waiting]


# ---- aborts --------------------------------------------------------------------------------------------------------


def test_an_abort_frees_the_memory_in_the_same_turn() -> None:
    harness = Harness()
    prompt = prompt_of(20)
    harness.send("a", prompt, params=LONG, n=2)
    for _ in range(5):
        harness.turn()
    used = harness.scheduler.kv.used
    assert used > 0
    assert harness.scheduler.abort(AbortReqInput(rids=("a", "b"), message="enough")) == (["a"], ["b"])
    assert harness.scheduler.kv.used == used  # marked only
    harness.turn()
    assert harness.scheduler.kv.used == 0
    for index in range(2):
        assert harness.finish("a", index) == FinishReason(type="abort", message="enough")
        output = harness.output("a", index)
        assert output == harness.expected(prompt, LONG)[: len(output)]
        assert harness.rows("a", index)[-1].completion_tokens == len(output)
    assert not harness.turn()
    harness.check_empty()


def test_a_queued_request_is_aborted_without_being_run() -> None:
    harness = Harness(max_running_requests=1)
    harness.send("runs", prompt_of(5), params=LONG)
    harness.send("waits", prompt_of(6))
    harness.turn()
    steps = len(harness.worker.plans)
    harness.inbox.append(AbortReqInput(rids=("waits",)))
    harness.turn()
    assert harness.finish("waits").type == "abort"
    assert harness.output("waits") == []
    assert all(len(plan.rows) == 1 for plan in harness.worker.plans)
    assert len(harness.worker.plans) == steps + 1
    harness.run()
    harness.check_empty()


def test_an_abort_of_a_request_that_comes_later_in_the_same_batch_of_messages_ends_nothing() -> None:
    harness = Harness()
    harness.inbox.append(AbortReqInput(rids=("a",)))
    harness.send("a", prompt_of(5))
    harness.run()
    assert harness.finish("a").type == "length"


@pytest.mark.parametrize(
    ("message", "aborted"),
    [
        (AbortReqInput(rids=("1",)), ["1"]),
        (AbortReqInput(rids=("",)), []),
        (AbortReqInput(), []),
        (AbortReqInput(prefix="1"), ["1", "10"]),
        (AbortReqInput(older_than_s=50.0), ["1", "10"]),
        (AbortReqInput(older_than_s=500.0), []),
        (AbortReqInput(everything=True), ["1", "10", "2"]),
        (AbortReqInput(rids=("2", "2", "1"), prefix="1"), ["2", "1", "10"]),
    ],
)
def test_an_abort_chooses_exactly(message: AbortReqInput, aborted: list[str]) -> None:
    harness = Harness(max_running_requests=2)
    harness.send("1", prompt_of(5, 1), params=LONG)
    harness.send("10", prompt_of(5, 2), params=LONG)
    harness.turn()
    harness.clock += 100
    harness.send("2", prompt_of(5, 3), params=LONG)
    harness.turn()
    assert harness.scheduler.abort(message)[0] == aborted
    harness.turn()
    assert sorted(harness.scheduler.table.groups) == sorted({"1", "10", "2"} - set(aborted))
    harness.run()
    for rid in ("1", "10", "2"):
        assert harness.finish(rid).type == ("abort" if rid in aborted else "length")
    harness.check_empty()


def test_an_abort_waits_for_the_step_in_flight() -> None:
    harness = Harness(depth=2)
    harness.send("a", prompt_of(90), params=LONG)
    harness.turn()
    harness.scheduler.abort(AbortReqInput(rids=("a",)))
    harness.turn()
    assert not harness.rows("a")
    harness.turn()
    assert harness.finish("a").type == "abort"
    harness.check_empty()


# ---- the queue -----------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_all_choices_at_once() -> None:
    harness = Harness(max_running_requests=2, max_queued_requests=3)
    for i in range(2):
        harness.send(f"runs{i}", prompt_of(5, i), params=LONG)
    harness.turn()
    harness.send("fits", prompt_of(5, 3), n=2)
    harness.send("two too many", prompt_of(5, 4), n=3)
    harness.send("fits too", prompt_of(5, 5))
    harness.embed("not one more", prompt_of(5, 6))
    harness.turn()
    for index in range(3):
        assert harness.finish("two too many", index).status == 503
        assert harness.rows("two too many", index)[0].prompt_tokens == 5
    reason = harness.embeddings.embedding_rows["not one more", 0][0].finish
    assert reason is not None
    assert reason.status == 503
    assert waiting(harness) == ["fits", "fits", "fits too"]
    harness.run()
    assert harness.finish("fits too").type == "length"
    harness.check_empty()


def test_a_request_that_no_queue_takes_need_not_come_again() -> None:
    harness = Harness(max_running_requests=2, max_queued_requests=3)
    harness.send("fits", prompt_of(5), n=5)
    harness.turn()
    harness.send("never", prompt_of(5), n=6)
    harness.run()
    reason = FinishReason(type="error", status=400, message="the request has 6 choices; at most 5 may run and wait")
    assert [harness.finish("never", index) for index in range(6)] == [reason] * 6
    assert [harness.finish("fits", index).type for index in range(5)] == ["length"] * 5


def test_what_can_start_at_once_is_not_queued() -> None:
    harness = Harness(max_running_requests=3, max_queued_requests=1)
    for i in range(5):
        harness.send(f"r{i}", prompt_of(5, i))
    harness.run()
    assert [harness.finish(f"r{i}").type for i in range(5)] == ["length"] * 4 + ["error"]


def test_the_wait_in_the_queue_has_a_deadline() -> None:
    harness = Harness(max_running_requests=1, queue_timeout=2.0)
    harness.send("runs", prompt_of(5), params=LONG)
    harness.send("waits", prompt_of(6))
    harness.turn()
    harness.clock += 1.9
    harness.turn()
    assert not harness.rows("waits")
    harness.clock += 0.1
    harness.turn()
    assert harness.finish("waits").status == 503
    assert "2 s" in harness.finish("waits").message
    harness.run()
    assert harness.finish("runs").type == "length"  # what has begun has no deadline
    harness.check_empty()


def test_no_patience_at_all_still_runs_what_can_start_now() -> None:
    harness = Harness(max_running_requests=1, queue_timeout=0.0)
    harness.send("runs", prompt_of(5))
    harness.send("waits", prompt_of(6))
    harness.run()
    assert harness.finish("runs").type == "length"
    assert harness.finish("waits").status == 503


def test_a_retracted_request_has_no_deadline() -> None:
    harness = Harness(queue_timeout=1.0)
    harness.send("a", prompt_of(5), params=LONG)
    harness.turn()
    harness.scheduler.pause("retract")
    harness.turn()
    harness.clock += 100
    harness.turn()
    harness.scheduler.resume()
    harness.run()
    assert harness.output("a") == harness.expected(prompt_of(5), LONG)


def test_a_rid_in_use_cannot_end_its_owner() -> None:
    harness = Harness()
    harness.send("a", prompt_of(5, 1))
    harness.send("a", prompt_of(6, 2))
    harness.run()
    assert harness.output("a") == harness.expected(prompt_of(5, 1))
    assert harness.finish("a").type == "length"


def test_an_empty_prompt_is_refused() -> None:
    harness = Harness()
    harness.send("a", [])
    harness.run()
    assert harness.finish("a").status == 400


# ---- pause, drain, flush -------------------------------------------------------------------------------------------


def test_a_pause_that_drains_lets_what_runs_end() -> None:
    harness = Harness(max_running_requests=1)
    harness.send("runs", prompt_of(5))
    harness.send("waits", prompt_of(6))
    harness.turn()
    assert harness.scheduler.pause("drain") == 0
    assert harness.scheduler.state == "paused"
    assert not harness.scheduler.quiet
    harness.run()
    assert harness.scheduler.quiet
    assert harness.finish("runs").type == "length"
    assert waiting(harness) == ["waits"]
    assert harness.scheduler.resume() == 1
    harness.run()
    assert harness.output("waits") == harness.expected(prompt_of(6))
    harness.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pause_that_retracts_frees_everything_and_loses_nothing(depth: int) -> None:
    harness = Harness(depth=depth)
    for i in range(4):
        harness.send(f"r{i}", prompt_of(9 + i, i), params=LONG, stream=True)
    for _ in range(11):
        harness.turn()
    assert harness.scheduler.pause("retract") == 4
    for _ in range(3):
        harness.turn()
    assert harness.scheduler.quiet
    assert waiting(harness) == ["r0", "r1", "r2", "r3"]
    assert harness.scheduler.kv.used == 0
    assert harness.scheduler.flush() > 0
    assert harness.scheduler.kv.available == harness.scheduler.kv.total
    assert harness.scheduler.kv.cached == 0
    harness.send("new", prompt_of(5))
    steps = len(harness.worker.plans)
    harness.run()
    assert len(harness.worker.plans) == steps  # paused
    assert harness.scheduler.resume() == 5
    harness.run()
    for i in range(4):
        assert harness.output(f"r{i}") == harness.expected(prompt_of(9 + i, i), LONG)
    assert harness.output("new") == harness.expected(prompt_of(5))
    harness.check_empty()


def test_a_retracted_request_finds_its_own_pages_again() -> None:
    harness = Harness()
    harness.send("a", prompt_of(9), params=LONG)
    for _ in range(12):
        harness.turn()
    (request,) = harness.scheduler.table.running
    computed = request.computed
    assert computed == 20
    harness.scheduler.pause("retract")
    harness.turn()
    harness.scheduler.resume()
    harness.turn()
    assert [len(row.token_ids) // 4 for row in harness.worker.plans[-1].rows] == [1]
    assert request.computed == computed + 1
    assert harness.rows("a")[-1].cached_tokens == 0
    harness.run()
    assert harness.output("a") == harness.expected(prompt_of(9), LONG)


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_a_request_that_gives_up_its_pages_leaves_only_what_is_computed(mode: PauseMode) -> None:
    """The last known token never is, not even where it fills a page."""
    for turns in range(1, 9):
        harness = Harness()
        harness.send("a", prompt_of(9), params=LONG, stream=True)
        for _ in range(turns):
            harness.turn()
        (request,) = harness.scheduler.table.running
        conversation = [*int32_array(bytes(request.tokens)).tolist(), 5, 6]
        harness.scheduler.pause(mode)
        harness.turn()
        harness.scheduler.resume()
        harness.send("b", conversation)
        harness.run()
        assert harness.output("b") == harness.expected(conversation)
        assert harness.output("a") == harness.expected(prompt_of(9), LONG)[: len(harness.output("a"))]


def test_a_pause_that_aborts_ends_what_has_begun() -> None:
    harness = Harness(max_running_requests=1)
    harness.send("runs", prompt_of(5), params=LONG)
    harness.send("waits", prompt_of(6))
    harness.turn()
    assert harness.scheduler.pause("abort") == 1
    harness.turn()
    assert harness.scheduler.quiet
    assert harness.finish("runs").type == "abort"
    assert waiting(harness) == ["waits"]
    harness.scheduler.resume()
    harness.run()
    assert harness.finish("waits").type == "length"
    harness.check_empty()


def test_an_abort_works_while_paused() -> None:
    harness = Harness()
    harness.send("a", prompt_of(5), params=LONG)
    harness.turn()
    harness.scheduler.pause("retract")
    harness.turn()
    harness.inbox.append(AbortReqInput(rids=("a",)))
    harness.turn()
    assert harness.finish("a").type == "abort"
    harness.check_empty()


def test_a_drain_refuses_what_comes_and_finishes_what_is_here() -> None:
    harness = Harness(max_running_requests=1)
    harness.send("runs", prompt_of(5))
    harness.send("waits", prompt_of(6))
    harness.turn()
    harness.scheduler.drain()
    harness.send("late", prompt_of(7))
    harness.run()
    assert harness.scheduler.state == "draining"
    assert harness.finish("late").status == 503
    assert [harness.finish(rid).type for rid in ("runs", "waits")] == ["length", "length"]
    harness.check_empty()


def test_a_flush_takes_the_hits_away() -> None:
    harness = Harness()
    for rid in ("cold", "warm"):
        harness.send(rid, prompt_of(40))
        harness.run()
    cached = harness.scheduler.kv.cached
    reports = len(harness.metrics)
    assert harness.scheduler.flush() == cached > 0
    harness.turn()
    assert [sample.flushes_total for sample in harness.metrics[reports - 1 :]] == [0, 1], "it is told at once"
    harness.send("flushed", prompt_of(40))
    harness.run()
    assert [harness.rows(rid)[-1].cached_tokens for rid in ("cold", "warm", "flushed")] == [0, 36, 0]
    assert harness.output("flushed") == harness.output("cold")


def test_the_loop_waits_when_there_is_nothing_to_do() -> None:
    """Idle, paused or held back it blocks in `wait`; with something unsent, or a verb at work, not for long."""
    harness = Harness()
    waits: list[float] = []

    class Enough(Exception):
        pass

    def wait(timeout_s: float) -> None:
        waits.append(timeout_s)
        match len(waits):
            case 1:  # idle
                harness.send("a", prompt_of(5), params=LONG)
            case 2:  # all done
                harness.scheduler.pause("drain")
                harness.send("b", prompt_of(5))
            case 3:  # paused
                harness.outbox.backlog = 1
            case 4:
                raise Enough

    with pytest.raises(Enough):
        harness.scheduler.run(wait)
    assert waits == [1.0, 1.0, 1.0, 0.01]
    assert harness.finish("a").type == "length"


# ---- metrics and integrity -----------------------------------------------------------------------------------------


def test_gauges_reach_zero_when_the_work_ends() -> None:
    harness = Harness(max_running_requests=2)
    for i in range(3):
        harness.send(f"r{i}", prompt_of(10, i))
    harness.turn()
    first = harness.metrics[-1]
    assert (first.running, first.waiting, first.kv_tokens_used) == (2, 1, 24)
    assert [(info.rid, info.state, info.output_tokens) for info in first.requests] == [
        ("r0", "decode", 1),
        ("r1", "decode", 1),
        ("r2", "waiting", 0),
    ]
    harness.run()
    last = harness.metrics[-1]
    assert (last.running, last.waiting, last.kv_tokens_used) == (0, 0, 0)
    assert last.kv_tokens_cached > 0
    assert last.steps_total == len(harness.worker.plans)
    assert last.prompt_tokens_total == last.prefill_tokens_total == 30
    assert last.decode_tokens_total == 24
    assert last.requests_total == 3
    assert last.requests == ()
    told = len(harness.metrics)
    harness.clock += 1.0
    harness.turn()
    assert len(harness.metrics) == told + 1  # the heartbeat


def test_what_is_shown_of_a_request() -> None:
    harness = Harness(chunked_prefill_size=8)
    harness.send("a", prompt_of(12), params=LONG, user="ann", text="secret")
    harness.turn()
    (info,) = harness.scheduler.snapshots.requests()
    assert (info.state, info.prompt_tokens, info.output_tokens, info.ttft_s) == ("prefill", 12, 0, None)
    assert (info.user, info.text, info.max_new_tokens) == ("ann", "", 50)
    for _ in range(11):
        harness.turn()
    (info,) = harness.scheduler.snapshots.requests(show_text=True)
    assert (info.state, info.output_tokens, info.text) == ("decode", 11, "secret")
    assert info.tokens_per_s == pytest.approx(100, rel=0.02)  # a turn takes 10 ms
    assert info.ttft_s == pytest.approx(0.01, abs=0.011)


def test_a_cache_out_of_order_is_found_at_rest_and_begun_anew(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    harness.send("a", prompt_of(5))
    harness.scheduler.turn()
    harness.scheduler.kv._pool.allocate(3)  # lost
    while harness.scheduler.turn():
        pass
    assert not caplog.text  # there may be more to do at once
    harness.clock += 1.0
    harness.scheduler.turn()
    assert "the cache was not in order" in caplog.text
    harness.check_empty()
    harness.send("b", prompt_of(6))
    harness.run()
    assert harness.output("b") == harness.expected(prompt_of(6))


def test_pages_that_are_mixed_up_in_mid_work_end_the_process() -> None:
    harness = Harness()
    harness.send("a", prompt_of(5), params=LONG)
    harness.turn()
    (request,) = harness.scheduler.table.running
    assert request.lease is not None
    harness.scheduler.kv._pool.release(request.lease.own_pages())
    harness.scheduler.abort(AbortReqInput(everything=True))
    with pytest.raises(IntegrityError):
        harness.scheduler.turn()


def test_death_of_the_worker_in_a_later_step() -> None:
    harness = Harness(FakeWorker())
    harness.send("a", prompt_of(5), params=LONG)
    harness.turn()
    harness.worker.fail = lambda plan: WorkerDied("gone")
    with pytest.raises(WorkerDied):
        harness.scheduler.run(lambda timeout_s: None)
