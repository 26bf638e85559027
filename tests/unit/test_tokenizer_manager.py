"""The TokenizerManager against a scheduler and a detokenizer that the test plays, over real sockets."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import small_tokenizers

from instances import PATIENCE_S
from llmserve.runtime import tokenizer_manager
from llmserve.runtime.config import ServerArgs
from llmserve.runtime.detokenizer import Detokenizer
from llmserve.runtime.engine.batch import int32_array, int32_bytes
from llmserve.runtime.messages import (
    AbortReqInput,
    BatchEmbeddingOutput,
    BatchTokenIDOutput,
    EmbeddingReqInput,
    EmbeddingRow,
    FinishReason,
    GenerateReqInput,
    Heartbeat,
    HttpMetrics,
    LogprobOptions,
    Message,
    MetricsInput,
    SamplingParams,
    SchedulerInput,
    SchedulerMetrics,
    StrRow,
    SubscribeMetricsReqInput,
    TokenIDRow,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from llmserve.runtime.ports import PortArgs, ipc_address
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.tokenizer import Tokenizer
from llmserve.runtime.tokenizer_manager import TokenizerManager
from llmserve.runtime.wire import Pull, Push

TOKENIZER = Tokenizer(small_tokenizers.byte_level(), {}, {})
MAX_MODEL_LEN = 100
CONFIG = type("Config", (), {"vocab_size": 400, "max_position_embeddings": 1000, "eos_token_ids": (1,)})
LENGTH = FinishReason(type="length")
ABORT = FinishReason(type="abort", message="the client has left")


class FakeStack:
    """The scheduler and the detokenizer of the manager under test."""

    def __init__(self, ports: PortArgs) -> None:
        self.inbox = Pull(ports.scheduler_input_ipc_name, SchedulerInput)
        self.text = Push(ports.tokenizer_ipc_name)
        self.metrics = Push(ports.metrics_ipc_name)
        self.detokenizer = Detokenizer(TOKENIZER)

    async def receive(self) -> Any:
        """The next message of the manager."""
        return await asyncio.wait_for(self.inbox.arecv(), PATIENCE_S)

    async def receives_nothing(self) -> bool:
        await asyncio.sleep(0.05)
        return self.inbox.recv() is None

    def send(self, *rows: TokenIDRow) -> None:
        self.text.send(self.detokenizer.convert(BatchTokenIDOutput(rows=rows)))

    def close(self) -> None:
        for socket in (self.inbox, self.text, self.metrics):
            socket.close()


def row(rid: str, text: str, index: int = 0, finish: FinishReason | None = None, **fields: Any) -> TokenIDRow:
    ids = TOKENIZER.encode(text)
    fields = {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": len(ids), **fields}
    return TokenIDRow(rid=rid, index=index, output_ids=int32_bytes(ids), finish=finish, **fields)


def request(rid: str = "r", n: int = 1, **fields: Any) -> GenerateReqInput:
    """A request whose sampling parameters may be among `fields`."""
    params = {name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields}
    fields = {"texts": () if "input_ids" in fields else ("Hello",), **fields}
    return GenerateReqInput(rid=rid, n=n, sampling_params=SamplingParams(**{"max_new_tokens": 8, **params}), **fields)


async def collect(manager: TokenizerManager, req: GenerateReqInput) -> list[StrRow]:
    return [text_row async for text_row in manager.generate(req)]


def started(manager: TokenizerManager, req: GenerateReqInput) -> "asyncio.Task[list[StrRow]]":
    return asyncio.create_task(collect(manager, req))


class Clock:
    """The manager's `time`: its monotonic clock goes on when the test says so."""

    perf_counter = staticmethod(time.perf_counter)
    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tokenizer_manager, "time", clock)
    return clock


