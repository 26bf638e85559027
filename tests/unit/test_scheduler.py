"""The scheduler over a fake worker: every request ends once, with what it gives alone, and all pages come back."""

import random
from collections import deque
from collections.abc import Sequence

import pytest
from fake_worker import FakeWorker, alone

from llmserve.runtime.config import ServerArgs
from llmserve.runtime.engine.batch import SampleSpec, int32_array, int32_bytes
from llmserve.runtime.messages import (
    AbortReqInput,
    BatchEmbeddingOutput,
    BatchTokenIDOutput,
    EmbeddingRow,
    FinishReason,
    Message,
    SamplingParams,
    SchedulerMetrics,
    TokenIDRow,
    TokenizedGenerateReqInput,
)
from llmserve.runtime.scheduler.loop import Scheduler

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)


class Outbox:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.congested = False
        self.backlog = 0

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def flush(self) -> bool:
        return True


class Inbox(deque[Message]):
    def recv(self) -> Message | None:
        return self.popleft() if self else None


class LetterDecoder:
    """The text of token t is the letter number t, so a stop string is a run of tokens."""

    def __init__(self, skip_special_tokens: bool, stop: tuple[str, ...], min_tokens: int) -> None:
        self.stopped: str | None = None
        self._stop, self._text, self._min = stop, "", min_tokens

    def add(self, ids: Sequence[int]) -> str:
        for token in ids:
            self._text += chr(ord("A") + token)
            for stop in self._stop:
                if self._text.endswith(stop) and len(self._text) > self._min:
                    self.stopped = stop
        return ""


class Harness:
    """A scheduler, its clock, and everything that it has said."""

    def __init__(self, worker: FakeWorker | None = None, depth: int = 1, **options: object) -> None:
        self.worker = worker or FakeWorker()
        self.clock = 0.0
        self.inbox, self.outbox, self.embeddings = Inbox(), Outbox(), Outbox()
        self.metrics: list[SchedulerMetrics] = []
        defaults = {"model": "fake", "chunked_prefill_size": 32, "max_running_requests": 8}
        self.scheduler = Scheduler(
            ServerArgs(**{**defaults, **options}),  # type: ignore[arg-type]
            self.worker,
            LetterDecoder,
            self.inbox,
            self.outbox,
            self.embeddings,
            self.metrics.append,
            depth=depth,
            now=lambda: self.clock,
        )

    def turn(self) -> bool:
        self.clock += 0.01
        progressed = self.scheduler.turn()
        self.scheduler.kv.check_integrity([r.lease for r in self.scheduler.table.running if r.lease is not None])
        return progressed

    def run(self, turns: int = 100_000) -> None:
        """Until nothing happens any more."""
        for _ in range(turns):
            if not self.turn():
                return
        raise AssertionError("the scheduler never rests")

    def send(self, rid: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **fields: object) -> None:
        message = TokenizedGenerateReqInput(
            rid=rid,
            prompts=(int32_bytes(list(prompt)),),
            sampling_params=params,
            **fields,  # type: ignore[arg-type]
        )
        self.inbox.append(message)

    def rows(self, rid: str, index: int = 0) -> list[TokenIDRow]:
        batches = [m for m in self.outbox.messages if isinstance(m, BatchTokenIDOutput)]
        return [row for batch in batches for row in batch.rows if row.rid == rid and row.index == index]

    def output(self, rid: str, index: int = 0) -> list[int]:
        return int32_array(b"".join(row.output_ids for row in self.rows(rid, index))).tolist()

    def finish(self, rid: str, index: int = 0) -> FinishReason:
        """How a choice ended, if it has ended exactly once and said nothing after."""
        rows = self.rows(rid, index)
        assert [row.finish is not None for row in rows] == [False] * (len(rows) - 1) + [True]
        assert rows[-1].finish is not None
        return rows[-1].finish

    def vector(self, rid: str, index: int = 0) -> EmbeddingRow:
        batches = [m for m in self.embeddings.messages if isinstance(m, BatchEmbeddingOutput)]
        (row,) = [row for batch in batches for row in batch.rows if row.rid == rid and row.index == index]
        return row

    def expected(self, prompt: Sequence[int], params: SamplingParams = GREEDY, seed: int | None = None) -> list[int]:
        info = self.worker.info
        stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(info.eos_token_ids))
        spec = SampleSpec(params=params, seed=params.seed if seed is None else seed, position=0)
        return alone(prompt, spec, params.max_new_tokens, info.vocab_size, stop)

    def check_empty(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler.table) == 0
        assert not scheduler.table.groups
        assert scheduler.quiet
        assert scheduler.kv.used == 0
        scheduler.kv.check_integrity([])
        scheduler.flush()
        assert scheduler.kv.available == scheduler.kv.total
        assert scheduler.kv.cached == 0
        scheduler.kv.check_integrity([])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 50), k=length)


