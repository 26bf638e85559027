"""Who runs next: the order of the queue, the budget, and who gives way when memory runs out."""

import random

import pytest
from fake_worker import FakeWorker
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, prompt_of

from llmserve.runtime.messages import SamplingParams

LONG = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)


def running(harness: Harness) -> list[str]:
    return [request.rid for request in harness.scheduler.table.running]


def starts(harness: Harness, rids: list[str]) -> list[str]:
    """The rids in the order in which they first ran."""
    order: list[str] = []
    while any(rid not in order for rid in rids):
        assert harness.turn()
        table = harness.scheduler.table
        order += [r.rid for r in table.running if r.rid not in order]
        order += [rid for rid in rids if rid not in order and harness.rows(rid)]
    return order


def test_fcfs_keeps_the_order_of_arrival() -> None:
    harness = Harness(schedule_policy="fcfs", max_running_requests=1)
    harness.send("warm", prompt_of(40), params=SHORT)
    harness.run()
    for rid, seed in (("a", 1), ("b", 2), ("hit", 0), ("c", 3)):
        harness.send(rid, prompt_of(40, seed), params=SHORT)
    assert starts(harness, ["a", "b", "hit", "c"]) == ["a", "b", "hit", "c"]


def test_lpm_prefers_the_longest_cached_prefix() -> None:
    harness = Harness(schedule_policy="lpm", max_running_requests=1)
    harness.send("warm", prompt_of(40), params=SHORT)
    harness.run()
    harness.send("a", prompt_of(40, 1), params=SHORT)
    harness.send("half", [*prompt_of(40)[:20], *prompt_of(20, 2)], params=SHORT)
    harness.send("hit", prompt_of(40), params=SHORT)
    harness.send("b", prompt_of(40, 3), params=SHORT)
    assert starts(harness, ["a", "half", "hit", "b"]) == ["hit", "half", "a", "b"]