@pytest_asyncio.fixture
async def manager(tmp_path: Path, clock: Clock) -> AsyncIterator[TokenizerManager]:
    checkpoint: Any = type("Checkpoint", (), {"config": CONFIG})
    args = ServerArgs(model="test", seed=1)
    manager = TokenizerManager(args, PortArgs.init_new(tmp_path), checkpoint, TOKENIZER)
    await manager.start()
    manager.ready(max_model_len=MAX_MODEL_LEN)
    yield manager
    await manager.close()


@pytest_asyncio.fixture
async def stack(manager: TokenizerManager, tmp_path: Path) -> AsyncIterator[FakeStack]:
    stack = FakeStack(PortArgs.init_new(tmp_path))
    yield stack
    stack.close()


# ---- the way of a request ------------------------------------------------------------------------------------------


async def test_a_request_is_tokenized_and_its_rows_come_back(manager: TokenizerManager, stack: FakeStack) -> None:
    running = started(manager, request(stream=True, user="me", temperature=0.5, logprobs=LogprobOptions(top=2)))
    sent = await stack.receive()
    assert isinstance(sent, TokenizedGenerateReqInput)
    assert int32_array(sent.prompts[0]).tolist() == TOKENIZER.encode("Hello")
    assert (sent.rid, sent.n, sent.stream, sent.user, sent.text) == ("r", 1, True, "me", "Hello")
    assert sent.sampling_params.temperature == 0.5
    assert sent.logprobs == LogprobOptions(top=2)

    stack.send(row("r", "one "))
    stack.send(row("r", "two", finish=LENGTH))
    rows = await running
    assert "".join(text_row.text for text_row in rows) == "one two"
    assert rows[-1].finish == LENGTH
    assert manager.in_flight == 0


async def test_choices_end_one_by_one(manager: TokenizerManager, stack: FakeStack) -> None:
    running = started(manager, request(n=2, texts=("a", "b")))
    assert len((await stack.receive()).prompts) == 2
    for index in (3, 1, 0):
        stack.send(row("r", str(index), index, LENGTH))
    await asyncio.sleep(0.05)
    assert not running.done()
    stack.send(row("r", "2", 2, LENGTH))
    assert sorted((text_row.index, text_row.text) for text_row in await running) == [(n, str(n)) for n in range(4)]


async def test_rows_of_one_batch_reach_their_own_requests(manager: TokenizerManager, stack: FakeStack) -> None:
    running = [started(manager, request(rid)) for rid in "abc"]
    for _ in running:
        await stack.receive()
    stack.send(*(row(rid, rid, finish=LENGTH) for rid in "cab"), row("unknown", "x", finish=LENGTH))
    assert [[text_row.text for text_row in await task] for task in running] == [["a"], ["b"], ["c"]]


async def test_rows_of_a_slow_consumer_are_merged(manager: TokenizerManager, stack: FakeStack) -> None:
    async with aclosing(manager.generate(request(stream=True))) as rows:
        first = asyncio.ensure_future(anext(rows))
        await stack.receive()
        stack.send(row("r", "0 "))
        taken = [await first]
        for number in range(1, 200):
            stack.send(row("r", f"{number} "))
        stack.send(row("r", "end", finish=LENGTH))
        while manager.in_flight:
            await asyncio.sleep(0.01)
        taken += [text_row async for text_row in rows]
    assert len(taken) < 20
    text = "".join(text_row.text for text_row in taken)
    assert text == "".join(f"{number} " for number in range(200)) + "end"
    assert b"".join(text_row.output_ids for text_row in taken) == int32_bytes(
        [token_id for part in [*(f"{n} " for n in range(200)), "end"] for token_id in TOKENIZER.encode(part)]
    )


async def test_a_long_text_is_tokenized_beside_the_loop(manager: TokenizerManager, stack: FakeStack) -> None:
    manager.ready(max_model_len=100_000)
    text = "The quick brown fox " * 1000
    running = started(manager, request(texts=(text,)))
    sent = await stack.receive()
    assert int32_array(sent.prompts[0]).tolist() == TOKENIZER.encode(text)
    assert len(sent.text) == 200
    stack.send(row("r", "", finish=LENGTH))
    await running


