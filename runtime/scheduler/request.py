"""The scheduler's state of a request: its choices, their tokens, and how far these are computed.

Decides nothing: policy.py decides who runs next, results.py what a result means and when a request ends.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from llmserve.runtime.cache.kv_cache import Lease
from llmserve.runtime.cache.radix import ELEMENT_BYTES
from llmserve.runtime.engine.batch import PlanRow, SampleSpec, StepHandle
from llmserve.runtime.messages import (
    FinishReason,
    LogprobOptions,
    Logprobs,
    SamplingParams,
    TokenizedReqInput,
)
from llmserve.runtime.scheduler.guides import Guide, Program

NO_SAMPLING = SamplingParams(max_new_tokens=0)


class StopDecoder(Protocol):
    """The part of tokenizer.IncrementalDecoder that finds stop strings in the text of tokens."""

    stopped: str | None

    def add(self, ids: Sequence[int]) -> str: ...


class Request:
    """One choice of a request, (rid, index): a sequence of tokens with three marks, counted in tokens:

    0 <= computed <= scheduled <= known. A token is known once it is part of the sequence; scheduled once a submitted
    step computes it; computed once the result of that step has been applied, so that its KV is in its page.
    Retraction only resets computed and scheduled to 0; the request then catches up again.
    """

    __slots__ = (
        "arrival",
        "cached",
        "computed",
        "decoder",
        "ending",
        "first_run",
        "first_token",
        "group",
        "guide",
        "in_flight",
        "index",
        "last_token",
        "lease",
        "limit",
        "logprobs",
        "namespace",
        "new_logprobs",
        "normalize",
        "params",
        "passed_by",
        "pooled",
        "pooling",
        "program",
        "prompt_len",
        "prompt_logprobs",
        "retractions",
        "rid",
        "rows_sent",
        "scheduled",
        "seed",
        "sent",
        "seq",
        "skip_special_tokens",
        "stop_ids",
        "stream",
        "tokens",
        "want_prompt_logprobs",
    )

    def __init__(self, group: "Group", index: int, seq: int, prompt: bytes) -> None:
        # What was asked for. An embedding keeps the defaults of fields that it does not use.
        self.group = group
        self.rid = group.rid
        self.index = index
        self.seq = seq
        """A number that orders all choices by arrival."""
        self.arrival = group.arrival
        self.namespace = ""
        self.tokens = bytearray(prompt)
        """All known tokens, the prompt's first."""
        self.prompt_len = len(prompt) // ELEMENT_BYTES
        self.limit = self.prompt_len
        """The number of known tokens at which the sequence ends."""
        self.params = NO_SAMPLING
        self.seed = 0
        self.stop_ids: frozenset[int] = frozenset()
        self.decoder: StopDecoder | None = None
        """Finds stop strings; None if there are none."""
        self.program: Future[Program] | None = None
        """The grammar that the text must match; the request does not start before it is compiled."""
        self.guide: Guide | None = None
        """Its state in the grammar, from the first sampled token on."""
        self.logprobs: LogprobOptions | None = None
        self.want_prompt_logprobs = False
        """Whether prompt logprobs are wanted and not all computed yet."""
        self.stream = False
        self.skip_special_tokens = True
        self.pooling = ""
        self.normalize = False

        # Its progress.
        self.scheduled = 0
        self.computed = 0
        self.in_flight = 0
        """Submitted steps whose results have not been applied."""
        self.lease: Lease | None = None
        """Its pages, while it runs."""
        self.ending: FinishReason | None = None
        """If set, it ends for this reason as soon as no step of it is in flight."""
        self.cached = 0
        """Prompt tokens that were taken from the prefix cache when it first started."""
        self.retractions = 0
        self.passed_by = 0
        """How many younger requests have overtaken it while it was first in the queue."""
        self.first_run: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None

        # Results gathered for the client and not sent yet.
        self.sent = self.prompt_len
        """The number of known tokens that are the prompt's or have been sent."""
        self.rows_sent = 0
        self.new_logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs] = []
        self.pooled: list[bytes] = []

    @property
    def known(self) -> int:
        return len(self.tokens) // ELEMENT_BYTES

    @property
    def pending(self) -> int:
        """Tokens that are known but not scheduled, which a step can compute."""
        return len(self.tokens) // ELEMENT_BYTES - self.scheduled

    @property
    def output_len(self) -> int:
        return len(self.tokens) // ELEMENT_BYTES - self.prompt_len

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is not computed yet."""
        return self.computed < self.prompt_len

    @property
    def draws(self) -> bool:
        """Whether it samples tokens. Embeddings and requests with max_new_tokens 0 do not."""
        return self.params.max_new_tokens > 0

    @property
    def ready(self) -> bool:
        """Whether it can start: its grammar, if any, is compiled."""
        return self.program is None or self.program.done()

    @property
    def queue_s(self) -> float:
        """Seconds from its arrival to its first step; 0 before that."""
        return 0.0 if self.first_run is None else self.first_run - self.arrival

    @property
    def reusable(self) -> int:
        """The number of first tokens that may be taken from the prefix cache: all but the last known one, which a step
        must compute, and none if a result is needed for every token.
        """
        if self.want_prompt_logprobs or self.pooling == "mean":
            return 0
        return self.known - 1

    def row(self, start: int, length: int) -> PlanRow:
        """The plan row for its tokens [start, start + length), which its lease must cover. Raises GrammarError."""
        assert self.lease is not None
        end = start + length
        last = end == self.known
        prompt_logprobs = next_token = None
        if self.want_prompt_logprobs and self.logprobs is not None and start < self.prompt_len - 1:
            prompt_logprobs = self.logprobs.top
            if end < self.prompt_len:
                next_token = self.token(end)
        return PlanRow(
            token_ids=bytes(self.tokens[start * ELEMENT_BYTES : end * ELEMENT_BYTES]),
            start=start,
            pages=bytes(self.lease.table),
            sample=self._sample_spec() if last and self.draws else None,
            prompt_logprobs=prompt_logprobs,
            next_token=next_token,
            pool=self.pooling if last or self.pooling == "mean" else "",
        )

    def token(self, position: int) -> int:
        at = position * ELEMENT_BYTES
        return int.from_bytes(self.tokens[at : at + ELEMENT_BYTES], "little", signed=True)

    def append(self, token: int) -> None:
        self.tokens += token.to_bytes(ELEMENT_BYTES, "little", signed=True)

    def forget_computed(self) -> None:
        """Resets it after its pages were released: everything must be computed again, including the results gathered so
        far.
        """
        self.lease = None
        self.computed = self.scheduled = 0
        self.pooled.clear()
        if self.want_prompt_logprobs:
            self.prompt_logprobs.clear()

    def _sample_spec(self) -> SampleSpec:
        params = self.params
        penalized = params.penalized
        forbidden, mask = self._forbidden(), b""
        if self.program is not None:
            self.guide = self.guide or Guide(self.program.result())
            forbidden, mask = (), self.guide.mask(forbidden)
        return SampleSpec(
            params=params,
            seed=self.seed,
            position=self.known,
            top_logprobs=None if self.logprobs is None else self.logprobs.top,
            forbidden=tuple(forbidden),
            history=bytes(self.tokens) if penalized else b"",
            prompt_len=self.prompt_len if penalized else 0,
            mask=mask,
        )

    def _forbidden(self) -> Collection[int]:
        """Tokens that would end it but must not yet, unless a grammar allows no other token."""
        if self.output_len < self.params.min_new_tokens:
            return self.stop_ids
        if self.params.ignore_eos and self.program is not None:
            return self.stop_ids.difference(self.params.stop_token_ids)
        return ()


class Group:
    """A client's request, and those of its choices that have not ended."""

    __slots__ = ("arrival", "message", "requests", "rid")

    def __init__(self, message: TokenizedReqInput, arrival: float) -> None:
        self.rid = message.rid
        self.message = message
        self.arrival = arrival
        self.requests: list[Request] = []


class Share(NamedTuple):
    """A request's part of a step: its tokens [start, start + length) are computed."""

    request: Request
    start: int
    length: int


class Step(NamedTuple):
    """A submitted step whose result has not been applied. `began` is on the scheduler's clock, in seconds."""

    shares: list[Share]
    handle: StepHandle
    began: float