def test_fcfs_computes_prompts_in_the_order_of_arrival() -> None:
    harness = Harness(schedule_policy="fcfs", chunked_prefill_size=16)
    harness.send("long", prompt_of(40, 1), params=SHORT)
    harness.turn()
    harness.send("short", prompt_of(4, 2), params=SHORT)
    harness.run()
    steps = [[len(row.token_ids) // 4 for row in plan.rows] for plan in harness.worker.plans]
    assert steps == [[16], [16], [8, 4], [1, 1]]


def test_one_that_hits_nothing_has_its_turn_among_hits() -> None:
    """A stream of perfect hits on a server with one place: four of them pass by the request that hits nothing."""
    harness = Harness(schedule_policy="lpm", max_running_requests=1)
    harness.send("warm", prompt_of(40), params=SHORT)
    harness.run()
    harness.send("cold", prompt_of(40, 1), params=SHORT)
    for i in range(10):
        harness.send(f"hit{i}", prompt_of(40), params=SHORT)
    order = starts(harness, ["cold", *(f"hit{i}" for i in range(10))])
    assert order == ["hit0", "hit1", "hit2", "hit3", "cold", *(f"hit{i}" for i in range(4, 10))]


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    harness = Harness(FakeWorker(num_pages=1000), chunked_prefill_size=32)
    for i in range(5):
        harness.send(f"crawler{i}", prompt_of(640, i), params=SHORT)
    harness.turn()
    for i in range(6):
        harness.send(f"chat{i}", prompt_of(10, 10 + i), params=SHORT)
        harness.turn()
        assert len(harness.rows(f"chat{i}")) == 1
        # The long ones go one after the other: in parallel all would be late.
        assert running(harness) == ["crawler0", f"chat{i}"]
        assert [len(row.token_ids) // 4 for row in harness.worker.plans[-1].rows] == [22, 10]
        harness.turn()


def test_prompts_that_are_about_alike_go_by_age() -> None:
    harness = Harness(chunked_prefill_size=16)
    for i, length in enumerate((30, 28, 29)):
        harness.send(f"r{i}", prompt_of(length, i), params=LONG)
    harness.turn()
    harness.turn()
    steps = [[len(row.token_ids) // 4 for row in plan.rows] for plan in harness.worker.plans]
    assert steps == [[16], [14, 2]]


def test_one_that_is_all_cached_takes_no_decodes_place() -> None:
    harness = Harness(FakeWorker(page_size=1), chunked_prefill_size=16)
    harness.send("a", prompt_of(9), params=LONG)
    harness.turn()
    harness.send("b", prompt_of(9), params=LONG)
    harness.turn()
    assert [request.cached for request in harness.scheduler.table.running] == [0, 8]
    assert [len(row.token_ids) // 4 for row in harness.worker.plans[-1].rows] == [1, 1]


def test_half_of_the_budget_is_the_oldest_prompts() -> None:
    """Short prompts that come without end, more than can be computed, slow a long one down to half its speed."""
    harness = Harness(FakeWorker(num_pages=1000), chunked_prefill_size=32, max_running_requests=64)
    harness.send("long", prompt_of(320), params=SHORT)
    harness.turn()
    for turn in range(18):  # 32 tokens are computed, 18 times 16 are left to do
        assert not harness.rows("long")
        for i in range(4):
            harness.send(f"short{turn}-{i}", prompt_of(10, 4 * turn + i + 1), params=SHORT)
        harness.turn()
    assert len(harness.rows("long")) == 1


@pytest.mark.parametrize("depth", [1, 2])
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    places=st.integers(1, 6),
    stream=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_no_request_starves(depth: int, lengths: list[int], places: int, stream: list[int], seed: int) -> None:
    """Whatever comes after them, and comes without end, requests end in a time that depends on those before them."""
    worker = FakeWorker(num_pages=120)  # 480 tokens: hardly more than two of them need
    harness = Harness(worker, depth, chunked_prefill_size=16, max_running_requests=places)
    for i, length in enumerate(lengths):
        harness.send(f"r{i}", prompt_of(length, seed + i), params=SHORT)
    # Each may be passed by four times, by what has no more left to compute than itself; it then has half of the budget.
    bound = 20 + sum(20 + 12 * length // 16 for length in lengths)
    rng = random.Random(seed)
    turn = 0
    while not all(harness.rows(f"r{i}") and harness.rows(f"r{i}")[-1].finish for i in range(len(lengths))):
        turn += 1
        assert turn < bound
        while len(harness.inbox) + len(harness.scheduler.table.waiting) < 12:
            harness.send(f"s{turn}-{len(harness.inbox)}", prompt_of(rng.choice(stream), rng.randrange(4)), params=SHORT)
        harness.turn()


def test_the_budget_is_shared_by_prompts_and_free_for_decodes() -> None:
    harness = Harness(chunked_prefill_size=16)
    harness.send("a", prompt_of(4, 1), params=LONG)
    harness.turn()
    harness.send("b", prompt_of(10, 2), params=LONG)
    harness.send("c", prompt_of(10, 3), params=LONG)
    harness.send("d", prompt_of(10, 4), params=LONG)
    for _ in range(3):
        harness.turn()
    steps = [[len(row.token_ids) // 4 for row in plan.rows] for plan in harness.worker.plans]
    assert steps == [[4], [1, 10, 6], [1, 1, 4, 10], [1, 1, 1, 1]]


def test_no_more_run_than_may() -> None:
    harness = Harness(max_running_requests=3)
    for i in range(5):
        harness.send(f"r{i}", prompt_of(3, i), params=SHORT)
    most = 0
    while harness.turn():
        most = max(most, *(len(plan.rows) for plan in harness.worker.plans))
    assert most == 3


def test_the_youngest_is_retracted_first_and_comes_back_in_its_place() -> None:
    harness = Harness(FakeWorker(num_pages=16), schedule_policy="fcfs")
    for i in range(4):
        harness.send(f"r{i}", prompt_of(8, i), params=LONG)
    while harness.scheduler.results.counters.retractions == 0:
        harness.turn()
    retracted = [request.rid for request in harness.scheduler.table.waiting if request.retractions]
    assert retracted == [max(running(harness) + retracted)]
    harness.send("late", prompt_of(8, 9), params=SHORT)
    harness.turn()
    assert [request.rid for request in harness.scheduler.table.waiting][-1] == "late"
    assert [request.seq for request in harness.scheduler.table.waiting] == sorted(
        request.seq for request in harness.scheduler.table.waiting
    )
    harness.run()
    ends = [harness.finish(f"r{i}").type for i in range(4)]
    assert ends == ["length"] * 4
    assert harness.scheduler.results.counters.retractions < 20


def test_the_oldest_is_never_retracted() -> None:
    harness = Harness(FakeWorker(num_pages=10), max_running_requests=8)
    for i in range(8):
        harness.send(f"r{i}", prompt_of(3, i), params=SamplingParams(max_new_tokens=30, ignore_eos=True))
    oldest = None
    while harness.turn():
        table = harness.scheduler.table
        if table.running and table.running[0] is not oldest:
            oldest = table.running[0]
        first = min(table, key=lambda request: request.seq, default=None)
        if first is not None and first.first_run is not None and not harness.scheduler.table.waiting:
            assert first.lease is not None
        if oldest is not None and oldest.rid == "r0":
            assert oldest.retractions == 0
    assert harness.scheduler.results.counters.retractions > 0
    harness.check_empty()


def test_a_request_waits_for_pages_that_another_one_computes() -> None:
    harness = Harness(schedule_policy="fcfs", chunked_prefill_size=8)
    prompt = prompt_of(20)
    harness.send("first", prompt, params=LONG)
    harness.send("same", prompt, params=LONG)
    harness.send("other", prompt_of(6, 1), params=LONG)
    harness.turn()
    harness.turn()
    assert running(harness) == ["first"]
    harness.turn()  # the last 4 tokens of "first"; the last 4 of "same" must be computed anyway
    assert running(harness) == ["first", "same"]
    harness.turn()
    assert running(harness) == ["first", "same", "other"]
    assert [request.cached for request in harness.scheduler.table.running] == [0, 16, 0]


def test_others_need_not_wait_with_it() -> None:
    harness = Harness(chunked_prefill_size=24)
    harness.send("first", prompt_of(20), params=LONG)
    harness.send("same", prompt_of(20), params=LONG)
    harness.send("other", prompt_of(6, 1), params=LONG)
    harness.turn()
    assert running(harness) == ["first", "other"]
    harness.run()
    for rid, prompt in (("first", prompt_of(20)), ("same", prompt_of(20)), ("other", prompt_of(6, 1))):
        assert harness.output(rid) == harness.expected(prompt, LONG)


def test_one_that_wants_no_hit_waits_for_nobody() -> None:
    harness = Harness(chunked_prefill_size=64)
    harness.send("first", prompt_of(40), params=LONG)
    harness.embed("mean", prompt_of(40), pooling="mean")
    harness.turn()
    assert [len(row.token_ids) // 4 for row in harness.worker.plans[0].rows] == [40, 24]


def test_one_that_started_earlier_but_came_later_gives_way_first() -> None:
    harness = Harness(FakeWorker(num_pages=20), schedule_policy="lpm", max_running_requests=2, chunked_prefill_size=32)
    harness.send("warm", prompt_of(9), params=SHORT)
    harness.send("runs", prompt_of(5, 1), params=SamplingParams(max_new_tokens=6, ignore_eos=True))
    harness.turn()
    harness.send("old", prompt_of(8, 2), params=LONG)
    harness.send("young", prompt_of(9), params=LONG)
    while running(harness) != ["old", "young"]:
        assert harness.turn()
    old, young = harness.scheduler.table.running
    assert young.first_run is not None
    assert old.first_run is not None
    assert young.first_run < old.first_run
    harness.run()
    assert old.retractions == 0
    assert young.retractions > 0


def test_pages_that_are_shared_are_counted_once() -> None:
    """Eight requests of 30 tokens fit into 80, as 28 of these tokens lie in the same pages."""
    harness = Harness(FakeWorker(num_pages=20), max_running_requests=8, chunked_prefill_size=64)
    prompt = prompt_of(28)
    for i in range(8):
        harness.send(f"r{i}", [*prompt, i + 1, i + 2], params=SamplingParams(max_new_tokens=2, ignore_eos=True))
    harness.turn()
    harness.turn()
    assert len(running(harness)) == 7  # the first has ended
    harness.run()
    assert harness.scheduler.results.counters.retractions == 0
    harness.check_empty()


def test_tokens_far_in_the_future_keep_nobody_out() -> None:
    """Eight may generate 4,000 tokens each, in a pool of 6,000: few requests ever generate all that they may."""
    harness = Harness(FakeWorker(num_pages=1500), chunked_prefill_size=512)
    for i in range(8):
        harness.send(f"r{i}", prompt_of(10, i), params=SamplingParams(max_new_tokens=4000, ignore_eos=True))
    harness.turn()
    assert len(running(harness)) == 8


def test_a_namespace_shares_with_no_other() -> None:
    harness = Harness(chunked_prefill_size=64)
    for rid in ("a", "b", "c"):
        harness.send(rid, prompt_of(20))
    harness.scheduler._receive()
    harness.scheduler.table.waiting[1].namespace = "other"
    harness.turn()
    assert running(harness) == ["a", "b"]  # "c" waits for what "a" computes
    harness.run()
    assert [harness.rows(rid)[-1].cached_tokens for rid in ("a", "b", "c")] == [0, 0, 16]


def test_steps_in_flight_share_what_runs() -> None:
    harness = Harness(depth=2)
    for i in range(5):
        harness.send(f"r{i}", prompt_of(3, i), params=LONG)
    for _ in range(12):
        harness.turn()
    # Both stages have work at any time: of five requests three are in one step and two in the other.
    assert [len(plan.rows) for plan in harness.worker.plans[-4:]] in ([3, 2, 3, 2], [2, 3, 2, 3])
    harness.run()
    for i in range(5):
        assert harness.output(f"r{i}") == harness.expected(prompt_of(3, i), LONG)