async def test_a_rid_is_taken_while_its_text_is_tokenized(manager: TokenizerManager, stack: FakeStack) -> None:
    manager.ready(max_model_len=100_000)
    text = "The quick brown fox " * 1000
    first, second = started(manager, request(texts=(text,))), started(manager, request(texts=(text,)))
    with pytest.raises(RequestError, match="in flight"):
        await second
    await stack.receive()
    assert await stack.receives_nothing()
    stack.send(row("r", "", finish=LENGTH))
    await first


async def test_embeddings(manager: TokenizerManager, stack: FakeStack) -> None:
    running = asyncio.create_task(manager.embed(EmbeddingReqInput(rid="e", texts=("a", "b"), pooling="mean")))
    sent = await stack.receive()
    assert isinstance(sent, TokenizedEmbeddingReqInput)
    assert (sent.pooling, len(sent.prompts)) == ("mean", 2)
    vectors = [EmbeddingRow(rid="e", index=index, embedding=bytes([index] * 4), prompt_tokens=1) for index in (1, 0)]
    for vector in vectors:
        stack.text.send(BatchEmbeddingOutput(rows=(vector,)))
    assert await running == vectors[::-1]
    assert manager.in_flight == 0


async def test_one_failed_prompt_fails_the_embedding(manager: TokenizerManager, stack: FakeStack) -> None:
    running = asyncio.create_task(manager.embed(EmbeddingReqInput(rid="e", texts=("a",))))
    await stack.receive()
    full = FinishReason(type="error", status=503, message="the queue is full")
    stack.text.send(
        BatchEmbeddingOutput(rows=(EmbeddingRow(rid="e", index=0, embedding=b"", prompt_tokens=1, finish=full),))
    )
    with pytest.raises(RequestError, match="queue is full") as caught:
        await running
    assert caught.value.status == 503


# ---- refusals ------------------------------------------------------------------------------------------------------


async def test_nothing_is_left_of_what_is_refused(manager: TokenizerManager, stack: FakeStack) -> None:
    with pytest.raises(RequestError, match="top_p"):
        await collect(manager, request(top_p=1.1))
    assert manager.in_flight == 0
    assert await stack.receives_nothing()


async def test_a_rid_in_flight_is_refused_and_free_again_after_its_end(
    manager: TokenizerManager, stack: FakeStack
) -> None:
    first = started(manager, request())
    await stack.receive()
    with pytest.raises(RequestError) as caught:
        await collect(manager, request())
    assert (caught.value.status, caught.value.param) == (400, "rid")
    stack.send(row("r", "first", finish=LENGTH))
    assert (await first)[-1].text == "first"
    second = started(manager, request())
    await stack.receive()
    stack.send(row("r", "second", finish=LENGTH))
    assert (await second)[-1].text == "second"


# ---- leaving, draining, failing ------------------------------------------------------------------------------------


async def test_closing_an_unfinished_stream_aborts_it_once(manager: TokenizerManager, stack: FakeStack) -> None:
    rows = manager.generate(request(n=2))
    first = asyncio.ensure_future(anext(rows))
    await stack.receive()
    stack.send(row("r", "x", finish=LENGTH))
    assert (await first).text == "x"
    await rows.aclose()
    assert (await stack.receive()).rids == ("r",)
    with pytest.raises(RequestError, match="in flight"):
        await collect(manager, request())  # the scheduler has not ended the old one
    stack.send(row("r", "", 1, ABORT))
    while manager.in_flight:
        await asyncio.sleep(0.01)
    assert await stack.receives_nothing()


async def test_cancelling_before_the_first_row_aborts(manager: TokenizerManager, stack: FakeStack) -> None:
    running = started(manager, request())
    await stack.receive()
    running.cancel()
    assert (await stack.receive()).rids == ("r",)