def test_one_request_gives_its_tokens_in_chunks() -> None:
    harness = Harness()
    prompt = prompt_of(70)
    harness.send("a", prompt)
    harness.run()
    assert harness.output("a") == harness.expected(prompt)
    assert harness.finish("a") == FinishReason(type="length")
    # 70 tokens in chunks of 32, then 7 decodes: the last chunk draws the first token.
    assert [len(row.token_ids) // 4 for plan in harness.worker.plans for row in plan.rows] == [32, 32, 6] + [1] * 7
    harness.check_empty()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_storm_in_a_small_pool(seed: int, policy: str) -> None:
    """Random lengths, shared prefixes, aborts at any moment: all end once, with what they give alone, and free all."""
    rng = random.Random(seed)
    harness = Harness(FakeWorker(num_pages=40), schedule_policy=policy, max_queued_requests=10_000)
    prefixes = [rng.choices(range(1, 50), k=rng.randrange(30)) for _ in range(6)]
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    aborted: set[str] = set()
    unsent = 400
    while unsent or len(harness.scheduler.table) or harness.inbox:
        for _ in range(rng.choice([0, 0, 1, 6])):
            if not unsent:
                break
            unsent -= 1
            prompt = rng.choice(prefixes) + rng.choices(range(1, 50), k=rng.randrange(1, 40))
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                seed=unsent,
                max_new_tokens=rng.choice([1, 5, 40, 90]),
                min_new_tokens=rng.choice([0, 0, 3]),
                stop_token_ids=tuple(rng.sample(range(50), k=rng.choice([0, 1, 3]))),
                ignore_eos=rng.random() < 0.5,
            )
            rid = f"r{unsent}"
            requests[rid] = prompt, params
            harness.send(rid, prompt, params, stream=rng.random() < 0.5)
            if rng.random() < 0.1:  # a client that leaves at once
                harness.inbox.append(AbortReqInput(rids=(rid,)))
                aborted.add(rid)
        if rng.random() < 0.05 and harness.scheduler.table.groups:
            rid = rng.choice(list(harness.scheduler.table.groups))
            harness.inbox.append(AbortReqInput(rids=(rid,)))
            aborted.add(rid)
        harness.turn()
    harness.run()
    assert harness.scheduler.results.counters.retractions > 0
    assert harness.scheduler.kv.evicted_pages > 0
    assert harness.scheduler.table.cached_tokens > 0
    for rid, (prompt, params) in requests.items():
        expected, output = harness.expected(prompt, params), harness.output(rid)
        reason = harness.finish(rid)
        if reason.type == "abort":
            assert rid in aborted
            assert output == expected[: len(output)]
        else:
            assert output == expected
            assert reason.type == ("length" if len(output) == params.max_new_tokens else "stop") or (
                output[-1] in {0, *params.stop_token_ids}
            )
        assert harness.rows(rid)[-1].completion_tokens == len(output)
    harness.check_empty()
