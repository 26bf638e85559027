"""Which replica gets a request, and why."""

import pytest

from llmserve.runtime.engine.batch import int32_bytes
from llmserve.runtime.messages import Histogram, SchedulerMetrics
from llmserve.runtime.routing import CHOICE_TOKENS, Routing
from llmserve.runtime.schedulers import Schedulers, total_of

PAGE = 4
NOW = 100.0


def prompt(*tokens: int) -> list[bytes]:
    return [int32_bytes(list(tokens))]


@pytest.fixture
def routing() -> Routing:
    return Routing(2, PAGE, max_running=3)


def test_the_longest_cached_prefix_wins(routing: Routing) -> None:
    shared = list(range(8))
    assert routing.choose(prompt(*shared, 100)) == 0
    assert routing.choose(prompt(50, 51, 52, 53, 54)) == 1, "the other one has sent nothing yet"
    assert routing.choose(prompt(*shared, 101)) == 0
    assert routing.choose(prompt(50, 51, 52, 53, 99)) == 1
    assert routing.choose(prompt(*shared[:4], 7, 7, 7, 7)) == 0, "its first page is known"
    assert routing.reasons == {"only": 0, "prefix": 3, "load": 2, "full": 0}


def test_a_page_counts_only_after_the_same_pages(routing: Routing) -> None:
    routing.choose(prompt(1, 1, 1, 1, 2, 2, 2, 2, 9))
    routing.started(0, 1)
    assert routing.choose(prompt(2, 2, 2, 2, 9)) == 1, "that page came second, so its KV is another's"
    assert routing.reasons["prefix"] == 0


def test_the_last_token_is_no_reason(routing: Routing) -> None:
    """A prompt that is cached wholly has its last page computed again, for the last token's logits."""
    routing.choose(prompt(1, 1, 1, 1, 2))
    routing.started(0, 1)
    assert routing.choose(prompt(1, 1, 1, 1)) == 1


def test_without_a_prefix_the_least_busy_one(routing: Routing) -> None:
    routing.started(0, 2)
    routing.started(1, 1)
    assert routing.choose(prompt(1)) == 1
    for _ in range(2):
        routing.ended(0)
    assert routing.choose(prompt(1)) == 0
    assert routing.reasons["load"] == 2


def test_a_short_prefix_is_not_worth_a_crowd() -> None:
    """All chats begin with the same system prompt, which the second replica has too as soon as it has got one."""
    routing = Routing(2, PAGE, max_running=64)
    for user in range(8):
        routing.started(routing.choose(prompt(*range(32), 100 + user)), 1)
    assert [replica.choices for replica in routing.replicas] == [4, 4]
    assert routing.reasons == {"only": 0, "prefix": 6, "load": 2, "full": 0}


def test_a_long_prefix_is_worth_a_crowd_of_its_size() -> None:
    routing = Routing(2, PAGE, max_running=64)
    conversation = range(4 * CHOICE_TOKENS)
    assert routing.choose(prompt(*conversation, 1)) == 0
    routing.started(0, 4)
    assert routing.choose(prompt(*conversation, 2)) == 0
    routing.started(0, 1)
    assert routing.choose(prompt(*conversation, 3)) == 1
    assert routing.reasons == {"only": 0, "prefix": 1, "load": 2, "full": 0}


def test_a_prefix_is_not_worth_a_wait(routing: Routing) -> None:
    routing.choose(prompt(1, 1, 1, 1, 2))
    routing.started(0, 3)
    assert routing.choose(prompt(1, 1, 1, 1, 3)) == 1
    assert routing.reasons["full"] == 1
    routing.started(1, 3)
    assert routing.choose(prompt(1, 1, 1, 1, 4)) in (0, 1)
    assert routing.reasons["full"] == 1, "both are full, so the prefix decides"


def test_what_is_remembered_is_as_much_as_the_pool_has(routing: Routing) -> None:
    routing.max_pages = 2
    routing.choose(prompt(1, 1, 1, 1, 0))
    routing.started(0, 1)
    routing.choose(prompt(2, 2, 2, 2, 0))
    routing.started(1, 1)
    for token in (3, 4):
        routing.started(1, 1)
        assert routing.choose(prompt(*[token] * 4, 0)) == 0
    routing.ended(1)
    routing.ended(1)
    routing.ended(1)
    assert routing.choose(prompt(1, 1, 1, 1, 0)) == 1, "replica 0 has evicted it"


def test_the_dead_and_the_draining_get_nothing() -> None:
    schedulers = Schedulers(["a", "b", "c"], PAGE, 8)
    routing = schedulers.routing
    routing.choose(prompt(1, 1, 1, 1, 0))
    routing.started(1, 5)
    schedulers.lose(0)
    schedulers.take(metrics(2, state="draining"), NOW)
    assert routing.choose(prompt(1, 1, 1, 1, 0)) == 1
    assert routing.reasons["only"] == 1
    assert not schedulers.send(None, 0), "what is sent to the dead goes nowhere"  # type: ignore[arg-type]


def test_an_emptied_cache_is_forgotten() -> None:
    schedulers = Schedulers(["a", "b"], PAGE, 8)
    routing = schedulers.routing
    schedulers.take(metrics(0, running=1), NOW)
    routing.choose(prompt(1, 1, 1, 1, 0))
    schedulers.take(metrics(0, kv_tokens_cached=0), NOW)
    assert routing.replicas[0].pages, "the first request has not come yet"
    schedulers.take(metrics(0, flushes_total=1, kv_tokens_cached=4, running=1), NOW)
    assert not routing.replicas[0].pages, "though others have filled it since"
    routing.choose(prompt(1, 1, 1, 1, 0))
    schedulers.take(metrics(0, flushes_total=1, kv_tokens_cached=4), NOW)
    assert routing.replicas[0].pages


def metrics(dp_rank: int, **fields: object) -> SchedulerMetrics:
    counts = {
        name: 0
        for name, kind in SchedulerMetrics.__annotations__.items()
        if kind in (int, float) and name not in ("dp_rank", "time")
    }
    fields = {"state": "ready", "weight_version": 1, "time": 5.0, **fields}
    return SchedulerMetrics(**{**counts, "dp_rank": dp_rank, **fields})  # type: ignore[arg-type]


def test_the_total_of_replicas() -> None:
    itl = Histogram(bounds=(1.0,), counts=(2, 1), sum=3.0)
    one = metrics(0, running=2, steps_total=10, time=7.0, step_s=0.1, weight_version=3, itl=itl)
    two = metrics(1, running=1, steps_total=5, time=6.0, step_s=0.3, weight_version=3, state="paused", itl=itl)
    total = total_of([one, two])
    assert total.itl == Histogram(bounds=(1.0,), counts=(4, 2), sum=6.0)
    assert (total.running, total.steps_total, total.time, total.step_s) == (3, 15, 6.0, 0.3)
    assert (total.weight_version, total.state) == (3, "ready"), "one of them still works"


def test_the_total_waits_for_every_replica_that_lives() -> None:
    schedulers = Schedulers(["a", "b"], PAGE, 8)
    assert schedulers.total is None
    schedulers.take(metrics(0, running=1), NOW)
    assert schedulers.total is None
    schedulers.take(metrics(1, running=4), NOW)
    assert schedulers.total is not None
    assert schedulers.total.running == 5
    schedulers.lose(1)
    assert schedulers.total == metrics(0, running=1)