async def test_a_finished_stream_is_not_aborted(manager: TokenizerManager, stack: FakeStack) -> None:
    async with aclosing(manager.generate(request())) as rows:
        first = asyncio.ensure_future(anext(rows))
        await stack.receive()
        stack.send(row("r", "x", finish=LENGTH))
        await first
    assert await stack.receives_nothing()


async def test_rows_of_an_abandoned_request_never_reach_its_successor(
    manager: TokenizerManager, stack: FakeStack
) -> None:
    left = started(manager, request())
    await stack.receive()
    left.cancel()
    await stack.receive()
    stack.send(row("r", "old"), row("r", "", finish=ABORT))
    while manager.in_flight:
        await asyncio.sleep(0.01)
    running = started(manager, request())
    await stack.receive()
    stack.send(row("r", "new", finish=LENGTH))
    assert [text_row.text for text_row in await running] == ["new"]


async def test_abort_by_rid_lets_the_consumer_see_it(manager: TokenizerManager, stack: FakeStack) -> None:
    running = started(manager, request())
    await stack.receive()
    assert manager.abort("r")
    assert not manager.abort("R")
    assert (await stack.receive()).rids == ("r",)
    stack.send(row("r", "", finish=ABORT))
    (last,) = await running
    assert last.finish == ABORT


async def test_failing_ends_all_in_flight_with_503(manager: TokenizerManager, stack: FakeStack) -> None:
    waiting = [started(manager, request(rid)) for rid in "abc"]
    embedding = asyncio.create_task(manager.embed(EmbeddingReqInput(rid="e", texts=("a",))))
    for _ in range(4):
        await stack.receive()
    stack.send(row("a", "partial"))
    await asyncio.sleep(0.05)
    manager.fail("the scheduler died")
    manager.fail("the server has stopped")  # which is no news
    for task in (*waiting, embedding):
        with pytest.raises(RequestError, match="the scheduler died") as caught:
            await asyncio.wait_for(task, PATIENCE_S)
        assert caught.value.status == 503
    with pytest.raises(RequestError, match="the scheduler died"):
        await collect(manager, request())
    assert manager.in_flight == 0
    assert manager.healthy() == (False, "the scheduler died")


async def test_draining_refuses_new_requests_and_finishes_the_others(
    manager: TokenizerManager, stack: FakeStack
) -> None:
    running = started(manager, request())
    await stack.receive()
    manager.drain()
    with pytest.raises(RequestError, match="draining") as caught:
        await collect(manager, request("other"))
    assert caught.value.status == 503
    assert not manager.healthy()[0]
    stack.send(row("r", "done", finish=LENGTH))
    assert (await running)[-1].text == "done"


async def test_a_scheduler_that_does_not_read_leads_to_503(manager: TokenizerManager) -> None:
    tasks = []
    for number in range(3000):  # nobody binds the scheduler's socket
        tasks.append(started(manager, request(str(number))))
        await asyncio.sleep(0)
    refused = [task for task in tasks if task.done()]
    assert refused
    with pytest.raises(RequestError, match="keep up") as caught:
        await refused[-1]
    assert caught.value.status == 503
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- health and metrics --------------------------------------------------------------------------------------------


def metrics(**fields: Any) -> SchedulerMetrics:
    others = ("state", "processes", "requests", "itl")
    names = [name for name in SchedulerMetrics.__struct_fields__ if name not in others]
    return SchedulerMetrics(**{**dict.fromkeys(names, 0), "state": "ready", **fields})


async def seen(manager: TokenizerManager, stack: FakeStack, message: SchedulerMetrics) -> None:
    """The scheduler says something, and the detokenizer lives too."""
    await beats(manager, stack)
    await steps(manager, stack, message)


