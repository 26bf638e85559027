"""A scheduler over a fake worker, with a clock of its own and everything that it says kept."""

import random
from collections import defaultdict, deque
from collections.abc import Sequence

from fake_worker import FakeWorker, alone
from llguidance import LLTokenizer

from llmserve.runtime.config import ServerArgs
from llmserve.runtime.engine.batch import SampleSpec, Worker, int32_array, int32_bytes
from llmserve.runtime.messages import (
    BatchEmbeddingOutput,
    BatchTokenIDOutput,
    EmbeddingRow,
    FinishReason,
    Message,
    SamplingParams,
    SchedulerMetrics,
    TokenIDRow,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from llmserve.runtime.scheduler.guides import Guides
from llmserve.runtime.scheduler.loop import Scheduler

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)


class Outbox:
    """Keeps the rows of each choice."""

    def __init__(self) -> None:
        self.token_rows: dict[tuple[str, int], list[TokenIDRow]] = defaultdict(list)
        self.embedding_rows: dict[tuple[str, int], list[EmbeddingRow]] = defaultdict(list)
        self.congested = False
        self.backlog = 0

    def send(self, message: Message) -> None:
        assert isinstance(message, BatchTokenIDOutput | BatchEmbeddingOutput)
        for row in message.rows:
            rows = self.token_rows if isinstance(row, TokenIDRow) else self.embedding_rows
            rows[row.rid, row.index].append(row)  # type: ignore[arg-type]

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


def no_vocabulary() -> LLTokenizer:
    raise AssertionError("no grammar is expected")


class Harness:
    """A scheduler, its clock, and everything that it has said."""

    def __init__(
        self, worker: Worker | None = None, depth: int = 1, guides: Guides | None = None, **options: object
    ) -> None:
        self.worker = worker or FakeWorker()
        self.clock = 0.0
        self.inbox, self.outbox, self.embeddings = Inbox(), Outbox(), Outbox()
        self.metrics: list[SchedulerMetrics] = []
        defaults = {"model": "fake", "chunked_prefill_size": 32, "max_running_requests": 8}
        self.scheduler = Scheduler(
            ServerArgs(**{**defaults, **options}),  # type: ignore[arg-type]
            self.worker,
            LetterDecoder,
            guides or Guides(no_vocabulary),
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

    def send(self, rid: str, *prompts: Sequence[int], params: SamplingParams = GREEDY, **fields: object) -> None:
        self.inbox.append(
            TokenizedGenerateReqInput(
                rid=rid,
                prompts=tuple(int32_bytes(list(prompt)) for prompt in prompts),
                sampling_params=params,
                **fields,  # type: ignore[arg-type]
            )
        )

    def embed(self, rid: str, *prompts: Sequence[int], **fields: object) -> None:
        self.inbox.append(
            TokenizedEmbeddingReqInput(
                rid=rid,
                prompts=tuple(int32_bytes(list(prompt)) for prompt in prompts),
                **fields,  # type: ignore[arg-type]
            )
        )

    def rows(self, rid: str, index: int = 0) -> list[TokenIDRow]:
        return self.outbox.token_rows[rid, index]

    def output(self, rid: str, index: int = 0) -> list[int]:
        return int32_array(b"".join(row.output_ids for row in self.rows(rid, index))).tolist()

    def finish(self, rid: str, index: int = 0) -> FinishReason:
        """How a choice ended, if it has ended exactly once and said nothing after."""
        rows = self.rows(rid, index)
        assert [row.finish is not None for row in rows] == [False] * (len(rows) - 1) + [True]
        assert rows[-1].finish is not None
        return rows[-1].finish

    def vector(self, rid: str, index: int = 0) -> EmbeddingRow:
        (row,) = self.embeddings.embedding_rows[rid, index]
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
    """Random tokens, none of them the end of sequence."""
    return random.Random(seed).choices(range(1, 50), k=length)