async def steps(manager: TokenizerManager, stack: FakeStack, message: SchedulerMetrics) -> None:
    stack.metrics.send(message)
    while manager.scheduler_metrics != message:
        await asyncio.sleep(0.001)


async def beats(manager: TokenizerManager, stack: FakeStack) -> None:
    stack.text.send(Heartbeat())
    while manager.detokenizer_heard != tokenizer_manager.time.monotonic():
        await asyncio.sleep(0.001)


async def test_health_follows_the_schedulers_steps(manager: TokenizerManager, stack: FakeStack, clock: Clock) -> None:
    assert manager.healthy() == (True, "ok")
    for second in range(8):  # an idle scheduler that lives
        await seen(manager, stack, metrics(time=float(second)))
        clock.seconds += 1
        assert manager.healthy()[0]
    for second in range(7):  # one that hangs with work at hand
        await seen(manager, stack, metrics(time=10.0 + second, running=1))
        clock.seconds += 1
    assert manager.healthy() == (False, "the scheduler has made no step for 8 s")
    await seen(manager, stack, metrics(time=20.0, running=1, steps_total=1))
    assert manager.healthy()[0]
    clock.seconds += 4
    assert manager.healthy()[0]
    clock.seconds += 2
    assert manager.healthy() == (False, "the scheduler has not been heard of for 6 s")


async def test_rows_that_do_not_come_make_it_unhealthy(
    manager: TokenizerManager, stack: FakeStack, clock: Clock
) -> None:
    """The scheduler has ended the request, and says that it is idle; the detokenizer lives, and sends nothing."""
    running = started(manager, request())
    await stack.receive()
    for second in range(7):
        await seen(manager, stack, metrics(time=float(second), steps_total=9))
        clock.seconds += 1
    assert manager.healthy() == (False, "the detokenizer has delivered nothing for 7 s")
    stack.send(row("r", "late", finish=LENGTH))
    await running
    assert manager.healthy()[0]


async def test_a_silent_detokenizer_makes_it_unhealthy(
    manager: TokenizerManager, stack: FakeStack, clock: Clock
) -> None:
    """Whatever the scheduler does; rows are a sign of life as well as heartbeats."""
    manager.ready(max_model_len=MAX_MODEL_LEN, detokenizer_pid=os.getpid())
    running = started(manager, request())
    await stack.receive()
    for step in range(6):
        clock.seconds += 1
        await steps(manager, stack, metrics(running=1, steps_total=step))
    assert manager.healthy() == (False, "the detokenizer has not been heard of for 6 s")
    assert [process.silent_s for process in manager.http_metrics().processes] == [0, 6]
    stack.send(row("r", "text", finish=LENGTH))
    await running
    assert manager.healthy() == (True, "ok")
    clock.seconds += 6
    await seen(manager, stack, metrics(running=1, steps_total=7))
    assert manager.healthy() == (True, "ok")


async def test_a_scheduler_whose_steps_are_long_may_be_silent_longer(
    manager: TokenizerManager, stack: FakeStack, clock: Clock
) -> None:
    """It speaks between steps. What one step has taken is forgotten when those that follow are short."""
    await seen(manager, stack, metrics(running=1, steps_total=1, step_s=8.0))
    clock.seconds += 20
    await beats(manager, stack)
    assert manager.healthy() == (True, "ok")
    clock.seconds += 5
    await beats(manager, stack)
    assert manager.healthy() == (False, "the scheduler has not been heard of for 25 s")
    for step in range(2, 162):
        await steps(manager, stack, metrics(running=1, steps_total=step, step_s=0.01))
    clock.seconds += 6
    await beats(manager, stack)
    assert manager.healthy() == (False, "the scheduler has not been heard of for 6 s")


async def test_a_pause_excuses_no_step_that_hangs(manager: TokenizerManager, stack: FakeStack, clock: Clock) -> None:
    for second in range(8):
        await seen(manager, stack, metrics(time=float(second), running=1, state="paused", in_step_s=float(second)))
        clock.seconds += 1
    assert manager.healthy() == (False, "the scheduler has made no step for 8 s")


async def test_a_replica_that_hangs_or_is_lost_degrades(tmp_path: Path, clock: Clock) -> None:
    """It gets no new requests, not even those whose beginning it has cached. The instance serves while one does."""
    checkpoint: Any = type("Checkpoint", (), {"config": CONFIG})
    inputs = ("ipc:///a", "ipc:///b", "ipc:///c")
    manager = TokenizerManager(ServerArgs(model="test"), PortArgs.init_new(tmp_path), checkpoint, TOKENIZER, inputs)
    manager.ready(max_model_len=MAX_MODEL_LEN)
    prompt = TokenizedGenerateReqInput(rid="r", prompts=(bytes(200),), sampling_params=SamplingParams(), n=1)

    def second(*working: int, hanging: Sequence[int] = ()) -> None:
        clock.seconds += 1
        manager.detokenizer_heard = clock.seconds
        for number in working:
            manager.schedulers.take(metrics(dp_rank=number, time=clock.seconds), clock.seconds)
        for number in hanging:
            manager.schedulers.take(metrics(dp_rank=number, time=clock.seconds, running=1), clock.seconds)

    def routed() -> set[int]:
        return {manager.schedulers.route(prompt, clock.seconds) for _ in range(5)}

    for _ in range(8):
        second(0, 1, 2)
    assert manager.healthy() == (True, "ok")
    assert routed() == {0}
    for _ in range(6):
        second(1, 2)
    assert manager.healthy() == (True, "degraded: replica 0 has not been heard of for 6 s")
    assert routed() == {1}
    second(1, 2, hanging=[0])
    for _ in range(6):
        second(2, hanging=[0, 1])
    hang = "replica 0 has made no step for 13 s; replica 1 has made no step for 6 s"
    assert manager.healthy() == (True, f"degraded: {hang}")
    assert routed() == {2}
    manager.fail_replica(2, "it died")
    assert manager.healthy() == (False, f"{hang}; replica 2 is lost")
    assert routed() <= {0, 1}, "there is no other"
    second(0, hanging=[1])
    assert manager.healthy() == (True, "degraded: replica 1 has made no step for 7 s; replica 2 is lost")
    assert routed() == {0}


async def test_a_paused_scheduler_is_healthy(manager: TokenizerManager, stack: FakeStack, clock: Clock) -> None:
    for second in range(8):
        await seen(manager, stack, metrics(time=float(second), waiting=1, state="paused"))
        clock.seconds += 1
    assert manager.healthy()[0]


@pytest.mark.parametrize(("status", "outcome"), [(400, "rejected"), (503, "unavailable"), (500, "error")])
async def test_refusals_by_the_scheduler_are_no_errors_of_the_server(
    manager: TokenizerManager, stack: FakeStack, status: int, outcome: str
) -> None:
    running = started(manager, request())
    await stack.receive()
    stack.send(row("r", "", 0, FinishReason(type="error", status=status, message="the queue is full")))
    await running
    counted = {name: count for name, count in manager.http_metrics().outcomes.items() if count}
    assert counted == {outcome: 1}


async def test_outcomes_and_latencies_are_counted(manager: TokenizerManager, stack: FakeStack) -> None:
    running = started(manager, request(n=2))
    await stack.receive()
    stack.send(row("r", "a", 0, queue_s=0.002))
    await asyncio.sleep(0.05)
    stack.send(row("r", "bcd", 0, LENGTH), row("r", "", 1, ABORT))
    await running
    with pytest.raises(RequestError):
        await collect(manager, request(n=0))
    manager.drain()
    with pytest.raises(RequestError):
        await collect(manager, request())

    found = manager.http_metrics()
    expected = {"stop": 0, "length": 1, "abort": 1, "error": 0, "rejected": 1, "unavailable": 1}
    assert found.outcomes == expected
    assert sum(found.ttft.counts) == 1
    assert sum(found.e2e.counts) == 1
    assert found.queue.sum == pytest.approx(0.002)
    assert found.processes[0].rss_bytes > 0


async def test_a_message_that_is_not_for_the_front_is_ignored(manager: TokenizerManager, stack: FakeStack) -> None:
    wrong: Message = AbortReqInput(rids=("r",))
    running = started(manager, request())
    await stack.receive()
    stack.text.send(wrong)
    stack.send(row("r", "fine", finish=LENGTH))
    assert (await running)[-1].text == "fine"


async def test_a_drain_of_the_scheduler_is_one_of_the_front(manager: TokenizerManager, stack: FakeStack) -> None:
    announced: list[str] = []
    manager.announce = announced.append
    await seen(manager, stack, metrics(state="draining"))
    assert manager.healthy() == (False, "draining")
    with pytest.raises(RequestError) as refused:
        await collect(manager, request())
    assert (refused.value.status, refused.value.code) == (503, "draining")
    await seen(manager, stack, metrics(state="ready"))
    assert manager.healthy() == (True, "ok")
    assert announced == ["draining", "ready"]


async def test_a_drain_of_the_front_does_not_end_with_that_of_the_scheduler(
    manager: TokenizerManager, stack: FakeStack
) -> None:
    await seen(manager, stack, metrics(state="draining"))
    manager.drain()
    await seen(manager, stack, metrics(state="ready"))
    assert manager.state == "draining"


async def test_a_watcher_gets_the_fronts_metrics_too(
    manager: TokenizerManager, stack: FakeStack, tmp_path: Path
) -> None:
    watcher = Pull(ipc_address(tmp_path / "watch-1"), MetricsInput)
    stack.text.send(SubscribeMetricsReqInput(endpoint="../elsewhere"))  # refused, and nothing else happens
    stack.text.send(SubscribeMetricsReqInput(endpoint="watch-1"))
    waiting = asyncio.create_task(watcher.arecv())
    while not waiting.done():
        await seen(manager, stack, metrics(time=asyncio.get_running_loop().time()))
    pushed = waiting.result()
    assert isinstance(pushed, HttpMetrics)
    assert [process.role for process in pushed.processes] == ["main"]
    watcher.close()


async def test_a_watcher_gets_the_fronts_metrics_while_its_lease_runs(
    manager: TokenizerManager, stack: FakeStack, tmp_path: Path, clock: Clock
) -> None:
    manager.ready(MAX_MODEL_LEN, detokenizer_pid=os.getpid())
    manager._watchers._now = clock.monotonic
    watcher = Pull(ipc_address(tmp_path / "watch-me"), HttpMetrics)
    stack.text.send(SubscribeMetricsReqInput(endpoint="watch-me", lease_s=3.0))
    while not len(manager._watchers):
        await asyncio.sleep(0.001)
    await seen(manager, stack, metrics(time=1.0))
    message: Any = await asyncio.wait_for(watcher.arecv(), PATIENCE_S)
    assert message.outcomes["stop"] == 0
    assert [process.role for process in message.processes] == ["main", "detokenizer"]
    clock.seconds += 4
    await seen(manager, stack, metrics(time=2.0))
    await asyncio.sleep(0.05)
    assert watcher.recv() is None
    watcher.close()


async def test_a_watcher_outside_the_directory_is_refused(
    manager: TokenizerManager, stack: FakeStack, caplog: pytest.LogCaptureFixture
) -> None:
    stack.text.send(SubscribeMetricsReqInput(endpoint="../elsewhere", lease_s=5))
    running = started(manager, request())
    await stack.receive()
    stack.send(row("r", "fine", finish=LENGTH))
    assert (await running)[-1].text == "fine"
    assert "no metrics for watcher" in caplog.text
